"""The four layouts hold the same examples, and their sizes are those of real files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.bench.loader import layouts
from tackboard.bench.loader.layouts import CODECS, LAYOUTS, assemble, compare_layouts, explode, measure_layouts
from tackboard.core.errors import DataError
from tackboard.data.request_layout import label_dataset, read_requests
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

WORLD = WorldConfig(num_users=15, num_items=80, num_topics=5, median_events=15.0, max_events=40, late_share=0.2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = write_world(WORLD, tmp_path_factory.mktemp("worlds"), "small")
    label_dataset(open_dataset(path), layouts.WINDOWS, quiet=True)
    return open_dataset(path.parent)


def history_by_loops(row: dict[str, Any], events: list[dict[str, Any]], max_history: int) -> list[dict[str, Any]]:
    seen = [one for one in events if one["user_id"] == row["user_id"] and one["received_ms"] < row["time_ms"]]
    return seen[-max_history:]


def test_histories_and_rows_are_those_of_a_loop(dataset: Dataset) -> None:
    table, requests = dataset.read_events(list(layouts.EVENT_COLUMNS)), read_requests(dataset)
    grouped = assemble(requests, table, 7)
    flat = explode(grouped).to_pylist()
    events, actions, surfaces = table.to_pylist(), dataset.actions, dataset.surfaces
    expected = []
    for row in requests.to_pylist():
        history = history_by_loops(row, events, 7)
        common = {name: row[name] for name in ("request", "user_id", "time_ms", "surface")} | {
            "history_item_id": [one["item_id"] for one in history],
            "history_action": [actions.index(one["action"]) for one in history],
            "history_surface": [surfaces.index(one["surface"]) for one in history],
            "history_time_ms": [one["time_ms"] for one in history],
        }
        names = ("item_id", "position", "weight", "label_click", "label_save")
        for place in range(len(row["item_id"])):
            expected.append(common | {name: row[name][place] for name in names})
    assert flat == expected
    assert max(len(row["history_item_id"]) for row in flat) == 7
    chosen = np.array([5, 0, 5])
    assert explode(grouped, chosen).to_pylist() == [expected[row] for row in chosen]


def test_sizes_of_each_layout_and_codec(dataset: Dataset, tmp_path: Path) -> None:
    found = compare_layouts(dataset, tmp_path)
    assert found["requests"] == dataset.num_events and found["users"] == dataset.num_users
    assert set(found["codecs"]) == set(CODECS)
    for sizes in found["codecs"].values():
        assert list(sizes) == list(LAYOUTS)
        in_bytes = [sizes[layout]["bytes"] for layout in LAYOUTS]
        assert in_bytes[0] > in_bytes[1] > in_bytes[2] > in_bytes[3] > 0
        assert sizes["ours"]["times_smaller"] == round(in_bytes[0] / in_bytes[3], 2)
    assert not list(tmp_path.iterdir())


def test_more_rows_than_a_row_group(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "ROWS_PER_GROUP", 100)
    found = compare_layouts(dataset, tmp_path)
    assert found["candidates"] > 300 and found["same_examples"]


def test_a_cut_keeps_whole_users(dataset: Dataset, tmp_path: Path) -> None:
    requests = read_requests(dataset)
    users = requests["user_id"].to_pylist()
    some = compare_layouts(dataset, tmp_path, max_values=8000)
    assert 1 < some["users"] < dataset.num_users
    assert some["requests"] == sum(user in sorted(set(users))[: some["users"]] for user in users)
    one = compare_layouts(dataset, tmp_path, max_values=1)
    assert (one["users"], one["requests"]) == (1, users.count(users[0]))


def test_a_layout_that_loses_a_value_is_found(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = layouts.pq.read_table

    def lossy(path: Path) -> pa.Table:
        table = read(path)
        return table.slice(1) if "events" in Path(path).name else table

    monkeypatch.setattr(
        layouts.pq, "read_table", lambda path, **_: lossy(path) if "layout" in str(path) else read(path)
    )
    with pytest.raises(DataError, match="the layout 'ours' does not return the same examples"):
        compare_layouts(dataset, tmp_path)


@pytest.mark.slow
def test_the_measurement_names_what_was_published(tmp_path: Path) -> None:
    found = measure_layouts(tmp_path, quick=True)
    assert "10 to 50" in found["published"]
    few, many = (found["worlds"][name] for name in ("few candidates", "many candidates"))
    assert many["candidates_per_request"] > few["candidates_per_request"]
