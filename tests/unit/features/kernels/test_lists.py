"""List kernels against plain Python, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column, differing_rows, offsets_of
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import BOOL, FLOAT, ID, INT, SCALARS, STRING, FeatureType

INTS, FLOATS, STRINGS = INT.in_list(), FLOAT.in_list(), STRING.in_list()
VECTOR = FeatureType("vector", width=2)
FAST = settings(max_examples=25, deadline=None)


def key(value: Any) -> Any:
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def slow_distinct(row: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [value for value in row if not (key(value) in seen or seen.add(key(value)))]


def slow_overlap(one: list[Any], other: list[Any]) -> int:
    return len({key(value) for value in one} & {key(value) for value in other})


def wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def slow_float_sum(row: list[Any]) -> float:
    total = 0.0
    for value in row:
        total += float(value)
    return total


def slow_max(row: list[Any]) -> Any:
    if any(key(value) == "nan" for value in row):
        return math.nan
    largest = max(row, default=None)
    return largest + 0.0 if isinstance(largest, float) else largest


def slow_differences(row: list[Any]) -> list[Any]:
    pairs = list(zip(row[1:], row, strict=False))
    if row and isinstance(row[0], float):
        return [0.0, *(later - earlier for later, earlier in pairs)]
    return [0, *(wrap(later - earlier) for later, earlier in pairs)][: len(row)]


@pytest.mark.parametrize("element", SCALARS)
@FAST
@given(data=st.data(), index=st.integers(-7, 7))
def test_lists_of_any_kind(check_kernel: Callable[..., None], element: str, data: st.DataObject, index: int) -> None:
    kind = f"list[{element}]"
    check_kernel(data, "length", [kind], len)
    check_kernel(data, "distinct_list", [kind], slow_distinct)
    check_kernel(data, "at", [kind], lambda row: row[index] if -len(row) <= index < len(row) else None, index=index)
    check_kernel(data, "take", [kind], lambda row: row[: abs(index)], count=abs(index))
    check_kernel(data, "has", [kind, element], lambda row, value: key(value) in [key(other) for other in row])
    check_kernel(data, "overlap", [kind, kind], slow_overlap)


@pytest.mark.parametrize("element", ["bool", "int", "float", "time"])
@FAST
@given(data=st.data())
def test_lists_of_numbers_and_times(check_kernel: Callable[..., None], element: str, data: st.DataObject) -> None:
    kind = f"list[{element}]"
    check_kernel(data, "list_max", [kind], slow_max)
    if element != "bool":
        check_kernel(data, "differences", [kind], slow_differences)
    if element != "time":
        total = slow_float_sum if element == "float" else lambda row: wrap(sum(row))
        check_kernel(data, "list_sum", [kind], total)
        check_kernel(data, "list_mean", [kind], lambda row: slow_float_sum(row) / len(row) if row else None)


@FAST
@given(data=st.data())
def test_texts_and_vectors(check_kernel: Callable[..., None], data: st.DataObject) -> None:
    check_kernel(data, "length", ["string"], len)
    check_kernel(data, "at", ["vector[2]"], lambda row: row[-1], index=-1)


def test_one_long_list_is_searched_for_many_values() -> None:
    known, wanted = list(range(0, 90, 3)), list(range(60))
    column = Column.of(INTS, [known])
    assert REGISTRY["has"].kernel(column, Column.of(INT, wanted)).to_pylist() == [value in known for value in wanted]
    pairs = Column.of(INTS, [[value, value + 1] for value in wanted])
    assert REGISTRY["overlap"].kernel(column, pairs).to_pylist() == [(v in known) + (v + 1 in known) for v in wanted]


def test_more_rows_than_16_bits() -> None:
    num_rows = 70_000
    values = np.tile(np.array([7, 5, 7]), num_rows)
    column = Column(INTS, values, offsets=offsets_of(np.full(num_rows, 3)))
    assert REGISTRY["distinct_list"].kernel(column).values.tolist() == [7, 5] * num_rows
    assert REGISTRY["overlap"].kernel(column, column).values.tolist() == [2] * num_rows
    only_first = Column(INTS, values[:3], offsets=offsets_of(np.where(np.arange(num_rows) == 0, 3, 0)))
    assert REGISTRY["overlap"].kernel(column, only_first).values.tolist() == [2] + [0] * (num_rows - 1)


def test_long_float_lists_do_not_depend_on_their_neighbours() -> None:
    random = np.random.default_rng(5)
    lengths = random.integers(0, 60, size=200)
    values = random.normal(size=int(lengths.sum())) * 10.0 ** random.integers(-9, 9, size=int(lengths.sum()))
    values[random.random(len(values)) < 0.01] = np.nan
    values[random.random(len(values)) < 0.02] = -0.0
    column = Column(FLOATS, values, offsets=offsets_of(lengths))
    with np.errstate(all="ignore"):
        for name in ("list_sum", "list_mean", "list_max", "differences", "distinct_list"):
            whole = REGISTRY[name].kernel(column)
            for row in range(200):
                alone = REGISTRY[name].kernel(column.take(np.array([row])))
                assert not len(differing_rows(alone, whole.take(np.array([row]))))


@pytest.mark.parametrize(
    ("name", "types", "params"),
    [
        *((name, (INT,), {}) for name in ("distinct_list", "list_sum", "list_mean", "list_max", "length")),
        ("take", (INT,), {"count": 1}),
        ("at", (INT,), {"index": 1}),
        *((name, (type_,), {}) for name in ("list_sum", "list_mean", "list_max", "differences")
          for type_ in (STRINGS, ID.in_list())),
        ("differences", (BOOL.in_list(),), {}),
        *(("has", types, {}) for types in ((INTS, FLOAT), (INTS, INTS), (INT, INT))),
        *(("overlap", types, {}) for types in ((INTS, FLOATS), (INTS, INT), (INT, INTS))),
        *(("at", (INTS,), {"index": index}) for index in (None, True, 1.0, "1", 2**31, -(2**31))),
        *(("at", (VECTOR,), {"index": index}) for index in (2, -3)),
        *(("take", (INTS,), {"count": count}) for count in (None, True, 1.0, -1, 2**31)),
    ],
)  # fmt: skip
def test_wrong_types_and_parameters(name: str, types: tuple[FeatureType, ...], params: dict[str, Any]) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule(types, params)
    assert clash.value.allowed
