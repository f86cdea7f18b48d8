"""Text kernels against plain Python, row by row."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column, differing_rows
from tackboard.features.kernels.text import per_text, renumber, used_texts
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import INT, STRING

TRICKY = [
    "",
    " ",
    "a",
    "A",
    "é",
    "e\u0301",
    "É",
    "E\u0301",
    "ß",
    "ẞ",
    "İ",
    "Σ",
    "ΟΔΟΣ",
    "\u00a0x\u2003",
    "ﬁ",
    "\u212b",
    "\ud800",
]
TEXTS = st.sampled_from(TRICKY) | st.text(max_size=6)
FAST = settings(max_examples=100, deadline=None)
NULLABLE = STRING.with_nullable(True)


def compute(name: str, *columns: Column, **params: Any) -> Column:
    """The kernel's result, after checks: each row alone gives the same text, and the rule foretells the type."""
    operator = REGISTRY[name]
    foretold = operator.rule(tuple(column.type for column in columns), params)
    whole: Column = operator.kernel(*columns, **params)
    for row in range(len(whole)):
        alone = operator.kernel(*(column.take(np.array([row])) for column in columns), **params)
        assert not len(differing_rows(alone, whole.take(np.array([row]))))
    assert whole.type == foretold.with_nullable(False)
    assert foretold.nullable or whole.mask.all()
    return whole


@st.composite
def columns(draw: st.DrawFn, num_rows: int) -> Column:
    """A column with strings that no row uses, a string twice, and codes beyond the dictionary where missing."""
    texts = draw(st.lists(TEXTS, min_size=1, max_size=8))
    codes = draw(st.lists(st.integers(0, len(texts) - 1), min_size=num_rows, max_size=num_rows))
    present = draw(st.none() | st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    values = np.array(codes, dtype=np.int64)
    dictionary = np.empty(len(texts), dtype=np.object_)
    dictionary[:] = texts
    if present is None:
        return Column(STRING, values, dictionary=dictionary)
    mask = np.array(present, dtype=np.bool_)
    values[~mask] = draw(st.sampled_from([-(2**63), -1, 0, 2**63 - 1]))
    return Column(NULLABLE, values, present=mask, dictionary=dictionary)


def plain(column: Column) -> list[str | None]:
    assert column.dictionary is not None
    return [column.dictionary[code] if there else None for code, there in zip(column.values, column.mask, strict=True)]


@FAST
@given(st.integers(0, 12).flatmap(columns))
@pytest.mark.parametrize(
    ("name", "twin"),
    [("lower", str.lower), ("strip", str.strip), ("nfc", lambda text: unicodedata.normalize("NFC", text))],
)
def test_rewriting(name: str, twin: Callable[[str], str], column: Column) -> None:
    assert plain(compute(name, column)) == [None if text is None else twin(text) for text in plain(column)]


@FAST
@given(st.integers(0, 12).flatmap(columns), st.sampled_from([text for text in TRICKY if text]))
def test_contains_text(column: Column, text: str) -> None:
    wanted = [None if whole is None else text in whole for whole in plain(column)]
    assert compute("contains_text", column, text=text).to_pylist() == wanted


@FAST
@given(
    st.integers(0, 12).flatmap(lambda n: st.lists(columns(n), min_size=1, max_size=4)), st.sampled_from(["", "|", "é"])
)
def test_concat(parts: list[Column], separator: str) -> None:
    rows = list(zip(*(plain(part) for part in parts), strict=True))
    wanted = [None if None in row else separator.join(row) for row in rows]
    assert plain(compute("concat", *parts, separator=separator)) == wanted


@FAST
@given(st.integers(0, 5).flatmap(columns), columns(1))
def test_concat_spreads_one_row(many: Column, one: Column) -> None:
    kernel = REGISTRY["concat"].kernel
    spread = one.take(np.zeros(len(many), dtype=np.int64))
    assert not len(differing_rows(kernel(many, one), kernel(many, spread)))
    assert not len(differing_rows(kernel(one, many), kernel(spread, many)))


def test_every_value_missing_and_no_dictionary() -> None:
    column = Column(NULLABLE, np.array([7, 8]), present=np.zeros(2, dtype=bool), dictionary=np.zeros(0, dtype=object))
    for name, params in (("lower", {}), ("concat", {}), ("contains_text", {"text": "a"})):
        assert compute(name, column, **params).mask.tolist() == [False, False]
    assert plain(compute("concat", column, column)) == [None, None]


def test_only_strings_in_use_are_worked_on() -> None:
    dictionary = np.array([f"text {number}" for number in range(50_000)], dtype=object)
    column = Column(STRING, np.array([49_999, 3, 3]), dictionary=dictionary)
    seen: list[str] = []

    def note(text: str) -> int:
        seen.append(text)
        return len(text)

    assert per_text(column, note, np.int64).tolist() == [10, 6, 6]
    assert sorted(seen) == ["text 3", "text 49999"]
    assert len(REGISTRY["lower"].kernel(column).dictionary) == 2
    assert len(REGISTRY["concat"].kernel(column, column).dictionary) == 2


@FAST
@given(st.lists(st.integers(0, 30)), st.sampled_from([31, 100_000]))
def test_renumber(codes: list[int], size: int) -> None:
    used, numbers = renumber(np.array(codes, dtype=np.int64), size)
    assert used.tolist() == sorted(set(codes))
    assert used[numbers].tolist() == codes


def test_used_texts_are_not_touched_where_all_may_be_used() -> None:
    column = Column.of(STRING, ["a", "b", "a"])
    codes, texts = used_texts(column)
    assert codes is column.values
    assert texts is column.dictionary


def test_wrong_types_and_parameters() -> None:
    for name in ("lower", "strip", "nfc", "contains_text", "concat"):
        with pytest.raises(TypeClash):
            REGISTRY[name].rule((INT,), {"text": "a"} if name == "contains_text" else {})
    with pytest.raises(TypeClash):
        REGISTRY["concat"].rule((), {})
    for separator in (None, 3, ["a"]):
        with pytest.raises(TypeClash, match="separator"):
            REGISTRY["concat"].rule((STRING,), {"separator": separator})
    for text in (None, "", 3):
        with pytest.raises(TypeClash):
            REGISTRY["contains_text"].rule((STRING,), {"text": text})
