"""Writes files and folders atomically: a reader sees the complete old content or the complete new content.

The steps of a durable write are: temporary file → flush → fsync → rename → fsync of the folder. A kill at any instant
leaves the old content or the new content. `observer` is called at named points between these steps; the chaos tests use
it to kill the process there.

Unfinished work has a unique temporary name:

    .NAME.tmp-TOKEN         a file, a link, or a folder
    .NAME.tmp-TOKEN.lock    lock file, held while that folder is being written (see locks.py)
    .NAME.gone-TOKEN        a folder that is being deleted

Decided: a cleaner (`remove_leftovers`) never removes a folder while a writer holds its lock, even if the writer runs in
another container. A temporary file or link needs no lock: if a cleaner removes the file or link, the writer writes it
again, because the writer still has the content in memory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tackboard.core.errors import CorruptFileError, StorageError, UsageError
from tackboard.core.locks import try_lock

observer: Callable[[str], None] | None = None
"""Called at each named point of a durable write; None outside the chaos tests."""

CHUNK_BYTES = 1 << 20
NUM_TRIES = 10
"""Number of attempts to write a small file, in case a cleaner removes its temporary file."""
LOCK_SUFFIX = ".lock"
UNLOCKED_DAYS = 1
"""Days after which a temporary folder without a lock file is removed. Only older versions made such folders."""

STORAGE_FAULTS = {
    errno.ENOSPC: "make room on that disk, then run the command again",
    errno.EDQUOT: "make room within your quota, then run the command again",
    errno.EFBIG: "raise the largest file size (ulimit -f), then run the command again",
    errno.EIO: "the device failed; look at the machine's log before running the command again",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.EACCES: "check the owner and the permissions of that path",
    errno.EPERM: "check the owner and the permissions of that path",
    errno.ENOTDIR: "a part of that path is a file; choose another path",
    errno.EISDIR: "that path is a folder; name a file",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "that path leads through a loop of symlinks; choose another path",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
}
"""The system errors that the machine or a path can cause, by number, each with advice for the user."""


def reach(point: str) -> None:
    """Tells the observer, if there is one, that the writer has reached `point`."""
    if observer is not None:
        observer(point)


def fsync_path(path: Path) -> None:
    """Forces a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def name_path(error: BaseException, path: Path) -> None:
    """Adds `path` to a system error that names no path, for example an error while writing to an open file."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replaces the content of `path` by `data`. Readers see all of the old bytes or all of the new bytes."""
    name = path.name

    def write(temporary: Path) -> None:
        reach(f"{name}:before-write")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            reach(f"{name}:after-write")
            os.fsync(file.fileno())
        reach(f"{name}:after-fsync")

    _replace(path, write)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` make a file or link under a temporary name, then renames it to `path`."""
    for left in reversed(range(NUM_TRIES)):
        temporary = _temporary(path)
        try:
            write(temporary)
            os.replace(temporary, path)
            break
        except FileNotFoundError:
            if not left or not path.parent.is_dir():
                raise
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            name_path(error, path)
            raise
    reach(f"{path.name}:after-rename")
    fsync_path(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.urandom(6).hex()}")


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a text as UTF-8 with `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode())


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes a value as JSON with `write_bytes_atomic`, indented and with a final newline."""
    write_text_atomic(path, json.dumps(value, indent=2) + "\n")


def append_line(path: Path, line: str) -> None:
    """Adds a line to a text file. If the write fails, the error names the path."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        name_path(error, path)
        raise


def replace_symlink(link: Path, target: str) -> None:
    """Points the symbolic link `link` at `target`, a name in the same folder. The change is atomic."""

    def write(temporary: Path) -> None:
        temporary.symlink_to(target)
        reach(f"{link.name}:before-rename")

    _replace(link, write)


@contextlib.contextmanager
def staging_directory(final: Path) -> Iterator[Path]:
    """Makes an empty temporary folder next to `final` for the time of the block. No cleaner removes it earlier."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(final)
    with try_lock(temporary.with_name(temporary.name + LOCK_SUFFIX)):
        try:
            temporary.mkdir()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Makes a temporary folder that becomes `final` when the block ends, or is removed if the block raises.

    The caller must fsync the files it writes (`write_manifest` fsyncs all of them). An existing `final` raises
    UsageError, even if another process made it during the block.
    """
    taken = UsageError(f"{final} exists already", fix="choose another name, or remove it first")
    if final.exists():
        raise taken
    try:
        with staging_directory(final) as temporary:
            remove_leftovers(final.parent, final.name)
            yield temporary
            fsync_path(temporary)
            reach(f"{final.name}:before-rename")
            try:
                os.rename(temporary, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise taken from None
            reach(f"{final.name}:after-rename")
            fsync_path(final.parent)
    except OSError as error:
        name_path(error, final)
        raise


def remove_directory(path: Path) -> None:
    """Renames a folder to a temporary name, then deletes it. So a kill never leaves an incomplete folder at `path`."""
    doomed = path.with_name(f".{path.name}.gone-{os.urandom(6).hex()}")
    reach(f"{path.name}:before-removal")
    os.rename(path, doomed)
    reach(f"{path.name}:during-removal")
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path, name: str | None = None) -> int:
    """Deletes temporary files and folders that killed writers left in `folder`; returns the number of deleted entries.

    With `name`, only leftovers of the file or folder with this name are deleted.
    """
    stem = "*" if name is None else glob.escape(name)
    removed = 0
    for lock in folder.glob(f".{stem}.tmp-*{LOCK_SUFFIX}"):
        with try_lock(lock, create=False) as is_dead:
            if is_dead:
                removed += _remove(lock.with_name(lock.name.removesuffix(LOCK_SUFFIX)))
    for path in [*folder.glob(f".{stem}.tmp-*"), *folder.glob(f".{stem}.gone-*")]:
        if path.name.endswith(LOCK_SUFFIX) or path.with_name(path.name + LOCK_SUFFIX).exists():
            continue
        if _is_folder(path) and ".gone-" not in path.name and not _is_old(path):
            continue
        removed += _remove(path)
    return removed


def _remove(path: Path) -> int:
    """Deletes a file, a link or a folder; returns 1, or 0 if it does not exist."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
        return 1
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return 1


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > UNLOCKED_DAYS * 86_400
    except FileNotFoundError:
        return False


def storage_error(error: OSError, doing: str = "", **advice: str) -> StorageError | None:
    """Returns `error` as a StorageError, or None if neither the machine nor a path caused `error`.

    `doing` says what failed. `advice` may hold the texts `allowed` and `fix` of the new error.
    """
    if error.errno not in STORAGE_FAULTS:
        return None
    place = f": {error.filename}" if error.filename else ""
    reason = f"{os.strerror(error.errno)}{place}"
    return StorageError(f"{doing}: {reason}" if doing else reason, **{"fix": STORAGE_FAULTS[error.errno], **advice})


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Wraps code that writes to `path`, the value of a command's `option`. The message of a system error names both."""
    try:
        yield
    except OSError as error:
        doing = f"{option} {path}"
        raise storage_error(error, doing) or UsageError(
            f"{doing}: {error.strerror or error}", fix="choose another path"
        ) from None


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Parses a JSON file. A missing, unreadable or malformed file raises CorruptFileError with its path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} cannot be read as JSON: {error}") from None
