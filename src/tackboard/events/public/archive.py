"""Files that a user downloaded: zip archives, folders and single files in, the bytes of a named file out.

Decided: a publisher's file is asked for by its own name, wherever in the archive or folder it lies, so that it makes no
difference whether somebody unpacked the download first. `.gz` and `.zst` are decompressed on the way.
"""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tackboard.core.errors import DataError, UsageError

_PACKED = (".gz", ".zst")


class Download:
    """What one or more paths hold, as files by name."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise UsageError("no file was given", fix="name what you downloaded: an archive, a folder or files")
        self.paths = tuple(paths)
        self._places: list[tuple[str, Path, str | None]] = []
        for path in self.paths:
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
                self._places += [(file.relative_to(path.parent).as_posix(), file, None) for file in files]
            elif not path.exists():
                raise UsageError(f"{path} does not exist", fix="name what you downloaded")
            elif _is_archive(path):
                self._places += [(name, path, name) for name in _members(path)]
            else:
                self._places.append((path.name, path, None))

    @property
    def title(self) -> str:
        """What was given, for a message."""
        return ", ".join(str(path) for path in self.paths)

    def names(self) -> list[str]:
        """Names of all files, with their folders, compression endings removed."""
        return [_unpacked(name) for name, _, _ in self._places]

    def find(self, name: str) -> Path | None:
        """The path of a file that lies on disk as it is, outside an archive; None where there is none."""
        return next((path for full, path, member in self._places if member is None and _is(full, name)), None)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name: `u.data`, or `bts/all/all.csv` with its folders."""
        return any(_is(_unpacked(full), name) for full, _, _ in self._places)

    def read(self, name: str) -> bytes:
        """The content of a file. A name that is not there, or is there twice, and torn files raise DataError."""
        found = [place for place in self._places if _is(_unpacked(place[0]), name)]
        if len(found) != 1:
            have = ", ".join(self.names()[:8]) or "nothing"
            problem = "holds no file" if not found else f"holds {len(found)} files"
            raise DataError(f"{self.title} {problem} {name}", allowed=f"it holds: {have}")
        full, path, member = found[0]
        try:
            return _decompressed(full, _bytes_of(path, member))
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, pa.ArrowException, RuntimeError) as error:
            where = path if member is None else f"{member} in {path}"
            raise DataError(f"{where} cannot be read: {str(error)[:200]}", fix="download it again") from None

    def text(self, name: str, encoding: str = "utf-8") -> str:
        """The content of a file of text. Bytes that are not of `encoding` raise DataError."""
        try:
            return self.read(name).decode(encoding)
        except UnicodeDecodeError as error:
            line = self.read(name)[: error.start].count(b"\n") + 1
            raise DataError(f"{name} in {self.title} is not {encoding} text in line {line}") from None


def _is_archive(path: Path) -> bool:
    """Whether a file is, or was meant to be, a zip archive: one that ends early lacks the list by which it is known."""
    with path.open("rb") as file:
        begins = file.read(4) == b"PK\x03\x04"
    return begins or path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)


def _members(path: Path) -> list[str]:
    """Names of the files in an archive; DataError where it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name for name in archive.namelist() if not name.endswith("/")]
    except zipfile.BadZipFile:
        raise DataError(
            f"{path} is damaged: no zip archive, or one that ends early ({path.stat().st_size:,} bytes)",
            fix="download it again",
        ) from None


def _is(full: str, name: str) -> bool:
    return full == name or full.endswith("/" + name)


def _unpacked(name: str) -> str:
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return name


def _bytes_of(path: Path, member: str | None) -> bytes:
    if member is None:
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(member)


def _decompressed(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(data)
    if name.endswith(".zst"):
        stream: Any = pa.CompressedInputStream(pa.BufferReader(data), "zstd")
        return io.BytesIO(stream.read()).getvalue()
    return data
