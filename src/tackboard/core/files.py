"""Files that are either old or new, never half.

Everything durable goes temp file → flush → fsync → rename → fsync of the folder. A kill at any instant leaves the old
content or the new one. `observer` is called with the name of each point between those moves; the chaos tests set it
to kill the process there.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tackboard.core.errors import CorruptFileError, StorageError, UsageError

observer: Callable[[str], None] | None = None
"""Called at each named point of a durable write; None outside the chaos tests."""

CHUNK_BYTES = 1 << 20

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
    errno.ELOOP: "that path is a symlink to itself; choose another path",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
}
"""Errors of the machine and of paths, not of ours, and what to do about each."""


def reach(point: str) -> None:
    """Tells the observer, if there is one, that the writer stands at `point`."""
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
    """Puts `path` into an error of the system that does not say where: neither writes nor libraries do."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`; readers see the old bytes or all of the new ones."""
    name = path.name
    temporary = path.with_name(f".{name}.tmp-{os.getpid()}")
    try:
        reach(f"{name}:before-write")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            reach(f"{name}:after-write")
            os.fsync(file.fileno())
        reach(f"{name}:after-fsync")
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_path(error, path)
        raise
    reach(f"{name}:after-rename")
    fsync_path(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """`write_bytes_atomic` for text, as UTF-8."""
    write_bytes_atomic(path, text.encode())


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_bytes_atomic` for JSON, indented, with a final newline."""
    write_text_atomic(path, json.dumps(value, indent=2) + "\n")


def append_line(path: Path, line: str) -> None:
    """Adds a line to a text file; a write that fails names the path."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        name_path(error, path)
        raise


def replace_symlink(link: Path, target: str) -> None:
    """Points `link` at `target` (a name in the same folder) in one rename."""
    temporary = link.with_name(f".{link.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
        reach(f"{link.name}:before-rename")
        os.replace(temporary, link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    reach(f"{link.name}:after-rename")
    fsync_path(link.parent)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes `final` when the block ends, or vanishes when it raises.

    The caller fsyncs the files it writes (`write_manifest` does so for all of them). An existing `final` is an error.
    """
    temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    if final.exists():
        raise UsageError(f"{final} exists already", fix="choose another name, or remove it first")
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final.parent, final.name)
    temporary.mkdir()
    try:
        yield temporary
        fsync_path(temporary)
        reach(f"{final.name}:before-rename")
        os.rename(temporary, final)
        reach(f"{final.name}:after-rename")
        fsync_path(final.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        name_path(error, final)
        raise


def remove_directory(path: Path) -> None:
    """Deletes a folder as if at once: it gets a temporary name first, so a kill never leaves half of it as `path`."""
    doomed = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    reach(f"{path.name}:before-removal")
    os.rename(path, doomed)
    reach(f"{path.name}:during-removal")
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path, name: str | None = None) -> int:
    """Deletes what killed writers of `name`, or of anything, left in `folder`; returns how many.

    That is `.NAME.tmp-PID` of processes that are gone.
    """
    removed = 0
    for path in folder.glob(f".{'*' if name is None else glob.escape(name)}.tmp-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed += 1
    return removed


def storage_error(error: OSError, doing: str = "", **advice: str) -> StorageError | None:
    """What a user should read about `error`, or None where it is no fault of the machine or of a path.

    `doing` says what could not be done; `advice` may hold `allowed` and `fix`.
    """
    if error.errno not in STORAGE_FAULTS:
        return None
    place = f": {error.filename}" if error.filename else ""
    reason = f"{os.strerror(error.errno)}{place}"
    return StorageError(f"{doing}: {reason}" if doing else reason, **{"fix": STORAGE_FAULTS[error.errno], **advice})


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Around the making of a file that a user asked for by `option`: an error of the system there is about the path."""
    try:
        yield
    except OSError as error:
        doing = f"{option} {path}"
        raise storage_error(error, doing) or UsageError(
            f"{doing}: {error.strerror or error}", fix="choose another path"
        ) from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Parses a JSON file; unreadable or malformed raises CorruptFileError naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} cannot be read as JSON: {error}") from None
