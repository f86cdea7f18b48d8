"""Columns: what goes in comes out, rows are taken and joined, and a difference of one bit is seen."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import (
    Column,
    both_present,
    differing_rows,
    encode_strings,
    join_columns,
    offsets_of,
    ordered_sum,
    ranges,
    spread,
)
from tackboard.features.types import FLOAT, ID, INT, STRING, TIME, FeatureType

VECTOR = FeatureType("vector", width=2)
SEQUENCE = FeatureType("sequence", columns=(("item", ID.in_list()), ("word", STRING.in_list())))
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES: dict[str, tuple[FeatureType, st.SearchStrategy[Any]]] = {
    "bool": (FeatureType("bool"), st.booleans()),
    "int": (INT, INT64),
    "float": (FLOAT, st.floats()),
    "string": (STRING, st.text(max_size=3)),
    "id": (ID, INT64),
    "time": (TIME, INT64),
    "vector": (VECTOR, st.lists(st.floats(width=32), min_size=2, max_size=2)),
    "list[string]": (STRING.in_list(), st.lists(st.text(max_size=2), max_size=3)),
    "list[float]": (FLOAT.in_list(), st.lists(st.floats(), max_size=3)),
    "sequence": (
        SEQUENCE,
        st.lists(st.tuples(INT64, st.text(max_size=2)), max_size=3).map(
            lambda rows: {"item": [row[0] for row in rows], "word": [row[1] for row in rows]}
        ),
    ),
}


def key(value: Any) -> Any:
    """A value that equals another where both have the same bits."""
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, list):
        return [key(element) for element in value]
    if isinstance(value, dict):
        return {name: key(element) for name, element in value.items()}
    return value


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=40)
@given(data=st.data())
def test_values_come_back_whole_taken_and_joined(kind: str, data: st.DataObject) -> None:
    type_, values = VALUES[kind]
    rows = data.draw(st.lists(st.none() | values, max_size=8))
    column = Column.of(type_, rows)
    assert len(column) == len(rows)
    assert key(column.to_pylist()) == key(rows)
    assert len(differing_rows(column, Column.of(type_, rows))) == 0
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    taken = column.take(np.array(places, dtype=np.int64))
    assert key(taken.to_pylist()) == key([rows[place] for place in places])
    joined = join_columns([taken, column, column.take(np.zeros(0, dtype=np.int64))])
    assert key(joined.to_pylist()) == key([*(rows[place] for place in places), *rows])
    assert joined.type == type_
    assert join_columns([column]) is column


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_difference_is_found_in_its_row(kind: str, data: st.DataObject) -> None:
    type_, values = VALUES[kind]
    rows = data.draw(st.lists(st.none() | values, min_size=1, max_size=6))
    other = data.draw(st.lists(st.none() | values, min_size=len(rows), max_size=len(rows)))
    found = differing_rows(Column.of(type_, rows), Column.of(type_, other))
    expected = [row for row, (one, two) in enumerate(zip(rows, other, strict=True)) if key(one) != key(two)]
    assert found.tolist() == expected


def test_signs_of_zero_and_bits_of_nan_are_differences() -> None:
    one = Column.of(FLOAT, [0.0, math.nan, math.nan, 1.0])
    two = Column.of(FLOAT, [-0.0, math.nan, -math.nan, 1.0])
    assert differing_rows(one, two).tolist() == [0, 2]
    assert differing_rows(Column.of(VECTOR, [[0.0, 1.0]]), Column.of(VECTOR, [[-0.0, 1.0]])).tolist() == [0]


def test_columns_of_other_lengths_or_fields_differ_everywhere() -> None:
    assert differing_rows(Column.of(INT, [1]), Column.of(INT, [1, 2])).tolist() == [0, 1]
    rows = [{"item": [1], "word": ["a"]}, {"item": [], "word": []}]
    other = FeatureType("sequence", columns=(("item", ID.in_list()),))
    found = differing_rows(Column.of(SEQUENCE, rows), Column.of(other, [{"item": [1]}, {"item": []}]))
    assert found.tolist() == [0, 1]


def test_equal_strings_are_equal_whatever_their_codes() -> None:
    texts = np.array(["b", "a", "b"], dtype=object)
    one = Column(STRING, np.array([0, 1]), dictionary=texts)
    two = Column(STRING, np.array([2, 1]), dictionary=texts)
    assert len(differing_rows(one, two)) == 0
    assert differing_rows(one, Column.of(STRING, ["b", "A"])).tolist() == [1]


def test_a_code_under_a_missing_entry_may_point_anywhere() -> None:
    present = np.array([True, False, False])
    wild = Column(STRING, np.array([0, 99, -5]), present=present, dictionary=np.array(["a"], dtype=object))
    assert wild.to_pylist() == ["a", None, None]
    assert len(differing_rows(wild, Column.of(STRING, ["a", None, None]))) == 0
    nothing = np.zeros(3, dtype=bool)
    empty = Column(STRING, np.array([0, 99, -5]), present=nothing, dictionary=np.zeros(0, dtype=object))
    assert empty.to_pylist() == [None, None, None]
    assert len(differing_rows(empty, Column.of(STRING, [None, None, None]))) == 0
    assert join_columns([empty, wild]).to_pylist() == [None, None, None, "a", None, None]


def test_values_under_missing_entries_are_no_difference() -> None:
    present = np.array([True, False])
    one, two = (Column(INT, np.array([1, hidden]), present=present) for hidden in (5, 6))
    assert len(differing_rows(one, two)) == 0
    offsets = np.array([0, 1, 3])
    lists = [
        Column(INT.in_list(), np.array([1, *hidden]), present=present, offsets=offsets) for hidden in ((2, 3), (4, 5))
    ]
    assert len(differing_rows(*lists)) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(allow_nan=False)), max_size=30))
def test_sums_add_one_after_the_other(pairs: list[tuple[int, float]]) -> None:
    totals = [0.0] * 4
    for row, value in pairs:
        totals[row] += value
    rows, values = np.array([row for row, _ in pairs], dtype=np.int64), np.array([value for _, value in pairs])
    assert key(ordered_sum(values, rows, 4).tolist()) == key(
        [total if total == total else float(total) for total in totals]
    )


def test_sums_do_not_follow_the_shape_of_the_array() -> None:
    numbers = np.random.default_rng(0).normal(size=(50, 1001)) * 10.0 ** np.arange(1001)[None, :] ** 0.3
    rows = np.repeat(np.arange(50), 1001)
    together = ordered_sum(numbers.ravel(), rows, 50)
    alone = [ordered_sum(row, np.zeros(1001, dtype=np.int64), 1)[0] for row in numbers]
    assert together.tolist() == alone
    assert together.tolist() != numbers.sum(axis=1).tolist(), "the test is blind: NumPy's own sum agrees"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6))
def test_ranges_are_runs_end_to_end(runs: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([run[side] for run in runs], dtype=np.int64) for side in (0, 1))
    expected = [place for start, length in runs for place in range(start, start + length)]
    assert ranges(starts, lengths).tolist() == expected
    assert offsets_of(lengths).tolist() == [sum(lengths[:place]) for place in range(len(runs) + 1)]


def test_masks_are_joined_and_spread() -> None:
    some, one = Column.of(INT, [1, None, 3]), Column.of(INT, [None])
    assert both_present(Column.of(INT, [1])) is None
    assert both_present(some, Column.of(INT, [1, 2, 3])).tolist() == [True, False, True]
    assert both_present(some, one).tolist() == [False, False, False]
    assert spread(None, 3) is None
    assert spread(one.present, 3).tolist() == [False, False, False]
    assert some.mask.tolist() == [True, False, True] and Column.of(INT, [1]).mask.tolist() == [True]


def test_strings_are_encoded_once_each() -> None:
    codes, dictionary = encode_strings(["b", "a", "b", "e\u0301", "\u00e9"])
    assert codes.tolist() == [0, 1, 0, 2, 3] and dictionary.tolist() == ["b", "a", "e\u0301", "\u00e9"]
