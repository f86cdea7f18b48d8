from __future__ import annotations

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.events.entities import encode_if_string, entity_table

EVENTS = pa.table(
    {
        "user": [1, 1, 2],
        "user_id": [1, 1, 2],
        "item": pa.array(["b", "a", "a"]).dictionary_encode(),
        "item_id": [20, 10, 10],
        "time_ms": [5, 7, 6],
    }
)


def test_one_row_per_id_with_counts_and_times() -> None:
    assert entity_table(EVENTS, "item").to_pylist() == [
        {"item": "a", "item_id": 10, "num_events": 2, "first_ms": 6, "last_ms": 7},
        {"item": "b", "item_id": 20, "num_events": 1, "first_ms": 5, "last_ms": 5},
    ]
    assert entity_table(EVENTS, "user")["num_events"].to_pylist() == [2, 1]


def test_attributes_are_joined_and_untouched_ids_kept() -> None:
    attributes = pa.table({"user": [3, 2], "age": [40, 30]})
    rows = entity_table(EVENTS, "user", attributes).to_pylist()
    assert [(row["user"], row["num_events"], row["first_ms"], row["age"]) for row in rows] == [
        (1, 2, 5, None),
        (2, 1, 6, 30),
        (3, 0, None, 40),
    ]


def test_an_empty_attribute_table_adds_only_columns() -> None:
    attributes = pa.table({"user": pa.array([], pa.int64()), "age": pa.array([], pa.int64())})
    assert entity_table(EVENTS, "user", attributes)["age"].to_pylist() == [None, None]


def test_an_attribute_may_not_take_our_column() -> None:
    with pytest.raises(DataError, match="num_events"):
        entity_table(EVENTS, "user", pa.table({"user": [1], "num_events": [9]}))


def test_encode_if_string_leaves_integers() -> None:
    assert encode_if_string(pa.chunked_array([[1], [2]])).to_pylist() == [1, 2]
    assert pa.types.is_dictionary(encode_if_string(pa.chunked_array([["a"], ["a"]])).type)
