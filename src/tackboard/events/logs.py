"""The files of one log: paths, folders and patterns in, one table whose rows know their file and line out.

Decided: files come in the order of their names and rows in the order of their file, whatever order they were given in,
so that the same folder always gives the same dataset. In a folder, names that begin with `.` or `_` are left out, as
the programs that write such folders mean it; anything else there that is no log is refused, because a file that is
silently left out is an event that is silently lost.
"""

from __future__ import annotations

import dataclasses
import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tackboard.core.errors import DataError, UsageError
from tackboard.core.progress import Progress
from tackboard.events.columns import is_text
from tackboard.events.tabular import Rows, Source, inspect, read, require_columns

SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
"""How the names of logs in a folder end."""
LONG_BYTES = 32 << 20
"""Smaller logs are read before anybody would look at a progress bar."""


def find_logs(paths: Sequence[Path]) -> list[Path]:
    """The files that `paths` mean: files themselves, folders and patterns such as `logs/*.csv`; sorted by name.

    Nothing found raises UsageError; a folder that holds no log, or something else, DataError.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += _in_folder(path)
        elif not path.exists() and not path.is_symlink() and glob.has_magic(str(path)):
            found += _matching(path)
        else:
            found.append(path)
    if not found:
        raise UsageError("no log was given", fix="name a CSV or Parquet file, or a folder of them")
    files = sorted(found, key=lambda path: path.as_posix())
    seen: dict[Path, Path] = {}
    for file in files:
        if (other := seen.setdefault(file.resolve(), file)) is not file:
            same = f"{file} is given twice" if other == file else f"{file} is the same file as {other}"
            raise UsageError(same, allowed="allowed: every file of a log once")
    return files


@dataclasses.dataclass(frozen=True)
class Log:
    """The wanted columns of all files of a log, one below the other."""

    parts: tuple[Rows, ...]
    """What was read of each file; their tables are empty, the rows stand in `columns`."""
    starts: tuple[int, ...]
    """Row at which each part begins, and behind the last one the number of rows."""
    columns: dict[str, pa.ChunkedArray]
    """By name."""
    uses: Counter[str]
    """How often each column is still wanted."""

    @property
    def num_rows(self) -> int:
        """Rows that could be read as records."""
        return self.starts[-1]

    @property
    def num_malformed(self) -> int:
        """Records that had the wrong number of fields."""
        return sum(len(part.malformed) for part in self.parts)

    @property
    def is_long(self) -> bool:
        """Whether work on the log takes long enough for a progress bar."""
        return sum(part.source.num_bytes for part in self.parts) >= LONG_BYTES

    @property
    def typed(self) -> bool:
        """Whether the types of the columns mean something: Parquet, not CSV."""
        return self.parts[0].source.format == "parquet"

    @property
    def title(self) -> str:
        """What the log is called in a message."""
        first = self.parts[0].source.path
        return str(first) if len(self.parts) == 1 else f"{first} and {len(self.parts) - 1} more"

    def take(self, column: str) -> pa.ChunkedArray:
        """A column for one of its uses. The last use takes it out of the log, so that memory is given back."""
        self.uses[column] -= 1
        return self.columns[column] if self.uses[column] > 0 else self.columns.pop(column)

    def place_of(self, row: int) -> str:
        """Where a row stands: `a.csv line 7`, `b.parquet row 5`."""
        part = int(np.searchsorted(self.starts[1:-1], row, side="right"))
        return self.parts[part].place_of(row - self.starts[part])

    def malformed_places(self, limit: int) -> list[str]:
        """Where the first records with the wrong number of fields stand."""
        places = [(part.source.path, line) for part in self.parts for line in sorted(part.malformed.tolist())]
        return [f"{path} line {line}" for path, line in places[:limit]]


def read_log(files: Sequence[Path], wanted: Mapping[str, str], fields: Mapping[str, str]) -> Log:
    """Reads the columns of `wanted` (option → column) and `fields` (name → column) of every file.

    The files must have one format, and each column one type in all of them, integers of any width being one; else
    DataError names the file.
    """
    sources = [inspect(file) for file in files]
    for source in sources:
        require_columns(source, dict(wanted))
        for column in fields.values():
            require_columns(source, {"--field": column})
    columns = list(dict.fromkeys([*wanted.values(), *fields.values()]))
    types = {column: _common_type(sources, column) for column in columns}
    num_bytes = sum(source.num_bytes for source in sources)
    parts: list[Rows] = []
    tables: list[pa.Table] = []
    with Progress("reading", total=num_bytes, unit="bytes", quiet=num_bytes < LONG_BYTES) as progress:
        for source in sources:
            rows = read(source, columns, progress=progress)
            tables.append(rows.table)
            parts.append(dataclasses.replace(rows, table=rows.table.slice(0, 0)))
    starts = (0, *np.cumsum([table.num_rows for table in tables]).tolist())
    joined = {column: _joined([table[column] for table in tables], types[column]) for column in columns}
    return Log(tuple(parts), starts, joined, Counter([*wanted.values(), *fields.values()]))


def _in_folder(folder: Path) -> list[Path]:
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
    if not entries:
        raise DataError(
            f"{folder} is a folder without logs",
            allowed="allowed: a folder with at least one CSV or Parquet file, whose name begins with neither . nor _",
        )
    for entry in entries:
        if entry.is_dir():
            raise DataError(
                f"{entry} is a folder inside a folder of logs", fix=f'give a pattern instead, e.g. "{folder}/*/*.csv"'
            )
        if not entry.name.lower().endswith(SUFFIXES):
            raise DataError(
                f"{entry} is no log by its name",
                allowed=f"allowed in a folder of logs: {', '.join(f'*{suffix}' for suffix in SUFFIXES)}",
                fix=f'move it away, or give a pattern, e.g. "{folder}/*.csv"',
            )
    return entries


def _matching(pattern: Path) -> list[Path]:
    names = glob.glob(str(pattern), recursive=True)
    files = [path for name in names if not (path := Path(name)).is_dir() and not path.name.startswith((".", "_"))]
    if not files:
        raise UsageError(f"no file matches {pattern}", fix="give the path of a CSV or Parquet file")
    return files


def _common_type(sources: Sequence[Source], column: str) -> pa.DataType:
    """The one type of a column in all files."""
    first = sources[0]
    types = [source.type_of(column) for source in sources]
    for source, type_ in zip(sources, types, strict=True):
        if source.format != first.format:
            raise DataError(
                f"{source.path} is {_format(source)}, but {first.path} is {_format(first)}",
                allowed="allowed: files of one format",
                fix="import them as two datasets, or convert one",
            )
        if _kind(type_) != _kind(types[0]):
            raise DataError(
                f"{source.path}, row 1 and below: the column {column!r} is {type_}, but {types[0]} in {first.path}",
                allowed="allowed: one type for a column in all files",
                fix="convert one of them",
            )
    if all(type_ == types[0] for type_ in types):
        return types[0]
    return pa.string() if is_text(types[0]) else pa.int64()


def _kind(type_: pa.DataType) -> str:
    if is_text(type_):
        return "text"
    return "integer" if pa.types.is_integer(type_) and type_ != pa.uint64() else str(type_)


def _format(source: Source) -> str:
    return "CSV" if source.format == "csv" else "Parquet"


def _joined(columns: list[pa.ChunkedArray], type_: pa.DataType) -> pa.ChunkedArray:
    same = [column if column.type == type_ else column.cast(type_) for column in columns]
    chunks = [chunk for column in same for chunk in column.chunks]
    return pa.chunked_array(chunks, type=type_)
