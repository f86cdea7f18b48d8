"""A user's file as a table: CSV, gzipped CSV or Parquet in, the wanted columns out.

What the file is, its first bytes decide, not its name. Decided: CSV columns are read as text, never by a guessed type,
because a guess turns the id `007` into 7 and one stray letter into a column of another type. Rows with the wrong number
of fields are left out and remembered; the caller decides whether there are too many.
"""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.config import suggest
from tackboard.core.errors import DataError, UsageError

DELIMITERS = (",", "\t", ";", "|")
_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
_HEADER_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Source:
    """A readable file: its columns, and how to read them."""

    path: Path
    format: str
    """`csv` or `parquet`."""
    columns: tuple[str, ...]
    delimiter: str = ","
    gzipped: bool = False


@dataclasses.dataclass(frozen=True)
class Rows:
    """Chosen columns of a file, and where its rows stood."""

    table: pa.Table
    malformed: NDArray[np.int64]
    """1-based numbers of the records, header included, that had the wrong number of fields and were left out."""
    header_rows: int

    def line_of(self, row: int) -> int:
        """The record number in the file of a row of `table`: 1-based, the header counted, left-out records too."""
        line = row + 1 + self.header_rows
        for left_out in np.sort(self.malformed).tolist():
            line += left_out <= line
        return line


def inspect(path: Path) -> Source:
    """Finds out what a file is and which columns it has. Unreadable files raise DataError, missing ones UsageError."""
    if not path.exists():
        raise UsageError(f"{path} does not exist", fix="give the path of a CSV or Parquet file")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", allowed="allowed: one CSV or Parquet file")
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_BYTES)
        if start.startswith(_ZIP):
            raise DataError(f"{path} is a zip archive", allowed="allowed: CSV, gzipped CSV, Parquet", fix="unzip it")
        if start.startswith(_PARQUET):
            return Source(path=path, format="parquet", columns=tuple(pq.read_schema(path).names))
        gzipped = start.startswith(_GZIP)
        if gzipped:
            with gzip.open(path) as stream:
                start = stream.read(_HEADER_BYTES)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}", allowed="allowed: CSV, gzipped CSV, Parquet") from None
    return _inspect_csv(path, start, gzipped=gzipped)


def require_columns(source: Source, wanted: dict[str, str]) -> None:
    """Raises DataError unless every wanted column (option → column) exists; names what there is and the closest."""
    for option, column in wanted.items():
        if column not in source.columns:
            close = suggest(column, source.columns)
            raise DataError(
                f"{source.path} has no column {column!r} (given by {option})",
                allowed=f"its columns: {', '.join(source.columns[:40])}",
                fix=f"did you mean {option} {close}?" if close else f"give {option} one of these",
            )


def read(source: Source, columns: list[str] | None = None, *, as_text: list[str] | None = None) -> Rows:
    """Reads `columns` (all by default). Parquet columns come as they are, CSV columns as strings.

    With `as_text`, only those CSV columns do and the others get the type that fits all their values.
    """
    names = list(dict.fromkeys(columns if columns is not None else source.columns))
    try:
        if source.format == "parquet":
            table = pq.read_table(source.path, columns=names)
            return Rows(table=table, malformed=np.zeros(0, dtype=np.int64), header_rows=0)
        return _read_csv(source, names, names if as_text is None else as_text)
    except UnicodeDecodeError:
        raise DataError(f"{source.path} is not UTF-8 text", fix="convert it, e.g. with iconv -t UTF-8") from None
    except (OSError, EOFError, pa.ArrowException) as error:
        message = str(error)
        if "UTF8" in message or "UTF-8" in message:
            raise DataError(f"{source.path} is not UTF-8 text", fix="convert it, e.g. with iconv -t UTF-8") from None
        if "Expected all lists to be of size" in message:
            raise DataError(
                f"{source.path} has a column of fixed-size lists that holds a null, which Arrow cannot read",
                fix="store that column as lists without a fixed size",
            ) from None
        raise DataError(f"{source.path} cannot be read: {message}", fix="check that the file is whole") from None


def _inspect_csv(path: Path, start: bytes, *, gzipped: bool) -> Source:
    header_bytes = start.split(b"\n", 1)[0].rstrip(b"\r")
    try:
        header = header_bytes.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is neither Parquet nor UTF-8 text", allowed="allowed: CSV, gzipped CSV, Parquet"
        ) from None
    if not header.strip() or "\x00" in header:
        raise DataError(f"{path} has no header line", allowed="allowed: CSV whose first line names the columns")
    delimiter = max(DELIMITERS, key=header.count)
    options = pyarrow.csv.ParseOptions(delimiter=delimiter)
    parsed = pyarrow.csv.read_csv(pa.BufferReader(header.encode() + b"\n"), parse_options=options)
    names = tuple(parsed.column_names)
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise DataError(f"{path} has two columns named {doubles[0]!r}", fix="rename one of them in the header")
    return Source(path=path, format="csv", columns=names, delimiter=delimiter, gzipped=gzipped)


def _read_csv(source: Source, names: list[str], as_text: list[str]) -> Rows:
    malformed: list[int] = []

    def leave_out(row: pyarrow.csv.InvalidRow) -> str:
        malformed.append(row.number)
        return "skip"

    # One thread: only then does pyarrow number the records it could not parse.
    with pa.OSFile(str(source.path)) as file:
        stream = pa.CompressedInputStream(file, "gzip") if source.gzipped else file
        table = pyarrow.csv.read_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=8 << 20),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=source.delimiter, newlines_in_values=True, invalid_row_handler=leave_out
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=names, column_types=dict.fromkeys(as_text, pa.string()), strings_can_be_null=False
            ),
        )
    return Rows(table=table, malformed=np.array(malformed, dtype=np.int64), header_rows=1)
