"""This module reads all files of a log into one table, and knows the file and the line of every row.

Decided: files are sorted by path, whatever order they were given in, so that the same folder always gives the same
dataset. In folders and patterns, files whose names begin with `.` or `_` are left out, because programs use such names
for files that are not data. Any other file that is not a log raises DataError, because skipping it could lose events.
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
from tackboard.events.tabular import FileRows, TableFile, inspect, read, require_columns

SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
"""Allowed endings of the names of logs in a folder."""
LONG_BYTES = 32 << 20
"""Smallest size of a log that gets a progress bar. Smaller logs are read too quickly to need a progress bar."""


def find_logs(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of `paths`, sorted by path. `paths` are files, folders and patterns such as `logs/*.csv`.

    Raises UsageError if there is no file, or if a file is given twice. Raises DataError if a folder holds no log,
    or holds another folder or a file that is not a log.
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
            raise UsageError(same, allowed="allowed: each file of a log once")
    return files


@dataclasses.dataclass(frozen=True)
class Log:
    """The requested columns of a log. The rows of all its files are concatenated."""

    parts: tuple[FileRows, ...]
    """One part per file. The tables of the parts are empty, because `columns` holds the rows."""
    starts: tuple[int, ...]
    """The row number at which each part begins, followed by the number of all rows."""
    columns: dict[str, pa.ChunkedArray]
    uses: Counter[str]
    """The number of calls of `take` that are still expected for each column."""

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @property
    def num_malformed(self) -> int:
        """Number of records with the wrong number of fields."""
        return sum(len(part.malformed) for part in self.parts)

    @property
    def is_long(self) -> bool:
        """Whether work on the log takes long enough for a progress bar."""
        return sum(part.source.num_bytes for part in self.parts) >= LONG_BYTES

    @property
    def typed(self) -> bool:
        """Whether the columns have types. Parquet columns do; CSV columns are all text."""
        return self.parts[0].source.format == "parquet"

    @property
    def title(self) -> str:
        """The name of the log in a message."""
        first = self.parts[0].source.path
        return str(first) if len(self.parts) == 1 else f"{first} and {len(self.parts) - 1} more"

    def take(self, column: str) -> pa.ChunkedArray:
        """Returns a column. The last expected call for a column removes it from the log, which frees memory."""
        self.uses[column] -= 1
        return self.columns[column] if self.uses[column] > 0 else self.columns.pop(column)

    def place_of(self, row: int) -> str:
        """Returns the place of a row in words, such as `a.csv line 7` or `b.parquet row 5`."""
        part = int(np.searchsorted(self.starts[1:-1], row, side="right"))
        return self.parts[part].place_of(row - self.starts[part])

    def malformed_places(self, limit: int) -> list[str]:
        """Returns the places of the first `limit` records with the wrong number of fields."""
        places = [(part.source.path, line) for part in self.parts for line in sorted(part.malformed.tolist())]
        return [f"{path} line {line}" for path, line in places[:limit]]


def read_log(files: Sequence[Path], wanted: Mapping[str, str], fields: Mapping[str, str]) -> Log:
    """Reads columns from every file. `wanted` (option → column) and `fields` (name → column) say which columns.

    All files must have the same format, and a column must have the same type in all files. Integers of different widths
    count as the same type, except uint64. If the files differ, raises DataError, which names the file that differs.
    """
    sources = [inspect(file) for file in files]
    for source in sources:
        require_columns(source, dict(wanted))
        for column in fields.values():
            require_columns(source, {"--field": column})
    columns = list(dict.fromkeys([*wanted.values(), *fields.values()]))
    types = {column: _common_type(sources, column) for column in columns}
    num_bytes = sum(source.num_bytes for source in sources)
    parts: list[FileRows] = []
    tables: list[pa.Table] = []
    with Progress("reading", total=num_bytes, unit="bytes", quiet=num_bytes < LONG_BYTES) as progress:
        for source in sources:
            rows = read(source, columns, progress=progress)
            tables.append(rows.table)
            parts.append(dataclasses.replace(rows, table=rows.table.slice(0, 0)))
    starts = (0, *np.cumsum([table.num_rows for table in tables]).tolist())
    joined = pa.concat_tables([table.select(columns).cast(pa.schema(types)) for table in tables])
    by_name = {column: joined[column] for column in columns}
    return Log(tuple(parts), starts, by_name, Counter([*wanted.values(), *fields.values()]))


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
                f"{entry} is not a log, judging by its name",
                allowed=f"allowed in a folder of logs: {', '.join(f'*{suffix}' for suffix in SUFFIXES)}",
                fix=f'move the file away, or give a pattern, e.g. "{folder}/*.csv"',
            )
    return entries


def _matching(pattern: Path) -> list[Path]:
    found = map(Path, glob.glob(str(pattern), recursive=True))
    files = [path for path in found if not path.is_dir() and not path.name.startswith((".", "_"))]
    if not files:
        raise UsageError(f"no file matches {pattern}", fix="give the path of a CSV or Parquet file")
    return files


def _common_type(sources: Sequence[TableFile], column: str) -> pa.DataType:
    """Returns the type to which a column is converted so that it has the same type in all files."""
    first = sources[0]
    formats = {"csv": "CSV", "parquet": "Parquet"}
    types = [source.type_of(column) for source in sources]
    for source, type_ in zip(sources, types, strict=True):
        if source.format != first.format:
            raise DataError(
                f"{source.path} is {formats[source.format]}, but {first.path} is {formats[first.format]}",
                allowed="allowed: files of one format",
                fix="import the files as two datasets, or convert one of them",
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
