from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import CorruptFileError
from tackboard.events.sequence_store.batch import columns_of
from tackboard.events.sequence_store.codec import Head, RowCodec, decode_column, encode_column
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.values import DTYPES, Values, encode_texts, same_columns

LOWEST, HIGHEST = -(2**63), 2**63 - 1
COLUMNS: list[tuple[str, list[Any]]] = [
    ("int", [5]),
    ("int", [LOWEST, HIGHEST, 0, -1]),
    ("int", [1_700_000_000_000 + number for number in range(300)]),
    ("int", [None, LOWEST, None]),
    ("float", [0.1, -0.0, float("inf"), None]),
    ("bool", [True, False, None, True] * 5),
    ("string", ["", "ä" * 400, None, "x", "", "\ud800"]),
    ("string", [None, None]),
    ("name", [0, 3, 3]),
]


def column_of(kind: str, values: list[Any]) -> Values:
    present = np.array([value is not None for value in values]) if None in values else None
    if kind == "string":
        codes, dictionary = encode_texts(["" if value is None else value for value in values])
        return Values(codes, present, dictionary)
    return Values(np.array([0 if value is None else value for value in values], dtype=DTYPES[kind]), present)


@pytest.mark.parametrize(("kind", "values"), COLUMNS)
def test_a_column_comes_back_as_it_was(kind: str, values: list[Any]) -> None:
    column = column_of(kind, values)
    data = encode_column(kind, column)
    found = decode_column(data)
    assert same_columns({"a": found}, {"a": column})
    assert found.values.dtype == column.values.dtype


def test_values_lie_in_the_narrowest_type() -> None:
    near = encode_column("int", Values(np.arange(1000) % 200 + 10**15))
    far = encode_column("int", Values(np.arange(1000) * 10**12))
    assert len(near) - 1000 == len(far) - 8000 == 16
    # What is undefined under a gap does not widen it.
    gaps = Values(np.array([7, HIGHEST, 8]), np.array([True, False, True]))
    assert len(encode_column("int", gaps)) == 16 + 1 + 3


def test_only_strings_that_occur_are_stored() -> None:
    codes, dictionary = encode_texts(["secret", "kept"])
    data = encode_column("string", Values(codes[1:], None, dictionary))
    assert b"kept" in data and b"secret" not in data


@pytest.mark.parametrize(("kind", "values"), COLUMNS)
def test_cut_bytes_are_refused(kind: str, values: list[Any]) -> None:
    data = encode_column(kind, column_of(kind, values))
    for length in range(len(data) - 1):
        with pytest.raises(CorruptFileError, match="cannot be read"):
            decode_column(data[:length])


def test_events_come_back_and_are_equal_exactly_where_their_bytes_are() -> None:
    config = StoreConfig(fields={"n": "int", "t": "string", "f": "float", "b": "bool", "u": "string"})
    codec = RowCodec(config.fields)
    draw = random.Random(4)
    events = [
        {
            "item_id": draw.choice([1, LOWEST]),
            "action": "a",
            "surface": "s",
            "time_ms": 1,
            "n": draw.choice([None, 0, 1]),
            "t": draw.choice([None, "", "ab"]),
            "f": draw.choice([None, 0.0]),
            "b": draw.choice([None, False]),
            "u": draw.choice(["b", "", "ab"]),
        }
        for _ in range(400)
    ]
    columns = columns_of(events, config)
    rows = codec.pack(columns)
    found = codec.unpack(rows)
    for name in ("item_id", *config.fields):
        assert found[name].to_pylist() == [event[name] for event in events]
    distinct = {tuple(event.items()) for event in events}
    assert len(set(rows)) == len(distinct) > 100


def test_a_head_comes_back() -> None:
    chunks = np.arange(15, dtype=np.int64).reshape(3, 5)
    head = Head(4, 1, 99, 3, chunks)
    found = Head.from_bytes(head.to_bytes())
    assert (found.num_recent, found.num_late, found.next_arrival, found.next_chunk) == (4, 1, 99, 3)
    assert np.array_equal(found.chunks, chunks)
    assert found.num_chunked == 1 + 6 + 11 and found.num_events == 22 and found.chunked_until_ms == 13
    assert Head.from_bytes(Head().to_bytes()).chunked_until_ms == -1
    for length in (0, 31, 33):
        with pytest.raises(CorruptFileError):
            Head.from_bytes(head.to_bytes()[:length])
