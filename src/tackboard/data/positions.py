"""Stores for each event the position of its item in the sorted catalogue, so that training need not look up items.

A training batch needs the table rows and frequencies of its distinct items. Without stored positions, the item ids of
each window must be dictionary-encoded and hashed, which takes longer than decoding the window. The position of an
event's item never changes, because a snapshot never changes. So positions are computed once, in one pass over the items
of the events, and stored beside the snapshot:

    datasets/<name>/index/<snapshot>/<hash>/   item_positions (little-endian int32, one per event) · MANIFEST.json

All processes and all later runs read this file; a window reads the ranges of its buckets. Decided: the file is read and
not memory-mapped, because the pages of a map would count as memory of every process that has touched them. As with the
other files of the index, a damaged file is made again. If no file can be stored, training still works, but is slower.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError, DataError, TackboardError
from tackboard.core.files import new_directory, remove_directory
from tackboard.core.manifest import verify_manifest, write_manifest
from tackboard.core.progress import Progress
from tackboard.data.index import LONG
from tackboard.data.source import SequenceSource, Spans
from tackboard.data.stored_counts import index_place
from tackboard.events.schema import numpy_column

KIND = "item positions"
FILE_NAME = "item_positions"
DTYPE = np.dtype("<i4")


class ItemPositions:
    """Reads the stored positions of ranges of events. Threads may share one object; processes may not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The file stays open, so that positions can be read even if another process removes the index.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, spans: Spans) -> NDArray[np.int32]:
        """Returns the positions of the events of every span, end to end."""
        found = np.empty(sum(last - first for first, last in spans), dtype=DTYPE)
        rest = found.view(np.uint8).data
        for first, last in spans:
            begin, end = first * DTYPE.itemsize, last * DTYPE.itemsize
            while begin < end:
                # `preadv` does not move the position of the file, which threads share. Linux reads less than 2 GiB at a
                # time.
                num_bytes = os.preadv(self._descriptor, [rest[: end - begin]], begin)
                if not num_bytes:
                    raise CorruptFileError(f"{self._path} has become shorter", fix="remove it and start again")
                begin, rest = begin + num_bytes, rest[num_bytes:]
        return found


def item_positions(source: SequenceSource, *, quiet: bool = True) -> ItemPositions | None:
    """Opens the positions of a dataset, after storing them if necessary. Returns None if they cannot be stored."""
    place = index_place(source.dataset, {"kind": KIND})
    if place is None:
        return None
    found = _open(place, source)
    if found is None:
        # If storing fails, no files are left behind. Storing can fail because another process stores the positions too.
        with contextlib.suppress(OSError, TackboardError):
            if place.exists():
                remove_directory(place)
            _store(place, source, quiet=quiet)
        found = _open(place, source)
    return found


def _open(place: Path, source: SequenceSource) -> ItemPositions | None:
    """Opens the stored positions. Returns None if they do not exist, are damaged, or do not fit this dataset."""
    try:
        verify_manifest(place, KIND)
        fits = (place / FILE_NAME).stat().st_size == source.dataset.num_events * DTYPE.itemsize
        return ItemPositions(place / FILE_NAME) if fits else None
    except (OSError, DataError):
        return None


def _store(place: Path, source: SequenceSource, *, quiet: bool) -> None:
    num_events = source.dataset.num_events
    with (
        new_directory(place) as folder,
        Progress("finding items", total=num_events, unit="events", quiet=quiet or num_events < LONG) as progress,
    ):
        with (folder / FILE_NAME).open("wb") as file:
            for table in source.dataset.event_chunks(["item_id"]):
                ids = numpy_column(table, "item_id")
                source.dataset.places_of_items(source.catalogue, ids).astype(DTYPE).tofile(file)
                progress.advance(table.num_rows)
        write_manifest(folder, KIND, meant=[FILE_NAME])
