"""This module reads columns of a CSV, gzipped CSV or Parquet file into a table.

The first bytes of a file, not its name, decide the format. Decided: CSV columns are read as text, because a guessed
type turns the id `007` into 7, and one stray letter changes the type of a column. Only attributes get guessed types.
Rows with the wrong number of fields are left out, and the caller gets their record numbers and decides whether too many
rows were left out. A file that changes while it is read raises DataError.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.config import did_you_mean
from tackboard.core.errors import DataError, UsageError
from tackboard.core.progress import Progress

DELIMITERS = (",", "\t", ";", "|")
ALLOWED = "allowed: CSV, gzipped CSV, Parquet"
_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
_NAME = re.compile(r"(?:[^\W\d][^@]{0,63})?")
"""Matches up to 64 characters without `@` that begin with a letter or `_`. An empty name (of an index) also matches."""
_HEADER_BYTES = 1 << 20
MAX_COLUMNS = 10_000
"""Largest number of columns in a file. A file with more columns is a matrix or has broken line ends."""
_BLOCK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A readable file, with its format and its columns."""

    path: Path
    format: str
    """`csv` or `parquet`."""
    columns: tuple[str, ...]
    state: tuple[int, ...]
    """Device, inode, size and time of the last change (ns). If any of the four differs later, the file has changed."""
    types: tuple[pa.DataType, ...] = ()
    """Holds one type per column for Parquet. It is empty for CSV, because every CSV column is text."""
    delimiter: str = ","
    gzipped: bool = False

    @property
    def num_bytes(self) -> int:
        return self.state[2]

    def type_of(self, column: str) -> pa.DataType:
        return self.types[self.columns.index(column)] if self.types else pa.string()

    @property
    def is_named(self) -> bool:
        """Whether the columns seem to have names. If a CSV file has no header, the first line holds data, not names."""
        return self.format == "parquet" or all(_NAME.fullmatch(name) for name in self.columns)

    def check_unchanged(self) -> None:
        """Raises DataError if the file has changed since it was inspected."""
        try:
            now = _state_of(self.path)
        except OSError:
            now = ()
        if now != self.state:
            what = f"was {self.state[2]:,} bytes, is {now[2]:,}" if now and now[2] != self.state[2] else "was rewritten"
            raise DataError(
                f"{self.path} changed while it was read: it {what if now else 'is gone'}",
                fix="run the command again when the file is complete",
            )


@dataclasses.dataclass(frozen=True)
class FileRows:
    """The columns that were read from a file. `line_of` and `place_of` say where in the file a row is."""

    source: TableFile
    table: pa.Table
    malformed: NDArray[np.int64]
    """Record numbers of the rows that were left out for a wrong number of fields. The header is record 1."""

    @property
    def unit(self) -> str:
        return "line" if self.source.format == "csv" else "row"

    def line_of(self, row: int) -> int:
        """Returns the record number, from 1, of a row of `table`. The CSV header and left-out rows are also counted."""
        line = row + 1 + (self.source.format == "csv")
        for left_out in np.sort(self.malformed).tolist():
            line += left_out <= line
        return line

    def place_of(self, row: int) -> str:
        """Returns the place of a row of `table` in words, such as `a.csv line 7`."""
        return f"{self.source.path} {self.unit} {self.line_of(row)}"


def inspect(path: Path) -> TableFile:
    """Finds a file's format and columns. A missing file or a folder raises UsageError. A bad file raises DataError."""
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"{path} is a symlink whose target does not exist", fix="restore the target, or leave out the link"
        )
    if not path.exists():
        raise UsageError(f"{path} does not exist", fix="give the path of a CSV or Parquet file")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", allowed="allowed: one CSV or Parquet file")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file", allowed=ALLOWED, fix="write its content to a file first")
    try:
        state = _state_of(path)
        with path.open("rb") as file:
            start = file.readline(_HEADER_BYTES)
        if start.startswith(_ZIP):
            raise DataError(f"{path} is a zip archive", allowed=ALLOWED, fix="unzip the archive")
        if start.startswith(_PARQUET):
            schema = pq.read_schema(path)
            _check_columns(path, tuple(schema.names))
            return TableFile(path, "parquet", tuple(schema.names), state, types=tuple(schema.types))
        gzipped = start.startswith(_GZIP)
        if gzipped:
            with gzip.open(path) as stream:
                start = stream.readline(_HEADER_BYTES)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {_reason(error)}", allowed=ALLOWED) from None
    return _inspect_csv(path, start, state, gzipped=gzipped)


