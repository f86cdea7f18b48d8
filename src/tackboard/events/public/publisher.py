"""What every public dataset has in common: its files in, canonical events checked against known counts out.

Decided: every row that the publisher ships is kept, exact repeats too, because published results count them; the counts
of users, items and events are known, and a file that has others is refused rather than imported under a name that it
does not deserve. Rows of one user and one time keep the publisher's order: that is the tie rule of all of them.
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
from tackboard.events.dataset import check_name, write_dataset
from tackboard.events.public.archive import Download
from tackboard.events.schema import NAMES, encode

ORDER_ONLY_START_MS = 946_684_800_000
"""2000-01-01 UTC: the time of the first event of every user where a dataset has an order but no times."""
ORDER_ONLY_STEP_MS = 60_000
"""Between two events of a user, where a dataset has an order but no times."""
ORDER_ONLY_NOTE = "times are made up: the publisher gives only the order; the n-th event of a user is n minutes in 2000"


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many there are in the publisher's files."""

    users: int
    items: int
    events: int


@dataclasses.dataclass(frozen=True)
class PublicData:
    """What an importer read."""

    events: pa.Table
    """The canonical columns; see `canonical_events`."""
    items: pa.Table | None = None
    """Attributes, with a column `item`."""
    users: pa.Table | None = None
    """Attributes, with a column `user`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicDataset:
    """One public dataset: where it comes from, and how it is read."""

    name: str
    title: str
    files: str
    """What to download, by the publisher's file names."""
    source: str
    """Where."""
    terms: str
    """What may be done with it; the publisher's own words count."""
    counts: Counts
    read: Callable[[Download], PublicData]
    note: str = ""
    """What somebody who trains on it should know."""


def import_public(
    dataset: PublicDataset, paths: Sequence[Path], root: Path, name: str | None = None
) -> tuple[Path, PublicData]:
    """Imports downloaded files as dataset `name` under `root`; returns the snapshot's path and what was read.

    Files that are not this dataset raise DataError; then nothing is written.
    """
    check_name(name or dataset.name)
    data = read_public(dataset, paths)
    source = {"kind": "public", "dataset": dataset.name, "from": dataset.source, "note": dataset.note}
    path = write_dataset(
        root, name or dataset.name, data.events, item_attributes=data.items, user_attributes=data.users, source=source
    )
    return path, data


def read_public(dataset: PublicDataset, paths: Sequence[Path]) -> PublicData:
    """What downloaded files hold. Files that are not this dataset, or torn ones, raise DataError."""
    try:
        data = dataset.read(Download(paths))
    except (ValueError, KeyError, IndexError, OverflowError, pa.ArrowException, zipfile.BadZipFile) as error:
        raise not_this(dataset, f"{type(error).__name__}: {error}") from None
    except DataError as error:
        raise not_this(dataset, error.got) from None
    check_counts(dataset, data.events)
    return data


def not_this(dataset: PublicDataset, got: str) -> DataError:
    """What a user reads whose files are not the dataset."""
    return DataError(
        f"these files are not {dataset.name} as published: {got[:240]}",
        allowed=f"needed: {dataset.files}",
        fix=f"download it from {dataset.source}",
    )


def check_counts(dataset: PublicDataset, events: pa.Table) -> None:
    """Raises DataError unless the events are as many as the publisher's."""
    found = Counts(
        users=pc.count_distinct(_codes(events["user"])).as_py(),
        items=pc.count_distinct(_codes(events["item"])).as_py(),
        events=events.num_rows,
    )
    if found != dataset.counts:
        got, known = (
            f"{counts.users:,} users, {counts.items:,} items and {counts.events:,} events"
            for counts in (found, dataset.counts)
        )
        raise not_this(dataset, f"they hold {got}, not {known}")


def canonical_events(
    user: Any, item: Any, time_ms: Any, *, action: Any = None, surface: Any = None, **more: Any
) -> pa.Table:
    """Columns of events in the publisher's order as a canonical table. Ids are integers or text; times ms UTC."""
    times = np.asarray(time_ms, dtype=np.int64)
    zeros = np.zeros(len(times), dtype=np.int32)
    columns = {
        "user": _ids(user),
        "item": _ids(item),
        "action": _constant(zeros, DEFAULT_ACTION) if action is None else encode(pa.chunked_array([action])),
        "surface": _constant(zeros, DEFAULT_SURFACE) if surface is None else encode(pa.chunked_array([surface])),
        "time_ms": times,
        "received_ms": times,
        "order": np.arange(len(times)),
    }
    return pa.table(columns | more)


def named(codes: NDArray[Any], names: Sequence[str]) -> pa.DictionaryArray:
    """Names of codes 0, 1, …; a code without a name raises DataError."""
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < len(names):
        raise DataError(f"a code {int(codes.max())} that has no name", allowed=f"allowed: 0 to {len(names) - 1}")
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names), pa.string()))


def order_only_times(lengths: Any) -> NDArray[np.int64]:
    """Made-up times of users that lie one after the other, `lengths` events each."""
    counts: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    places: NDArray[np.int64] = np.arange(int(counts.sum()), dtype=np.int64) - starts
    return ORDER_ONLY_START_MS + ORDER_ONLY_STEP_MS * places


def table_of(data: bytes, columns: Mapping[str, pa.DataType], delimiter: str, *, header: bool = False) -> pa.Table:
    """A publisher's text as a table: `columns` in order, or with a header by name. Other shapes raise ArrowInvalid."""
    return pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(column_names=None if header else list(columns)),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char='"' if header else False),
        convert_options=pyarrow.csv.ConvertOptions(column_types=dict(columns), include_columns=list(columns)),
    )


def _codes(column: pa.ChunkedArray) -> pa.Array:
    array = encode(column) if pa.types.is_dictionary(column.type) else column
    return array.indices if isinstance(array, pa.DictionaryArray) else array


def _ids(values: Any) -> pa.Array:
    if isinstance(values, np.ndarray):
        return pa.array(values.astype(np.int64, copy=False))
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return array.cast(pa.int64()) if pa.types.is_integer(array.type) else encode(array).cast(NAMES)


def _constant(zeros: NDArray[np.int32], name: str) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(zeros), pa.array([name]))
