"""List kernels against plain Python, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tackboard.features.kernels.lists  # noqa: F401
from tackboard.features.column import Column, differing_rows, offsets_of
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType

INT64 = st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), 2**63 - 1])
ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": INT64,
    "float": st.sampled_from([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, -math.nan, 1e16]) | st.floats(),
    "string": st.sampled_from(["", "a", "b", "é", "e\u0301"]),
    "id": INT64,
    "time": INT64,
}
FAST = settings(max_examples=60, deadline=None)


def compute(name: str, *columns: Column, **params: Any) -> list[Any]:
    """The kernel's rows, after checks: each row alone gives the same bits, and the rule foretells the type."""
    operator = REGISTRY[name]
    foretold = operator.rule(tuple(column.type for column in columns), params)
    with np.errstate(all="ignore"):
        whole: Column = operator.kernel(*columns, **params)
        for row in range(len(whole)):
            alone = operator.kernel(*(column.take(np.array([row])) for column in columns), **params)
            assert not len(differing_rows(alone, whole.take(np.array([row]))))
        backwards = operator.kernel(*(column.take(np.arange(len(column))[::-1]) for column in columns), **params)
        assert not len(differing_rows(backwards, whole.take(np.arange(len(whole))[::-1])))
    assert whole.type.with_nullable(False) == foretold.with_nullable(False)
    assert whole.values.dtype == Column.of(foretold, []).values.dtype
    assert foretold.nullable or whole.mask.all()
    return whole.to_pylist()


def same(got: list[Any], wanted: list[Any]) -> bool:
    """Equal to the bit, NaNs apart, which are all the same here."""
    return repr(got).replace("-nan", "nan") == repr(wanted).replace("-nan", "nan")


