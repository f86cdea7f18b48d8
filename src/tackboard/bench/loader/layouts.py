"""Measures the size of the same training examples in four file layouts, for `tackboard bench loader`.

In a dataset with labelled requests, an example consists of a candidate, its labels, and the last N events of the user
that were received before the request. This module writes the examples in four layouts and reads them back. If all
values are unchanged, it returns the sizes of the files. The layouts are:

    flat, shuffled     one row per candidate, with its history, in random order; this is the usual layout
    flat, sorted       the same rows sorted by user and request, so that the codec finds equal histories side by side
    grouped            one row per request, with one copy of the history and with lists of candidates and labels
    ours               requests without histories, and every event once; a reader assembles the histories

Decided: the comparison is made twice, with snappy and with zstd as the codec of all four layouts. Each column uses the
smaller of Parquet's two usual encodings (dictionary or plain), measured on the first rows. Flat rows are made
one row group at a time, from grouped rows in memory. Only the first users are used, because flat rows repeat histories
and would become too large.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.keyed_random import permutation
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset, read_requests
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.schema import encode, numpy_column
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.features.views import visible_before

CODECS = ("snappy", "zstd")
LAYOUTS = ("flat, shuffled", "flat, sorted", "grouped", "ours")
MAX_HISTORY = 256
MAX_VALUES = 60_000_000
"""Largest number of history events in all flat rows together. An event takes 20 bytes before compression."""
ROWS_PER_GROUP = 65_536
Parts = Callable[[], Iterator[pa.Table]]
"""A function that makes the rows of a table, one row group at a time."""
EVENT_COLUMNS = ("user_id", "item_id", "action", "surface", "time_ms", "received_ms")
"""Columns of the event table that are needed to assemble a history."""
HISTORY = ("history_item_id", "history_action", "history_surface", "history_time_ms")
PUBLISHED = "10 to 50 times smaller by sorting on user id and request id (Pinterest, 2026)"
WINDOWS = LabelConfig(labels=(Label("click", 1_800_000), Label("save", 604_800_000)))
WORLDS = {
    "few candidates": WorldConfig(num_users=1000),
    "many candidates": WorldConfig(num_users=400, num_items=20_000, median_events=60.0, num_candidates=60),
}
QUICK_WORLDS = {
    "few candidates": WorldConfig(num_users=40, num_items=200),
    "many candidates": WorldConfig(num_users=10, num_items=200, median_events=60.0, num_candidates=30),
}


def measure_layouts(folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """Makes two synthetic datasets, with few and with many candidates per request, and compares the layouts on both."""
    worlds = {}
    for name, config in (QUICK_WORLDS if quick else WORLDS).items():
        path = write_world(config, folder, name.replace(" ", "-"))
        label_dataset(open_dataset(path), WINDOWS, quiet=True)
        worlds[name] = compare_layouts(open_dataset(path.parent), folder)
    return {"published": PUBLISHED, "worlds": worlds}


def compare_layouts(
    dataset: Dataset, folder: Path, *, max_history: int = MAX_HISTORY, max_values: int = MAX_VALUES
) -> dict[str, Any]:
    """Returns the bytes of each layout with each codec, and how many times smaller the layout is than "flat, shuffled".

    Writes files to `folder` and removes them. Raises DataError if a layout does not return the same examples.
    """
    requests, events = _whole_users(dataset, max_history, max_values)
    grouped = assemble(requests, events, max_history)
    num_candidates = len(_request_of(grouped))
    layouts: dict[str, dict[str, Parts]] = {
        "flat, shuffled": {"rows": partial(_exploded_parts, grouped, permutation(num_candidates, 1))},
        "flat, sorted": {"rows": partial(_exploded_parts, grouped, np.arange(num_candidates))},
        "grouped": {"rows": partial(_parts, grouped)},
        "ours": {"requests": partial(_parts, requests), "events": partial(_parts, events)},
    }
    sizes: dict[str, dict[str, int]] = {}
    for codec in CODECS:
        sizes[codec] = {}
        for layout, sources in layouts.items():
            paths = {name: folder / f"{name}.layout.parquet" for name in sources}
            for name, source in sources.items():
                _write(source, paths[name], codec)
            _check(layout, paths, sources, grouped, max_history)
            sizes[codec][layout] = sum(path.stat().st_size for path in paths.values())
            for path in paths.values():
                path.unlink()
    return {
        "dataset": dataset.name,
        "users": len(np.unique(numpy_column(requests, "user_id"))),
        "requests": requests.num_rows,
        "candidates": num_candidates,
        "candidates_per_request": round(num_candidates / requests.num_rows, 2),
        "mean_history": round(float(_lengths(grouped["history_item_id"]).mean()), 1),
        "max_history": max_history,
        "same_examples": True,
        "codecs": {
            codec: {
                layout: {
                    "bytes": num_bytes,
                    "bytes_per_candidate": round(num_bytes / num_candidates, 2),
                    "times_smaller": round(of_layouts[LAYOUTS[0]] / num_bytes, 2),
                }
                for layout, num_bytes in of_layouts.items()
            }
            for codec, of_layouts in sizes.items()
        },
    }


def assemble(requests: pa.Table, events: pa.Table, max_history: int) -> pa.Table:
    """Adds to each request the last `max_history` events of its user that were received strictly before the request.

    `events` has EVENT_COLUMNS, sorted as in a dataset. Actions and surfaces become numbers, as in training.
    """
    users, starts = np.unique(numpy_column(events, "user_id"), return_index=True)
    bounds = np.append(starts, events.num_rows).astype(np.int64)
    wanted = numpy_column(requests, "user_id")
    place = np.minimum(np.searchsorted(users, wanted), len(users) - 1)
    owners = np.where(users[place] == wanted, place, -1)
    received = numpy_column(events, "received_ms")
    view = visible_before(received, bounds, owners, numpy_column(requests, "time_ms")).newest(max_history)
    chosen = view.events_of_rows()
    offsets = pa.array(np.concatenate([[0], np.cumsum(view.lengths)]).astype(np.int32))
    values = (
        numpy_column(events, "item_id"),
        _codes(events["action"]),
        _codes(events["surface"]),
        numpy_column(events, "time_ms"),
    )
    surface = requests["surface"].cast(pa.string())
    table = requests.set_column(requests.column_names.index("surface"), "surface", surface)
    for name, column in zip(HISTORY, values, strict=True):
        table = table.append_column(name, pa.ListArray.from_arrays(offsets, pa.array(column[chosen])))
    return table


def explode(grouped: pa.Table, rows: NDArray[np.int64] | None = None) -> pa.Table:
    """Returns one row per candidate, with all columns of its request. `rows` selects candidates; None selects all."""
    lists = [name for name in grouped.column_names if pa.types.is_list(grouped.schema.field(name).type)]
    candidates = [name for name in lists if name not in HISTORY]
    request_of = _request_of(grouped)
    chosen = np.arange(len(request_of)) if rows is None else rows
    of_requests = grouped.select([name for name in grouped.column_names if name not in candidates])
    flat = of_requests.take(pa.array(request_of[chosen]))
    for name in candidates:
        flat = flat.append_column(name, grouped[name].combine_chunks().flatten().take(pa.array(chosen)))
    return flat


def _exploded_parts(grouped: pa.Table, order: NDArray[np.int64]) -> Iterator[pa.Table]:
    for first in range(0, len(order), ROWS_PER_GROUP):
        yield explode(grouped, order[first : first + ROWS_PER_GROUP])


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    for first in range(0, table.num_rows, ROWS_PER_GROUP):
        yield table.slice(first, ROWS_PER_GROUP)


def _write(parts: Parts, path: Path, codec: str) -> None:
    """Writes the parts as row groups. Each column gets the encoding that takes fewer bytes in the first part."""
    first = next(parts())
    smaller: dict[str, tuple[int, bool]] = {}
    for dictionary in (True, False):
        pq.write_table(first, path, compression=codec, use_dictionary=dictionary, row_group_size=ROWS_PER_GROUP)
        group = pq.read_metadata(path).row_group(0)
        for place in range(group.num_columns):
            column = group.column(place)
            size = (column.total_compressed_size, dictionary)
            smaller[column.path_in_schema] = min(size, smaller.get(column.path_in_schema, size))
    encoded = [name for name, (_, dictionary) in smaller.items() if dictionary]
    with pq.ParquetWriter(path, first.schema, compression=codec, use_dictionary=encoded) as writer:
        for part in parts():
            writer.write_table(part, row_group_size=ROWS_PER_GROUP)


def _check(
    layout: str, paths: Mapping[str, Path], sources: Mapping[str, Parts], grouped: pa.Table, max_history: int
) -> None:
    """Raises DataError unless the files hold the same examples as `grouped`."""
    if layout in ("flat, shuffled", "flat, sorted"):
        with pq.ParquetFile(paths["rows"]) as file:
            found = (file.read_row_group(group) for group in range(file.num_row_groups))
            pairs = itertools.zip_longest(found, sources["rows"]())
            same = all(one is not None and one.equals(other) for one, other in pairs)
    elif layout == "grouped":
        same = pq.read_table(paths["rows"]).equals(grouped)
    else:
        read = {name: pq.read_table(path) for name, path in paths.items()}
        same = assemble(read["requests"], read["events"], max_history).equals(grouped)
    if not same:
        raise DataError(f"the layout {layout!r} does not return the same examples")


def _whole_users(dataset: Dataset, max_history: int, max_values: int) -> tuple[pa.Table, pa.Table]:
    """Returns requests and events of the first users, so that flat rows have at most `max_values` history events."""
    requests, events = read_requests(dataset), dataset.read_events(list(EVENT_COLUMNS))
    users, event_users = numpy_column(requests, "user_id"), numpy_column(events, "user_id")
    # `values` is an upper bound, which assumes that every history holds all events of the user.
    lengths = np.searchsorted(event_users, users, side="right") - np.searchsorted(event_users, users)
    values = np.cumsum(np.minimum(lengths, max_history) * _lengths(requests["item_id"]))
    num_rows = int(np.searchsorted(values, max_values, side="right"))
    if num_rows < len(users):
        # The user who exceeds the limit is left out as a whole. But the first user is always kept.
        num_rows = int(np.searchsorted(users, users[num_rows])) or int(np.searchsorted(users, users[0], side="right"))
    last = users[num_rows - 1]
    num_events = int(np.searchsorted(event_users, last, side="right"))
    return requests.slice(0, num_rows).combine_chunks(), events.slice(0, num_events).combine_chunks()


def _lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Returns the lengths of a column of lists."""
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in column.chunks]).astype(np.int64)


def _request_of(grouped: pa.Table) -> NDArray[np.int64]:
    """Returns, for every candidate, the row of its request."""
    return np.repeat(np.arange(grouped.num_rows), _lengths(grouped["item_id"]))


def _codes(column: pa.ChunkedArray) -> NDArray[np.int16]:
    """Replaces each name by its position in the sorted list of distinct names."""
    encoded = encode(column)
    names = np.array(encoded.dictionary.to_pylist())
    return np.argsort(np.argsort(names)).astype(np.int16)[encoded.indices.to_numpy()]
