"""How benches compare: contenders take turns, and a run that shared its machine with others is not judged.

In: contenders as functions, and aims that were measured. Out: what each contender returned in each round; how much of
the machine other processes used meanwhile; and verdicts. Decided: aims that compare speeds use CPU time, because time
on the clock counts what other processes do. CPU time is not beyond their influence either (caches, clock rates, the
second thread of a core), so contenders take turns and no aim is called met, or missed, on a machine that was busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from tackboard.core.processes import TICK_SECONDS, own_cpu_seconds

T = TypeVar("T")
STAT = Path("/proc/stat")
MOST_BY_OTHERS = 0.05
"""Share of the machine's CPU time above which other processes disturb a measurement."""
_VERDICTS = {True: "met", False: "NOT met", None: "not judged"}


def take_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Calls every contender once a round; every other round goes backwards. Returns the answers of each by name."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            found[name].append(contenders[name]())
    return found


class Neighbours:
    """What other processes did on this machine while a `with` block ran: all but this process and its descendants."""

    def __init__(self) -> None:
        self.share: float | None = None
        """Their part of the CPU time of all cores, 0 to 1, once the block has ended; None where nobody can tell."""

    def __enter__(self) -> Self:
        self._started_s, self._busy_s, self._own_s = time.perf_counter(), machine_busy_seconds(), own_cpu_seconds()
        return self

    def __exit__(self, *_error: object) -> None:
        busy_s, own_s = machine_busy_seconds(), own_cpu_seconds()
        if busy_s is not None and self._busy_s is not None:
            others_s = busy_s - self._busy_s - (own_s - self._own_s)
            wall_s = time.perf_counter() - self._started_s
            self.share = min(1.0, max(0.0, others_s / (wall_s * (os.cpu_count() or 1))))

    def report(self) -> dict[str, Any]:
        """For a bench's result: `others_share`, and whether the run was `disturbed`, which it also is if unknown."""
        share = self.share
        return {
            "others_share": None if share is None else round(share, 3),
            "disturbed": share is None or share > MOST_BY_OTHERS,
        }


def machine_busy_seconds() -> float | None:
    """CPU time of all processes since the machine started, and what its host took away; None without /proc/stat."""
    try:
        user, nice, system, _idle, _waiting, *rest = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) * TICK_SECONDS


def judged(aims: Iterable[Mapping[str, Any]], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The aims of a run; in a disturbed one nobody knows whether they are met, so `met` is None."""
    return [{**aim, "met": None if report["disturbed"] else aim["met"]} for aim in aims]


def aim_lines(result: Mapping[str, Any]) -> list[str]:
    """A bench's result for people: whether it was disturbed, and a line for each of its aims, if it has any."""
    return [*disturbance_lines(result), *(aim_line(aim) for aim in result.get("aims", ()))]


def aim_line(aim: Mapping[str, Any]) -> str:
    """One aim with its verdict and its value."""
    return f"{_VERDICTS[aim['met']]}: {aim['value']:g}, {aim['aim']}"


def disturbance_lines(result: Mapping[str, Any]) -> list[str]:
    """One line where a run was disturbed, else none."""
    if not result["disturbed"]:
        return []
    share = result["others_share"]
    if share is None:
        return [f"disturbed, or not: nobody can tell what else this machine did, because {STAT} is missing"]
    return [f"disturbed: other processes used {share:.0%} of this machine's CPU time; run it again on a quiet machine"]
