"""Reports the cores and memory of this machine, sets the number of threads, and lets a process keep freed memory.

Decided: the number of threads is set before torch is imported, to the number of cores that this process may use
(affinity and cgroup quota). With too many threads, an update of an embedding table took fifty times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Options of glibc's `mallopt`. In this order: the number of unused bytes at which the heap shrinks; the smallest size
of an allocation that bypasses the heap; the largest number of allocations that bypass the heap."""
LARGEST_KEPT_BYTES = 1 << 30
"""Smallest size of an allocation that `keep_freed_memory` does not keep when it is freed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def usable_cores() -> int:
    """Counts the cores that this process may use: the smaller of affinity mask and cgroup quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cgroup_quota()
    return max(1, min(cores, quota) if quota else cores)


def set_thread_environment(num_threads: int | None = None) -> int:
    """Sets each of THREAD_VARIABLES that is not set; returns the number of threads. Call it before importing torch."""
    chosen = num_threads or usable_cores()
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, str(chosen))
    # Waiting OpenMP threads sleep instead of spinning. On a shared machine, a spinning thread may occupy the core of
    # the thread that it waits for. This made a training step four times slower (docs/log.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdigit() else chosen


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for its next allocations. Returns whether this is possible.

    Without this setting, glibc returns every large tensor to the kernel when the tensor is freed, and the kernel clears
    the same pages again for the next tensor. In training this can take a third of a step (docs/performance.md). With
    the setting, the process keeps its peak memory until it ends. C libraries other than glibc have no such setting;
    there, nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Some versions of glibc refuse a threshold above 32 MiB. With these versions, no allocation may bypass the heap.
    is_in_heap = mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) == 1 or mallopt(M_MMAP_MAX, 0) == 1
    return bool(is_in_heap and mallopt(M_TRIM_THRESHOLD, 2**31 - 1) == 1)


class _HeapFigures(ctypes.Structure):
    """The result of glibc's `mallinfo2`: ten numbers. Number 8 is the number of free bytes in all heaps."""

    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]


def freed_memory_bytes() -> int:
    """Returns the bytes that this process has freed and that its heap keeps for the next allocations; 0 if unknown."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _HeapFigures
    return int(mallinfo2().field_8)


def peak_rss_bytes() -> int:
    """Returns the largest resident set that this process has had, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # `getrusage` would also count the memory of the parent process, because a fork starts as a copy of its parent.
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def total_memory_bytes() -> int:
    """Returns the memory of the machine, or the limit of this process's cgroup if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_first_line(Path("/sys/fs/cgroup/memory.max"))
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory_bytes() -> int:
    """Returns the bytes that this process can still take without swapping; all memory if this is not reported.

    File pages that the kernel can drop count as available.
    """
    lines = _read_text(Path("/proc/meminfo")).splitlines()
    words = next((line.split() for line in lines if line.startswith("MemAvailable:")), [])
    available = int(words[1]) * 1024 if len(words) > 1 and words[1].isdigit() else total_memory_bytes()
    limit, used = (_read_first_line(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        pages = re.search(r"^inactive_file (\d+)$", _read_text(Path("/sys/fs/cgroup/memory.stat")), re.MULTILINE)
        available = min(available, max(0, int(limit) - int(used) + (int(pages[1]) if pages else 0)))
    return available


def has_nvidia_driver() -> bool:
    """Returns whether an NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def _cgroup_quota() -> int | None:
    quota, _, period = _read_first_line(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, int(quota) // int(period))
    return None


def _read_first_line(path: Path) -> str:
    return _read_text(path).split("\n", 1)[0].strip()


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
