"""Sets the bytes of a database file that belong to nothing to zero, because SQLite leaves deleted text there.

secure_delete overwrites what is deleted, and pages that become free. It does not overwrite what stays of a row in the
middle of a page when the row is moved to another page as the tree is balanced: in a test of 960 deletions, 97 times
the file still held text of somebody who was deleted. Those bytes lie between a page's list of cells and its first
cell. SQLite never reads them, so zeros may be written over them whatever happens on the way: a kill in the middle
leaves a file that is as good as before.

Decided: the caller holds the write lock and the write-ahead log is empty, so that the file is all there is. Afterwards
it changes something in the database, which makes every other connection drop the pages that it remembers.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tackboard.core.errors import StorageError

PAGES_PER_READ = 2048
MOST_PAGES = 1 << 25
"""With this many pages (128 GiB), the first bytes of an overflow page may look like the type of a tree page."""
_FIRST_HEADER = 100
_INTERIOR, _LEAF = (2, 5), (10, 13)
_descriptors: dict[tuple[int, int], int] = {}
"""Open files by device and inode. They are never closed: by POSIX rules, closing one would let go of every lock that
this process holds on the file, SQLite's too."""


def zero_unallocated(path: Path, page_bytes: int) -> int:
    """Sets the bytes of a database file that no row uses to zero; returns the number of changed pages.

    A file of 128 GiB or more raises StorageError.
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
    """The first and last place of a page's bytes that belong to nothing; (0, 0) for a page outside of a tree."""
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
