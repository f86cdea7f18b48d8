from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset, open_dataset, write_dataset
from tackboard.events.sequence_store import correction
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.correction import compare, correct, horizon_ms
from tackboard.events.sequence_store.engine import Appended
from tackboard.events.sequence_store.interface import SequenceStore

CONFIG = StoreConfig(fields={"dwell": "float"}, max_events=50, max_recent=7, chunk_events=10)
Row = tuple[int, int, str, int, int, float | None]
"""user, item, action, time, received, dwell."""


def snapshot(folder: Path, rows: Sequence[Row]) -> Dataset:
    users, items, actions, times, received, dwell = (list(column) for column in zip(*rows, strict=True))
    columns = {
        "user": pa.array(users, pa.int64()),
        "item": pa.array(items, pa.int64()),
        "action": pa.array(actions).dictionary_encode(),
        "surface": pa.array(["home"] * len(rows)).dictionary_encode(),
        "time_ms": pa.array(times, pa.int64()),
        "received_ms": pa.array(received, pa.int64()),
        "order": pa.array(range(len(rows)), pa.int64()),
        "dwell": pa.array(dwell, pa.float64()),
    }
    return open_dataset(write_dataset(folder, "log", pa.table(columns)))


def plain(row: Row) -> dict[str, Any]:
    names = ("item_id", "action", "time_ms", "received_ms", "dwell")
    return {**dict(zip(names, row[1:], strict=True)), "surface": "home"}


def append(store: SequenceStore, rows: Sequence[Row]) -> Appended:
    return store.append_many([row[0] for row in rows], [plain(row) for row in rows])


def held(store: SequenceStore) -> set[Row]:
    return {
        (user, e["item_id"], e["action"], e["time_ms"], e["received_ms"], e["dwell"])
        for user in store.user_ids().tolist()
        for e in store.read(user).rows()
    }


@pytest.fixture
def store(make_store: Callable[..., SequenceStore]) -> SequenceStore:
    return make_store(CONFIG)


TRUE: list[Row] = [(user, n, "click", n * 10, n * 10 + 1, 0.5) for user in range(1, 6) for n in range(20)]


def test_missing_extra_and_different_events_are_found_by_action_and_set_right(
    store: SequenceStore, tmp_path: Path
) -> None:
    dataset = snapshot(tmp_path, TRUE)
    wrong = [row for row in TRUE if row[:2] not in ((1, 3), (1, 4), (2, 5))]
    wrong = [(*row[:5], 9.0) if row[:2] == (3, 7) else row for row in wrong]
    wrong += [(4, 99, "save", 55, 56, None), (77, 1, "save", 60, 61, None)]
    later: list[Row] = [(5, 100, "hide", 500, 501, None), (78, 1, "click", 500, 600, None)]
    append(store, [*wrong, *later])
    report = compare(store, dataset)
    assert {action: dict(counts) for action, counts in report.actions.items()} == {
        "click": {"missing": 3, "different": 1},
        "save": {"extra": 2},
    }
    assert (report.num_users, report.num_changed_users, report.horizon_ms) == (7, 5, 191)
    assert held(store) == {*wrong, *later}, "comparing changes nothing"
    assert correct(store, dataset) == report
    assert held(store) == {*TRUE, *later}
    again = correct(store, dataset)
    assert again.num_changed_users == 0 and again.actions == {}
    assert compare(store, dataset).num_changed_users == 0


def test_an_empty_store_is_filled(store: SequenceStore, tmp_path: Path) -> None:
    dataset = snapshot(tmp_path, TRUE)
    report = compare(store, dataset)
    assert report.total("missing") == len(TRUE) and store.user_ids().tolist() == []
    correct(store, dataset)
    assert held(store) == set(TRUE)
    assert append(store, TRUE) == Appended(0, len(TRUE))


