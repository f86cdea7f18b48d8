"""Stored tables: events and attributes as a plan reads them, as valid at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core.errors import DataError, UsageError
from tackboard.core.hashing import string_id
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column
from tackboard.features.entities import Events, Float, Int, Item, List, Request, String, User, Vector
from tackboard.features.entity_tables import (
    EntityTable,
    EventTable,
    find_ids,
    load_entities,
    load_tables,
    stored_event_columns,
    with_default,
)
from tackboard.features.plan import compile_features
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

MIN, MAX = -(2**63), 2**63 - 1
IDS = st.sampled_from([MIN, MAX, 0, -1, 1, 2, 3])
TIMES = st.sampled_from([MIN, MIN + 1, -1, 0, 1, 5, MAX - 1, MAX])


@given(st.sets(IDS), st.lists(IDS))
def test_ids_are_found(known: set[int], wanted: list[int]) -> None:
    table = sorted(known)
    found = find_ids(np.array(table, dtype=np.int64), np.array(wanted, dtype=np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == [table.index(id_) if id_ in known else -1 for id_ in wanted]


@given(st.dictionaries(IDS, st.sets(TIMES, min_size=1), max_size=4), st.lists(st.tuples(IDS, TIMES), max_size=6))
def test_a_request_sees_the_newest_version_valid_at_its_time(
    versions: dict[int, set[int]], asked: list[tuple[int, int]]
) -> None:
    rows = [(id_, start) for id_ in sorted(versions) for start in sorted(versions[id_])]
    table = EntityTable(
        np.array([row[0] for row in rows], dtype=np.int64),
        {"place": Column.of(INT, list(range(len(rows))))},
        np.array([row[1] for row in rows], dtype=np.int64),
    )
    ids, times = (np.array([one[side] for one in asked], dtype=np.int64) for side in (0, 1))
    expected = []
    for id_, moment in asked:
        valid = [place for place, row in enumerate(rows) if row[0] == id_ and row[1] <= moment]
        expected.append(valid[-1] if valid else None)
    assert table.lookup(ids, times)("place", None).to_pylist() == expected
    filled = [-7 if place is None else place for place in expected]
    assert table.lookup(ids, times)("place", -7).to_pylist() == filled


def test_versions_need_a_time() -> None:
    table = EntityTable(np.array([1, 1]), {"x": Column.of(INT, [1, 2])}, np.array([0, 5]))
    with pytest.raises(UsageError, match="attributes change with time"):
        table.lookup(np.array([1]), None)
    assert EntityTable(np.array([1]), {"x": Column.of(INT, [1])}).lookup(np.array([1]), None)(
        "x", None
    ).to_pylist() == [1]


@pytest.mark.parametrize(
    ("type_", "values", "default"),
    [
        (BOOL, [True, None], True),
        (INT, [1, None], MAX),
        (FLOAT, [0.5, None], 2),
        (STRING, ["a", None], "e\u0301"),
        (STRING, ["a", None], "a"),
        (ID, [1, None], MIN),
        (TIME, [1, None], 5),
    ],
)
def test_defaults_fill_missing_values_of_their_kind(type_: FeatureType, values: list[Any], default: Any) -> None:
    filled = with_default(Column.of(type_, values), default)
    assert filled.to_pylist() == [values[0], default]
    assert (
        filled.present is None and filled.type == type_ and filled.values.dtype == Column.of(type_, values).values.dtype
    )
    whole = Column.of(type_, values[:1])
    assert with_default(whole, default) is whole


@pytest.mark.parametrize(
    "type_", [INT, STRING, FeatureType("vector", width=2), INT.in_list(), STRING.in_list()], ids=str
)
def test_an_empty_table_knows_nobody(type_: FeatureType) -> None:
    table = EntityTable(np.zeros(0, dtype=np.int64), {"x": Column.of(type_, [])})
    found = table.lookup(np.array([1, 2]), np.array([5, 5]))("x", None)
    assert found.to_pylist() == [None, None] and len(found) == 2


def test_unseen_ids_are_missing_in_every_type() -> None:
    columns = {
        "s": Column.of(STRING, ["a", None]),
        "v": Column.of(FeatureType("vector", width=2), [[1.0, 2.0], None]),
        "l": Column.of(STRING.in_list(), [["a", "b"], []]),
    }
    read = EntityTable(np.array([3, 9]), columns).lookup(np.array([9, 4, 3]), None)
    assert read("s", None).to_pylist() == [None, None, "a"]
    assert read("v", None).to_pylist() == [None, None, [1.0, 2.0]]
    assert read("l", None).to_pylist() == [[], None, ["a", "b"]]


item = Item(price=Float(default=9.0), colour=String, look=Vector(2), tags=List(Int))
user = User(country=String)
events = Events(dwell_ms=Int, query=String(default="-"))
request = Request()


def event_table() -> pa.Table:
    return pa.table(
        {
            "user_id": pa.array([MIN, MIN, 5, MAX]),
            "time_ms": pa.array([1, 2, 3, 4]),
            "received_ms": pa.array([1, 9, 3, 4]),
            "item_id": pa.array([7, 8, 9, 7]),
            "action": pa.array(["a", "b", "a", "c"]).dictionary_encode(),
            "dwell_ms": pa.array([1, None, 3, 4]),
            "query": pa.array(["x", None, "y", "z"]),
        }
    )


def test_events_are_read_as_the_plan_declares_them() -> None:
    plan = compile_features(
        {"a": events.last(events.item), "b": events.last(events.query), "c": events.sum(events.dwell_ms)}
    )
    table = EventTable.from_arrow(event_table(), plan)
    assert table.user_ids.tolist() == [MIN, 5, MAX] and table.offsets.tolist() == [0, 2, 3, 4]
    assert set(table.columns) == {"item", "query", "dwell_ms"}
    assert table.columns["query"].to_pylist() == ["x", "-", "y", "z"]
    assert table.owners_of(np.array([5, 0, MAX, MIN])).tolist() == [1, -1, 2, 0]
    part = table.slice(1, 3)
    assert part.user_ids.tolist() == [5, MAX] and part.offsets.tolist() == [0, 1, 2]
    assert part.times.tolist() == [3, 4] and part.columns["item"].to_pylist() == [9, 7]
    assert table.slice(0, 3).columns is table.columns, "nothing is copied for all users"
    assert len(table.slice(1, 1).times) == 0


def test_a_column_that_the_file_does_not_have() -> None:
    plan = compile_features({"a": events.sum(events.dwell_ms)})
    with pytest.raises(DataError) as error:
        EventTable.from_arrow(event_table().drop_columns(["dwell_ms"]), plan)
    assert (
        error.value.got.startswith("feature a (test_entity_tables.py:")
        and "events.dwell_ms is not in the data" in error.value.got
    )
    with pytest.raises(DataError, match="item.colour is not in the data"):
        EntityTable.from_arrow(pa.table({"item_id": [1]}), "item", compile_features({"a": item.colour}))


def test_a_column_of_another_type_names_the_feature() -> None:
    plan = compile_features({"a": events.sum(events.dwell_ms)})
    wrong = event_table().set_column(5, "dwell_ms", pa.array(["1", "2", "3", "4"]))
    with pytest.raises(DataError) as error:
        EventTable.from_arrow(wrong, plan)
    assert error.value.got.startswith("feature a (test_entity_tables.py:") and "is string" in error.value.got


def test_a_table_without_events_or_times() -> None:
    plan = compile_features({"a": events.last(events.item)})
    empty = EventTable.from_arrow(event_table().slice(0, 0), plan)
    assert empty.offsets.tolist() == [0] and empty.owners_of(np.array([5])).tolist() == [-1]
    untimed = EventTable.from_arrow(event_table().drop_columns(["time_ms", "received_ms"]), plan)
    assert untimed.times.tolist() == [0, 0, 0, 0]


# From a dataset on disk.


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def write(**tables: pa.Table) -> Path:
        log = pa.table(
            {
                "user": pa.array(["u", "u", "v"]).dictionary_encode(),
                "item": pa.array(["i", "j", "i"]).dictionary_encode(),
                "action": pa.array(["click", "save", "click"]).dictionary_encode(),
                "surface": pa.array(["home"] * 3).dictionary_encode(),
                "time_ms": pa.array([10, 20, 30]),
                "received_ms": pa.array([10, 90, 30]),
                "order": pa.array([0, 1, 2]),
                "dwell_ms": pa.array([5, None, 7]),
                "query": pa.array(["x", None, "y"]),
            }
        )
        write_dataset(tmp_path, "tiny", log, **tables)
        return tmp_path / "tiny"

    return write


ITEMS = pa.table(
    {
        "item": ["i", "k"],
        "price": [1.5, None],
        "colour": ["red", None],
        "look": [[1.0, 2.0], None],
        "tags": pa.array([[1], []], pa.list_(pa.int64())),
    }
)


def test_a_dataset_is_read_as_far_as_the_plan_needs_it(folder: Callable[..., Path]) -> None:
    dataset = open_dataset(folder(item_attributes=ITEMS))
    plan = compile_features({"a": item.price + 1, "b": events.last(events.query), "id": user.id})
    table, users, items = load_tables(dataset, plan)
    assert table is not None and set(table.columns) == {"query"} and users is None
    assert items is not None and set(items.columns) == {"price"}
    assert stored_event_columns(dataset, plan) == ["user_id", "time_ms", "received_ms", "query"]
    assert stored_event_columns(dataset, plan, timed=False) == ["user_id", "query"]
    assert load_tables(dataset, compile_features({"hour": request.time.hour()})) == (None, None, None)
    assert load_entities(dataset, compile_features({"id": item.id})) == (None, None)


def test_point_in_time_from_disk_to_features(folder: Callable[..., Path]) -> None:
    dataset = open_dataset(folder(item_attributes=ITEMS))
    plan = compile_features(
        {"n": events.count(), "price": item.price, "colour": item.colour, "look": item.look, "tags": item.tags}
    )
    table, users, items = load_tables(dataset, plan)
    u, i, k, unknown = (string_id(text) for text in ("u", "i", "k", "z"))
    found = BatchExecutor(plan, events=table, users=users, items=items).compute(
        RequestRows(
            user_ids=np.array([u, u, u, unknown]),
            request_ms=np.array([10, 11, 91, 99]),
            item_ids=np.array([i, k, unknown, i]),
        )
    )
    assert {name: column.to_pylist() for name, column in found.items()} == {
        "n": [0, 1, 2, 0],
        "price": [1.5, 9.0, 9.0, 1.5],
        "colour": ["red", None, None, "red"],
        "look": [[1.0, 2.0], None, None, [1.0, 2.0]],
        "tags": [[1], [], None, [1]],
    }


def test_attributes_that_change_with_time_from_disk(folder: Callable[..., Path]) -> None:
    history = pa.table({"item": ["i", "i", "j"], "valid_from_ms": [0, 50, 50], "colour": ["red", "blue", "green"]})
    people = pa.table({"user": ["u", "u"], "valid_from_ms": [20, 40], "country": ["de", None]})
    dataset = open_dataset(folder(item_attributes=history, user_attributes=people))
    plan = compile_features({"colour": item.colour, "country": user.country})
    _, users, items = load_tables(dataset, plan)
    u, i, j = (string_id(text) for text in ("u", "i", "j"))
    found = BatchExecutor(plan, users=users, items=items).compute(
        RequestRows(user_ids=np.array([u] * 4), request_ms=np.array([19, 20, 49, 50]), item_ids=np.array([i, j, i, i]))
    )
    assert found["colour"].to_pylist() == ["red", None, "red", "blue"]
    assert found["country"].to_pylist() == [None, "de", None, None]
