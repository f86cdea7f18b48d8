"""Keeps counts that one pass over the events of a snapshot made, so that the next run can read them.

    datasets/<name>/index/<snapshot>/<settings>/   one file of little-endian int64 numbers per array · MANIFEST.json

<settings> is a hash of the files of the snapshot and of all settings that decide the counts. Decided: stored counts are
optional. If they are damaged or do not fit the dataset, they are made again. If the folder is read-only, they are not
stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError, TackboardError
from tackboard.core.files import new_directory, remove_directory
from tackboard.core.manifest import verify_manifest, write_manifest
from tackboard.events.dataset import Dataset, index_folder

KIND = "training index"
VERSION = 1
"""Version of the stored counts. Raise the version if a change of the code gives other counts for the same settings."""


@dataclasses.dataclass(frozen=True)
class StoredCounts:
    """Holds the content of a stored index: arrays of whole numbers, and single whole numbers."""

    arrays: dict[str, NDArray[np.int64]]
    figures: dict[str, int]


def counted_once(
    dataset: Dataset,
    settings: Mapping[str, Any],
    count: Callable[[], StoredCounts],
    fits: Callable[[StoredCounts], bool],
) -> StoredCounts:
    """Returns the stored counts of a snapshot for these settings, or calls `count` and stores its result.

    `settings` must hold everything that decides the counts. `fits` says whether stored counts fit this dataset.
    """
    place = index_place(dataset, settings)
    counts = None if place is None else _read(place, fits)
    if counts is None:
        counts = count()
        if place is not None:
            _keep(place, counts)
    return counts


def index_place(dataset: Dataset, settings: Mapping[str, Any]) -> Path | None:
    """Returns the folder of the index for these settings, or None if the snapshot has no folder for indices."""
    folder = index_folder(dataset.path)
    files = {entry["name"]: entry["sha256"] for entry in dataset.manifest["files"]}
    everything = {"version": VERSION, "files": files, **settings}
    digest = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()
    return None if folder is None else folder / digest[:16]


def _read(place: Path, fits: Callable[[StoredCounts], bool]) -> StoredCounts | None:
    """Returns the stored index, or None if it does not exist, is damaged or does not fit."""
    try:
        manifest = verify_manifest(place, KIND)
        names = [entry["name"] for entry in manifest["files"]]
        arrays = {name: np.fromfile(place / name, "<i8").astype(np.int64) for name in names}
        figures = {name: value for name, value in manifest.items() if type(value) is int}
        counts = StoredCounts(arrays, figures)
        is_sane = all(array.min(initial=0) >= 0 for array in arrays.values()) and fits(counts)
    except (OSError, DataError, KeyError, TypeError, ValueError):
        return None
    return counts if is_sane else None


def _keep(place: Path, counts: StoredCounts) -> None:
    """Stores an index for the next run. Errors are ignored; for example, another run may have stored it already."""
    with contextlib.suppress(OSError, TackboardError):
        if place.exists():
            remove_directory(place)
        with new_directory(place) as folder:
            for name, array in counts.arrays.items():
                array.astype("<i8").tofile(folder / name)
            write_manifest(folder, KIND, counts.figures, meant=counts.arrays)
