"""This module describes the cells of `tackboard bench quality` and stores their results.

A cell is one unit of work: one stage of the protocol for one method with one seed on one prepared dataset. The
description of a cell holds the whole config of the run, the protocol, and the earlier cell that this cell needs. It
names no machine, so the hash of the description identifies the work on every machine. The folder WORK holds:

    WORK/quality.json                     marks the folder as a folder of this benchmark
    WORK/datasets/<prepared>/             see data.py
    WORK/cells/<label>-<hash>/            cell.json · result.json · ranks.npy … of a finished cell; never changed again
    WORK/runs/<label>-<hash>/             the run directory of a cell that trains; an unfinished cell continues there
    WORK/logs/<label>-<hash>.log          output of the process that ran the cell

The folder `cells` is small. To continue on another machine, copy this folder; datasets are prepared again there.
Decided: a result of an older version may still count. If the old description lacks a setting, the setting gets today's
default. The old result counts if the description then equals the description of today's cell. Without this rule, every
new setting would throw away days of results. Each result records the commit that made it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError, TackboardError, UsageError
from tackboard.core.files import new_directory, read_json, remove_leftovers, write_bytes_atomic, write_json_atomic
from tackboard.core.rundir import describe_environment
from tackboard.flow.jobs import step_name
from tackboard.train.config import RunConfig, config_from_json, config_to_json

MARKER = "quality.json"
KIND = "tackboard quality work"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """The description of one unit of work; see the docstring of the module."""

    prepared: str
    """Name of the prepared dataset under WORK/datasets."""
    ties: str
    """Tie rule of the prepared dataset."""
    method: str
    seed: int
    stage: str
    """Name of the stage: see STAGES in cell.py."""
    protocol: Mapping[str, Any]
    """How results are judged, and other settings that the stage reads."""
    config: Mapping[str, Any] | None = None
    """Config of the run as JSON (`config_to_json`), with the name of the prepared dataset; None if the stage reads no
    config."""
    after: Cell | None = None
    """The cell whose result this cell reads, for example to get the chosen number of steps."""

    @property
    def label(self) -> str:
        """Says which cell of a study this is. The label of a try (tuning.py) ends with the number of the try."""
        return f"{self.prepared}_{self.method}_seed{self.seed}_{self.stage}{self.protocol.get('try_number', '')}"

    @property
    def name(self) -> str:
        """The label, followed by the hash of the description."""
        return step_name(self.label, self.describe())

    def describe(self) -> dict[str, Any]:
        """Returns the complete description as JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        described = fields | {"after": self.after.describe() if self.after else None}
        return dict(json.loads(json.dumps(described)))

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Cell:
        """Returns the cell with this description; the inverse of `describe`."""
        after = description["after"]
        return cls(**{**description, "after": cls.from_description(after) if after else None})

    def run_config(self) -> RunConfig:
        if self.config is None:
            raise DataError(f"{self.label} fits nothing and has no run")
        return config_from_json(dict(self.config))

    def in_todays_words(self) -> Cell:
        """Returns the cell with today's defaults for settings that are missing in its description."""
        return dataclasses.replace(
            self,
            config=None if self.config is None else config_to_json(self.run_config()),
            after=self.after.in_todays_words() if self.after else None,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished cell."""

    path: Path
    cell: Cell
    values: Mapping[str, Any]
    """The content of result.json."""
    loaded: Mapping[str, NDArray[Any]] | None = None
    """The arrays, if they are in memory; otherwise they are read from `path`."""

    def array_names(self) -> set[str]:
        """Returns the names of the arrays of the result."""
        return {path.stem for path in self.path.glob("*.npy")} if self.loaded is None else set(self.loaded)

    def array(self, name: str = "ranks") -> NDArray[Any]:
        """Returns an array of the result, such as the 0-based rank of each user's held-out item."""
        if self.loaded is not None and name in self.loaded:
            return self.loaded[name]
        path = self.path / f"{name}.npy"
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}", fix="remove its folder, then the cell runs again"
            ) from None


