"""To Arrow and back: the same bits, shared memory where nothing is missing, and a clear error for another type."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.features.arrow import arrow_type, from_arrow, to_arrow, to_table
from tackboard.features.column import Column, differing_rows
from tackboard.features.types import BOOL, FLOAT, ID, INT, SCALARS, STRING, TIME, FeatureType

VECTOR = FeatureType("vector", width=3)
SEQUENCE = FeatureType("sequence", columns=(("item", ID.in_list()), ("word", STRING.in_list()), ("at", TIME.in_list())))
INT64 = st.integers(-(2**63), 2**63 - 1)
SCALAR_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": INT64,
    "float": st.floats() | st.sampled_from([-math.nan, -0.0]),
    "string": st.text(max_size=3),
    "id": INT64,
    "time": INT64,
}
CASES: dict[str, tuple[FeatureType, st.SearchStrategy[Any]]] = {
    **{kind: (FeatureType(kind), SCALAR_VALUES[kind]) for kind in SCALARS},
    **{
        f"list[{kind}]": (FeatureType(kind).in_list(), st.lists(SCALAR_VALUES[kind], max_size=3)) for kind in SCALARS
    },
    "vector": (VECTOR, st.lists(st.floats(width=32), min_size=3, max_size=3)),
    "sequence": (
        SEQUENCE,
        st.lists(st.tuples(INT64, st.text(max_size=2), INT64), max_size=3).map(
            lambda rows: {name: [row[place] for row in rows] for place, name in enumerate(("item", "word", "at"))}
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=30)
@given(data=st.data())
def test_columns_come_back_whole_sliced_and_in_chunks(case: str, data: st.DataObject) -> None:
    type_, values = CASES[case]
    rows = data.draw(st.lists(st.none() | values if data.draw(st.booleans()) else values, max_size=8))
    column = Column.of(type_, rows)
    array = to_arrow(column)
    assert array.type == arrow_type(type_) and len(array) == len(rows)
    array.validate(full=True)
    assert len(differing_rows(from_arrow(array, type_), column)) == 0
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = from_arrow(array[start:stop], type_)
    assert len(differing_rows(part, column.take(np.arange(start, stop)))) == 0
    chunks = pa.chunked_array([array[:start], array[start:]], type=array.type)
    assert len(differing_rows(from_arrow(chunks, type_), column)) == 0
    nothing = pa.chunked_array([], type=array.type)
    assert len(from_arrow(nothing, type_)) == 0


def address(array: Any) -> int:
    return int(array.buffers()[-1].address)


@pytest.mark.parametrize(
    ("type_", "rows"),
    [
        (INT, [1, 2, 3]),
        (ID, [-1, 2**63 - 1]),
        (FLOAT, [0.5, math.nan]),
        (TIME, [0, 5]),
        (VECTOR, [[1.0, 2.0, 3.0]] * 2),
    ],
)
def test_memory_is_shared_where_nothing_is_missing(type_: FeatureType, rows: list[Any]) -> None:
    column = Column.of(type_, rows)
    array = to_arrow(column)
    assert address(array) == column.values.ctypes.data, "to Arrow"
    back = from_arrow(array, type_)
    assert np.shares_memory(back.values, column.values), "and back"
    assert back.present is None
    one_chunk = from_arrow(pa.chunked_array([array]), type_)
    assert np.shares_memory(one_chunk.values, column.values), "a table's column of one chunk"
    sliced = from_arrow(array[1:], type_)
    assert np.shares_memory(sliced.values, column.values), "a part"


@pytest.mark.parametrize("element", ["int", "float", "id", "time"])
def test_memory_of_lists_is_shared(element: str) -> None:
    type_ = FeatureType(element).in_list()
    column = Column.of(type_, [[1, 2], [], [3]])
    array = to_arrow(column)
    assert address(array) == column.values.ctypes.data
    assert array.buffers()[1].address == column.offsets.ctypes.data
    back = from_arrow(array, type_)
    assert np.shares_memory(back.values, column.values) and np.shares_memory(back.offsets, column.offsets)
    whole = from_arrow(pa.table({"x": array})["x"], type_)
    assert np.shares_memory(whole.values, column.values)


def test_memory_of_sequences_and_codes_is_shared() -> None:
    column = Column.of(SEQUENCE, [{"item": [1, 2], "word": ["a", "b"], "at": [3, 4]}])
    back = from_arrow(to_arrow(column), SEQUENCE)
    for name in ("item", "at"):
        assert np.shares_memory(back.fields[name].values, column.fields[name].values)
    texts = Column.of(STRING, ["a", "b", "a"])
    assert to_arrow(texts).indices.buffers()[1].address == texts.values.ctypes.data
    assert np.shares_memory(from_arrow(to_arrow(texts), STRING).values, texts.values)


def test_a_column_with_missing_values_is_copied_and_its_memory_left_alone() -> None:
    column = Column.of(INT, [1, None, 3])
    before = column.values.tobytes()
    back = from_arrow(to_arrow(column), INT)
    assert not np.shares_memory(back.values, column.values)
    assert back.to_pylist() == [1, None, 3] and column.values.tobytes() == before


def test_codes_under_missing_entries_may_point_anywhere() -> None:
    present = np.array([True, False])
    for dictionary in (np.array(["a"], dtype=object), np.zeros(0, dtype=object)):
        shown = present if len(dictionary) else np.zeros(2, dtype=bool)
        array = to_arrow(Column(STRING, np.array([0, 99]), present=shown, dictionary=dictionary))
        array.validate(full=True)
        assert array.to_pylist() == ["a" if shown[0] else None, None]


@pytest.mark.parametrize(
    ("array", "type_", "expected"),
    [
        (pa.array([1, None], pa.int8()), INT, [1, None]),
        (pa.array([1, 2], pa.uint32()), ID, [1, 2]),
        (pa.array([1, 2], pa.int32()), FLOAT, [1.0, 2.0]),
        (pa.array([0.5, None], pa.float32()), FLOAT, [0.5, None]),
        (pa.array([5, None], pa.timestamp("s")), TIME, [5000, None]),
        (pa.array([5000], pa.timestamp("us", tz="Europe/Berlin")), TIME, [5]),
        (pa.array([5, 6]), TIME, [5, 6]),
        (pa.array(["a", None], pa.large_string()), STRING, ["a", None]),
        (pa.array(["a", None, "b"]).dictionary_encode(), STRING, ["a", None, "b"]),
        (pa.array(["a", "b", None]), ID, [string_id("a"), string_id("b"), None]),
        (pa.array(["a", "b"]).dictionary_encode(), ID, [string_id("a"), string_id("b")]),
        (pa.array([[1], None, []], pa.list_(pa.int32())), INT.in_list(), [[1], None, []]),
        (pa.array([["a"], None]), ID.in_list(), [[string_id("a")], None]),
        (pa.array([[1.0, 2.0, 3.0], None], pa.list_(pa.float64())), VECTOR, [[1.0, 2.0, 3.0], None]),
        (pa.array([[1, 2, 3]], pa.large_list(pa.int64())), VECTOR, [[1.0, 2.0, 3.0]]),
        (pa.array([None, [1.0, 2.0, 3.0]], pa.list_(pa.float32(), 3)), VECTOR, [None, [1.0, 2.0, 3.0]]),
        (pa.array([[1e300, 0.0, -1e300]], pa.list_(pa.float64())), VECTOR, [[math.inf, 0.0, -math.inf]]),
        (pa.array([None, None], pa.string()), STRING, [None, None]),
        (pa.array([None], pa.list_(pa.string())), STRING.in_list(), [None]),
    ],
)
def test_other_widths_of_a_kind_are_read(array: pa.Array, type_: FeatureType, expected: list[Any]) -> None:
    for shape in (array, pa.chunked_array([array[:1], array[1:]])):
        assert from_arrow(shape, type_).to_pylist() == expected


def test_a_null_inside_a_dictionary_is_missing() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 1]), pa.array(["a", None]))
    assert from_arrow(array, STRING).to_pylist() == ["a", None, None, None]
    assert from_arrow(array, ID).to_pylist() == [string_id("a"), None, None, None]


def test_missing_lists_are_read_without_their_hidden_elements() -> None:
    hidden = pa.LargeListArray.from_arrays(pa.array([0, 2, 4]), pa.array([1, 2, 3, 4]), mask=pa.array([True, False]))
    assert from_arrow(hidden, INT.in_list()).to_pylist() == [None, [3, 4]]
    extreme = pa.array([[-(2**63)], None, [2**63 - 1]], pa.list_(pa.timestamp("ms")))
    assert from_arrow(extreme, TIME.in_list()).to_pylist() == [[-(2**63)], None, [2**63 - 1]]


@pytest.mark.parametrize(
    ("array", "type_", "message"),
    [
        (pa.array(["a"]), INT, "item.x is string"),
        (pa.array([1.5]), INT, "item.x is double"),
        (pa.array([1]), BOOL, "item.x is int64"),
        (pa.array([True]), INT, "item.x is bool"),
        (pa.array([1]), STRING, "item.x is int64"),
        (pa.array([1.5]), ID, "item.x is double"),
        (pa.array([2**64 - 1], pa.uint64()), INT, "item.x: "),
        (pa.array([1500], pa.timestamp("us")), TIME, "item.x: "),
        (pa.array([2**53 + 1]), FLOAT, "item.x: "),
        (pa.array([1]), INT.in_list(), "item.x is int64"),
        (pa.array([[1, None]]), INT.in_list(), "item.x has lists with missing elements"),
        (pa.array([["a"]]), FLOAT.in_list(), "item.x is string"),
        (pa.array([1.0]), VECTOR, "item.x is double"),
        (pa.array([[1.0, 2.0]]), VECTOR, "item.x has vectors of width 2"),
        (pa.array([[1.0, 2.0], [1.0]]), VECTOR, "item.x has vectors of width 2"),
        (pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), VECTOR, "item.x has vectors of width 2"),
        (pa.array([["a", "b", "c"]]), VECTOR, "item.x is list<item: string>"),
        (pa.array([[1.0, None, 2.0]]), VECTOR, "item.x has vectors with missing numbers"),
        (pa.array([[1.0, None, 2.0]], pa.list_(pa.float32(), 3)), VECTOR, "item.x has vectors with missing numbers"),
        (pa.nulls(2), INT, "item.x is null"),
    ],
)
def test_another_type_is_an_error_that_names_the_column(array: pa.Array, type_: FeatureType, message: str) -> None:
    with pytest.raises(DataError) as error:
        from_arrow(array, type_, "item.x")
    assert error.value.got.startswith(message)


def test_half_floats_are_read_or_refused() -> None:
    half = pa.array(np.array([0.5, 2.0], dtype=np.float16))
    assert from_arrow(half, FLOAT).to_pylist() == [0.5, 2.0]
    with_null = pa.concat_arrays([half, pa.nulls(1, pa.float16())])
    try:
        assert from_arrow(with_null, FLOAT).to_pylist() == [0.5, 2.0, None]
    except DataError as error:
        assert "a column: " in error.got


def test_a_table_remembers_types() -> None:
    table = to_table({"a": Column.of(INT, [1]), "b": Column.of(VECTOR, [[1.0, 2.0, 3.0]])})
    assert table.column_names == ["a", "b"] and table.num_rows == 1
    assert table.schema.field("b").metadata == {b"feature_type": b"vector[3]"}