def require_columns(source: TableFile, wanted: dict[str, str]) -> None:
    """Raises DataError if a column in `wanted` (option → column) does not exist. The error lists up to 40 columns."""
    for option, column in wanted.items():
        if column not in source.columns:
            if not source.is_named:
                raise _no_names(source.path, f"no column {column!r} (given by {option})")
            raise DataError(
                f"{source.path} has no column {column!r} (given by {option})",
                allowed=f"its columns: {', '.join(source.columns[:40])}",
                fix=did_you_mean(column, source.columns, f"{option} ") or f"give {option} one of these columns",
            )


def _no_names(path: Path, lack: str) -> DataError:
    """Returns an error that does not quote the first line of the file, because that line may hold the id of a user."""
    return DataError(
        f"{path} has {lack}, and its first line looks like data",
        allowed="allowed: CSV whose first line names the columns, each beginning with a letter",
        fix="add a first line with the names",
    )


def read(
    source: TableFile,
    columns: list[str] | None = None,
    *,
    as_text: list[str] | None = None,
    progress: Progress | None = None,
) -> FileRows:
    """Reads `columns` (by default all). Parquet columns keep their types, and CSV columns are strings.

    If `as_text` is given, only the CSV columns in `as_text` are strings. Each other CSV column gets the type that fits
    all its values. `progress` counts bytes of the file, except for CSV with `as_text`. A file that cannot be read, or
    that changes while it is read, raises DataError. The error names the row if the row is known.
    """
    names = list(dict.fromkeys(columns if columns is not None else source.columns))
    progress = progress if progress is not None else Progress("", quiet=True)
    try:
        if source.format == "parquet":
            rows = _read_parquet(source, names, progress)
        else:
            rows = _read_csv(source, names, as_text, progress)
    except DataError:
        source.check_unchanged()  # If the file has changed, this call raises an error that explains the problem.
        raise
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
        source.check_unchanged()
        raise _unreadable(source, error) from None
    source.check_unchanged()
    return rows


