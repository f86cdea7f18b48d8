"""Text kernels against plain Python, row by row."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.features.column import Column
from tackboard.features.kernels.text import per_text, renumber, text_keys, used_texts
from tackboard.features.operators import REGISTRY, TypeClash
from tackboard.features.types import INT, STRING, FeatureType

FAST = settings(max_examples=50, deadline=None)


@FAST
@given(data=st.data(), text=st.sampled_from([" ", "a", "é", "e\u0301", "ΟΔ"]))
def test_one_text(check_kernel: Callable[..., None], data: st.DataObject, text: str) -> None:
    check_kernel(data, "lower", ["string"], str.lower)
    check_kernel(data, "strip", ["string"], str.strip)
    check_kernel(data, "nfc", ["string"], lambda whole: unicodedata.normalize("NFC", whole))
    check_kernel(data, "contains_text", ["string"], lambda whole: text in whole, text=text)


@FAST
@given(data=st.data(), count=st.integers(1, 3), separator=st.sampled_from(["", "|", "é"]))
def test_concat(check_kernel: Callable[..., None], data: st.DataObject, count: int, separator: str) -> None:
    check_kernel(data, "concat", ["string"] * count, lambda *texts: separator.join(texts), separator=separator)


def test_every_value_missing_and_no_dictionary() -> None:
    column = Column(
        STRING.with_nullable(True),
        np.array([7, 8]),
        present=np.zeros(2, dtype=bool),
        dictionary=np.zeros(0, dtype=object),
    )
    for name, params in (("lower", {}), ("concat", {}), ("contains_text", {"text": "a"})):
        assert REGISTRY[name].kernel(column, **params).to_pylist() == [None, None]
    assert REGISTRY["concat"].kernel(column, column).to_pylist() == [None, None]


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
    all_used = Column.of(STRING, ["a", "b", "a"])
    assert all(
        kept is held for kept, held in zip(used_texts(all_used), (all_used.values, all_used.dictionary), strict=True)
    )
    one, other = text_keys(column, Column.of(STRING, ["text 3", "b"]))
    assert one[1] == one[2] == other[0] and len({one[0], one[1], other[1]}) == 3


@FAST
@given(st.lists(st.integers(0, 30)), st.sampled_from([31, 100_000]))
def test_renumber(codes: list[int], size: int) -> None:
    used, numbers = renumber(np.array(codes, dtype=np.int64), size)
    assert used.tolist() == sorted(set(codes))
    assert used[numbers].tolist() == codes


@pytest.mark.parametrize(
    ("name", "types", "params"),
    [
        *((name, (INT,), {}) for name in ("lower", "strip", "nfc", "concat")),
        ("contains_text", (INT,), {"text": "a"}),
        *(("contains_text", (STRING,), {"text": text}) for text in (None, "", 3)),
        ("concat", (), {}),
        *(("concat", (STRING,), {"separator": separator}) for separator in (None, 3, ["a"])),
    ],
)
def test_wrong_types_and_parameters(name: str, types: tuple[FeatureType, ...], params: dict[str, Any]) -> None:
    with pytest.raises(TypeClash) as clash:
        REGISTRY[name].rule(types, params)
    assert clash.value.allowed
