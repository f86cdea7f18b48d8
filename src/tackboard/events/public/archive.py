"""This module finds a downloaded file by its name in zip archives, folders and single files, and returns its bytes.

Decided: a file is found by the publisher's name, wherever it lies in the archive or folder. So a download can be used
packed or unpacked. Files that end in `.gz` or `.zst` are decompressed.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tackboard.core.errors import DataError, UsageError

_PACKED = (".gz", ".zst")


class Download:
    """Finds files by name in one or more paths."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise UsageError("no file was given", fix="name the downloaded archive, folder or files")
        self.paths = tuple(paths)
        self._places: list[tuple[str, Path, str | None]] = []
        for path in self.paths:
            if path.is_dir():
                files = sorted(file for file in path.rglob("*") if file.is_file())
                self._places += [(file.relative_to(path.parent).as_posix(), file, None) for file in files]
            elif not path.exists():
                raise UsageError(f"{path} does not exist", fix="name the downloaded archive, folder or files")
            elif _is_archive(path):
                try:
                    with zipfile.ZipFile(path) as archive:
                        members = [name for name in archive.namelist() if not name.endswith("/")]
                except zipfile.BadZipFile:
                    raise DataError(
                        f"{path} is damaged: it is not a zip archive, or it ends early ({path.stat().st_size:,} bytes)",
                        fix="download it again",
                    ) from None
                self._places += [(name, path, name) for name in members]
            else:
                self._places.append((path.name, path, None))

    @property
    def title(self) -> str:
        """The given paths as text for a message."""
        return ", ".join(str(path) for path in self.paths)

    def names(self) -> list[str]:
        """Returns the names of all files, with their folders and without `.gz` and `.zst`."""
        return [_unpacked(name) for name, _, _ in self._places]

    def find(self, name: str) -> Path | None:
        """Returns the path of a file that is neither compressed nor in an archive, or None if there is no such file."""
        return next((path for full, path, member in self._places if member is None and _is(full, name)), None)

    def has(self, name: str) -> bool:
        """Returns whether a file of this name exists. A name such as `bts/all/all.csv` may include folders."""
        return any(_is(_unpacked(full), name) for full, _, _ in self._places)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file. Raises DataError if it is missing or damaged, or if two files have this name."""
        found = [place for place in self._places if _is(_unpacked(place[0]), name)]
        if len(found) != 1:
            have = ", ".join(self.names()[:8]) or "nothing"
            problem = "holds no file" if not found else f"holds {len(found)} files"
            raise DataError(f"{self.title} {problem} {name}", allowed=f"it holds: {have}")
        full, path, member = found[0]
        try:
            if member is None:
                return _decompressed(full, path.read_bytes())
            with zipfile.ZipFile(path) as archive:
                return _decompressed(full, archive.read(member))
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, pa.ArrowException, RuntimeError) as error:
            where = path if member is None else f"{member} in {path}"
            raise DataError(f"{where} cannot be read: {str(error)[:200]}", fix="download the file again") from None

    def text(self, name: str, encoding: str = "utf-8") -> str:
        """Reads a text file. Bytes that are not text in `encoding` raise DataError."""
        try:
            return self.read(name).decode(encoding)
        except UnicodeDecodeError as error:
            line = self.read(name)[: error.start].count(b"\n") + 1
            raise DataError(f"{name} in {self.title} is not {encoding} text in line {line}") from None


def _is_archive(path: Path) -> bool:
    """Returns whether a file is a zip archive. Unlike `is_zipfile`, it also recognises an incomplete archive."""
    with path.open("rb") as file:
        begins = file.read(4) == b"PK\x03\x04"
    return begins or path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)


def _is(full: str, name: str) -> bool:
    return full == name or full.endswith("/" + name)


def _unpacked(name: str) -> str:
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return name


def _decompressed(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.decompress(data)
    if name.endswith(".zst"):
        return bytes(pa.CompressedInputStream(pa.BufferReader(data), "zstd").read())
    return data
