from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sequence_model import SMALL, event

from tackboard.core.errors import UsageError
from tackboard.events.sequence_store.batch import columns_of
from tackboard.events.sequence_store.codec import Head, RowCodec
from tackboard.events.sequence_store.merging import Change, State, append_change, recent_columns
from tackboard.events.sequence_store.selection import Query, select
from tackboard.events.sequence_store.values import Values

CODEC = RowCodec(SMALL.fields)


def no_bytes(names: Sequence[str], chunks: Sequence[int]) -> dict[tuple[str, int], bytes]:
    raise AssertionError("nothing is stored yet")


def change_of(times: Sequence[int], received: Sequence[int] | None = None) -> Change:
    """What a new user's events make of an empty store."""
    events = [event(t, n, received_ms=t if received is None else received[n]) for n, t in enumerate(times)]
    columns = columns_of(events, SMALL)
    for name in ("action", "surface"):
        columns[name] = Values(columns[name].values)
    change, _ = append_change(State(Head(), None, no_bytes), columns, SMALL, CODEC)
    assert change is not None
    return change


def read(change: Change, *fields: str, **conditions: Any) -> tuple[dict[str, list[Any]], list[tuple[list[str], int]]]:
    """The columns found, and (columns, number of chunks) of every request for bytes."""
    reading = select(change.head, recent_columns(change.add_recent, CODEC), Query(fields, **conditions), SMALL)
    asked: list[tuple[list[str], int]] = []
    try:
        names, chunks = next(reading)
        while True:
            asked.append((list(names), len(chunks)))
            names, chunks = reading.send({(n, chunk): change.put[n, chunk] for n in names for chunk in chunks})
    except StopIteration as end:
        return {name: column.to_pylist() for name, column in end.value.items()}, asked


def test_only_the_columns_asked_for_are_read() -> None:
    change = change_of(range(40))
    found, asked = read(change, "item_id", "dwell")
    assert found["item_id"] == list(range(40)) and asked == [(["item_id", "dwell"], 4)]


def test_the_newest_need_only_the_newest_chunks() -> None:
    change = change_of(range(40))
    assert read(change, "item_id", last=3) == ({"item_id": [37, 38, 39]}, [(["item_id"], 1)])
    assert read(change, "item_id", last=11)[1] == [(["item_id"], 2)]


def test_a_range_reads_times_only_where_it_cuts_a_chunk() -> None:
    change = change_of(range(40))
    found, asked = read(change, "item_id", since_ms=10, until_ms=30)
    assert found["item_id"] == list(range(10, 30)) and asked == [(["item_id"], 2)]
    found, asked = read(change, "item_id", since_ms=15, until_ms=30)
    assert found["item_id"] == list(range(15, 30)) and asked == [(["time_ms"], 1), (["item_id"], 2)]
    assert read(change, "item_id", since_ms=99) == ({"item_id": []}, [])


def test_received_is_read_only_where_something_came_too_late() -> None:
    received = [*range(35), 100, 36, 37, 100, 39]
    change = change_of(range(40), received)
    found, asked = read(change, "item_id", received_before_ms=50, last=4)
    assert found["item_id"] == [34, 36, 37, 39] and asked == [(["received_ms"], 1), (["item_id"], 1)]
    found, asked = read(change, "received_ms", received_before_ms=50, last=4)
    assert found["received_ms"] == [34, 36, 37, 39] and asked == [(["received_ms"], 1)]


def test_a_column_that_was_needed_on_the_way_is_not_read_twice() -> None:
    _, asked = read(change_of(range(40)), "time_ms", since_ms=33)
    assert asked == [(["time_ms"], 1)]


def test_the_buffer_alone_needs_no_bytes() -> None:
    assert read(change_of([5, 3, 4]), "time_ms", last=2) == ({"time_ms": [4, 5]}, [])


def test_none_is_no_number_of_events() -> None:
    with pytest.raises(UsageError, match="the last 0 events"):
        Query(("item_id",), last=0)
