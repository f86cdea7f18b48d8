"""Turns, neighbours and verdicts, with a neighbour that really is busy."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tackboard.bench import turns
from tackboard.bench.turns import Neighbours, aim_lines, judged, take_turns

QUIET = {"others_share": 0.01, "disturbed": False}
WORK = "x = 0\nfor i in range({}): x += i"


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """A process per core that is not ours, each busy until the end.

    They are children of a process that is gone, so nobody finds them below this one.
    """
    code = "import os, time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    start = f"subprocess.Popen([sys.executable, '-c', {code!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    launch = f"import subprocess, sys\nprint({start}.pid)"
    pids = []
    try:
        for _ in range(os.cpu_count() or 1):
            done = subprocess.run(
                [sys.executable, "-c", launch], capture_output=True, text=True, check=True, timeout=30
            )
            pids.append(int(done.stdout))
        yield
    finally:
        for pid in pids:
            os.kill(pid, 9)


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def contender(name: str) -> int:
        order.append(name)
        return len(order)

    found = take_turns({name: lambda name=name: contender(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert order == list("abccbaabc")
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def cpu_of(num_steps: int) -> float:
    """CPU seconds of a process that works for a while."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-I", "-S", "-c", WORK.format(num_steps)], check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_busy_neighbour_flips_no_verdict() -> None:
    """The rival needs less than four times our CPU time, so an aim of ten is missed, and nobody calls it met."""
    with busy_neighbours(), Neighbours() as neighbours:
        found = take_turns({"ours": lambda: cpu_of(400_000), "rival": lambda: cpu_of(1_600_000)}, 2)
    assert min(found["rival"]) / min(found["ours"]) < 10
    report = neighbours.report()
    assert report["disturbed"] and report["others_share"] > 0.2, report
    for met in (True, False):
        lines = aim_lines({"aims": judged([{"aim": "fast", "value": 26.5, "met": met}], report), **report})
        assert len(lines) == 2 and lines[0].startswith("disturbed: other processes used")
        assert lines[1] == "not judged: 26.5, fast"


def test_our_own_work_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel counts for this process and its children is not taken for a neighbour's."""
    busy = turns.own_cpu_seconds
    monkeypatch.setattr(turns, "machine_busy_seconds", lambda: busy() + 100.0)
    with Neighbours() as neighbours:
        cpu_of(3_000_000)
    assert not neighbours.report()["disturbed"], neighbours.share


def test_a_machine_that_cannot_tell_judges_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(turns, "STAT", tmp_path / "absent")
    with Neighbours() as neighbours:
        pass
    report = neighbours.report()
    assert report == {"others_share": None, "disturbed": True}
    assert "perhaps disturbed" in aim_lines({"aims": [], **report})[0]


def test_a_quiet_run_is_judged() -> None:
    found = judged([{"aim": "a", "value": 2.0, "met": True}, {"aim": "b", "value": 1.0, "met": False}], QUIET)
    assert aim_lines({"aims": found, **QUIET}) == ["met: 2, a", "NOT met: 1, b"]
