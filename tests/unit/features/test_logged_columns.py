"""Columns in the log: bit for bit there and back, and one JSON for all columns that look the same."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import CorruptFileError
from tackboard.features.column import Column, differing_rows, offsets_of
from tackboard.features.logged_columns import decode_array, decode_column, encode_array, encode_column
from tackboard.features.types import BOOL, FLOAT, ID, INT, SCALARS, STRING, TIME, FeatureType

INT64 = np.iinfo(np.int64)
VECTOR = FeatureType("vector", width=3)
SCALAR_TYPES = [BOOL, INT, FLOAT, STRING, ID, TIME]
LIST_TYPES = [type_.in_list() for type_ in SCALAR_TYPES]
SEQUENCE = FeatureType("sequence", columns=(("item", ID.in_list()), ("word", STRING.in_list())))
ALL_TYPES = [*SCALAR_TYPES, VECTOR, *LIST_TYPES, SEQUENCE]
TEXTS = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(["e\u0301", "é", "\ud800", "\x00", '"\\'])
WHOLE = st.integers(INT64.min, INT64.max) | st.sampled_from([INT64.min, INT64.max, 0, -1])


def float_bits(kind: Any, count: int) -> st.SearchStrategy[Any]:
    """Any bit pattern at all: every NaN, both zeros, subnormals."""
    unsigned = {np.float64: np.uint64, np.float32: np.uint32}[kind]
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5], dtype=kind).view(unsigned).tolist()
    pattern = st.integers(0, int(np.iinfo(unsigned).max)) | st.sampled_from(special)
    return st.lists(pattern, min_size=count, max_size=count).map(lambda row: np.array(row, dtype=unsigned).view(kind))


@st.composite
def values_of(draw: Any, type_: FeatureType, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Raw values of a scalar or vector type, and a dictionary where there is one."""
    if type_.kind == "vector":
        return draw(float_bits(np.float32, count * type_.width)).reshape(count, type_.width), None
    if type_.kind == "float":
        return draw(float_bits(np.float64, count)), None
    if type_.kind == "bool":
        return np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_), None
    if type_.kind == "string":
        texts = draw(st.lists(TEXTS, min_size=1, max_size=5))
        dictionary = np.empty(len(texts), dtype=np.object_)
        dictionary[:] = texts
        codes = draw(st.lists(st.integers(0, len(texts) - 1), min_size=count, max_size=count))
        return np.array(codes, dtype=np.int64), dictionary
    return np.array(draw(st.lists(WHOLE, min_size=count, max_size=count)), dtype=np.int64), None


@st.composite
def columns(draw: Any, type_: FeatureType, num_rows: int | None = None) -> Column:
    """A column of a type, with masks that hide values, dictionaries with unused and repeated strings."""
    count = draw(st.integers(0, 6)) if num_rows is None else num_rows
    present = draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count).map(lambda m: np.array(m, bool)))
    if type_.kind in ("list", "sequence"):
        lengths = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), dtype=np.int64)
        offsets = offsets_of(lengths)
        lists = {}
        for name, inner in type_.columns or (("", type_),):
            values, dictionary = draw(values_of(inner.of_elements(), int(offsets[-1])))
            lists[name] = Column(inner, values, offsets=offsets, dictionary=dictionary)
        if type_.kind == "sequence":
            return Column(type_, np.zeros(0), present=present, fields=lists)
        only = lists[""]
        return Column(type_, only.values, present=present, offsets=offsets, dictionary=only.dictionary)
    values, dictionary = draw(values_of(type_, count))
    if dictionary is not None and present is not None:
        values[~present] = 10**9  # Undefined: it names no string at all.
    return Column(type_, values, present=present, dictionary=dictionary)


def through_json(column: Column) -> Column:
    return decode_column(column.type, json.loads(json.dumps(encode_column(column))), len(column))


@pytest.mark.parametrize("type_", ALL_TYPES, ids=str)
def test_every_bit_comes_back(type_: FeatureType) -> None:
    @given(columns(type_))
    @settings(max_examples=30, deadline=None)
    def check(column: Column) -> None:
        back = through_json(column)
        assert len(back) == len(column)
        assert not len(differing_rows(column, back))
        assert str(back.type) == str(type_)
        assert back.to_pylist().count(None) == int((~column.mask).sum())

    check()


