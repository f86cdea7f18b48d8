"""Padded batches in the loop: what a run learns, and what torch compiles on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.core.rundir import RunDirectory
from tackboard.data.source import SequenceSource
from tackboard.train import trainer as trainer_module
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.trainer import WARM_UP_STEPS, Trainer

Config = Callable[..., RunConfig]
MakeTrainer = Callable[..., Trainer]

pytestmark = [
    pytest.mark.usefixtures("torch_settings"),
    pytest.mark.filterwarnings("ignore"),  # torch warns itself of what it does to compile
]
STEPS = WARM_UP_STEPS + 6


@pytest.fixture
def make_trainer(tmp_path: Path, tiny_config: Config, tiny_source: SequenceSource) -> MakeTrainer:
    """`make_trainer("a.b=c")`: a trainer of the tiny config without dropout, on a new run."""

    def make(*overrides: str) -> Trainer:
        config = tiny_config(
            f"training.steps={STEPS}", "model.dropout=0.0", "training.checkpoint_every=100", *overrides
        )
        run = RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
        return Trainer(config, RunDirectory.open(run.path), tiny_source)

    return make


def seen_sizes(trainer: Trainer) -> list[tuple[int, int]]:
    """Returns a list that receives the number of events and rows of each batch."""
    sizes: list[tuple[int, int]] = []
    honest = trainer._one_step

    def one_step(data_step: int, batch: Any) -> bool:
        sizes.append((batch.num_events, batch.num_rows))
        return honest(data_step, batch)

    trainer._one_step = one_step  # type: ignore[method-assign]
    return sizes


def recompiled(trainer: Trainer) -> list[dict[str, Any]]:
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "recompiled"]


def test_a_padded_run_learns_the_same(make_trainer: MakeTrainer) -> None:
    plain, padded = make_trainer(), make_trainer("training.pad_shapes=on")
    sizes = [seen_sizes(trainer) for trainer in (plain, padded)]
    for trainer in (plain, padded):
        trainer.train(quiet=True)
    assert not plain.pads and padded.pads
    assert len(set(sizes[0])) > 3 >= len(set(sizes[1]))
    assert plain.num_tokens == padded.num_tokens
    lines = [trainer.run.read_metrics() for trainer in (plain, padded)]
    for one, other in zip(*lines, strict=True):
        assert one["tokens"] == other["tokens"]
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-2), (one["step"], name)
    assert lines[0][0]["loss"] == pytest.approx(lines[1][0]["loss"], rel=1e-5)


@pytest.mark.parametrize("pad_shapes", ["off", "on"])
def test_a_recompilation_after_the_warm_up_is_told(
    make_trainer: MakeTrainer, pad_shapes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled for one size at a time, φ_in is compiled again for every new number of events."""

    def compile_maps(model: Any) -> None:
        torch._dynamo.reset()
        model.phi_in.compile(dynamic=False, backend="eager")

    monkeypatch.setattr(trainer_module, "compile_parts", compile_maps)
    trainer = make_trainer("training.compile=on", f"training.pad_shapes={pad_shapes}", "model.maps=residual")
    sizes = seen_sizes(trainer)
    with torch._dynamo.config.patch(recompile_limit=64):
        trainer.train(quiet=True)
    late = {events for events, _ in sizes[WARM_UP_STEPS:]} - {events for events, _ in sizes[:WARM_UP_STEPS]}
    told, lines = recompiled(trainer), capsys.readouterr().err
    assert bool(told) == bool(late) == (pad_shapes == "off")
    assert len(told) == len(late) == lines.count("torch compiled ")
    if told:
        assert told[0]["step"] >= WARM_UP_STEPS and told[0]["part"] == "_Residual.forward"
        assert "size mismatch" in told[0]["reason"] and told[0]["reason"] in lines


@pytest.mark.slow
def test_nothing_is_compiled_again_after_the_first_steps(make_trainer: MakeTrainer) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    trainer = make_trainer("training.compile=on", "training.pad_shapes=on", "training.steps=30")
    sizes, graphs = seen_sizes(trainer), []
    honest = trainer._one_step

    def one_step(data_step: int, batch: Any) -> bool:
        counted = honest(data_step, batch)
        graphs.append(int(counters["stats"]["unique_graphs"]))
        return counted

    trainer._one_step = one_step  # type: ignore[method-assign]
    trainer.train(quiet=True)
    first_of_size = {size: number for number, size in reversed(list(enumerate(sizes)))}
    for number in range(1, len(graphs)):
        if graphs[number] > graphs[number - 1]:
            assert first_of_size[sizes[number]] == number, f"step {number} compiled for a size that was seen before"
    assert graphs[0] > 0 and graphs[-1] == graphs[WARM_UP_STEPS]
    assert recompiled(trainer) == []
