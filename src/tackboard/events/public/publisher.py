"""This module holds the code that all public datasets share: it imports a publisher's files as canonical events.

Decided: every row of the publisher is kept, even exact repeats, because published results include the repeats. The
published numbers of users, items and events are known, and files with other numbers raise DataError. So an import holds
all published data, except the data of users whom `tackboard data forget` has put on the dataset's list of users to
leave out (forgotten.json). Rows of the same user and time keep their order.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.vocabulary import DEFAULT_ACTION, DEFAULT_SURFACE
from tackboard.events import schema
from tackboard.events.dataset import check_name, write_dataset
from tackboard.events.public.archive import Download
from tackboard.events.schema import NAMES, encode

ORDER_ONLY_START_MS = 946_684_800_000
"""The time 2000-01-01 UTC. Every user's first event gets this time if the publisher gives an order but no times."""
ORDER_ONLY_STEP_MS = 60_000
"""The made-up time between two successive events of a user if the publisher gives an order but no times."""
ORDER_ONLY_NOTE = "times are made up: the publisher gives only the order; events are 1 minute apart from 2000-01-01 on"


@dataclasses.dataclass(frozen=True)
class PublishedCounts:
    """The numbers of users, items and events in the publisher's files."""

    users: int
    items: int
    events: int


@dataclasses.dataclass(frozen=True)
class PublicData:
    """The canonical events of a public dataset, and its tables of attributes, which have a column `item` or `user`."""

    events: pa.Table
    items: pa.Table | None = None
    users: pa.Table | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicDataset:
    """Says where to download a public dataset, and how to read it."""

    name: str
    title: str
    files: str
    """The files to download, with the publisher's names."""
    source: str
    """Where to download the files."""
    terms: str
    """A summary of the terms of use. Only the publisher's own text is binding."""
    counts: PublishedCounts
    read: Callable[[Download], PublicData]
    note: str = ""
    """A note for people who train on the dataset."""


def import_public(
    dataset: PublicDataset, paths: Sequence[Path], root: Path, name: str | None = None
) -> tuple[Path, PublicData]:
    """Imports downloaded files as dataset `name` under `root`. Returns the snapshot's path and the data.

    If the files are not this dataset, raises DataError and writes nothing.
    """
    check_name(name or dataset.name)
    data = read_public(dataset, paths)
    source = {"kind": "public", "dataset": dataset.name, "from": dataset.source, "note": dataset.note}
    path = write_dataset(
        root, name or dataset.name, data.events, item_attributes=data.items, user_attributes=data.users, source=source
    )
    return path, data


def read_public(dataset: PublicDataset, paths: Sequence[Path]) -> PublicData:
    """Reads downloaded files. Damaged files, and files that are not this dataset, raise DataError."""
    try:
        data = dataset.read(Download(paths))
        users, items = (pc.count_distinct(_codes(data.events[kind])).as_py() for kind in ("user", "item"))
        found = PublishedCounts(users, items, data.events.num_rows)
        if found != dataset.counts:
            got, known = (
                f"{counts.users:,} users, {counts.items:,} items and {counts.events:,} events"
                for counts in (found, dataset.counts)
            )
            raise DataError(f"they hold {got}, not {known}")
        return data
    except DataError as error:
        problem = error.got
    except (ValueError, KeyError, IndexError, OverflowError, pa.ArrowException, zipfile.BadZipFile) as error:
        problem = f"{type(error).__name__}: {error}"
    raise DataError(
        f"these files are not {dataset.name} as published: {problem[:240]}",
        allowed=f"needed: {dataset.files}",
        fix=f"download it from {dataset.source}",
    )


def canonical_events(
    user: Any, item: Any, time_ms: Any, *, action: Any = None, surface: Any = None, **more: Any
) -> pa.Table:
    """Makes canonical events from columns, whose rows are in the publisher's order.

    Ids are integers or text, and times are ms UTC.
    """
    times = np.asarray(time_ms, dtype=np.int64)
    zeros = np.zeros(len(times), dtype=np.int32)
    columns = {
        "user": _ids(user),
        "item": _ids(item),
        "action": named(zeros, [DEFAULT_ACTION]) if action is None else encode(pa.chunked_array([action])),
        "surface": named(zeros, [DEFAULT_SURFACE]) if surface is None else encode(pa.chunked_array([surface])),
        "time_ms": times,
        "received_ms": times,
        "order": np.arange(len(times)),
    }
    return pa.table(columns | more)


def named(codes: NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    """Replaces each code c by `names[c]`. A code without a name raises DataError."""
    unknown = codes[(codes < 0) | (codes >= len(names))]
    if len(unknown):
        raise DataError(f"the code {int(unknown[0])} has no name", allowed=f"allowed: 0 to {len(names) - 1}")
    return schema.named(codes, names)


def order_only_times(lengths: Any) -> NDArray[np.int64]:
    """Returns made-up times for the events of all users, user by user. `lengths` is each user's number of events."""
    counts: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    places: NDArray[np.int64] = np.arange(int(counts.sum()), dtype=np.int64) - starts
    return ORDER_ONLY_START_MS + ORDER_ONLY_STEP_MS * places


def table_of(data: bytes, columns: Mapping[str, pa.DataType], delimiter: str, *, header: bool = False) -> pa.Table:
    """Reads a publisher's CSV. If there is no header, `columns` must be in the order of the file.

    A file that lacks one of `columns`, or has values of a different type, raises an ArrowException.
    """
    return pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(column_names=None if header else list(columns)),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char='"' if header else False),
        convert_options=pyarrow.csv.ConvertOptions(column_types=dict(columns), include_columns=list(columns)),
    )


def _codes(column: pa.ChunkedArray) -> pa.Array:
    return encode(column).indices if pa.types.is_dictionary(column.type) else column


def _ids(values: Any) -> pa.Array:
    if isinstance(values, np.ndarray):
        return pa.array(values.astype(np.int64, copy=False))
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return array.cast(pa.int64()) if pa.types.is_integer(array.type) else encode(array).cast(NAMES)