def _state_of(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    assert stat.S_ISREG(found.st_mode)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _reason(error: BaseException) -> str:
    """Returns the text of an error. Leaves out the path of a system error, because our message names the path."""
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__


def _unreadable(source: TableFile, error: BaseException) -> DataError:
    message = str(error)
    if source.format == "csv" and "UTF8" in message:
        row = re.search(r"Row #(\d+)", message)
        where = f" in line {row[1]}" if row else ""
        return DataError(f"{source.path} is not UTF-8 text{where}", fix="convert the file, e.g. with iconv -t UTF-8")
    if "Expected all lists to be of size" in message:
        return DataError(
            f"{source.path} has a column of fixed-size lists that holds a null, which Arrow cannot read",
            fix="store this column as lists without a fixed size",
        )
    return DataError(f"{source.path} cannot be read: {_reason(error)}", fix="check that the file is complete")


def _inspect_csv(path: Path, start: bytes, state: tuple[int, ...], *, gzipped: bool) -> TableFile:
    header_bytes = start.split(b"\n", 1)[0].rstrip(b"\r")
    try:
        # Only the start of the file was read, so the line may end in the middle of a multi-byte character.
        is_cut = len(start) == _HEADER_BYTES and b"\n" not in start
        header = codecs.getincrementaldecoder("utf-8-sig")().decode(header_bytes, final=not is_cut)
    except UnicodeDecodeError:
        raise DataError(f"{path} is neither Parquet nor UTF-8 text", allowed=ALLOWED) from None
    if not header.strip() or "\x00" in header:
        raise DataError(f"{path} has no header line", allowed="allowed: CSV whose first line names the columns")
    delimiter = max(DELIMITERS, key=header.count)
    # The number of columns is checked before the names, because the last name of a cut line is incomplete.
    _check_width(path, header.count(delimiter) + 1, is_cut=is_cut)
    if is_cut:
        raise DataError(
            f"{path} has a first line of more than {_HEADER_BYTES:,} bytes",
            allowed="allowed: CSV whose first line names the columns",
            fix="check that the lines of the file end in line breaks",
        )
    options = pyarrow.csv.ParseOptions(delimiter=delimiter)
    try:
        parsed = pyarrow.csv.read_csv(pa.BufferReader(header.encode() + b"\n"), parse_options=options)
    except pa.ArrowException as error:
        raise DataError(f"{path} line 1 is not a header: {_reason(error)}", fix="name the columns in line 1") from None
    names = tuple(parsed.column_names)
    source = TableFile(path, "csv", names, state, delimiter=delimiter, gzipped=gzipped)
    if len(set(names)) < len(names) and not source.is_named:
        raise _no_names(path, "two columns of the same name")
    _check_columns(path, names)
    return source


def _check_width(path: Path, num_columns: int, *, is_cut: bool = False) -> None:
    if num_columns > MAX_COLUMNS:
        raise DataError(
            f"{path} has {'more than ' if is_cut else ''}{num_columns:,} columns",
            allowed=f"allowed: up to {MAX_COLUMNS:,}",
            fix="keep only the needed columns, and check that lines end in line breaks",
        )


def _check_columns(path: Path, names: tuple[str, ...]) -> None:
    """Raises DataError if there are too many columns, or if two columns have the same name."""
    _check_width(path, len(names))
    doubles = sorted(name for name, count in Counter(names).items() if count > 1)
    if doubles:
        raise DataError(f"{path} has two columns named {doubles[0]!r}", fix="rename one of these columns")


def _read_parquet(source: TableFile, names: list[str], progress: Progress) -> FileRows:
    """Reads one row group at a time, so that an error can name the bad rows and a progress bar can move."""
    tables = []
    with pq.ParquetFile(source.path, page_checksum_verification=True) as file:
        start, num_rows = 0, file.metadata.num_rows
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group, columns=names)
                # Arrow does not check text in Parquet, and bytes that are not UTF-8 would cause an error much later.
                table.validate(full=True)
            except (OSError, pa.ArrowException) as error:
                if "Expected all lists to be of size" in str(error):
                    raise
                raise DataError(
                    f"{source.path} rows {start + 1:,} to {end:,} cannot be read: {_reason(error)}",
                    fix="check that the file is complete",
                ) from None
            tables.append(table)
            progress.advance(source.num_bytes * (end - start) // max(num_rows, 1))
            start = end
        schema = pa.schema([file.schema_arrow.field(name) for name in names])
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    return FileRows(source, table, np.zeros(0, dtype=np.int64))


@contextlib.contextmanager
def _undecodable_rows(source: TableFile) -> Iterator[None]:
    """Raises DataError if a row with the wrong number of fields is also not UTF-8.

    Arrow fails before it can hand such a row to `invalid_row_handler`, at a point where Python cannot raise exceptions.
    Python then calls `sys.unraisablehook`, which would print a traceback. So this context manager replaces the hook.
    """
    failed: list[object] = []
    usual, sys.unraisablehook = sys.unraisablehook, lambda problem: failed.append(problem.exc_type)
    try:
        yield
    finally:
        sys.unraisablehook = usual
        if failed:
            with gzip.open(source.path) if source.gzipped else source.path.open("rb") as file:
                lines = enumerate(file, start=1)
                number = next((n for n, line in lines if line.decode(errors="ignore").encode() != line), 1)
            raise _unreadable(source, pa.ArrowInvalid(f"UTF8 Row #{number}"))


def _read_blocks(stream: Any, file: pa.OSFile, options: dict[str, Any], progress: Progress) -> pa.Table:
    batches, position = [], 0
    with pyarrow.csv.open_csv(stream, **options) as reader:
        for batch in reader:
            batches.append(batch)
            # `tell` is called only once per block. Arrow reads ahead in the background, so a second result may differ.
            place = file.tell()
            progress.advance(place - position)
            position = place
        progress.advance(file.tell() - position)
        return pa.Table.from_batches(batches, reader.schema)


def _read_csv(source: TableFile, names: list[str], as_text: list[str] | None, progress: Progress) -> FileRows:
    malformed: list[int] = []
    torn: list[int] = []

    def leave_out(row: pyarrow.csv.InvalidRow) -> str:
        malformed.append(row.number)
        if "\n" in row.text:
            torn.append(row.number)
        return "skip"

    texts = dict.fromkeys(names if as_text is None else as_text, pa.string())
    # Only one thread reads, because with several threads pyarrow gives no record numbers for bad records.
    options = {
        "read_options": pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        "parse_options": pyarrow.csv.ParseOptions(
            delimiter=source.delimiter, newlines_in_values=True, invalid_row_handler=leave_out
        ),
        "convert_options": pyarrow.csv.ConvertOptions(
            include_columns=names, column_types=texts, strings_can_be_null=False
        ),
    }
    with pa.OSFile(str(source.path)) as file, _undecodable_rows(source):
        stream = pa.CompressedInputStream(file, "gzip") if source.gzipped else file
        try:
            if as_text is not None:
                table = pyarrow.csv.read_csv(stream, **options)
            else:
                table = _read_blocks(stream, file, options, progress)
        except pa.ArrowInvalid as error:
            if "Empty CSV file or block" not in str(error):
                raise
            table = pa.table({name: pa.array([], pa.string()) for name in names})  # The file has only a header.
    if torn:
        # An unclosed quote swallows all lines up to the next quote. All these lines would count as one bad row.
        raise DataError(
            f"{source.path} line {torn[0]} opens a quote and does not close it",
            fix="close the quote, or double the quotes inside a value",
        )
    return FileRows(source, table, np.array(malformed, dtype=np.int64))
