"""The logs of `tackboard bench daily`: their periods, the recipe with its settings, and the budget of tokens.

The end of a log is divided into periods of equal length, such as days or weeks. Each period begins with a cut. The
models of a period were trained on events before its cut, and are judged on the events of the period.

    ───────────────────── history ─────────────────────┊ period 1 ┊ period 2 ┊ … ┊ period n
    frozen      trained once ──────────────────────────┤ judged   ┊ judged   ┊   ┊ judged
    retrained   trained from random parameters ────────┤ judged ──┤ judged ──┤ …   each on all earlier events
    continued   trained once, then each period goes on ┤ judged ─►┤ judged ─►┤ …   with the newest period's events

The first run of `continued` ends one period before the first cut. So for each period there is a model that was not
trained on the period before. The head of live counts is fitted with this model (live_head.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tackboard.bench.quality.data import BENCHES, find_files, of_dataset
from tackboard.core.errors import DataError, UsageError
from tackboard.core.progress import say
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation.judged_events import Judged
from tackboard.flow.command import run_command

WORLD = "news"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DailyPlan:
    """What is trained and judged on one log."""

    dataset: str
    """Name of a public dataset, or of the synthetic world."""
    recipe: str
    settings: tuple[str, ...]
    """Settings that differ from the recipe."""
    hours: int
    """Length of a period."""
    periods: int
    """Number of periods at the end of the log."""
    tokens: int
    """Number of training tokens that each arm may read, over all periods."""
    tokens_per_step: int
    max_users: int
    """At most this number of users is judged in each period; the users are drawn by their ids."""
    judged: Judged
    """Events that are judged in each period: each user's `first`, or `all`."""

    def cuts(self, last_ms: int) -> list[int]:
        """Returns the instants at which the periods begin, and the end of the last period.

        The last period ends with the last whole UTC day of the log.
        """
        day = 24 * HOUR_MS
        end = (last_ms // day + 1) * day
        return [end - (self.periods - place) * self.hours * HOUR_MS for place in range(self.periods + 1)]


SMALL = (
    *("data.max_length=32", "model.max_history=32", "model.width=64", "model.backbone.num_layers=2"),
    *("model.tables.num_hashes=4", "optimizer.warmup_steps=10"),
)
PLANS = {
    plan.dataset: plan
    for plan in (
        DailyPlan(
            dataset="kakao-brunch",
            recipe="kakao-brunch",
            settings=(*SMALL, "model.tables.num_rows=131072", "data.uniform_negatives=1024"),
            hours=24,
            periods=21,
            tokens=4_200_000,
            tokens_per_step=8192,
            max_users=500,
            judged="first",
        ),
        DailyPlan(
            dataset="deskdrop",
            recipe="deskdrop",
            settings=("optimizer.warmup_steps=10",),
            hours=168,
            periods=12,
            tokens=1_200_000,
            tokens_per_step=4096,
            max_users=2000,
            judged="all",
        ),
        DailyPlan(
            dataset=WORLD,
            recipe="kakao-brunch",
            settings=(*SMALL, "model.tables.num_rows=16384", "data.uniform_negatives=512", "model.dropout=0.1"),
            hours=24,
            periods=7,
            tokens=1_400_000,
            tokens_per_step=4096,
            max_users=1000,
            judged="first",
        ),
    )
}


def find_plan(dataset: str, *, periods: int | None, tokens: int | None, quick: bool) -> DailyPlan:
    """Returns the plan of a log, with other numbers of periods and tokens if they are given."""
    plan = of_dataset(dataset, PLANS)
    if quick:
        plan = dataclasses.replace(plan, periods=3, tokens=min(plan.tokens, 240_000), max_users=200)
    plan = dataclasses.replace(plan, periods=periods or plan.periods, tokens=tokens or plan.tokens)
    least = 8 * plan.periods * plan.tokens_per_step
    if plan.tokens < least:
        raise UsageError(
            f"--tokens {plan.tokens} is too small", allowed=f"allowed: at least {least:,}, a few steps in each period"
        )
    return plan


def find_dataset(dataset: str, folder: Path, data: Path | None) -> Path:
    """Returns the folder of a dataset under `folder`. If there is none, makes the dataset first."""
    path = folder / dataset
    if not path.exists():
        say(f"preparing {dataset}")
        words: tuple[str, ...] = ("data", "synth", "--world", WORLD)
        if dataset != WORLD:
            words = ("data", "import", dataset, *map(str, find_files(BENCHES[dataset].public, data)))
        run_command("data", (*words, "--out", str(folder), "--name", dataset), log=folder / f"{dataset}.log")
    return path


def check_length(plan: DailyPlan, first_ms: int, last_ms: int) -> None:
    """Raises DataError unless the log has at least two periods before the first cut."""
    if plan.cuts(last_ms)[0] - 2 * plan.hours * HOUR_MS <= first_ms:
        raise DataError(
            f"{plan.dataset} is too short for {plan.periods} periods of {plan.hours} hours",
            allowed="allowed: a log with at least two periods before the first cut",
            fix="lower --periods",
        )
