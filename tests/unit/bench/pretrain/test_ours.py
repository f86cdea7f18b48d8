"""The timed trainer is the trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tackboard.bench.pretrain.ours import TimedTrainer, num_graphs
from tackboard.core.rundir import RunDirectory
from tackboard.data.source import SequenceSource
from tackboard.train.config import RunConfig
from tackboard.train.trainer import Trainer


@pytest.fixture
def config(tiny_config: RunConfig) -> RunConfig:
    training = dataclasses.replace(tiny_config.training, num_threads=1, steps=5)
    return dataclasses.replace(tiny_config, training=training)


def test_timed_steps_end_where_the_trainer_ends(
    config: RunConfig, tiny_bench_source: SequenceSource, tmp_path: Path
) -> None:
    plain = Trainer(config, RunDirectory.create(tmp_path, "plain", {}), tiny_bench_source)
    plain.train(quiet=True)
    timed = TimedTrainer(config, tmp_path, tiny_bench_source, warmup=2, timed=3)
    timed.train(quiet=True)
    assert timed.figures["last_loss"] == plain.last_loss
    assert timed.figures["first_loss"] != plain.last_loss
    assert len(timed.ends_s) == 4
    assert len(timed.begins_s) == 3


def test_the_figures_fit_together(config: RunConfig, tiny_bench_source: SequenceSource, tmp_path: Path) -> None:
    called: list[str] = []
    trainer = TimedTrainer(config, tmp_path, tiny_bench_source, warmup=1, timed=2)
    trainer.on_begin, trainer.on_end = lambda: called.append("begin"), lambda: called.append("end")
    trainer.train(quiet=True)
    figures = trainer.figures
    assert called == ["begin", "end"]
    assert 0 <= figures["loader_ms"] < figures["wall_ms"]
    rate = 1000 * figures["tokens_per_step"] / figures["wall_ms"]
    assert figures["tokens_per_s"] == pytest.approx(rate)
    assert figures["recompiled"] == 0
    assert figures["peak_bytes"] > 1e6


def test_no_checkpoint_is_written(config: RunConfig, tiny_bench_source: SequenceSource, tmp_path: Path) -> None:
    trainer = TimedTrainer(config, tmp_path, tiny_bench_source, warmup=1, timed=1)
    trainer.train(quiet=True)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert num_graphs() >= 0
