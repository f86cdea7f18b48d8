"""The loop: a run is a function of its config, whatever interrupts it and whatever goes wrong on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tackboard.batch import SequenceBatch
from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.core.errors import CorruptFileError, DivergedError, Preempted, UsageError
from tackboard.core.manifest import MANIFEST, write_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.features.feature_set import read_features
from tackboard.features.standard import features_for_model
from tackboard.models.interface import LossOutput
from tackboard.models.ranker import Ranker, RankerConfig
from tackboard.train.config import RunConfig, config_to_json, features_for
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]
MakeTrainer = Callable[..., Trainer]

pytestmark = pytest.mark.usefixtures("torch_settings")


@pytest.fixture
def make_trainer(tmp_path: Path, tiny_config: Config, tiny_source: SequenceSource) -> MakeTrainer:
    """`make_trainer("a.b=c", run=None)`: a trainer of the tiny config, on a new run or on an old one."""

    def make(*overrides: str, run: RunDirectory | None = None) -> Trainer:
        config = tiny_config(*overrides)
        run = run or RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
        return Trainer(config, RunDirectory.open(run.path), tiny_source)

    return make


def plant(trainer: Trainer, fault: Callable[[int], str | None]) -> list[int]:
    """Spoils the data steps that `fault` names (`loss`, `nan gradient`, `spike`); returns the steps read, growing."""
    read: list[int] = []
    honest_step, honest_loss = trainer._one_step, trainer.model.loss

    def one_step(data_step: int, batch: Any) -> bool:
        read.append(data_step)
        return honest_step(data_step, batch)

    def loss(batch: Any) -> LossOutput:
        value, metrics, _ = honest_loss(batch)
        kind = fault(read[-1])
        if kind == "loss":
            value = value * float("nan")
        elif kind is not None:
            factor = float("nan") if kind == "nan gradient" else 1e6
            value.register_hook(lambda gradient: gradient * factor)
        return LossOutput(value, metrics)

    trainer._one_step = one_step  # type: ignore[method-assign]
    trainer.model.loss = loss
    return read


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def outcome(run: RunDirectory) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """All that a run computed: tensors, state and metrics, without clocks."""
    checkpoint = load_checkpoint(find_checkpoint(run.path))
    tensors = {f"{group}/{key}": t.tolist() for group, named in checkpoint.tensors.items() for key, t in named.items()}
    metrics = [{k: v for k, v in line.items() if k not in ("time", "tokens_per_s")} for line in run.read_metrics()]
    return tensors, checkpoint.state, metrics


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == name]


def test_two_runs_are_bit_identical(make_trainer: MakeTrainer, trained_run: RunDirectory) -> None:
    trainer = make_trainer()
    trainer.train(quiet=True)
    assert outcome(trainer.run) == outcome(trained_run)
    assert trainer.run.status == "done"
    tensors, state, metrics = outcome(trainer.run)
    assert (state["step"], state["data_step"], [line["step"] for line in metrics]) == (6, 6, [1, 2, 3, 4, 5, 6])
    assert all(np.isfinite(line["loss"]) and np.isfinite(line["grad_norm"]) for line in metrics)
    assert metrics[-1]["tokens"] == state["num_tokens"] > 100
    assert {name.partition("/")[0] for name in tensors} == {"dense", "tables", "optimizer"}


@pytest.mark.parametrize(
    "overrides",
    [(), ("data.validation_hours=12", "training.validate_every=2"), ("data.uniform_negatives=9",)],
    ids=["cut", "slice", "negatives"],
)
def test_nothing_from_the_cut_on_reaches_a_run(
    tmp_path: Path, tiny_config: Config, make_timed: Callable[..., Path], overrides: tuple[str, ...]
) -> None:
    """Two logs that differ only from the cut on give the same parameters, optimiser states and losses, bit for bit.

    The logs differ in the items, actions, surfaces, times and number of these events, and in events that were received
    from the cut on. A third log, which differs before the cut, gives another run.
    """
    found = []
    for seed, seed_after in ((1, 10), (1, 11), (2, 10)):
        dataset = make_timed(tmp_path / f"{seed}-{seed_after}", seed, seed_after)
        settings = (f"data.dataset={dataset}", "data.split=time", "data.cut=2024-05-03T12:00:00", *overrides)
        config = tiny_config(*settings)
        source = config.data.open(features_for(config))
        run = RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
        trainer = Trainer(config, run, source)
        trainer.train(quiet=True)
        tensors, state, metrics = outcome(run)
        same = {name: state[name] for name in ("vocabulary", "step", "num_tokens")}
        found.append((tensors, same, metrics, source.dataset.read_events().to_pydict()))
    first, second, third = found
    assert first[3] != second[3] and len(first[3]["item"]) != len(second[3]["item"])
    assert first[:3] == second[:3]
    assert first[0] != third[0] and first[2] != third[2]


def test_the_seed_decides(make_trainer: MakeTrainer, trained_run: RunDirectory) -> None:
    trainer = make_trainer("seed=1")
    trainer.train(quiet=True)
    assert outcome(trainer.run)[2] != outcome(trained_run)[2]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12 says so of every fork
def test_workers_change_nothing(make_trainer: MakeTrainer, trained_run: RunDirectory) -> None:
    trainer = make_trainer("data.num_workers=1")
    trainer.train(quiet=True)
    assert outcome(trainer.run)[0] == outcome(trained_run)[0]


@pytest.mark.parametrize("dies_in", [0, 3, 4])
def test_an_interrupted_run_ends_in_the_same_bits(
    make_trainer: MakeTrainer, trained_run: RunDirectory, dies_in: int
) -> None:
    """Before the first step, one step past a checkpoint, right on one. Kills at other instants: tests/chaos."""
    trainer = make_trainer()

    def die(data_step: int) -> None:
        if data_step == dies_in:
            raise MemoryError

    plant(trainer, die)
    with pytest.raises(MemoryError):
        trainer.train(quiet=True)
    assert trainer.run.status.startswith("failed: MemoryError")
    resumed = make_trainer(run=trainer.run)
    resumed.train(quiet=True)
    assert outcome(resumed.run) == outcome(trained_run)
    assert events(resumed.run, "resume")[0]["step"] == dies_in // 2 * 2


EVERYTHING = (
    "data.uniform_negatives=7",
    "data.held_out=2",
    "model.tables.storage=fp16",
    "model.loss.streaming_frequencies=true",
    "model.loss.multi_token_weight=0.5",
    "model.loss.multi_token_share=0.5",
    "model.loss.future_token_weight=0.5",
    "model.loss.future_token_anchor=3",
    "model.backbone.kind=hstu",
    "model.backbone.positions=rotary",
    "model.request_time=true",
    "training.precision=bf16",
)
"""Whatever draws, counts or rounds on the way."""


@pytest.fixture
def make_full_trainer(tmp_path: Path, tiny_config: Config) -> MakeTrainer:
    """`make_trainer` with all of `EVERYTHING`, on a source that reads what this model reads."""

    def make(*overrides: str, run: RunDirectory | None = None) -> Trainer:
        config = tiny_config(*EVERYTHING, *overrides)
        run = run or RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
        source = open_sequences(
            config.data.dataset, config.data.positive_actions, features=features_for(config), held_out=2
        )
        return Trainer(config, RunDirectory.open(run.path), source)

    return make


def test_an_interrupted_run_with_everything_on_ends_in_the_same_bits(make_full_trainer: MakeTrainer) -> None:
    straight = make_full_trainer()
    straight.train(quiet=True)
    cut = make_full_trainer("data.num_workers=1")
    plant(cut, _stop_at_3)
    with pytest.raises(MemoryError):
        cut.train(quiet=True)
    resumed = make_full_trainer(run=cut.run)
    resumed.train(quiet=True)
    tensors, state, metrics = outcome(resumed.run)
    expected = outcome(straight.run)
    assert (tensors, metrics) == (expected[0], expected[2])
    assert state["data_step"] == expected[1]["data_step"]
    assert tensors["dense/frequencies.step"] == 6
    assert {"loss_next_token", "loss_multi_token", "loss_future_token"} <= set(metrics[-1])
    assert all(np.isfinite(line["loss"]) for line in metrics)


def test_what_a_model_has_counted_of_a_bad_batch_is_taken_back(make_full_trainer: MakeTrainer) -> None:
    """Frequencies are counted before the loss is known."""
    trainer = make_full_trainer()
    plant(trainer, lambda data_step: "loss" if data_step == 3 else None)
    trainer.train(quiet=True)
    assert trainer.guard.skipped == [3]
    assert [event["step"] for event in events(trainer.run, "rolled_back")] == [2]
    clean = make_full_trainer()
    clean.guard.skipped = [3]
    clean.train(quiet=True)
    assert outcome(clean.run) == outcome(trainer.run)


def test_half_precision_products_leave_the_parameters_as_they_are(
    make_trainer: MakeTrainer, trained_run: RunDirectory
) -> None:
    trainer = make_trainer("training.precision=bf16")
    trainer.train(quiet=True)
    assert {tensor.dtype for tensor in trainer.model.state_dict().values()} == {torch.float32}
    losses, full = ([line["loss"] for line in run.read_metrics()] for run in (trainer.run, trained_run))
    assert losses != full
    assert losses == pytest.approx(full, rel=0.02)


def test_every_checkpoint_of_a_step_is_told(make_trainer: MakeTrainer, trained_run: RunDirectory) -> None:
    """To who evaluates as the run goes on; what they do with the model's mode or random numbers changes nothing."""
    trainer = make_trainer("training.checkpoint_every=4")
    told: list[tuple[int, str]] = []

    def look(found: Trainer) -> None:
        found.model.eval()
        torch.manual_seed(1)
        told.append((found.step, find_checkpoint(found.run.path).name))

    trainer.on_checkpoint = look
    trainer.train(quiet=True)
    assert told == [(4, "step-00000004"), (6, "step-00000006")]
    assert outcome(trainer.run)[0] == outcome(trained_run)[0]
    with pytest.raises(ZeroDivisionError):
        make_failing(make_trainer).train(quiet=True)


