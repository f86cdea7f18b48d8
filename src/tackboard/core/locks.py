"""Makes lock files. Only one process at a time can hold a lock file, across containers and, with limits, across hosts.

The lock is a kernel lock (`lockf`) on an open file. It belongs to one process, always ends with this process, and is
visible to every process that opens the same file, in any PID namespace. Child processes do not inherit the lock.
This is intended: a child that outlives its killed parent must not keep the lock.

Some file systems have no locks, and some have locks within one host only (NFS mounted with `nolock`). Therefore the
file also names the host of its holder, and the holder touches the file every HEARTBEAT_S. If the file system has no
locks, or the file names another host, the lock becomes free LEASE_S after the last touch. Decided: a host compares the
file's modification time with its own clock, so the clocks of hosts that share a folder must agree within a few seconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LEASE_S = 60.0
"""A lock file that has not been touched for this number of seconds is free if no kernel lock protects it."""
HEARTBEAT_S = 10.0
"""Seconds between two touches of a lock file by its holder."""
POLL_S = 0.05
"""Seconds between two attempts of `wait_for_lock`."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""The errors of a file system without locks."""

_held: dict[str, object] = {}
"""Lock files that this process holds. Without this record, the kernel would grant the process the same lock a second
time. Closing either of the two descriptors would then drop the lock."""


@contextlib.contextmanager
def try_lock(path: Path, *, create: bool = True) -> Iterator[bool]:
    """Tries to take the lock file `path` for the time of the block, without waiting. Yields whether this call took it.

    If this call took the lock, it removes the file at the end. Yields False if a process (this one included) already
    holds the lock. If `create` is False, also yields False if the file is missing.
    """
    key, claim = str(path.parent.resolve() / path.name), object()
    if _held.setdefault(key, claim) is not claim:
        yield False
        return
    try:
        descriptor = _take(path, create=create)
        if descriptor is None:
            yield False
            return
        try:
            with _heartbeat(descriptor):
                yield True
        finally:
            # The file is removed while this process still holds the lock, so no other process can lock it before that.
            if _is_at(descriptor, path):
                path.unlink()
            os.close(descriptor)
    finally:
        del _held[key]


@contextlib.contextmanager
def wait_for_lock(path: Path, timeout_s: float = float("inf")) -> Iterator[bool]:
    """Repeats `try_lock` for at most `timeout_s` seconds; yields whether this process holds the lock."""
    deadline = time.monotonic() + timeout_s
    while True:
        with try_lock(path) as held:
            if held or time.monotonic() >= deadline:
                yield held
                return
        time.sleep(POLL_S)


def silence_to_wait_for(path: Path) -> float:
    """Returns the seconds after which another host's lock is free if it stays untouched; 0 if there is no such lock."""
    try:
        if path.read_bytes() == _host():
            return 0.0
        return max(0.0, LEASE_S - (time.time() - path.stat().st_mtime))
    except FileNotFoundError:
        return 0.0


def _take(path: Path, *, create: bool) -> int | None:
    """Takes the lock and returns its descriptor; None if it is taken, or if `create` is False and no file exists."""
    while True:
        try:
            # Only one process can create the file, even on a file system without locks.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
            is_new = create
        except FileNotFoundError:
            if create:
                raise
            return None
        except FileExistsError:
            try:
                descriptor, is_new = os.open(path, os.O_RDWR | os.O_CLOEXEC), False
            except FileNotFoundError:
                continue  # The holder has just removed the file, so try again.
        try:
            answer = _claim(descriptor, path, is_new=is_new)
            if answer:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _host(), 0)
                return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)
            raise
        os.close(descriptor)
        if answer is False:
            return None


def _claim(descriptor: int, path: Path, *, is_new: bool) -> bool | None:
    """Returns whether this process holds the lock now; None if `path` was replaced, so that the caller must retry."""
    has_locks = True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        has_locks = False
    if not _is_at(descriptor, path):
        return None
    if is_new or (has_locks and os.pread(descriptor, 64, 0) == _host()):
        return True
    if time.time() - os.fstat(descriptor).st_mtime < LEASE_S:
        return False
    if has_locks:
        return True
    return _remove_silent(descriptor, path)


def _remove_silent(descriptor: int, path: Path) -> bool | None:
    """Removes an abandoned lock file on a file system without locks; only one process can succeed in renaming it.

    Returns None if the caller must retry, False if another process holds the lock.
    """
    aside = path.with_name(f"{path.name}-{os.urandom(6).hex()}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    try:
        if not _is_at(descriptor, aside):
            os.link(aside, path)  # Another process was faster, and this is its new lock file. Put the file back.
            return False
    finally:
        aside.unlink()
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _heartbeat(descriptor: int) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            # A disk that fails for a moment must not end the heartbeat.
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="tackboard-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _host() -> bytes:
    """Returns a hash of this host's boot id, which its containers share; without a boot id, a hash of the host name."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        identity = platform.node().encode()
    return hashlib.sha256(identity).hexdigest()[:16].encode()
