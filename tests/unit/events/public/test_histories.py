from __future__ import annotations

from collections.abc import Callable

import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.histories import SEQUENCES
from tackboard.events.public.publisher import ORDER_ONLY_START_MS

BY_NAME = {dataset.name: dataset for dataset in SEQUENCES}


def test_s3rec_has_an_order_and_attributes(import_tiny: Callable[..., Dataset]) -> None:
    files = {"Beauty.txt": "1 5 6 5\n2 6\n", "Beauty_item2attributes.json": '{"6": [3, 1], "5": [2]}'}
    dataset = import_tiny(BY_NAME["amazon-beauty-s3rec"], files, (2, 2, 4))
    rows = dataset.read_events(["user", "item", "time_ms"]).to_pylist()
    assert [(row["user"], row["item"]) for row in rows] == [(1, 5), (1, 6), (1, 5), (2, 6)]
    assert [(row["time_ms"] - ORDER_ONLY_START_MS) // 60_000 for row in rows] == [0, 1, 2, 0]
    assert {row["item"]: row["attributes"] for row in dataset.read_items().to_pylist()} == {5: [2], 6: [3, 1]}
    assert "made up" in dataset.manifest["source"]["note"]


def test_ticoserec_has_times(import_tiny: Callable[..., Dataset]) -> None:
    files = {"Sports_item.txt": "1 9 4 5\n2 4\n", "Sports_time.txt": "1 86400 86400 172800\n2 86400\n"}
    dataset = import_tiny(BY_NAME["amazon-sports-ticoserec"], files, (2, 3, 4))
    rows = dataset.read_events(["item", "time_ms"]).to_pylist()
    assert [(row["item"], row["time_ms"]) for row in rows[:3]] == [(9, 86_400_000), (4, 86_400_000), (5, 172_800_000)]
    with pytest.raises(DataError, match="do not have the same users and lengths"):
        import_tiny(BY_NAME["amazon-sports-ticoserec"], files | {"Sports_time.txt": "1 5 6\n2 5\n"}, (2, 3, 4))


@pytest.mark.parametrize(
    ("name", "file"), [("amazon-video-sasrec", "Video.txt"), ("amazon-beauty-bert4rec", "beauty.txt")]
)
def test_pairs(import_tiny: Callable[..., Dataset], name: str, file: str) -> None:
    dataset = import_tiny(BY_NAME[name], {file: "1 7\n1 3\n2 7\n"}, (2, 2, 3))
    rows = dataset.read_events(["user", "item", "time_ms"]).to_pylist()
    assert [(row["user"], row["item"]) for row in rows] == [(1, 7), (1, 3), (2, 7)]
    assert rows[1]["time_ms"] - rows[0]["time_ms"] == 60_000
    with pytest.raises(DataError, match="as published"):
        import_tiny(BY_NAME[name], {file: "1 7 8\n1 3 9\n"}, (2, 2, 3))