@pytest.mark.parametrize("type_", ALL_TYPES, ids=str)
def test_columns_have_one_json_exactly_where_no_bit_differs(type_: FeatureType) -> None:
    @given(st.data())
    @settings(max_examples=30, deadline=None)
    def check(data: st.DataObject) -> None:
        one = data.draw(columns(type_, 3))
        other = data.draw(columns(type_, 3) | st.just(one).map(disguised))
        assert (encode_column(one) == encode_column(other)) == (not len(differing_rows(one, other)))

    check()


def disguised(column: Column) -> Column:
    """The same values in other clothes: a mask that hides nothing, a dictionary the other way round."""
    present = column.mask
    if column.fields is not None:
        return Column(column.type, column.values, present=present, fields=column.fields)
    values, dictionary = column.values, column.dictionary
    if dictionary is not None:
        values, dictionary = len(dictionary) - 1 - values, dictionary[::-1].copy()
    return Column(column.type, values, present=present, offsets=column.offsets, dictionary=dictionary)


@pytest.mark.parametrize("type_", ALL_TYPES, ids=str)
def test_a_part_of_a_column_is_written_alone(type_: FeatureType) -> None:
    @given(columns(type_, 4))
    @settings(max_examples=15, deadline=None)
    def check(column: Column) -> None:
        if column.offsets is not None:
            # Offsets that do not begin at 0, as a slice without a copy has them.
            part = Column(column.type, column.values, present=column.mask[1:], offsets=column.offsets[1:],
                          dictionary=column.dictionary)  # fmt: skip
        else:
            part = column.take(np.array([1, 2, 3]))
        expected = column.take(np.array([1, 2, 3]))
        assert encode_column(part) == encode_column(expected)
        assert not len(differing_rows(through_json(part), expected))

    check()


def test_the_form_is_as_documented() -> None:
    assert encode_column(Column.of(FLOAT, [1.0, None])) == {
        "present": base64.b64encode(b"\x80").decode(),
        "dtype": "<f8",
        "values": base64.b64encode(np.array([1.0, 0.0], "<f8").tobytes()).decode(),
    }
    words = encode_column(Column.of(STRING.in_list(), [["b", "a"], [], ["b"]]))
    assert words["dictionary"] == ["a", "b"]
    assert base64.b64decode(words["offsets"]) == np.array([0, 2, 2, 3], "<i8").tobytes()
    sequence = encode_column(Column.of(SEQUENCE, [{"item": [1], "word": ["x"]}]))
    assert set(sequence) == {"offsets", "fields"}
    assert set(sequence["fields"]["item"]) == {"dtype", "values"}
    assert decode_array(encode_array(np.array([1, 2], ">i8")), np.int64).tolist() == [1, 2], "big-endian"
    one_mask_for_all = Column(FLOAT, np.array([1.0, 2.0]), present=np.array([False]))
    assert through_json(one_mask_for_all).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("type_", "change"),
    [
        (FLOAT, {"dtype": "<f4"}),
        (FLOAT, {"values": "%%%"}),
        (FLOAT, {"values": "AAAA"}),
        (FLOAT, {"values": ""}),
        (FLOAT, {"values": None}),
        (FLOAT, {"present": "AAA="}),
        (STRING, {"dictionary": None}),
        (STRING, {"dictionary": [1]}),
        (STRING, {"dictionary": []}),
        (ID.in_list(), {"offsets": ""}),
        (ID.in_list(), {"offsets": base64.b64encode(np.array([0, 2, 1, 3], "<i8").tobytes()).decode()}),
        (ID.in_list(), {"offsets": base64.b64encode(np.array([0, 1, 1, 99], "<i8").tobytes()).decode()}),
        (SEQUENCE, {"fields": {}}),
        (SEQUENCE, {"fields": {"item": 1, "word": 2}}),
        (VECTOR, {"values": base64.b64encode(bytes(4)).decode()}),
    ],
    ids=str,
)
def test_what_is_no_column_is_refused(type_: FeatureType, change: dict[str, Any]) -> None:
    rows: dict[str, list[Any]] = {
        "float": [1.0, 2.0, 3.0],
        "string": ["a", "b", "c"],
        "list": [[1], [2], [3]],
        "sequence": [{"item": [1], "word": ["a"]}] * 3,
        "vector": [[1, 2, 3]] * 3,
    }
    data = encode_column(Column.of(type_, rows[type_.kind])) | change
    for wrong in (data, None, [], "x"):
        with pytest.raises(CorruptFileError):
            decode_column(type_, wrong, 3)


def test_all_types_of_the_language_are_covered() -> None:
    assert {type_.kind for type_ in ALL_TYPES} == {*SCALARS, "vector", "list", "sequence"}
    assert {type_.element for type_ in LIST_TYPES} == set(SCALARS)
