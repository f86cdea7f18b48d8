"""Makes the comparisons in benches fair: contenders take turns, and a run on a busy machine is not judged.

A contender is one of the things that a bench compares. `take_turns` gets a function for each contender, and calls these
functions in rounds. `Neighbours` measures the share of the machine's CPU time that other processes use in a `with`
block. `judged` withdraws the verdicts of a disturbed run. Decided: aims that compare speeds use CPU time, because
wall-clock time includes the work of other processes. But other processes also influence CPU time, through caches, clock
rates and the second hardware thread of a core. So contenders take turns, and on a busy machine no aim counts as met or
missed.
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
"""If other processes use more than this share of the machine's CPU time, the measurement counts as disturbed."""
_VERDICTS = {True: "met", False: "NOT met", None: "not judged"}


def take_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Calls every contender once per round and returns the answers by name. Every other round runs in reverse order."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            found[name].append(contenders[name]())
    return found


class Neighbours:
    """Measures the CPU time that other processes use during a `with` block.

    Other processes are all processes except the current process and its descendants.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        """After the block: the share of all cores' CPU time that other processes used, 0 to 1; None if unknown."""

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
        """Returns `others_share` and `disturbed` for the result of a bench. An unknown share counts as disturbed."""
        share = self.share
        return {
            "others_share": None if share is None else round(share, 3),
            "disturbed": share is None or share > MOST_BY_OTHERS,
        }


def machine_busy_seconds() -> float | None:
    """Returns the CPU seconds of all processes since the machine started, or None if /proc/stat cannot be read.

    Steal time is included: the time that the host of a virtual machine gave to other machines.
    """
    try:
        user, nice, system, _idle, _waiting, *rest = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) * TICK_SECONDS


def judged(aims: Iterable[Mapping[str, Any]], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the aims. In a disturbed run, `met` becomes None, because it is unknown whether an aim is met."""
    return [{**aim, "met": None if report["disturbed"] else aim["met"]} for aim in aims]


def aim_lines(result: Mapping[str, Any]) -> list[str]:
    """Returns a line for each aim, with its verdict and value. If the run was disturbed, the first line says so."""
    aims = [f"{_VERDICTS[aim['met']]}: {aim['value']:g}, {aim['aim']}" for aim in result.get("aims", ())]
    return [*disturbance_lines(result), *aims]


def disturbance_lines(result: Mapping[str, Any]) -> list[str]:
    """Returns one line if a run was disturbed, otherwise no line."""
    if not result["disturbed"]:
        return []
    share = result["others_share"]
    if share is None:
        return [f"perhaps disturbed: {STAT} is missing, so the work of other processes is unknown"]
    return [f"disturbed: other processes used {share:.0%} of this machine's CPU time; run it again on a quiet machine"]
