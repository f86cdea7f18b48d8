"""Operators on text: lower case, trimming, Unicode form, joining, searching.

The kernels take string columns, which hold codes into a dictionary. They return a new string column, or a column of
other values.

Decided: work on text is done once per string of the dictionary. If the dictionary is longer than the column, only the
strings that a row uses are processed, so a request for ten items never goes through the strings of a whole catalogue.
Python's `str` defines lower case and white space, so a character newer than Python's Unicode tables stays as it is.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.features.column import Column, both_present, spread
from tackboard.features.operators import Example, Params, TypeClash, any_missing, gives, need, register
from tackboard.features.types import BOOL, STRING, FeatureType

Codes = NDArray[np.int64]
Texts = NDArray[np.object_]
SMALL_TABLE = 1024
_register = functools.partial(register, family="text", elementwise=True)


def used_texts(column: Column) -> tuple[Codes, Texts]:
    """Returns (codes, strings) of a column of strings or of lists of strings. There is one code per value.

    There are no more strings than codes, except that an empty dictionary gives one string. Every code is valid, even
    the code of a missing value. The same string may occur twice.
    """
    codes, texts = column.values, column.dictionary
    if texts is None or len(texts) == 0:
        # No value is present, so any string will do.
        return np.zeros(len(codes), dtype=np.int64), np.array([""], dtype=np.object_)
    if column.present is not None:
        codes = np.clip(codes, 0, len(texts) - 1)
    if len(codes) == 1:
        return np.zeros(1, dtype=np.int64), texts[codes]
    if len(texts) > len(codes):
        used, codes = renumber(codes, len(texts))
        texts = texts[used]
    return codes, texts


def renumber(codes: Codes, size: int) -> tuple[Codes, Codes]:
    """Returns the distinct values of `codes` in ascending order, and the position of each code among these values.

    All codes are in [0, size).
    """
    if size > 4 * len(codes) + SMALL_TABLE:
        used, numbers = np.unique(codes, return_inverse=True)
        return used, numbers
    # A table of flags is faster than sorting if the table is not much longer than the codes.
    seen = np.zeros(size, dtype=np.bool_)
    seen[codes] = True
    used = np.flatnonzero(seen)
    numbers = np.empty(size, dtype=np.int64)
    numbers[used] = np.arange(len(used))
    return used, numbers[codes]


def per_text(column: Column, compute: Callable[[str], Any], dtype: Any) -> NDArray[Any]:
    """Returns `compute(string)` for every value, as an array of `dtype`. Calls `compute` once per used string."""
    codes, texts = used_texts(column)
    table: NDArray[Any] = np.fromiter((compute(text) for text in texts), dtype=dtype, count=len(texts))
    return table.take(codes)  # `take` is several times faster than indexing.


def text_keys(*columns: Column) -> list[Codes]:
    """Returns a number for every value of each string column. Numbers are equal if and only if the strings are
    equal."""
    known: dict[str, int] = {}
    return [per_text(column, lambda text: known.setdefault(text, len(known)), np.int64) for column in columns]


def _rewritten(column: Column, rewrite: Callable[[str], str]) -> Column:
    codes, texts = used_texts(column)
    dictionary = np.empty(len(texts), dtype=np.object_)
    dictionary[:] = [rewrite(text) for text in texts]
    return Column(STRING, codes, present=column.present, dictionary=dictionary)


def _joined(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    if not types:
        raise TypeClash("it is given nothing", allowed="it takes one string or more", fix="concat(a, b)")
    for position in range(len(types)):
        need(types, position, ("string",))
    separator = params.get("separator", "")
    if not isinstance(separator, str):
        raise TypeClash(f"its separator is {str(separator)[:80]!r}", allowed="it takes a string")
    return STRING.with_nullable(any_missing(types))


def _check_text(params: Params) -> None:
    text = params.get("text")
    if not isinstance(text, str) or not text:
        raise TypeClash(f"it looks for {str(text)[:80]!r}", allowed="it takes a string of one character or more")


@_register(
    "lower",
    "a.lower()",
    gives(STRING, ("string",)),
    Example("x.lower()", ["zürich", "οδος", None], {"x": ("string?", ["Zürich", "ΟΔΟΣ", None])}),
)
def lower(a: Column) -> Column:
    """The text in lower case, by the rules of Unicode; the result may be longer. Missing stays missing."""
    return _rewritten(a, str.lower)


@_register(
    "strip",
    "a.strip()",
    gives(STRING, ("string",)),
    Example("x.strip()", ["red shoe", "", None], {"x": ("string?", ["  red shoe\n", "\u00a0", None])}),
)
def strip(a: Column) -> Column:
    """The text without leading and trailing white space, as Unicode defines white space. Missing stays missing."""
    return _rewritten(a, str.strip)


@_register(
    "nfc",
    "a.nfc()",
    gives(STRING, ("string",)),
    Example("x.nfc() == y", [True], {"x": ("string", ["cafe\u0301"]), "y": ("string", ["caf\u00e9"])}),
)
def nfc(a: Column) -> Column:
    """The text in Unicode's composed form (NFC), in which two encodings of the same character become equal. Missing
    stays missing."""
    return _rewritten(a, lambda text: unicodedata.normalize("NFC", text))


@_register(
    "concat",
    'concat(a, b, ..., separator="")',
    _joined,
    Example(
        'concat(a, b, separator="/")',
        ["de/home", None, "/"],
        {"a": ("string", ["de", "de", ""]), "b": ("string?", ["home", None, ""])},
    ),
)
def concat(*columns: Column, separator: str = "") -> Column:
    """The texts joined in the given order, with `separator` between them, even if a text is empty. Missing if any text
    is missing."""
    codes, texts = used_texts(columns[0])
    for column in columns[1:]:
        right_codes, right_texts = used_texts(column)
        used, codes = renumber(codes * len(right_texts) + right_codes, len(texts) * len(right_texts))
        left, right = np.divmod(used, len(right_texts))
        joined = np.empty(len(used), dtype=np.object_)
        joined[:] = [a + separator + b for a, b in zip(texts[left], right_texts[right], strict=True)]
        texts = joined
    return Column(STRING, codes, present=spread(both_present(*columns), len(codes)), dictionary=texts)


@_register(
    "contains_text",
    "a.contains_text(text)",
    gives(BOOL, ("string",), check=_check_text),
    Example('x.contains_text("shoe")', [True, False, None], {"x": ("string?", ["red shoes", "Shoe", None])}),
)
def contains_text(a: Column, *, text: str) -> Column:
    """Whether the constant `text` occurs in the value, compared character by character. Use `lower()` and `nfc()` first
    if case or Unicode form may differ. Missing stays missing.
    """
    return Column(BOOL, per_text(a, lambda whole: text in whole, np.bool_), present=a.present)
