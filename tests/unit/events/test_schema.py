from __future__ import annotations

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.events import schema
from tackboard.events.schema import NAMES, check_events, complete_events, encode, ids_of


def events(**changes: object) -> pa.Table:
    columns: dict[str, object] = {
        "user": pa.array([2, 1, 2], pa.int64()),
        "item": pa.array(["b", "a", "a"]).dictionary_encode(),
        "action": pa.array(["click", "click", "save"]).dictionary_encode(),
        "surface": pa.array(["home"] * 3).dictionary_encode(),
        "time_ms": pa.array([5, 9, 5], pa.int64()),
        "received_ms": pa.array([5, 9, 5], pa.int64()),
        "order": pa.array([2, 1, 0], pa.int64()),
    }
    columns.update(changes)
    return pa.table({name: value for name, value in columns.items() if value is not None})


def test_events_are_sorted_by_user_time_and_order_and_get_ids() -> None:
    table = complete_events(events())
    assert table["user_id"].to_pylist() == [1, 2, 2]
    assert table["item"].to_pylist() == ["a", "a", "b"]
    assert table["order"].to_pylist() == [1, 0, 2]
    assert table["item_id"].to_pylist() == [string_id("a"), string_id("a"), string_id("b")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_ms": None}, "lack the column time_ms"),
        ({"time_ms": pa.array([1.0, 2.0, 3.0])}, "time_ms is double"),
        ({"user": pa.array([1, None, 2], pa.int64())}, "1 events have no user"),
        ({"position": pa.array([0, 1, 2], pa.int64())}, "position is int64"),
        ({"colour": pa.array([0, 1, 2], pa.int32())}, "colour is int32"),
        ({"Colour": pa.array([0, 1, 2])}, "field named 'Colour'"),
        ({"class": pa.array([0, 1, 2])}, "field named 'class'"),
        ({"user_id": pa.array([0, 1, 2])}, "reserved"),
        ({"time": pa.array([0, 1, 2])}, "reserved"),
    ],
)
def test_events_that_break_the_schema_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_events(events(**changes))


def test_fields_come_last_with_their_nulls_and_text_is_encoded() -> None:
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["x", "x", None]))
    fields = {
        "dwell_ms": pa.array([7, None, 9]),
        "price": pa.array([0.5, float("nan"), None]),
        "seen": pa.array([True, None, False]),
        "note": pa.array(["a", None, "a"]),
        "device": twice,
    }
    table = complete_events(events(position=pa.array([0, 1, None], pa.int32()), **fields))
    assert table.column_names == [*schema.EVENT_COLUMNS, "position", "user_id", "item_id", *fields]
    assert table["dwell_ms"].to_pylist() == [None, 9, 7]
    assert table["note"].to_pylist() == [None, "a", "a"]
    assert table["seen"].to_pylist() == [None, False, True]
    assert table["device"].to_pylist() == ["x", None, "x"]
    assert table["note"].type == table["device"].type == NAMES
    assert table["device"].chunk(0).dictionary.to_pylist() == ["x"]
    assert [schema.FIELD_KINDS[table[name].type] for name in fields] == ["int", "float", "bool", "string", "string"]


def test_two_fields_of_one_name_are_refused() -> None:
    twice = events(dwell=pa.array([1, 2, 3])).append_column("dwell", pa.array([1, 2, 3]))
    with pytest.raises(DataError, match="two fields named dwell"):
        check_events(twice)


def test_two_strings_with_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "string_id", lambda text: 7)
    with pytest.raises(DataError, match="item 'b' has the same 64-bit id"):
        ids_of(pa.chunked_array([["a", "b"]]), "item")
    with pytest.raises(DataError, match="one user has the same 64-bit id") as caught:
        ids_of(pa.chunked_array([["anna", "ben"]]), "user")
    assert "anna" not in str(caught.value) and "ben" not in str(caught.value)


def test_encode_joins_chunks_with_different_dictionaries() -> None:
    chunks = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", "c"]).dictionary_encode()])
    array = encode(chunks)
    assert array.to_pylist() == ["a", "b", "b", "c"]
    assert len(set(array.dictionary.to_pylist())) == len(array.dictionary)
