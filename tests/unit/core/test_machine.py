"""What the machine has: the smaller of affinity and quota decides, and set variables are respected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tackboard.core import machine
from tackboard.core.machine import (
    THREAD_VARIABLES,
    available_memory_bytes,
    freed_memory_bytes,
    keep_freed_memory,
    peak_rss_bytes,
    set_thread_environment,
    total_memory_bytes,
    usable_cores,
)


@pytest.mark.parametrize(
    ("cpu_max", "affinity", "expected"),
    [
        ("max 100000", 8, 8),
        ("", 8, 8),
        ("200000 100000", 8, 2),
        ("350000 100000", 8, 3),
        ("50000 100000", 8, 1),
        ("800000 100000", 2, 2),
    ],
)
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, cpu_max: str, affinity: int, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(machine, "_read_first_line", lambda _path: cpu_max)
    assert usable_cores() == expected


def test_thread_variables_are_set_unless_they_are_set_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*THREAD_VARIABLES, "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that the change is undone after the test
        monkeypatch.delenv(name)
    assert set_thread_environment(3) == 3
    assert {os.environ[name] for name in THREAD_VARIABLES} == {"3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert set_thread_environment(2) == 5
    assert os.environ["MKL_NUM_THREADS"] == "3"


def test_memory_is_the_smaller_of_machine_and_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read_first_line", lambda _path: "max")
    whole = total_memory_bytes()
    assert whole > peak_rss_bytes() > 1_000_000
    monkeypatch.setattr(machine, "_read_first_line", lambda _path: "123456")
    assert total_memory_bytes() == 123456


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_is_what_the_kernel_says() -> None:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert peak_rss_bytes() == pytest.approx(int(lines["VmHWM"].split()[0]) * 1024, rel=0.05)


def test_a_missing_file_reads_as_nothing(tmp_path: Path) -> None:
    assert machine._read_first_line(tmp_path / "absent") == ""


def test_without_glibc_freed_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _name: object())
    assert not keep_freed_memory()
    assert freed_memory_bytes() == 0


@pytest.mark.parametrize(("refused", "expected"), [(None, {-3, -1}), (-3, {-3, -4, -1})])
def test_an_old_glibc_takes_everything_from_the_heap(
    refused: int | None, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Library:
        @staticmethod
        def mallopt(option: int, _value: int) -> int:
            asked.append(option)
            return int(option != refused)

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _name: Library)
    assert keep_freed_memory()
    assert set(asked) == expected


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    code = (
        "import resource\n"
        "from tackboard.core.machine import keep_freed_memory\n"
        "kept = keep_freed_memory()\n"
        "for _ in range(4):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    block = bytearray(64 << 20)\n"
        "    for place in range(0, len(block), 4096):\n"
        "        block[place] = 1\n"
        "    del block\n"
        "print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    kept, faults = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    if kept == "False":
        pytest.skip("this C library has no such setting")
    assert int(faults) < 1000  # 64 MiB have 16,384 pages.


@pytest.mark.skipif(freed_memory_bytes() == 0, reason="this C library does not say what it keeps")
def test_freed_memory_that_is_kept_is_told() -> None:
    code = (
        "from tackboard.core.machine import freed_memory_bytes, keep_freed_memory\n"
        "keep_freed_memory()\n"
        "block = bytearray(64 << 20)\n"
        "before = freed_memory_bytes()\n"
        "del block\n"
        "print(freed_memory_bytes() - before)\n"
    )
    freed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert int(freed) == pytest.approx(64 << 20, rel=0.02)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"meminfo": "MemTotal: 99 kB\nMemAvailable:   20 kB\n"}, 20 * 1024),
        ({"meminfo": "MemAvailable: 20 kB", "memory.max": "max", "memory.current": "5"}, 20 * 1024),
        ({"meminfo": "MemAvailable: 20 kB", "memory.max": "9000", "memory.current": "5000"}, 4000),
        (
            {
                "meminfo": "MemAvailable: 20 kB",
                "memory.max": "9000",
                "memory.current": "5000",
                "memory.stat": "anon 7\ninactive_file 1000\n",
            },
            5000,
        ),
        ({"meminfo": "MemAvailable: 20 kB", "memory.max": "9000", "memory.current": "9500"}, 0),
    ],
)
def test_available_memory(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int) -> None:
    monkeypatch.setattr(machine, "_read_text", lambda path: files.get(path.name, ""))
    assert available_memory_bytes() == expected


def test_available_memory_of_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read_text", lambda _path: "")
    assert available_memory_bytes() == total_memory_bytes()