def test_the_millisecond_of_the_horizon_loses_nothing(store: SequenceStore, tmp_path: Path) -> None:
    dataset = snapshot(tmp_path, [(1, 1, "click", 5, 100, None)])
    assert horizon_ms(dataset) == 100
    append(store, [(1, 2, "click", 6, 100, None), (1, 3, "click", 7, 99, None), (2, 1, "click", 5, 100, None)])
    correct(store, dataset)
    assert held(store) == {(1, 1, "click", 5, 100, None), (1, 2, "click", 6, 100, None), (2, 1, "click", 5, 100, None)}


def test_an_event_received_twice_is_one(store: SequenceStore, tmp_path: Path) -> None:
    # The store got it after the horizon, the log before: the log's is kept.
    dataset = snapshot(tmp_path, [(1, 1, "click", 5, 50, None), (1, 2, "click", 6, 100, None)])
    append(store, [(1, 1, "click", 5, 130, None)])
    correct(store, dataset)
    assert held(store) == {(1, 1, "click", 5, 50, None), (1, 2, "click", 6, 100, None)}


def test_the_cap_holds(store: SequenceStore, tmp_path: Path) -> None:
    rows: list[Row] = [(1, n, "click", n, n, None) for n in range(80)]
    later: list[Row] = [(1, n, "click", n, n, None) for n in range(80, 90)]
    append(store, later)
    dataset = snapshot(tmp_path, rows)
    correct(store, dataset)
    assert held(store) == {*rows[40:], *later}
    assert compare(store, dataset).num_changed_users == 0


def test_a_forgotten_user_does_not_come_back(store: SequenceStore, tmp_path: Path) -> None:
    append(store, TRUE)
    store.forget(3)
    dataset = snapshot(tmp_path, TRUE)
    assert compare(store, dataset).num_changed_users == 0
    correct(store, dataset)
    assert held(store) == {row for row in TRUE if row[0] != 3}


def test_new_names_of_the_snapshot_are_compared_without_being_stored(store: SequenceStore, tmp_path: Path) -> None:
    append(store, TRUE)
    dataset = snapshot(tmp_path, [*TRUE, (1, 5, "share", 50, 51, None)])
    assert {action: dict(counts) for action, counts in compare(store, dataset).actions.items()} == {
        "share": {"missing": 1}
    }
    assert store.read_names("action") == ["click"]


def test_a_run_that_was_stopped_goes_on(store: SequenceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 40)
    dataset = snapshot(tmp_path, TRUE)
    assert sum(1 for _ in dataset.event_chunks(["time_ms"])) > 1, "several pieces"

    def stop(point: str) -> None:
        if point == "correction:after-note":
            raise KeyboardInterrupt

    monkeypatch.setattr("tackboard.core.files.observer", stop)
    with pytest.raises(KeyboardInterrupt):
        correct(store, dataset)
    monkeypatch.setattr("tackboard.core.files.observer", None)
    first = len(store.user_ids())
    assert 0 < first < 5
    seen = correct(store, dataset)
    assert seen.num_users == 5 - first, "users that were done are not looked at again"
    assert held(store) == set(TRUE)
    assert store.note(correction.NOTE) is None
    assert correct(store, dataset).num_users == 5


def test_a_snapshot_without_a_field_of_the_store_is_refused(
    make_store: Callable[..., SequenceStore], tmp_path: Path
) -> None:
    store = make_store(StoreConfig(fields={"dwell": "float", "price": "float"}))
    dataset = snapshot(tmp_path, TRUE)
    with pytest.raises(DataError, match="no column price"):
        correct(store, dataset)


def test_events_that_arrive_meanwhile_stay(
    store: SequenceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from tackboard.events.sequence_store.opening import open_store

    dataset = snapshot(tmp_path, TRUE)
    append(store, TRUE[:50])
    arrived: list[Row] = []

    def write(point: str) -> None:
        # Between two steps another client writes, also of a user that is already done.
        if point == "correction:before-note":
            arrived.extend([(1, 500, "click", 1000, 1001, None), (5, 501, "click", 3, 1002, None)])
            with open_store(place) as other:
                monkeypatch.setattr("tackboard.core.files.observer", None)
                append(other, arrived)

    monkeypatch.setattr("tackboard.core.files.observer", write)
    correct(store, dataset)
    assert held(store) == {*TRUE, *arrived} and arrived
