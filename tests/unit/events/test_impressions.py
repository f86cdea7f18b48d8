"""Impressions come in from a file, a world or events, and go out bucket by bucket, none lost unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.hashing import string_id
from tackboard.events.dataset import Dataset, open_dataset, write_dataset
from tackboard.events.impressions import COLUMNS, common_codes, open_impressions, parse_impressions, with_ids
from tackboard.events.schema import complete_events

NAMES = {"user": "who", "item": "what", "time": "when", "request": "call", "position": "slot"}
HEADER = "who,what,when,call,slot\n"


def events(request_type: pa.DataType | None = None, **changes: Any) -> pa.Table:
    """Three users, two requests each, one event per request but for the last, which has none to its name."""
    requests = [f"{number}" for number in range(5)] + [None]
    columns: dict[str, Any] = {
        "user": pa.array([3, 3, 1, 1, 2, 2]),
        "item": pa.array([10, 11, 12, 13, 14, 15]),
        "action": pa.array(["view", "click", "view", "view", "click", "view"]).dictionary_encode(),
        "surface": pa.array(["home"] * 6).dictionary_encode(),
        "time_ms": pa.array([50, 40, 30, 20, 10, 5]),
        "received_ms": pa.array([50, 40, 30, 20, 10, 5]),
        "order": pa.array(range(6)),
    }
    if request_type is not None:
        columns["request"] = pa.array(requests).cast(request_type)
        columns["position"] = pa.array([7, 6, 5, 4, 3, 2], type=pa.int32())
    return pa.table({**columns, **changes})


def make(root: Path, table: pa.Table, impressions: pa.Table | None = None) -> Dataset:
    return open_dataset(write_dataset(root, "shop", table, impressions=impressions))


def by_bucket(dataset: Dataset, shown: str | None = None) -> tuple[list[list[dict[str, Any]]], tuple[int, int]]:
    impressions = open_impressions(dataset, shown)
    columns = ["time_ms", "request", "action", "item_id", "position"]
    chunks = enumerate(dataset.event_chunks(columns))
    found = []
    for bucket, chunk in chunks:
        parts = list(impressions.of_bucket(bucket, chunk))
        assert pa.concat_tables([events for _, events in parts]).equals(chunk), "every event comes once"
        for rows, events in parts:
            others = [other for other, _ in parts if other is not rows]
            users = {*rows["user_id"].to_pylist(), *events["user_id"].to_pylist()}
            assert not any(users & set(other["user_id"].to_pylist()) for other in others), "users are never split"
        found.append([row for rows, _ in parts for row in rows.to_pylist()])
    impressions.close()
    return found, (impressions.without_request, impressions.without_user)


def parse(tmp_path: Path, text: str, table: pa.Table, names: dict[str, str] = NAMES) -> list[dict[str, Any]]:
    path = tmp_path / "shown.csv"
    path.write_text(text)
    return parse_impressions([path], names, complete_events(table), 0.01).table.to_pylist()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 2)


def test_a_file_is_read_by_the_rules_of_the_log(tmp_path: Path) -> None:
    text = HEADER + "2,15,2024-05-01T10:00:00Z,b,\n 1 ,14,2024-05-01T10:00:00Z,b,1\n1,13,2024-05-01T10:00:00Z,b,0\n"
    found = parse(tmp_path, text, events(pa.string()))
    ms = 1_714_557_600_000
    assert [tuple(row[name] for name in COLUMNS) for row in found] == [
        (1, ms, "b", 0, 13),
        (1, ms, "b", 1, 14),
        (2, ms, "b", None, 15),
    ]


def test_ids_get_the_types_of_the_events(tmp_path: Path) -> None:
    names = events(pa.int64(), user=pa.array(["1", "1", "x", "x", "y", "y"]).dictionary_encode())
    found = parse(tmp_path, HEADER + "1,14,1714557600,9000000000000000001,0\n", names)
    assert (found[0]["user_id"], found[0]["item_id"]) == (string_id("1"), 14)
    assert found[0]["request"] == 9_000_000_000_000_000_001
    path = tmp_path / "shown.parquet"
    pq.write_table(pa.table({"who": [1], "what": ["14"], "when": [1_714_557_600], "call": [5]}), path)
    shown = parse_impressions([path], NAMES, complete_events(events(pa.string())), 0.01)
    table = shown.table
    assert (table["request"].to_pylist(), table["position"].to_pylist(), shown.num_dropped) == (["5"], [None], 0)
    unnamed = {name: column for name, column in NAMES.items() if name != "position"}
    text = "who,what,when,call,position\n1,14,1714557600,b,3\n"
    assert parse(tmp_path, text, events(pa.string()), unnamed)[0]["position"] == 3, "a position needs no option"


def test_unusable_rows_are_counted_up_to_the_share(tmp_path: Path) -> None:
    path = tmp_path / "shown.csv"
    good = "".join(f"1,{number},1714557600,b,\n" for number in range(96))
    path.write_text(HEADER + good + ",14,1714557600,b,\n1,,1714557600,b,\n1,14,soon,b,\n1,14,1714557600,,\n")
    typed = complete_events(events(pa.string()))
    shown = parse_impressions([path], NAMES, typed, 0.04)
    assert (shown.table.num_rows, shown.num_dropped) == (96, 4)
    with pytest.raises(
        DataError, match=r"4 of 100 rows of .*: .*shown\.csv line 98, .* line 99, .* line 100"
    ) as refused:
        parse_impressions([path], NAMES, typed, 0.01)
    assert "--max-bad-share" in refused.value.allowed


@pytest.mark.parametrize("table", [events(), events(pa.string())])
def test_impressions_need_requests(tmp_path: Path, table: pa.Table) -> None:
    names = {"user": "who", "item": "what", "time": "when"}
    with pytest.raises(UsageError, match="--impressions needs --request"):
        parse(tmp_path, HEADER + "1,14,1714557600,b,\n", table, names)


@pytest.mark.parametrize("text", [False, True])
def test_what_was_only_shown_is_listed(tmp_path: Path, text: bool) -> None:
    def ids(*numbers: int) -> pa.Array:
        return pa.array([f"i{number}" for number in numbers]).dictionary_encode() if text else pa.array(numbers)

    table = events(pa.string(), item=ids(10, 11, 12, 13, 14, 15))
    raw = ids(10, 99)

    def listed(attributes: pa.Table | None, name: str) -> tuple[Dataset, list[dict[str, Any]]]:
        with_new = with_ids(attributes, "item", raw)
        dataset = open_dataset(write_dataset(tmp_path, name, table, item_attributes=with_new))
        rows = dataset.read_items().to_pylist()
        assert dataset.num_items == 7
        assert [row["num_events"] for row in rows if row["item"] == raw[1].as_py()] == [0]
        return dataset, rows

    listed(None, "bare")
    _, rows = listed(pa.table({"item": ids(10), "colour": ["red"]}), "attributes")
    assert [row["colour"] for row in rows if row["colour"]] == ["red"]
    versions = {"item": ids(10, 10), "price": [1.0, 2.0], "look": [[1.0, 2.0], None], "valid_from_ms": [5, 9]}
    dataset, rows = listed(pa.table(versions), "versions")
    assert [row["price"] for row in rows if row["price"]] == [2.0]
    history = dataset.read_history("item")
    assert history is not None and sorted(history["valid_from_ms"].to_pylist()) == [0, 5, 9]


def impressions_of(*rows: tuple[int, int, str, int, int]) -> pa.Table:
    types = (pa.int64(), pa.int64(), pa.string(), pa.int32(), pa.int64())
    return pa.table(
        {
            name: pa.array([row[place] for row in rows], type=type_)
            for place, (name, type_) in enumerate(zip(COLUMNS, types, strict=True))
        }
    )


@pytest.mark.parametrize("rows_per_part", [1, 2, 3, 100])
def test_buckets_hold_the_impressions_of_their_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_part: int
) -> None:
    monkeypatch.setattr("tackboard.events.impressions.ROWS_PER_PART", rows_per_part)
    rows = [(-5, 1, "a", 0, 9), (1, 2, "b", 0, 9), (1, 2, "b", 1, 8), (2, 1, "c", 0, 9), (3, 1, "d", 0, 9)]
    rows += [(99, 4, "e", 0, 9)]
    dataset = make(tmp_path, events(pa.string()), impressions_of(*rows))
    assert dataset.layout.num_buckets == 3
    found, left_out = by_bucket(dataset)
    # Users without events have a bucket too: the first, or that of the next smaller user.
    assert [[row["user_id"] for row in bucket] for bucket in found] == [[-5, 1, 1], [2], [3, 99]]
    assert [row for bucket in found for row in bucket] == impressions_of(*rows).to_pylist()
    assert left_out == (0, 0)


def test_a_table_without_users_takes_those_of_the_first_event(tmp_path: Path) -> None:
    twice = events(pa.string(), request=pa.array(["a", "a", "b", "b", "b", None]))
    columns = {"request": ["a", "a", "b", "nobody", None], "position": [1, 0, 0, 0, 0], "item_id": [1, 2, 3, 4, 5]}
    table = pa.table(columns).set_column(1, "position", pa.array(columns["position"], type=pa.int32()))
    found, left_out = by_bucket(make(tmp_path, twice, table))
    placed = [(row["user_id"], row["time_ms"], row["request"], row["item_id"]) for bucket in found for row in bucket]
    # Request a begins with user 3's event at 40, b with user 2's at 10.
    assert placed == [(2, 10, "b", 3), (3, 40, "a", 2), (3, 40, "a", 1)]
    assert left_out == (0, 2)


def test_events_can_be_the_impressions(tmp_path: Path) -> None:
    found, left_out = by_bucket(make(tmp_path, events(pa.int64())), "view")
    shown = [(row["user_id"], row["request"], row["item_id"], row["position"]) for bucket in found for row in bucket]
    assert shown == [(1, 3, 13, 4), (1, 2, 12, 5), (3, 0, 10, 7)]
    assert left_out == (1, 0), "the view without a request"


def test_a_dataset_that_does_not_say_what_was_shown(tmp_path: Path) -> None:
    dataset = make(tmp_path, events(pa.int64()))
    with pytest.raises(DataError, match="does not say what was shown") as refused:
        open_impressions(dataset)
    assert "--impressions FILE" in refused.value.allowed and "--shown" in refused.value.fix
    with pytest.raises(UsageError, match="has the action 'vew'") as wrong:
        open_impressions(dataset, "vew")
    assert wrong.value.fix == "did you mean view?"


def test_impressions_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="have no request"):
        open_impressions(make(tmp_path, events()), "view")
    table = impressions_of((1, 2, "b", 0, 9))
    with pytest.raises(DataError, match=r"request is string in impressions\.parquet"):
        open_impressions(make(tmp_path, events(pa.int64()), table))
    table = impressions_of((2, 1, "c", 0, 9), (1, 2, "b", 0, 9))
    with pytest.raises(CorruptFileError, match="not sorted by user_id"):
        open_impressions(make(tmp_path, events(pa.string()), table))


@pytest.mark.parametrize(
    ("first", "second"), [([3, None, -1], [3, 5]), (["b", None, ""], ["é", "b"]), ([], [4, 4]), ([None], [])]
)
def test_common_codes_compare_like_the_values(first: list[Any], second: list[Any]) -> None:
    type_ = pa.string() if any(isinstance(value, str) for value in first) else pa.int64()
    codes = common_codes(pa.array(first, type=type_), pa.chunked_array([pa.array(second, type=type_)]))
    assert [len(part) for part in codes] == [len(first), len(second)]
    values = [None if value is None else value for value in [*first, *second]]
    joined = np.concatenate(codes).tolist()
    for one, code in zip(values, joined, strict=True):
        assert (code == -1) == (one is None)
        for other, other_code in zip(values, joined, strict=True):
            if one is not None and other is not None:
                assert (one < other) == (code < other_code) and (one == other) == (code == other_code)
