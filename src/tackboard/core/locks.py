"""Lock files: one process at a time, across containers and, if the file system allows it, across hosts.

The lock is a kernel lock (`lockf`) on an open file. It belongs to one process, ends with that process in every case,
and is visible to everybody who opens the same file, in any PID namespace. Child processes do not inherit it, because
they may outlive a killed parent.

Some file systems have no locks, and some keep them on one host (NFS mounted with `nolock`). So the file also names the
host of its holder, and the holder touches the file every HEARTBEAT_S. If the file system has no locks, or another host
left the file, the lock counts as held until the file has not been touched for LEASE_S. Decided: this silence is the
difference between the file's time and this host's clock, so the clocks of hosts that share a folder must agree within a
few seconds.
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
"""Seconds of silence after which a lock without a kernel lock is free."""
HEARTBEAT_S = 10.0
"""How often a holder touches its lock file."""
POLL_S = 0.05
"""How often `wait_for_lock` tries again."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What a file system without locks answers."""

_held: dict[str, object] = {}
"""Lock files of this process. The kernel grants a process its own locks again and drops them when a copy is closed."""


@contextlib.contextmanager
def try_lock(path: Path, *, create: bool = True) -> Iterator[bool]:
    """Whether this process, and nobody else, holds the lock file `path` during the block. Does not wait.

    The file is removed at the end. Without `create`, a file that does not exist cannot be locked.
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
            # Removed while it is held: nobody can lock the file between the two.
            if _is_at(descriptor, path):
                path.unlink()
            os.close(descriptor)
    finally:
        del _held[key]


@contextlib.contextmanager
def wait_for_lock(path: Path, timeout_s: float = float("inf")) -> Iterator[bool]:
    """`try_lock`, tried again until the lock is free or `timeout_s` have passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        with try_lock(path) as held:
            if held or time.monotonic() >= deadline:
                yield held
                return
        time.sleep(POLL_S)


def silence_to_wait_for(path: Path) -> float:
    """Seconds until a lock file of another host counts as abandoned if that host stays silent; 0 for any other file."""
    try:
        if path.read_bytes() == _host():
            return 0.0
        return max(0.0, LEASE_S - (time.time() - path.stat().st_mtime))
    except FileNotFoundError:
        return 0.0


def _take(path: Path, *, create: bool) -> int | None:
    """A descriptor that holds the lock file, or None if another process holds it."""
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
                continue  # Its holder has removed it: try again.
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
    """Whether the open file is ours now; None if `path` is another file by now, so the caller must try again."""
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
    """Removes a silent file on a file system without locks. Of several processes only one can rename it."""
    aside = path.with_name(f"{path.name}-{os.urandom(6).hex()}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    try:
        if not _is_at(descriptor, aside):
            os.link(aside, path)  # Another process was faster, and this is its new file: put it back.
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
    """Identifies the running kernel: the same in all its containers, different on other hosts and after a restart."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        identity = platform.node().encode()
    return hashlib.sha256(identity).hexdigest()[:16].encode()
