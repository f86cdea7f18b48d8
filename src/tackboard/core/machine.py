"""What this machine has: cores, memory, threads.

Decided: thread counts are set before torch is imported and follow the cores this process may really use (affinity and
cgroup quota), because oversubscription has been seen to slow a table step fifty times.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def usable_cores() -> int:
    """Cores this process may use: the smaller of its affinity mask and its cgroup's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cgroup_quota()
    return max(1, min(cores, quota) if quota else cores)


def set_thread_environment(num_threads: int | None = None) -> int:
    """Sets the thread variables that are not set yet, and returns the number in force. Call before importing torch."""
    chosen = num_threads or usable_cores()
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, str(chosen))
    # Waiting OpenMP threads sleep instead of spinning. On a shared machine a spinning team holds the core that the
    # thread it waits for needs: a training step was measured four times slower for it (docs/log.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdigit() else chosen


def peak_rss_bytes() -> int:
    """The largest resident set this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def total_memory_bytes() -> int:
    """Memory of the machine, or of this process's cgroup where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_first_line(Path("/sys/fs/cgroup/memory.max"))
    return min(total, int(limit)) if limit.isdigit() else total


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def _cgroup_quota() -> int | None:
    quota, _, period = _read_first_line(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, int(quota) // int(period))
    return None


def _read_first_line(path: Path) -> str:
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except OSError:
        return ""