@st.composite
def list_columns(draw: st.DrawFn, element: str, num_rows: int) -> Column:
    """Lists with elements in missing rows too, values outside all rows, and strings that stand twice."""
    rows = draw(st.lists(st.lists(ELEMENTS[element], max_size=6), min_size=num_rows, max_size=num_rows))
    present = draw(st.none() | st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    column = Column.of(FeatureType("list", element=element), rows)
    values, offsets, dictionary = column.values, column.offsets, column.dictionary
    if draw(st.booleans()) and len(values):
        offsets = offsets + 1
        values = np.concatenate([values[-1:], values, values[:1]])
    if dictionary is not None and len(values):
        # The same strings under codes of their own for every second value.
        values = np.where(np.arange(len(values)) % 2, values, values + len(dictionary))
        dictionary = np.concatenate([dictionary, dictionary])
    mask = None if present is None else np.array(present, dtype=np.bool_)
    kind = FeatureType("list", element=element, nullable=mask is not None)
    return Column(kind, values, present=mask, offsets=offsets, dictionary=dictionary)


def any_list(*elements: str) -> st.SearchStrategy[Column]:
    return st.tuples(st.sampled_from(elements), st.integers(0, 8)).flatmap(lambda pair: list_columns(*pair))


def each(column: Column, plain: Callable[[list[Any]], Any]) -> list[Any]:
    return [None if row is None else plain(row) for row in column.to_pylist()]


def key(value: Any) -> Any:
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def plain_distinct(row: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [value for value in row if not (key(value) in seen or seen.add(key(value)))]


def wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def plain_float_sum(row: list[Any]) -> float:
    total = 0.0
    for value in row:
        total += float(value)
    return total


def plain_max(row: list[Any]) -> Any:
    if any(key(value) == "nan" for value in row):
        return math.nan
    largest = max(row, default=None)
    return largest + 0.0 if isinstance(largest, float) else largest


def plain_differences(row: list[Any]) -> list[Any]:
    pairs = list(zip(row[1:], row, strict=False))
    if row and isinstance(row[0], float):
        return [0.0, *(later - earlier for later, earlier in pairs)]
    return [0, *(wrap(later - earlier) for later, earlier in pairs)][: len(row)]


@FAST
@given(any_list(*ELEMENTS))
def test_length_and_distinct(column: Column) -> None:
    assert compute("length", column) == each(column, len)
    assert same(compute("distinct_list", column), each(column, plain_distinct))


@FAST
@given(any_list(*ELEMENTS), st.integers(-7, 7))
def test_at(column: Column, index: int) -> None:
    wanted = each(column, lambda row: row[index] if -len(row) <= index < len(row) else None)
    assert same(compute("at", column, index=index), wanted)


@FAST
@given(any_list(*ELEMENTS), st.integers(0, 7))
def test_take(column: Column, count: int) -> None:
    assert same(compute("take", column, count=count), each(column, lambda row: row[:count]))


@FAST
@given(st.lists(st.none() | st.text(max_size=5) | st.sampled_from(["é", "e\u0301", "\U0001f600"]), max_size=8))
def test_length_of_text(texts: list[str | None]) -> None:
    wanted = [None if text is None else len(text) for text in texts]
    assert compute("length", Column.of(STRING.with_nullable(True), texts)) == wanted


@FAST
@given(st.data(), st.sampled_from(list(ELEMENTS)), st.integers(0, 8))
def test_has(data: st.DataObject, element: str, num_rows: int) -> None:
    column = data.draw(list_columns(element, num_rows))
    wanted = data.draw(st.lists(st.none() | ELEMENTS[element], min_size=num_rows, max_size=num_rows))
    sought = Column.of(FeatureType(element, nullable=True), wanted)
    result = compute("has", column, sought)
    for row, value, found in zip(column.to_pylist(), wanted, result, strict=True):
        expected = key(value) in [key(other) for other in row] if row is not None and value is not None else None
        assert found is expected


@FAST
@given(st.data(), st.sampled_from(list(ELEMENTS)), st.integers(0, 8))
def test_overlap(data: st.DataObject, element: str, num_rows: int) -> None:
    left, right = data.draw(list_columns(element, num_rows)), data.draw(list_columns(element, num_rows))
    wanted = [
        None if a is None or b is None else len({key(value) for value in a} & {key(value) for value in b})
        for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True)
    ]
    assert compute("overlap", left, right) == wanted


@FAST
@given(st.data(), st.sampled_from(list(ELEMENTS)), st.integers(0, 8))
def test_one_row_spreads(data: st.DataObject, element: str, num_rows: int) -> None:
    one, many = data.draw(list_columns(element, 1)), data.draw(list_columns(element, num_rows))
    sought = Column.of(FeatureType(element), data.draw(st.lists(ELEMENTS[element], min_size=8, max_size=8)))
    sought = sought.take(np.arange(num_rows))
    spread = one.take(np.zeros(num_rows, dtype=np.int64))
    has, overlap = REGISTRY["has"].kernel, REGISTRY["overlap"].kernel
    assert not len(differing_rows(has(one, sought), has(spread, sought)))
    assert not len(differing_rows(overlap(one, many), overlap(spread, many)))
    assert not len(differing_rows(overlap(many, one), overlap(many, spread)))
    if num_rows:
        single = sought.take(np.array([0]))
        assert not len(differing_rows(has(many, single), has(many, sought.take(np.zeros(num_rows, dtype=np.int64)))))


def test_more_rows_than_16_bits() -> None:
    num_rows = 70_000
    lengths = np.full(num_rows, 3)
    values = np.tile(np.array([7, 5, 7]), num_rows)
    column = Column(INT.in_list(), values, offsets=offsets_of(lengths))
    assert REGISTRY["distinct_list"].kernel(column).values.tolist() == [7, 5] * num_rows
    assert REGISTRY["overlap"].kernel(column, column).values.tolist() == [2] * num_rows
    only_first = Column(INT.in_list(), values[:3], offsets=offsets_of(np.where(np.arange(num_rows) == 0, 3, 0)))
    assert REGISTRY["overlap"].kernel(column, only_first).values.tolist() == [2] + [0] * (num_rows - 1)


@FAST
@given(any_list("bool", "int", "float"))
def test_sum_and_mean(column: Column) -> None:
    total = plain_float_sum if column.type.element == "float" else lambda row: wrap(sum(row))
    assert same(compute("list_sum", column), each(column, total))
    means = each(column, lambda row: plain_float_sum(row) / len(row) if row else None)
    assert same(compute("list_mean", column), means)


@FAST
@given(any_list("bool", "int", "float", "time"))
def test_max(column: Column) -> None:
    assert same(compute("list_max", column), each(column, plain_max))


@FAST
@given(any_list("int", "float", "time"))
def test_differences(column: Column) -> None:
    wanted = each(column, lambda row: plain_differences(row) if row else [])
    assert same(compute("differences", column), wanted)


def test_long_float_lists_do_not_depend_on_their_neighbours() -> None:
    random = np.random.default_rng(5)
    lengths = random.integers(0, 60, size=200)
    values = random.normal(size=int(lengths.sum())) * 10.0 ** random.integers(-9, 9, size=int(lengths.sum()))
    values[random.random(len(values)) < 0.01] = np.nan
    values[random.random(len(values)) < 0.02] = -0.0
    column = Column(FLOAT.in_list(), values, offsets=offsets_of(lengths))
    for name in ("list_sum", "list_mean", "list_max", "differences", "distinct_list"):
        compute(name, column)


def test_vectors_have_components() -> None:
    column = Column.of(FeatureType("vector", width=2, nullable=True), [[0.5, -0.0], None])
    assert same(compute("at", column, index=-1), [-0.0, None])
    assert compute("at", column, index=0) == [0.5, None]
    for index in (2, -3):
        with pytest.raises(TypeClash, match="no component"):
            REGISTRY["at"].rule((column.type,), {"index": index})


def test_wrong_types_and_parameters() -> None:
    ints, floats, strings = INT.in_list(), FLOAT.in_list(), STRING.in_list()
    for name in ("take", "distinct_list", "list_sum", "list_mean", "list_max", "differences", "at", "length"):
        with pytest.raises(TypeClash):
            REGISTRY[name].rule((INT,), {"count": 1, "index": 1})
    for name in ("list_sum", "list_mean", "list_max", "differences"):
        for element in (strings, ID.in_list()):
            with pytest.raises(TypeClash):
                REGISTRY[name].rule((element,), {})
    with pytest.raises(TypeClash):
        REGISTRY["differences"].rule((BOOL.in_list(),), {})
    for types in ((ints, FLOAT), (ints, ints), (INT, INT)):
        with pytest.raises(TypeClash):
            REGISTRY["has"].rule(types, {})
    for types in ((ints, floats), (ints, INT), (INT, ints)):
        with pytest.raises(TypeClash):
            REGISTRY["overlap"].rule(types, {})
    for index in (None, True, 1.0, "1", 2**31, -(2**31)):
        with pytest.raises(TypeClash, match="index"):
            REGISTRY["at"].rule((ints,), {"index": index})
    for count in (None, True, 1.0, -1, 2**31):
        with pytest.raises(TypeClash, match="count"):
            REGISTRY["take"].rule((ints,), {"count": count})


def test_what_may_be_missing() -> None:
    ints = INT.in_list()
    assert REGISTRY["at"].rule((ints,), {"index": 0}) == INT.with_nullable(True)
    assert REGISTRY["list_mean"].rule((ints,), {}) == FLOAT.with_nullable(True)
    assert REGISTRY["list_max"].rule((TIME.in_list(),), {}) == TIME.with_nullable(True)
    assert REGISTRY["list_sum"].rule((ints,), {}) == INT
    assert REGISTRY["has"].rule((ints, INT.with_nullable(True)), {}) == BOOL.with_nullable(True)