class Work:
    """The folder WORK, with prepared datasets, cells, runs and logs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.datasets, self.cells = root / "datasets", root / "cells"
        self.runs, self.logs = root / "runs", root / "logs"

    @classmethod
    def open(cls, root: Path) -> Work:
        """Opens or creates the folder `root`. Raises UsageError if `root` is a file or holds unrelated files."""
        work = cls.check(root)
        for folder in (work.datasets, work.cells, work.runs, work.logs):
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
        if not (root / MARKER).exists():
            write_json_atomic(root / MARKER, {"kind": KIND, "format_version": 1})
        return work

    @classmethod
    def check(cls, root: Path) -> Work:
        """Returns the folder `root` without creating it. Raises UsageError if `open` would refuse the folder."""
        work = cls(root)
        marker = root / MARKER
        if root.exists() and not root.is_dir():
            raise UsageError(f"--work {root} is a file", allowed="allowed: a folder", fix="give another --work")
        if marker.exists():
            if not isinstance(kind := read_json(marker), dict) or kind.get("kind") != KIND:
                raise UsageError(f"--work {root} holds a {MARKER} of another program", fix="give another --work")
        elif root.exists() and not {path.name for path in root.iterdir()} <= {"datasets", "cells", "runs", "logs"}:
            raise UsageError(
                f"--work {root} holds files that this command did not write",
                allowed="allowed: a new or empty folder, or a folder that this command made",
                fix="give another --work",
            )
        return work

    def dataset(self, cell: Cell) -> Path:
        return self.datasets / cell.prepared

    def run(self, cell: Cell) -> Path:
        return self.runs / cell.name

    def log(self, cell: Cell) -> Path:
        return self.logs / f"{cell.name}.log"

    def spec(self, cell: Cell) -> Path:
        """Writes the description of a cell to a file, for the process that runs the cell, and returns the file."""
        path = self.logs / f"{cell.name}.json"
        write_json_atomic(path, cell.describe())
        return path

    def find(self, cell: Cell) -> Result | None:
        """Returns the result of a cell, or None if the cell is not finished."""
        exact = self.cells / cell.name
        if (exact / "result.json").is_file():
            return Result(exact, cell, read_json(exact / "result.json"))
        for path in sorted(self.cells.glob(f"{cell.label}-*")):
            if len(path.name) == len(cell.name) and _means(path, cell):
                return Result(path, cell, read_json(path / "result.json"))
        return None

    def save(self, cell: Cell, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any] | Path]) -> Result:
        """Writes a result atomically. If the cell already has a result from another process, that result is kept.

        An entry of `arrays` may be a folder. The files of this folder are copied to a folder with the entry's name.
        """
        final = self.cells / cell.name
        values = {
            "cell": cell.name,
            **values,
            "environment": describe_environment(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if not final.exists():
            with new_directory(final) as folder:
                for name, array in arrays.items():
                    if isinstance(array, Path):
                        (folder / name).mkdir()
                        for file in array.iterdir():
                            write_bytes_atomic(folder / name / file.name, file.read_bytes())
                    else:
                        save_array(folder / f"{name}.npy", array)
                write_json_atomic(folder / "cell.json", cell.describe())
                write_json_atomic(folder / "result.json", values)
        return Result(final, cell, read_json(final / "result.json"))


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Writes an array of numbers to `path` atomically."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_bytes_atomic(path, buffer.getvalue())


def _means(path: Path, cell: Cell) -> bool:
    """Returns whether the finished cell at `path`, which an older version wrote, describes the same work as `cell`."""
    try:
        older = Cell.from_description(read_json(path / "cell.json")).in_todays_words()
    except (TackboardError, KeyError, TypeError):
        return False  # The older cell has a setting that no longer exists, so it describes other work.
    return older.describe() == cell.describe()
