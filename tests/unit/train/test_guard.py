"""The guard: when a number is bad, when there were too many, and that its memory survives a checkpoint."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tackboard.core.errors import ConfigError, DivergedError
from tackboard.train.guard import Guard, GuardConfig


def judge(guard: Guard, norm: float, loss: float = 1.0) -> str | None:
    """Why a step is bad, or None."""
    verdict = guard.judge(torch.tensor(loss), torch.tensor(norm))
    found = verdict.packed().tolist()
    assert found[3] == float(verdict.keep)
    return None if verdict.keep else Guard.reason(*found[:3])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_bad(loss: float) -> None:
    guard = Guard(GuardConfig())
    assert judge(guard, 1.0, loss) == f"loss is {loss}"
    assert (int(guard.num_norms), float(guard.mean_norm)) == (0, 0.0)
    assert judge(guard, 1.0, 1e30) is None


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_bad_from_the_first_step(norm: float) -> None:
    guard = Guard(GuardConfig(settle_steps=1000))
    assert judge(guard, norm) == f"gradient norm is {norm}"
    assert (int(guard.num_norms), float(guard.mean_norm)) == (0, 0.0)


def test_spikes_count_only_after_settling_and_never_enter_the_mean() -> None:
    guard = Guard(GuardConfig(spike_factor=3.0, settle_steps=3))
    for norm in (1.0, 50.0, 3.0):  # still settling: anything finite passes
        assert judge(guard, norm) is None
    assert float(guard.mean_norm) == pytest.approx(18.0)
    assert judge(guard, 54.1) == "gradient norm 54.1 is above 54"
    assert float(guard.mean_norm) == pytest.approx(18.0)
    assert judge(guard, 53.9) is None  # at the limit is not above it
    assert int(guard.num_norms) == 4


def test_a_rise_that_stays_is_let_through() -> None:
    """A dropped step changes nothing, so the next steps would be dropped too, until the run ends as diverged."""
    guard = Guard(GuardConfig(spike_factor=20.0, settle_steps=3))
    for _ in range(3):
        judge(guard, 1.0)
    found = [judge(guard, 65.0) for _ in range(4)]
    assert found == ["gradient norm 65 is above 20", "gradient norm 65 is above 40", None, None]
    assert int(guard.num_spikes) == 0
    assert judge(guard, math.nan) == "gradient norm is nan"
    assert int(guard.num_spikes) == 0, "what is not finite is no spike"
    judge(guard, 1e6)
    other = Guard(GuardConfig())
    other.load_state(guard.state())
    assert int(other.num_spikes) == 1
    other.load_state({name: value for name, value in guard.state().items() if name != "num_spikes"})
    assert int(other.num_spikes) == 0


def test_the_mean_follows_recent_norms() -> None:
    guard = Guard(GuardConfig())
    for _ in range(100):
        judge(guard, 1.0)
    for _ in range(200):
        judge(guard, 10.0)
    assert 9.5 < float(guard.mean_norm) < 10.0


def test_too_many_bad_steps_within_the_window_end_the_run() -> None:
    guard = Guard(GuardConfig(max_bad_steps=2, window=10))
    guard.skip(1, "x")
    guard.skip(5, "x")
    guard.skip(11, "x")  # step 1 has left the window
    with pytest.raises(DivergedError, match="3 of the last 10 steps were bad: loss is nan"):
        guard.skip(14, "loss is nan")
    assert guard.skipped == [1, 5, 11, 14]


def test_no_bad_step_may_be_borne() -> None:
    with pytest.raises(DivergedError):
        Guard(GuardConfig(max_bad_steps=0)).skip(0, "x")


def test_state_round_trips_through_json_and_keeps_later_skips() -> None:
    guard = Guard(GuardConfig())
    judge(guard, 0.1)
    judge(guard, 1 / 3)
    guard.skip(4, "x")
    state = json.loads(json.dumps(guard.state()))
    other = Guard(GuardConfig())
    other.load_state(state)
    assert other.state() == guard.state()
    judge(guard, 100.0)
    guard.skip(9, "x")
    guard.load_state(state)  # a roll-back: the mean goes back, what was found bad stays so
    assert float(guard.mean_norm) == float(other.mean_norm)
    assert guard.skipped == [4, 9]


def test_a_state_stays_as_it_was_when_later_steps_are_bad() -> None:
    """A thread writes the state of a checkpoint while training goes on."""
    guard = Guard(GuardConfig())
    guard.skip(3, "")
    state = guard.state()
    guard.skip(4, "")
    assert (state["skipped"], guard.state()["skipped"]) == ([3], [3, 4])


@pytest.mark.parametrize("wrong", [{"spike_factor": 1.0}, {"settle_steps": 0}, {"max_bad_steps": -1}, {"window": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GuardConfig(**wrong)  # type: ignore[arg-type]
