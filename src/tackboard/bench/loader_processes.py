"""CPU time and memory of a process and all processes under it, from /proc, without a library.

CPU time counts what ended children have used, too, as far as their parents have waited for them. Memory is the
proportional set size: a page that several processes share is counted once in all, and pages of mapped files count.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROC = Path("/proc")
TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
SAMPLE_SECONDS = 0.05


def tree_of(pid: int) -> list[int]:
    """The process and its descendants, as far as they are alive."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, ahead = [], [pid]
    while ahead:
        found.append(ahead.pop())
        ahead += children.get(found[-1], [])
    return found


def cpu_seconds() -> float:
    """User and system time of this process, of its threads, and of every process under it."""
    own = time.process_time() + sum(os.times()[2:4])
    others = 0
    for pid in tree_of(os.getpid())[1:]:
        if fields := _stat(pid):
            others += sum(map(int, fields[11:15]))
    return own + others * TICK_SECONDS


def resident_bytes(pid: int) -> int:
    """Memory of one process: its share of every page, in bytes; 0 where it has ended."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def run_watched(command: Sequence[str], env: Mapping[str, str], *, watch: bool) -> tuple[int, str, str, int]:
    """Runs a command: (exit code, output, errors, peak bytes of its process tree; 0 unless `watch`)."""
    # Files, not pipes: nothing has to read them while the process runs.
    import tempfile

    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        peak = 0
        try:
            while watch and process.poll() is None:
                peak = max(peak, sum(map(resident_bytes, tree_of(process.pid))))
                time.sleep(SAMPLE_SECONDS)
            code = process.wait()
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read(), peak


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty where the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
