from __future__ import annotations

import io
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.kakao_brunch import KAKAO_BRUNCH

KOREA = timezone(timedelta(hours=9))
MIDNIGHT_MS = int(datetime(2018, 10, 1, tzinfo=KOREA).timestamp()) * 1000


def test_the_compact_form(import_tiny: Callable[..., Dataset]) -> None:
    table = {
        "user": pa.array([0, 0, 0, 1], pa.int32()),
        "item": pa.array([1, 0, 0, 1], pa.int32()),
        "hour": pa.array([0, 25, 25, 3000], pa.int16()),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    names = pa.Codec("zstd").compress(b"@someone_1\n@some_body_7\n@never_1\n", asbytes=True)
    files = {"reads.parquet": sink.getvalue(), "items.txt.zst": names}
    dataset = import_tiny(KAKAO_BRUNCH, files, (2, 2, 4), zipped=False)
    rows = dataset.read_events(["user", "item", "action", "time_ms"]).to_pylist()
    found = [(row["user"], row["item"], (row["time_ms"] - MIDNIGHT_MS) // 3_600_000) for row in rows]
    assert found == [(0, 1, 0), (0, 0, 25), (0, 0, 25), (1, 1, 3000)]
    assert dataset.actions == ["read"]
    items = dataset.read_items(["item", "article", "author", "num_events"]).to_pylist()
    assert [tuple(row.values()) for row in items] == [
        (0, "@someone_1", "someone", 2),
        (1, "@some_body_7", "some_body", 2),
        (2, "@never_1", "never", 0),
    ]


@pytest.mark.parametrize("zipped", [True, False])
def test_the_hourly_files(import_tiny: Callable[..., Dataset], zipped: bool) -> None:
    files = {
        "read/2018100101_2018100102": "#bb @x_1\n#aa @x_1 @y_2 @x_1 \n",
        "read/2018100100_2018100101": "#aa @y_2 @y_2\n",
    }
    dataset = import_tiny(KAKAO_BRUNCH, files, (2, 2, 6), zipped=zipped)
    rows = [row for row in dataset.read_events().to_pylist() if row["user"] == "#aa"]
    assert [row["item"] for row in rows] == ["@y_2", "@y_2", "@x_1", "@y_2", "@x_1"]
    assert [(row["time_ms"] - MIDNIGHT_MS) // 3_600_000 for row in rows] == [0, 0, 1, 1, 1]
    assert {row["item"]: row["author"] for row in dataset.read_items().to_pylist()} == {"@x_1": "x", "@y_2": "y"}


def test_neither_form(import_tiny: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="neither reads.parquet nor files such as 2018100100_2018100101"):
        import_tiny(KAKAO_BRUNCH, {"other": "x"}, (1, 1, 1))
