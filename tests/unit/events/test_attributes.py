from __future__ import annotations

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.events.attributes import entity_table, split_versions

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


def test_an_attribute_or_a_version_may_not_take_our_column() -> None:
    with pytest.raises(DataError, match="num_events"):
        entity_table(EVENTS, "user", pa.table({"user": [1], "num_events": [9]}))
    with pytest.raises(DataError, match="num_events"):
        split_versions("user", pa.table({"user": [1], "valid_from_ms": [1], "num_events": [9]}))


def test_without_a_time_there_are_no_versions() -> None:
    attributes = pa.table({"user": [3, 2], "age": [40, 30]})
    assert split_versions("user", attributes) == (attributes, None)
    assert split_versions("user", None) == (None, None)


def test_the_newest_version_counts_and_all_are_kept_in_order() -> None:
    item = pa.array(["b", "a", "b", "b"]).dictionary_encode()
    attributes = pa.table({"price": [3.0, 1.0, None, 2.0], "item": item, "valid_from_ms": [0, 7, 9, -5]})
    newest, versions = split_versions("item", attributes)
    assert newest is not None and versions is not None
    assert {row["item"]: row["price"] for row in newest.to_pylist()} == {"a": 1.0, "b": None}
    assert newest.column_names == ["price", "item"]
    assert versions.column_names == ["item_id", "valid_from_ms", "price"]
    by_id = sorted([(string_id("b"), -5, 2.0), (string_id("b"), 0, 3.0), (string_id("b"), 9, None)])
    by_id = sorted([*by_id, (string_id("a"), 7, 1.0)], key=lambda row: row[:2])
    assert [tuple(row.values()) for row in versions.to_pylist()] == by_id


def test_no_versions_at_all() -> None:
    attributes = pa.table({"user": pa.array([], pa.int64()), "valid_from_ms": pa.array([], pa.int64())})
    newest, versions = split_versions("user", attributes)
    assert newest is not None and newest.num_rows == 0
    assert versions is not None and versions.column_names == ["user_id", "valid_from_ms"]


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (pa.array([5, 5, 6]), "1 rows of the users repeat an id and a valid_from_ms; the first is for one user at 5"),
        (pa.array([5, None, 6]), "1 rows of the users have no valid_from_ms"),
        (pa.array([5.0, 6.0, 7.0]), "valid_from_ms of the users is double"),
    ],
)
def test_versions_that_cannot_be_told_apart_are_refused(times: pa.Array, words: str) -> None:
    with pytest.raises(DataError, match=words):
        split_versions("user", pa.table({"user": [1, 1, 1], "valid_from_ms": times}))


def test_a_list_is_a_vector_in_both_tables_or_in_none() -> None:
    # The newest versions alone would all have two numbers.
    attributes = pa.table({"user": [1, 1, 2], "valid_from_ms": [1, 2, 1], "v": [[1.0], [1.0, 2.0], [3.0, 4.0]]})
    newest, versions = split_versions("user", attributes)
    assert newest is not None and versions is not None
    assert newest["v"].type == versions["v"].type == pa.list_(pa.float64())
