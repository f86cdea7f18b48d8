"""The plans of `bench daily`: where periods begin, and what a plan refuses."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tackboard.bench.daily.periods import PLANS, check_length, find_dataset, find_plan
from tackboard.core.errors import DataError, UsageError
from tackboard.data.time_split import HOUR_MS, parse_instant, shown_instant
from tackboard.recipes.registry import find_recipe


def test_periods_end_with_the_last_day() -> None:
    plan = dataclasses.replace(PLANS["news"], periods=3, hours=24)
    last = round(datetime(2025, 3, 9, 17, 5, tzinfo=UTC).timestamp() * 1000)
    cuts = plan.cuts(last)
    assert [shown_instant(cut) for cut in cuts] == ["2025-03-07", "2025-03-08", "2025-03-09", "2025-03-10"]
    weekly = dataclasses.replace(plan, hours=168, periods=2).cuts(last)
    assert [shown_instant(cut) for cut in weekly] == ["2025-02-24", "2025-03-03", "2025-03-10"]


def test_a_log_needs_two_periods_before_the_first_cut() -> None:
    plan = dataclasses.replace(PLANS["news"], periods=3, hours=24)
    last = parse_instant("2025-03-09T17:05", "last")
    check_length(plan, parse_instant("2025-03-04T23:00", "first"), last)
    with pytest.raises(DataError, match="too short for 3 periods"):
        check_length(plan, parse_instant("2025-03-05", "first") + HOUR_MS, last)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_names_a_recipe_and_settings_that_exist(name: str) -> None:
    from tackboard.core.config import apply_overrides

    plan = PLANS[name]
    config = apply_overrides(find_recipe(plan.recipe), [*plan.settings, "data.split=time", "data.cut=0.5"])
    assert (config.data.split, config.optimizer.warmup_steps) == ("time", 10)


def test_wrong_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dataset deskdrob does not exist"):
        find_plan("deskdrob", periods=None, tokens=None, quick=False)
    with pytest.raises(UsageError, match="--tokens 10 is too small"):
        find_plan("news", periods=None, tokens=10, quick=False)
    quick = find_plan("news", periods=None, tokens=None, quick=True)
    assert (quick.periods, quick.max_users) == (3, 200)
    with pytest.raises(UsageError, match="are not given"):
        find_dataset("deskdrop", tmp_path, None)
