"""The switches of the ladder."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tackboard.bench.pretrain import ladder
from tackboard.bench.pretrain.ladder import RUNGS, Rung, replaced, rungs_of, without
from tackboard.core.errors import UsageError
from tackboard.train import trainer
from tackboard.train.config import RunConfig


def test_rungs_have_names_of_their_own_and_a_way_to_be_switched_off() -> None:
    assert len({rung.name for rung in RUNGS}) == len(RUNGS)
    for rung in RUNGS:
        assert rung.off is not None or rung.settings_off
        if rung.off is not None:
            with rung.off():  # The place that it replaces exists.
                pass


def test_a_rung_that_is_off_has_its_slow_twin_in_place(tiny_config: RunConfig) -> None:
    fast = trainer.keep_freed_memory
    with ExitStack() as stack:
        config = without(tiny_config, ["threads", "memory"], "cpu", stack)
        assert trainer.keep_freed_memory is bool
        assert config.training.num_threads == 1
        assert config.data.num_workers == tiny_config.data.num_workers
    assert trainer.keep_freed_memory is fast


def test_settings_of_another_device_are_left_alone(tiny_config: RunConfig) -> None:
    with ExitStack() as stack:
        assert without(tiny_config, [], "cpu", stack).training.precision == "fp32"
        assert without(tiny_config, [], "cuda", stack).training.precision == "bf16"
    names = ["workers", "bf16", "compile", "shapes", "attention-kernel", "loss-kernel", "negatives", "graph"]
    assert [rung.name for rung in rungs_of("cuda")] == names


def test_a_twin_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = replaced("tackboard.bench.pretrain.ladder:Rung.tolerance", "tackboard.bench.pretrain.ladder:RUNGS")
    before = Rung.tolerance
    with switch():
        assert ladder.Rung.tolerance is RUNGS
    assert Rung.tolerance == before


def test_an_unknown_rung_is_refused(tiny_config: RunConfig) -> None:
    with ExitStack() as stack, pytest.raises(UsageError, match="there is no rung wings"):
        without(tiny_config, ["wings"], "cpu", stack)
