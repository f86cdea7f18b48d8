"""Sets the unused bytes of a database file to zero, because SQLite leaves deleted text there.

SQLite's secure_delete overwrites deleted rows, and pages that become free. But when SQLite balances a tree, it moves
rows to other pages and leaves copies in the old pages: after 97 of 960 deletions in a test, the file still held text of
the deleted user. These copies lie between a page's list of cells and its first cell. SQLite never reads them, so a kill
while zeros are written does no harm to the file.

Decided: the caller must hold the write lock, and the write-ahead log must be empty, so that the file alone holds all
data. Afterwards the caller must change a value in the database, so that other connections drop their cached pages.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tackboard.core.errors import StorageError

PAGES_PER_READ = 2048
MOST_PAGES = 1 << 25
"""Files of this many pages or more (128 GiB with 4 KiB pages) are refused: overflow pages may look like tree pages."""
_FIRST_HEADER = 100
_INTERIOR, _LEAF = (2, 5), (10, 13)
_descriptors: dict[tuple[int, int], int] = {}
"""Open files by device and inode. They are never closed: by POSIX rules, closing a descriptor would release every lock
of this process on the file, including SQLite's locks."""


def zero_unallocated(path: Path, page_bytes: int) -> int:
    """Writes zeros over the bytes of a database file that no row uses; returns the number of changed pages.

    A file of `MOST_PAGES` pages or more raises StorageError.
    """
    descriptor = _descriptor_of(path)
    size = os.fstat(descriptor).st_size
    if size // page_bytes >= MOST_PAGES:
        raise StorageError(
            f"{path} has {size // page_bytes:,} pages, too many to overwrite the deleted events",
            fix=f"no reader sees the deleted events any more; remove their traces with: sqlite3 {path} VACUUM",
        )
    num_changed = 0
    for start in range(0, size, PAGES_PER_READ * page_bytes):
        data = os.pread(descriptor, PAGES_PER_READ * page_bytes, start)
        pages = np.frombuffer(data, np.uint8, len(data) // page_bytes * page_bytes).reshape(-1, page_bytes)
        for number in range(len(pages)):
            low, high = _gap(data, number * page_bytes, _FIRST_HEADER if start + number == 0 else 0, page_bytes)
            if low < high and pages[number, low:high].any():
                os.pwrite(descriptor, bytes(high - low), start + number * page_bytes + low)
                num_changed += 1
    if num_changed:
        os.fsync(descriptor)
    return num_changed


def _gap(data: bytes, page: int, header: int, page_bytes: int) -> tuple[int, int]:
    """Returns the bounds of a page's unused bytes, the end excluded; (0, 0) for a page that is not part of a tree."""
    kind = data[page + header]
    if kind not in _INTERIOR and kind not in _LEAF:
        return 0, 0
    num_cells = int.from_bytes(data[page + header + 3 : page + header + 5], "big")
    content = int.from_bytes(data[page + header + 5 : page + header + 7], "big") or 65_536
    low = header + (12 if kind in _INTERIOR else 8) + 2 * num_cells
    return (low, content) if low <= content <= page_bytes else (0, 0)


def _descriptor_of(path: Path) -> int:
    found = path.stat()
    key = (found.st_dev, found.st_ino)
    if key not in _descriptors:
        _descriptors[key] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return _descriptors[key]
