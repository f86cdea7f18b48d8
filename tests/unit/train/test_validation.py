"""Judging on the way: the mean is that of all examples, the best step is kept, and patience ends a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.core.errors import ConfigError
from tackboard.core.rundir import RunDirectory
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer
from tackboard.train.validation import Validation, mean_loss

Config = Callable[..., RunConfig]
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("torch_settings")


def trainer_of(config: RunConfig, folder: Path, run: RunDirectory | None = None) -> Trainer:
    run = run or RunDirectory.create(folder / "runs", config.name, config_to_json(config))
    return Trainer(config, RunDirectory.open(run.path), open_source(config))


def test_the_best_is_the_lowest_and_patience_counts_the_others() -> None:
    validation = Validation(patience=2)
    noted = [validation.note(step, loss) for step, loss in ((10, 3.0), (20, 2.0), (30, 2.0), (40, math.nan))]
    assert noted == [True, True, False, False]
    assert (validation.best_step, validation.best_loss, validation.is_over) == (20, 2.0, True)
    twin = Validation(patience=2)
    twin.load_state(validation.state())
    assert twin.state() == validation.state() and twin.is_over
    twin.load_state({})
    assert twin.best_step is None and not twin.is_over


def test_without_patience_a_run_never_ends_early() -> None:
    validation = Validation()
    assert not any(validation.note(step, 1.0) and validation.is_over for step in range(50))
    assert not validation.is_over


def test_the_loss_is_the_mean_over_examples_and_the_same_each_time(ranker_config: Config, tmp_path: Path) -> None:
    trainer = trainer_of(ranker_config("training.validate_every=2"), tmp_path)
    judges = trainer.judges
    assert judges is not None
    found = mean_loss(trainer.model, judges, CPU, 100)
    assert mean_loss(trainer.model, judges, CPU, 100) == found
    batches = [judges[step] for step in range(judges.plan.first_step(1))]
    assert len(batches) > 1
    trainer.model.eval()
    losses = [(batch.num_examples(), float(trainer.model.loss(batch).loss.detach())) for batch in batches]
    expected = sum(size * loss for size, loss in losses) / sum(size for size, _ in losses)
    assert found == pytest.approx(expected, rel=1e-6)
    first = mean_loss(trainer.model, judges, CPU, 1)
    assert first == pytest.approx(losses[0][1], rel=1e-6)


def scripted(trainer: Trainer, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Judgements in place of real ones; what becomes of them is the trainer's."""
    told = iter(losses)
    monkeypatch.setattr("tackboard.train.trainer.mean_loss", lambda *_: next(told))


def test_the_best_checkpoint_is_kept_and_is_what_a_run_stands_for(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("data.validation_share=0.3", "training.validate_every=2", "training.steps=12")
    trainer = trainer_of(tiny_config(*settings, "training.checkpoint_every=1"), tmp_path)
    scripted(trainer, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0], monkeypatch)
    trainer.train(quiet=True)
    best = find_checkpoint(trainer.run.path)
    assert best.name == "step-00000004"
    assert sorted(path.name for path in trainer.run.checkpoints.glob("step-*")) == [
        "step-00000004", "step-00000011", "step-00000012",
    ]  # fmt: skip
    assert load_checkpoint(best).state["validation"] == {"best_loss": 1.0, "best_step": 4, "num_worse": 0}
    assert load_checkpoint(trainer.run.checkpoints / "latest").state["validation"]["num_worse"] == 4


def test_patience_ends_a_run_and_a_resumed_one_stays_ended(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("data.validation_share=0.3", "training.validate_every=2", "training.steps=40", "training.patience=2")
    trainer = trainer_of(tiny_config(*settings), tmp_path)
    scripted(trainer, [3.0, 4.0, 4.0], monkeypatch)
    trainer.train(quiet=True)
    assert (trainer.step, trainer.run.status) == (6, "done")
    (trainer.run.checkpoints / "best").unlink()
    again = trainer_of(trainer.config, tmp_path, trainer.run)
    again.train(quiet=True)
    assert (again.step, find_checkpoint(again.run.path).name) == (6, "step-00000002")


def test_judging_does_not_change_what_is_trained(tiny_config: Config, tmp_path: Path) -> None:
    settings = ("data.validation_share=0.3", "training.steps=6", "model.loss.multi_token_weight=1.0")
    plain, judged = (
        trainer_of(tiny_config(*settings, *more), tmp_path / str(number))
        for number, more in enumerate(((), ("training.validate_every=1",)))
    )
    for trainer in (plain, judged):
        trainer.train(quiet=True)
    mine: dict[str, Any] = plain.model.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in judged.model.state_dict().items())


def test_to_judge_somebody_must_be_held_out(tiny_config: Config) -> None:
    with pytest.raises(ConfigError, match="nothing is held out") as caught:
        tiny_config("training.validate_every=2")
    assert "--set data.validation_share" in caught.value.fix
    with pytest.raises(ConfigError, match="training.patience"):
        tiny_config("training.patience=2")
