"""`bench splits`: both tables of a small world."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tackboard.bench import splits
from tackboard.bench.report import table_lines
from tackboard.bench.splits import SPLIT_PLANS, measure_splits, splits_report
from tackboard.core.config import apply_overrides
from tackboard.core.errors import UsageError
from tackboard.recipes.registry import find_recipe


def test_every_plan_names_a_recipe_and_settings_that_exist() -> None:
    for plan in SPLIT_PLANS.values():
        config = apply_overrides(find_recipe(plan.recipe), [*plan.settings, "data.split=time", f"data.cut={plan.cut}"])
        assert (config.data.split, config.data.cut) == ("time", plan.cut)
    with pytest.raises(UsageError, match="--dataset news2 does not exist"):
        measure_splits(Path(), "news2")


@pytest.mark.slow
def test_both_splits_of_a_small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPLIT_PLANS, "news", dataclasses.replace(SPLIT_PLANS["news"], max_users=100))
    result = measure_splits(tmp_path, "news", tokens=40_000)
    last, time = (result["splits"][split] for split in ("last", "time"))
    assert last["protocol"].startswith("leave-last-out") and "2025-01-26" in time["protocol"]
    assert time["never_seen_share"] > last["never_seen_share"]
    assert "recent, frozen" in [row["name"] for row in time["rows"]]
    monkeypatch.setattr(splits, "run_command", None)
    assert measure_splits(tmp_path, "news", tokens=40_000)["splits"] == result["splits"]
    assert "recent, live" in "\n".join(table_lines(splits_report(result)))
