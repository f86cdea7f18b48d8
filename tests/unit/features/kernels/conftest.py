"""One check for every kernel: against a slow twin, row by row, and against itself on single rows and spread inputs."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tackboard.features.column import DTYPES, Column, differing_rows, ranges
from tackboard.features.operators import REGISTRY
from tackboard.features.reference import parse_type
from tackboard.features.types import FeatureType

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INTS = st.sampled_from([0, 1, -1, 2, -3, 2**53 + 1, INT64_MIN, INT64_MAX]) | st.integers(INT64_MIN, INT64_MAX)
SPECIAL = [0.0, -0.0, 1.0, -1.5, math.nan, -math.nan, math.inf, -math.inf, 5e-324, 1e308, 2.0**53, 2.0**63]
STRINGS = [
    "",
    " ",
    "a",
    "A",
    "é",
    "e\u0301",
    "É",
    "E\u0301",
    "\U0001f642",
    "straße",
    "ẞ",
    "İ",
    "ΟΔΟΣ",
    "\u00a0x\u2003",
    "\ud800",
]
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": INTS,
    "float": st.sampled_from(SPECIAL) | st.floats(),
    "string": st.sampled_from(STRINGS) | st.text(max_size=4),
    "id": INTS,
    "time": INTS,
}
# What may stand under a missing entry, in two columns that must give the same result.
GARBAGE: tuple[dict[str, Any], ...] = (
    {"bool": False, "int": 0, "float": 0.0, "id": 0, "time": 0, "string": ""},
    {"bool": True, "int": INT64_MIN, "float": math.nan, "id": -1, "time": INT64_MAX, "string": "x"},
)


def values_of(type_: FeatureType) -> st.SearchStrategy[Any]:
    if type_.kind == "vector":
        return st.lists(st.floats(width=32), min_size=type_.width, max_size=type_.width)
    return st.lists(SCALARS[type_.element], max_size=6) if type_.kind == "list" else SCALARS[type_.kind]


def garbage_of(type_: FeatureType, version: int) -> Any:
    if type_.kind == "vector":
        return [math.inf if version else 0.0] * type_.width
    return [GARBAGE[1][type_.element]] * (2 * version) if type_.kind == "list" else GARBAGE[version][type_.kind]


def column_of(type_: FeatureType, values: Sequence[Any], version: int) -> Column:
    """The column of `values`; version 1 differs in what lies under missing entries, in dictionary and offsets."""
    present = np.array([value is not None for value in values], dtype=np.bool_) if type_.nullable else None
    column = Column.of(type_, [garbage_of(type_, version) if value is None else value for value in values])
    codes, offsets, dictionary = column.values, column.offsets, column.dictionary
    if dictionary is not None and version == 1:
        # Every string twice, more strings than rows that no row uses, and codes without a string where one is missing.
        dictionary = np.array(["unused", *dictionary, *dictionary, *("y" * n for n in range(len(codes)))], dtype=object)
        codes = codes + 1 + (np.arange(len(codes)) % 2) * len(column.dictionary)
        if offsets is None and present is not None:
            codes[~present] = INT64_MAX
    if offsets is not None and version == 1 and len(codes):
        # Values outside all rows, as a slice without a copy has them.
        codes, offsets = np.concatenate([codes[-1:], codes, codes[:1]]), offsets + 1
    return Column(type_, codes, present=present, offsets=offsets, dictionary=dictionary)


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits; all NaNs are the same, for Python does not say which one it makes."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is float and type(other) is float:
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and bool(one == other)


def snapshot(column: Column) -> list[bytes]:
    arrays = (column.values, column.present, column.offsets)
    return [array.tobytes() for array in arrays if array is not None]


def check(
    data: st.DataObject,
    name: str,
    kinds: Sequence[str],
    twin: Callable[..., Any],
    *,
    sees_missing: bool = False,
    **params: Any,
) -> None:
    """Draws rows of `kinds` for the operator `name` and checks its kernel on them; see the module's docstring.

    A kind is a type as it is written, such as `list[int]`. `twin` takes one row's plain values and gives the result or
    None. Unless `sees_missing` it is not asked about rows in which a value is missing: their result is missing.
    """
    operator = REGISTRY[name]
    nullable = [data.draw(st.booleans()) for _ in kinds]
    types = tuple(parse_type(kind).with_nullable(flag) for kind, flag in zip(kinds, nullable, strict=True))
    cells = [st.none() | values_of(type_) if type_.nullable else values_of(type_) for type_ in types]
    rows = data.draw(st.lists(st.tuples(*cells), max_size=20))
    values = [[row[position] for row in rows] for position in range(len(kinds))]
    columns, others = (
        [column_of(type_, cells, version) for type_, cells in zip(types, values, strict=True)] for version in (0, 1)
    )
    before = [snapshot(column) for column in (*columns, *others)]
    promised = operator.rule(types, params)
    with np.errstate(all="ignore"):
        result = operator.kernel(*columns, **params)
        assert len(result) == len(rows)
        assert result.type.with_nullable(False) == promised.with_nullable(False)
        assert result.values.dtype == DTYPES[promised.element or promised.kind]
        assert promised.nullable or result.mask.all()
        assert result.present is None or result.present.shape == (len(rows),)
        for got, row in zip(result.to_pylist(), rows, strict=True):
            expected = twin(*row) if sees_missing or None not in row else None
            assert same(got, expected), (row, got, expected)
        assert len(differing_rows(result, operator.kernel(*others, **params))) == 0
        for row in range(len(rows)):
            index = np.array([row])
            alone = operator.kernel(*(column.take(index) for column in columns), **params)
            assert len(differing_rows(result.take(index), alone)) == 0
        if (operator.elementwise or operator.broadcasts) and rows:
            check_spread(operator.kernel, columns, params)
    assert before == [snapshot(column) for column in (*columns, *others)]


def check_spread(kernel: Callable[..., Column], columns: Sequence[Column], params: dict[str, Any]) -> None:
    """A column of one row gives the same as that row repeated, whichever inputs have one row."""
    first, repeated = ranges(np.array([0]), np.array([1])), np.zeros(len(columns[0]), dtype=np.int64)
    for chosen in itertools.product((False, True), repeat=len(columns)):
        short = [column.take(first) if one else column for column, one in zip(columns, chosen, strict=True)]
        long = [column.take(repeated) if one else column for column, one in zip(columns, chosen, strict=True)]
        result = kernel(*short, **params)
        expected = kernel(*long, **params).take(first if all(chosen) else np.arange(len(repeated)))
        assert result.present is None or len(result.present) == len(result.values)
        assert len(differing_rows(result, expected)) == 0


@pytest.fixture(scope="session")
def same_value() -> Callable[[Any, Any], bool]:
    """`same_value(one, other)`, see `same`."""
    return same


@pytest.fixture(scope="session")
def check_kernel() -> Callable[..., None]:
    """`check_kernel(data, "add", ("int", "float"), twin, param=…)`, see `check`."""
    return check