def make_failing(make_trainer: MakeTrainer) -> Trainer:
    trainer = make_trainer()
    trainer.on_checkpoint = lambda _trainer: print(1 // 0)
    return trainer


def test_a_finished_run_trains_no_further(make_trainer: MakeTrainer, trained_run: RunDirectory) -> None:
    trainer = make_trainer("training.steps=2")
    trainer.train(quiet=True)
    before = outcome(trainer.run)
    again = make_trainer("training.steps=2", run=trainer.run)
    again.train(quiet=True)
    assert outcome(again.run) == before
    assert again.last_loss == trainer.last_loss


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_and_says_how_to_go_on(
    make_trainer: MakeTrainer, trained_run: RunDirectory, number: signal.Signals
) -> None:
    trainer = make_trainer()
    previous = signal.getsignal(number)

    def stop(data_step: int) -> None:
        if data_step == 2:
            os.kill(os.getpid(), number)

    plant(trainer, stop)
    with pytest.raises(Preempted, match="at step 3") as caught:
        trainer.train(quiet=True)
    assert f"--resume {trainer.run.path}" in caught.value.fix
    assert trainer.run.status == "preempted"
    assert find_checkpoint(trainer.run.path).name == "step-00000003"
    assert signal.getsignal(number) is previous
    resumed = make_trainer(run=trainer.run)
    resumed.train(quiet=True)
    assert outcome(resumed.run) == outcome(trained_run)


def test_a_second_signal_is_not_waited_for(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()

    def stop_twice(data_step: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    plant(trainer, stop_twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(quiet=True)


def test_a_signal_while_the_first_step_is_compiled_is_not_kept_waiting(
    make_trainer: MakeTrainer, trained_run: RunDirectory
) -> None:
    trainer = make_trainer()
    trainer.is_compiled = True
    reached: list[int] = []

    def stop(data_step: int) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(data_step)
        except Exception as error:  # As torch's compiler does with what it meets on the way.
            raise RuntimeError from error

    plant(trainer, stop)
    with pytest.raises(Preempted, match="at step 0"):
        trainer.train(quiet=True)
    assert not reached and trainer.run.status == "preempted"
    resumed = make_trainer(run=trainer.run)
    resumed.train(quiet=True)
    assert outcome(resumed.run) == outcome(trained_run)


@pytest.mark.parametrize("reads_every_step", [True, False])
@pytest.mark.parametrize(("kind", "bad"), [("loss", 1), ("nan gradient", 0), ("nan gradient", 3), ("spike", 4)])
def test_a_bad_step_ends_as_if_its_data_had_never_been_there(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], kind: str, bad: int, reads_every_step: bool
) -> None:
    """On a GPU the host reads the verdicts later; the parameters of a bad step stay where they are all the same."""
    settings = ("training.steps=6", "training.log_every=3", "guard.settle_steps=1")
    trainer = make_trainer(*settings)
    trainer.reads_every_step = reads_every_step
    read = plant(trainer, lambda data_step: kind if data_step == bad else None)
    trainer.train(quiet=True)
    assert sorted(set(read)) == [0, 1, 2, 3, 4, 5, 6]
    assert trainer.guard.skipped == [bad]
    assert (trainer.step, trainer.data_step) == (6, 7)
    assert events(trainer.run, "rolled_back") == []
    assert [event["data_step"] for event in events(trainer.run, "bad_step")] == [bad]
    assert f"skipping data step {bad}" in capsys.readouterr().err

    clean = make_trainer(*settings)
    clean.guard.skipped = [bad]
    clean.train(quiet=True)
    assert outcome(clean.run) == outcome(trainer.run)


def test_verdicts_that_are_read_later_change_nothing(make_trainer: MakeTrainer) -> None:
    settings = ("training.log_every=3", "training.checkpoint_every=3")
    at_once, later = make_trainer(*settings), make_trainer(*settings)
    later.reads_every_step = False
    settled: list[int] = []
    settle = later._settle
    later._settle = lambda: settled.append(later.step) or settle()  # type: ignore[method-assign, func-returns-value]
    for trainer in (at_once, later):
        trainer.train(quiet=True)
    assert settled == [3, 6]
    assert outcome(at_once.run) == outcome(later.run)


@pytest.mark.parametrize("reads_every_step", [True, False])
def test_too_many_bad_steps_end_the_run(make_trainer: MakeTrainer, reads_every_step: bool) -> None:
    trainer = make_trainer("guard.max_bad_steps=2")
    trainer.reads_every_step = reads_every_step
    plant(trainer, lambda data_step: "loss" if data_step >= 2 else None)
    with pytest.raises(DivergedError, match="3 of the last"):
        trainer.train(quiet=True)
    assert trainer.run.status.startswith("failed: 3 of the last")
    assert find_checkpoint(trainer.run.path).name == "step-00000002"


def test_a_table_that_is_not_finite_is_never_checkpointed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.save()
    with torch.no_grad():
        trainer.model.item_tables.weight[5, 1] = float("inf")
    trainer.optimizers.tables["item_tables"].sums[5] = 1.0  # as after an update of this row
    trainer.step = 1
    with pytest.raises(DivergedError, match=r"item_tables\.weight holds non-finite values at step 1"):
        trainer.save()
    assert find_checkpoint(trainer.run.path).name == "step-00000000"


def test_steps_with_nothing_to_predict_are_passed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("training.steps=3")
    window = trainer.steps.load_window(0, 0)
    honest, trainer.steps.load_window = window.batch, lambda *_: window  # type: ignore[method-assign]
    empty = dataclasses.replace(honest(0), is_positive=torch.zeros_like(honest(0).is_positive))
    asked: list[int] = []

    def sometimes_empty(place: int) -> SequenceBatch:
        asked.append(place)
        return empty if len(asked) in (1, 3) else honest(place)

    window.batch = sometimes_empty  # type: ignore[method-assign]
    trainer.train(quiet=True)
    assert (trainer.step, trainer.data_step) == (3, 5)
    assert trainer.guard.skipped == []


def test_a_run_whose_checkpoints_are_all_damaged_starts_again(
    make_trainer: MakeTrainer, trained_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    trainer.train(quiet=True)
    for state in trainer.run.checkpoints.glob("step-*/state.json"):
        state.write_text("{}")
    again = make_trainer(run=trainer.run)
    again.train(quiet=True)
    assert capsys.readouterr().err.count("skipping step") == 2
    assert outcome(again.run) == outcome(trained_run)


def test_a_run_goes_on_with_its_own_snapshot_only(
    make_trainer: MakeTrainer, tmp_path: Path, make_dataset: Callable[..., Path], tiny_config: Config
) -> None:
    trainer = make_trainer("training.steps=1")
    trainer.train(quiet=True)
    other = make_dataset(tmp_path, [(1, item, "click", "home", item) for item in range(9)])
    with pytest.raises(UsageError, match="was started on snapshot"):
        Trainer(tiny_config("training.steps=1"), trainer.run, open_sequences(other)).train(quiet=True)


@pytest.mark.parametrize("change", ["shape", "missing", "name", "dense"])
def test_tensors_that_are_not_the_runs_are_named(make_trainer: MakeTrainer, change: str) -> None:
    """A checkpoint may be sealed anew with other tensors; a resumed run does not take them for its own."""
    trainer = make_trainer("training.steps=1")
    trainer.train(quiet=True)
    path = trainer.store.complete()[-1]
    file = path / ("dense.safetensors" if change == "dense" else "optimizer.safetensors")
    tensors = load_file(file)
    name = next(key for key in sorted(tensors) if tensors[key].dim() == 2)
    if change == "missing":
        del tensors[next(key for key in tensors if key.startswith("adagrad."))]
    elif change == "name":
        tensors["/".join([name, "x"])] = tensors[name].clone()
        tensors[f"{name.rpartition('.')[0]}.more"] = tensors.pop(name)
    else:
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, file)
    (path / MANIFEST).unlink()
    write_manifest(path, "checkpoint", {"step": 1})
    with pytest.raises(CorruptFileError) as caught:
        make_trainer("training.steps=2", run=trainer.run).train(quiet=True)
    assert str(path if change == "dense" else file) in caught.value.got


def test_every_checkpoint_says_what_the_model_reads(make_trainer: MakeTrainer, tiny_source: SequenceSource) -> None:
    trainer = make_trainer("training.steps=3", "training.checkpoint_every=2")
    trainer.train(quiet=True)
    checkpoints = trainer.store.complete()
    assert [path.name for path in checkpoints] == ["step-00000002", "step-00000003"]
    for path in checkpoints:
        features = read_features(path)
        assert features is not None
        assert features.hash == tiny_source.features.hash
    started = events(trainer.run, "start")[0]
    assert started["features"] == tiny_source.features.hash
    assert started["trimming"]["read"] == ["item", "action", "surface", "time"]
    assert started["trimming"]["skipped"] == ["received"]


def other_features(dataset: Path, config: RunConfig) -> SequenceSource:
    """The tiny data with one more column of the history."""
    reads = (*config.model.reads, "history.time")
    return open_sequences(
        dataset,
        config.data.positive_actions,
        features=lambda vocabulary: features_for_model(reads, vocabulary, config.model.max_history),
    )


def test_a_run_goes_on_with_its_own_features_only(
    make_trainer: MakeTrainer, tiny_config: Config, tiny_dataset: Path, tiny_source: SequenceSource
) -> None:
    trainer = make_trainer("training.steps=1")
    trainer.train(quiet=True)
    config = tiny_config("training.steps=1")
    changed = other_features(tiny_dataset, config)
    with pytest.raises(UsageError, match="was started with other features") as caught:
        Trainer(config, trainer.run, changed).train(quiet=True)
    assert tiny_source.features.hash[:12] in caught.value.got
    assert changed.features.hash[:12] in caught.value.allowed
    assert "--resume never" in caught.value.fix


def test_a_run_from_before_features_goes_on(
    make_trainer: MakeTrainer, trained_run: RunDirectory, tiny_source: SequenceSource
) -> None:
    """Its checkpoints say nothing of features, and its model reads the standard ones."""
    trainer = make_trainer()
    plant(trainer, _stop_at_3)
    with pytest.raises(MemoryError):
        trainer.train(quiet=True)
    for path in trainer.store.complete():
        (path / "features.json").unlink()
        (path / "MANIFEST.json").unlink()
        write_manifest(path, "checkpoint", {"step": int(path.name.rpartition("-")[2])})
    resumed = make_trainer(run=trainer.run)
    resumed.train(quiet=True)
    assert outcome(resumed.run) == outcome(trained_run)


def _stop_at_3(data_step: int) -> None:
    if data_step == 3:
        raise MemoryError


def test_one_run_is_trained_by_one_process(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    # The lock does not name this host, so its silence is waited for.
    monkeypatch.setattr("tackboard.core.locks.LEASE_S", 1.0)
    trainer = make_trainer()
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held'); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-u", "-c", hold, str(trainer.run.path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match="another process"):
            trainer.train(quiet=True)
        other.communicate(b"")
    assert trainer.run.status == "new"


def test_speed_counts_everything_this_process_did(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    honest = trainer.save

    def slow_save() -> None:
        time.sleep(0.2)  # a checkpoint belongs to the run, so it counts
        honest()

    monkeypatch.setattr(trainer, "save", slow_save)
    started = time.perf_counter()
    trainer.train(quiet=True)
    seconds = time.perf_counter() - started
    assert trainer.num_tokens / seconds <= trainer.tokens_per_s <= trainer.num_tokens / 0.2


def test_statistics_of_a_batch_of_few_users_are_warned_of(
    tiny_config: Config, ranker_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class NormedConfig(RankerConfig):
        def build(self, vocabulary: Vocabulary) -> Ranker:
            model = super().build(vocabulary)
            model.cross.normed = NORMS[self.head.num_cross_layers]
            return model

    def said(config: RunConfig) -> str:
        Trainer(config, RunDirectory(tmp_path), open_source(config))
        return capsys.readouterr().err

    def normed(number: int) -> RunConfig:
        config = ranker_config(f"model.head.num_cross_layers={number}")
        settings = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
        return dataclasses.replace(config, model=NormedConfig(**settings))

    warning = "warning: cross.normed normalises by the statistics of a batch, but a batch of requests holds few users"
    assert warning in said(normed(0)) and said(normed(0)).count("warning") == 1
    assert "use nn.LayerNorm, or nn.SyncBatchNorm" in said(normed(0))
    assert "and 1 more normalises" in said(normed(1))
    assert not said(normed(2)) and not said(ranker_config()) and not said(tiny_config())


NORMS = (
    torch.nn.BatchNorm1d(4),
    torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)),
    torch.nn.SyncBatchNorm(4),
)
