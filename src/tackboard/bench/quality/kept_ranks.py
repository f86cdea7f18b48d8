"""Keeps the ranks behind a published table in one small file, from which the table can be made again.

The input is a finished study: the description of each cell, the numbers of its result, and its arrays with one entry
per ranked user. The output is a file `…_ranks.npz` beside the published table. Reading the file needs neither the
dataset nor a GPU. NumPy opens the file (`numpy.load(file, allow_pickle=False)`):

    study           JSON as bytes: `kind`, `format_version`, the options and facts of the study (`options`, `result`),
                    and `cells`: for each cell its description (method, seed, tie rule, stage), its numbers, and
                    array name → member of this file
    0, 1, 2, …      the arrays. `ranks`: 0-based rank of each user's held-out item, int32. `users`: position of each
                    ranked user in the dataset. `gaps`: seconds between the held-out event and the event before it.

Decided: metrics are not stored. They are computed from the ranks when the file is read, so a table that is made from
the file cannot say more than the ranks do. Equal arrays, such as `gaps` of all methods, are stored once. A zip archive
has a checksum for each member, so a damaged file is noticed. The name of a cell contains the hash of its whole config,
and configs change with new versions. So cells are found by their label (dataset, method, seed, stage).
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.quality.cell import metrics_of
from tackboard.bench.quality.cells import Cell, Result
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.files import write_bytes_atomic

KIND = "tackboard quality ranks"
FORMAT_VERSION = 1
SUFFIX = "_ranks.npz"
STUDY = "study"
DERIVED = {"metrics": "ranks", "best_metrics": "ranks_best"}
"""Name of metrics in a result → name of the ranks behind them. For `ranks_…_ahead`, the two names are the same."""

UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
"""The errors that reading may raise if a file is not as `write_kept` wrote it."""


@dataclasses.dataclass(frozen=True)
class KeptStudy:
    """The content of a file with ranks."""

    path: Path
    options: Mapping[str, Any]
    result: Mapping[str, Any]
    """What `measure` returned, without the table."""
    results: Mapping[str, Result]
    """Label of a cell → its result, with the arrays in memory."""

    def find(self, cell: Cell) -> Result | None:
        """Returns the kept result of the cell with the same label, or None."""
        return self.results.get(cell.label)


def write_kept(path: Path, options: Mapping[str, Any], result: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Writes the results of a study, with all their arrays, to `path` atomically."""
    members: dict[bytes, str] = {}
    arrays: dict[str, Any] = {}
    cells = []
    for one in results:
        places = {}
        for name in sorted(one.array_names()):
            array = _small(one.array(name))
            content = array.dtype.str.encode() + array.tobytes()
            places[name] = members.setdefault(content, str(len(members)))
            arrays[places[name]] = array
        values = {key: value for key, value in one.values.items() if DERIVED.get(key, key) not in places}
        values["environment"] = {"commit": one.values["environment"]["commit"]}
        cells.append({"cell": one.cell.describe(), "values": values, "arrays": places})
    study = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "options": dict(options),
        "result": {key: value for key, value in result.items() if key not in ("table", "ranks")},
        "cells": cells,
    }
    arrays[STUDY] = np.frombuffer(json.dumps(study, ensure_ascii=False).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes_atomic(path, buffer.getvalue())


def _small(array: NDArray[Any]) -> NDArray[Any]:
    """Returns whole numbers as int32 if they fit, and other arrays as they are."""
    limits = np.iinfo(np.int32)
    if array.dtype.kind != "i" or (array.size and not limits.min <= array.min() <= array.max() <= limits.max):
        return array
    return array.astype(np.int32)


def read_kept(path: Path) -> KeptStudy:
    """Reads a file that `write_kept` wrote. A damaged file, or a file of another format, raises CorruptFileError."""
    try:
        if not zipfile.is_zipfile(path):  # NumPy's own error would suggest unsafe loading.
            raise ValueError("it is no zip archive")
        with np.load(path, allow_pickle=False) as file:
            study = json.loads(file[STUDY].tobytes())
            _check_format(path, study)
            arrays = {name: file[name] for name in file.files if name != STUDY}
        results = [_result(path, one, arrays) for one in study["cells"]]
        return KeptStudy(path, study["options"], study["result"], {one.cell.label: one for one in results})
    except UNREADABLE as error:
        raise CorruptFileError(
            f"{path} is damaged or is no file with ranks: {error}",
            allowed=f"needed: a file …{SUFFIX} that `tackboard bench quality --results` wrote",
            fix="restore the file, for example with git",
        ) from None


def _check_format(path: Path, study: Any) -> None:
    if not isinstance(study, dict) or study.get("kind") != KIND:
        raise ValueError(f"its member {STUDY!r} does not name the kind {KIND!r}")
    version = study.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version}",
            allowed=f"this version of Tackboard reads format version {FORMAT_VERSION}",
            fix="use the version of Tackboard that wrote the file, or a newer one",
        )


def _result(path: Path, kept: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Result:
    """Returns a kept result. Its metrics are computed from its ranks."""
    loaded = {name: arrays[member] for name, member in kept["arrays"].items()}
    names = DERIVED | {name: name for name in loaded if name.startswith("ranks_") and name.endswith("_ahead")}
    derived = {metrics: metrics_of(loaded[ranks]) for metrics, ranks in names.items() if ranks in loaded}
    return Result(path, Cell.from_description(kept["cell"]), kept["values"] | derived, loaded)


def find_kept(path: Path) -> list[Path]:
    """Returns the file `path`, or all files with ranks in the folder `path`. Raises UsageError if there are none."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise UsageError(
            f"--recompute {path} does not exist", allowed=f"allowed: a file …{SUFFIX}, or a folder of them"
        )
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        raise UsageError(
            f"--recompute {path} holds no file …{SUFFIX}",
            allowed="allowed: a folder such as benchmarks/results, or the --work folder of a study",
        )
    return found
