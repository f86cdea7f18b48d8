"""A recipe for one's own events: sizes follow the dataset and stay within a laptop's reach."""

from __future__ import annotations

import pytest

from tackboard.data.loader import DataConfig
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.recipes.pretrain import EPOCHS, TOKENS_PER_STEP, pretrain_recipe


@pytest.mark.parametrize(
    ("num_items", "num_rows"),
    [(0, 1024), (1, 1024), (1024, 1024), (1025, 2048), (3000, 4096), (1 << 21, 1 << 21), (10**9, 1 << 21)],
)
def test_rows_are_the_next_power_of_two_above_the_items(num_items: int, num_rows: int) -> None:
    assert pretrain_recipe(dataset="x", num_items=num_items, num_events=10).model.tables.num_rows == num_rows


def test_steps_follow_the_events_between_bounds() -> None:
    def steps(num_events: int) -> int:
        return pretrain_recipe(dataset="x", num_items=10, num_events=num_events).training.steps

    assert steps(1) == 50
    assert steps(10**12) == 5000
    assert steps(100 * TOKENS_PER_STEP) == 100 * EPOCHS
    assert steps(200_000) <= steps(400_000)


def test_what_is_given_is_taken_over() -> None:
    config = pretrain_recipe(
        dataset="datasets/shop", num_items=10, num_events=10**6, name="shop", positive_actions=("buy",)
    )
    assert (config.name, config.data.dataset, config.data.positive_actions) == ("shop", "datasets/shop", ("buy",))
    assert config.optimizer.warmup_steps < config.training.checkpoint_every < config.training.steps


def test_choices_from_the_log_are_taken_over_and_the_defaults_are_those_of_the_settings() -> None:
    chosen = pretrain_recipe(
        dataset="x", num_items=10, num_events=10, split="time", cut="0.9", filter_seen=True, uniform_negatives=64
    )
    assert (chosen.data.split, chosen.data.cut, chosen.data.uniform_negatives) == ("time", "0.9", 64)
    assert chosen.evaluation.filter_seen
    plain = pretrain_recipe(dataset="x", num_items=10, num_events=10)
    default = DataConfig(dataset="x")
    for name in ("split", "cut", "uniform_negatives"):
        assert getattr(plain.data, name) == getattr(default, name)
    assert plain.evaluation == EvaluationConfig()
