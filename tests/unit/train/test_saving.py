"""Saving beside training: what is written, when training waits, and what a failing writer does to the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tackboard.checkpoint.store import CheckpointStore, find_checkpoint, load_checkpoint
from tackboard.checkpoint.trained import stored_tables
from tackboard.core.errors import StorageError, UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.data.source import SequenceSource
from tackboard.models.changed_rows import ChangedRows, whole_tensor
from tackboard.train import saving
from tackboard.train.config import RunConfig, StartConfig, config_to_json
from tackboard.train.trainer import Trainer

Config = Callable[..., RunConfig]
MakeTrainer = Callable[..., Trainer]
TABLE = "item_tables.weight"
LARGE = ("model.tables.num_rows=5000", "model.tables.storage=fp16")

pytestmark = pytest.mark.usefixtures("torch_settings")


@pytest.fixture
def make_trainer(tmp_path: Path, tiny_config: Config, tiny_source: SequenceSource) -> MakeTrainer:
    """`make_trainer("a.b=c", run=None)`: a trainer with a table far larger than the data needs."""

    def make(*overrides: str, run: RunDirectory | None = None, start: StartConfig | None = None) -> Trainer:
        config = tiny_config(*LARGE, *overrides)
        config = dataclasses.replace(config, start=start or StartConfig())
        run = run or RunDirectory.create(tmp_path / "runs", config.name, config_to_json(config))
        return Trainer(config, RunDirectory.open(run.path), tiny_source)

    return make


def saved(trainer: Trainer, name: str = "latest") -> Any:
    return load_checkpoint(trainer.run.checkpoints / name)


def events(trainer: Trainer, name: str) -> list[int]:
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if entry["event"] == name]


def test_a_checkpoint_holds_the_moved_rows_and_the_key(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.save()
    trainer.saver.wait()
    first = saved(trainer)
    assert first.tensors["tables"][f"{TABLE}:rows"].numel() == 0
    assert sum(path.stat().st_size for path in first.path.iterdir()) < 40_000 < 2 * 5000 * 4 * 2
    trainer.train(quiet=True)
    last = saved(trainer)
    weight, fresh = trainer.model.item_tables.weight.detach(), trainer.model.item_tables.fresh
    assert last.state["format_version"] == 2
    assert last.state["fresh_rows"] == {TABLE: {"key": fresh.key, "std": fresh.std, "num_rows": 10_000}}
    table = stored_tables(last)[TABLE]
    assert isinstance(table, ChangedRows)
    assert torch.equal(whole_tensor(table, Path()), weight)
    moved, rows = fresh.differing(weight), table.rows_N.long()
    assert 0 < len(moved) <= len(rows) < 100 and set(moved.tolist()) <= set(rows.tolist())
    sums = trainer.optimizers.tables["item_tables"].sums
    assert torch.equal(last.tensors["optimizer"]["adagrad.item_tables:rows"].long(), sums.nonzero().view(-1))
    assert torch.equal(last.tensors["optimizer"]["adagrad.item_tables:values"], sums[sums != 0])


def test_a_resumed_run_ends_in_the_same_files(make_trainer: MakeTrainer) -> None:
    straight = make_trainer()
    straight.train(quiet=True)
    cut = make_trainer("training.steps=6")

    def stop(trainer: Trainer) -> None:
        if trainer.step == 4:
            raise MemoryError

    cut.on_checkpoint = stop
    with pytest.raises(MemoryError):
        cut.train(quiet=True)
    resumed = make_trainer(run=cut.run)
    resumed.train(quiet=True)
    for name in ("dense", "tables", "optimizer"):
        files = [saved(trainer).path / f"{name}.safetensors" for trainer in (straight, resumed)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert torch.equal(straight.model.item_tables.weight, resumed.model.item_tables.weight)


def test_the_key_of_the_checkpoint_counts(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a later version of the model draws another key."""
    trainer = make_trainer("training.steps=2")
    trainer.train(quiet=True)
    expected = trainer.model.item_tables.weight.detach().clone()
    monkeypatch.setattr("tackboard.models.tables.draw_key", lambda: 99)
    again = make_trainer("training.steps=2", run=trainer.run)
    assert not torch.equal(again.model.item_tables.weight, expected)
    again.train(quiet=True)
    assert torch.equal(again.model.item_tables.weight, expected)
    assert again.model.item_tables.fresh == trainer.model.item_tables.fresh


def test_a_row_without_a_sum_is_never_moved(make_trainer: MakeTrainer) -> None:
    """The square of 1e-30 is 0. If such a gradient moved a row, the checkpoint would not know of it."""
    trainer = make_trainer()
    table = trainer.model.item_tables
    with torch.no_grad():
        table.weight[7] = 0.0
    before = table.weight.detach().clone()
    trainer.optimizers.prepare(100)
    (table(torch.tensor([[7, 8]])) * 1e-30).sum().backward()
    assert not trainer.optimizers.tables["item_tables"].sums.any()
    assert torch.equal(table.weight, before)


def test_rows_that_a_run_began_with_are_kept(make_trainer: MakeTrainer) -> None:
    """Rows that neither are fresh nor have a sum: of a model that changes its own table, or of another run."""
    trainer = make_trainer("training.steps=2")
    with torch.no_grad():
        trainer.model.item_tables.weight[4321] = 5.0
    trainer.train(quiet=True)
    again = make_trainer("training.steps=4", run=trainer.run)
    again.train(quiet=True)
    table = stored_tables(saved(again))[TABLE]
    assert isinstance(table, ChangedRows) and 4321 in table.rows_N.tolist()
    assert torch.equal(table.whole(Path()), again.model.item_tables.weight)


@pytest.mark.parametrize("storage", ["fp16", "fp32"])
def test_a_run_that_starts_from_another_stores_few_rows_too(make_trainer: MakeTrainer, storage: str) -> None:
    """Unless it stores rows in another precision, in which no row equals a fresh row of its own."""
    first = make_trainer("training.steps=2")
    first.train(quiet=True)
    start = StartConfig(run=str(first.run.path))
    second = make_trainer("seed=3", "training.steps=2", f"model.tables.storage={storage}", start=start)
    fresh = second.model.item_tables.fresh
    second.train(quiet=True)
    table = stored_tables(saved(second))[TABLE]
    assert isinstance(table, ChangedRows) == (storage == "fp16")
    assert torch.equal(whole_tensor(table, Path()), second.model.item_tables.weight)
    assert (second.model.item_tables.fresh == first.model.item_tables.fresh) and fresh != first.model.item_tables.fresh
    again = make_trainer("seed=3", "training.steps=3", f"model.tables.storage={storage}", run=second.run)
    again.train(quiet=True)
    assert torch.equal(whole_tensor(stored_tables(saved(again))[TABLE], Path()), again.model.item_tables.weight)


def test_a_frozen_table_is_stored_as_it_began(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer('optimizer.multipliers={"item_tables.": 0}', "training.steps=2")
    trainer.train(quiet=True)
    table = stored_tables(saved(trainer))[TABLE]
    assert isinstance(table, ChangedRows) and not len(table.rows_N)
    assert "adagrad.item_tables:rows" not in saved(trainer).tensors["optimizer"]


class SlowStore(CheckpointStore):
    """A store whose writer waits until it may go on, and then fails if it shall."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()
        self.error: OSError | None = None

    def save(self, step: int, *arguments: Any, **options: Any) -> Path:
        if step:
            assert self.may_write.wait(20)
            if self.error is not None:
                raise self.error
        return super().save(step, *arguments, **options)


def slow_trainer(make_trainer: MakeTrainer, *overrides: str) -> tuple[Trainer, SlowStore]:
    trainer = make_trainer(*overrides)
    store = SlowStore(trainer.run.checkpoints)
    trainer.saver.store = store
    return trainer, store


def watch(trainer: Trainer, seen: Callable[[int], None]) -> None:
    honest = trainer._one_step

    def one_step(data_step: int, batch: Any) -> bool:
        seen(data_step)
        return honest(data_step, batch)

    trainer._one_step = one_step  # type: ignore[method-assign]


def test_training_goes_on_while_a_checkpoint_is_written(make_trainer: MakeTrainer) -> None:
    trainer, store = slow_trainer(make_trainer)
    weights: dict[int, torch.Tensor] = {}

    def seen(data_step: int) -> None:
        weights[data_step] = trainer.model.item_tables.weight.detach().clone()
        if data_step == 3:  # Two steps were done; the third began while the checkpoint of step 2 was not written.
            assert find_checkpoint(trainer.run.path).name == "step-00000000"
            assert events(trainer, "checkpoint") == [0]
            store.may_write.set()

    watch(trainer, seen)
    trainer.train(quiet=True)
    assert events(trainer, "checkpoint") == [0, 2, 4, 6]
    assert [path.name for path in store.complete()] == ["step-00000004", "step-00000006"]
    step_4 = whole_tensor(stored_tables(saved(trainer, "step-00000004"))[TABLE], Path())
    assert torch.equal(step_4, weights[4]) and not torch.equal(step_4, weights[5])


def test_a_failing_writer_stops_the_run_at_the_next_checkpoint(make_trainer: MakeTrainer) -> None:
    trainer, store = slow_trainer(make_trainer)
    store.error = OSError(28, os.strerror(28), "somewhere")
    store.may_write.set()
    with pytest.raises(StorageError, match="the checkpoint of step 2 could not be written: No space left on device"):
        trainer.train(quiet=True)
    assert trainer.step == 4
    assert trainer.run.status.startswith("failed: the checkpoint of step 2 could not be written")
    assert events(trainer, "checkpoint") == [0]


def test_a_failing_last_checkpoint_is_not_done(make_trainer: MakeTrainer) -> None:
    trainer, store = slow_trainer(make_trainer, "training.checkpoint_every=100")
    store.error = OSError(5, os.strerror(5))
    store.may_write.set()
    with pytest.raises(StorageError, match="the checkpoint of step 6"):
        trainer.train(quiet=True)
    assert trainer.run.status.startswith("failed")
    store.error = None
    trainer.save()  # the same step again, on a healthy disk
    trainer.saver.wait()
    assert find_checkpoint(trainer.run.path).name == "step-00000006"


def test_another_error_waits_for_the_checkpoint(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    for fails in (False, True):
        trainer, store = slow_trainer(make_trainer)
        store.error = OSError(5, os.strerror(5)) if fails else None

        def die(data_step: int, store: SlowStore = store) -> None:
            if data_step == 3:
                threading.Timer(0.1, store.may_write.set).start()
                raise MemoryError

        watch(trainer, die)
        with pytest.raises(MemoryError):
            trainer.train(quiet=True)
        assert find_checkpoint(trainer.run.path).name == ("step-00000000" if fails else "step-00000002")
        assert ("warning: the checkpoint of step 2" in capsys.readouterr().err) == fails


def test_a_full_disk_and_a_full_memory_are_found_before_writing(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
        with pytest.raises(StorageError, match="the checkpoint of step 0 .* No space left on device") as full:
            trainer.train(quiet=True)
    assert "and 1.0 kB are free; the checkpoints before it are intact" in full.value.allowed
    assert not trainer.store.complete()
    with monkeypatch.context() as patch:
        patch.setattr(saving, "available_memory_bytes", lambda: 1000)
        with pytest.raises(UsageError, match="the copy for the checkpoint of step 0 needs .* kB") as short:
            trainer.train(quiet=True)
    assert "are free" in short.value.allowed and str(trainer.run.path) in short.value.fix
    trainer.train(quiet=True)
    assert trainer.run.status == "done"


def test_the_memory_of_the_last_copy_serves_the_next_one(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process on a CPU keeps freed memory. The system counts this memory as used."""
    trainer = make_trainer()
    trainer.save()
    trainer.saver.wait()
    monkeypatch.setattr(saving, "available_memory_bytes", lambda: 100)
    monkeypatch.setattr(saving, "freed_memory_bytes", lambda: 0)
    trainer.step = 1
    with pytest.raises(UsageError, match="the copy for the checkpoint of step 1"):
        trainer.save()
    monkeypatch.setattr(saving, "freed_memory_bytes", lambda: 1 << 40)
    trainer.save()
    trainer.saver.wait()
    monkeypatch.setattr(saving, "LARGEST_KEPT_BYTES", 0)  # As if every tensor were too large to be kept.
    for trainer.step, is_refused in ((2, False), (3, True)):
        with pytest.raises(UsageError) if is_refused else contextlib.nullcontext():
            trainer.save()
        trainer.saver.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_a_run_on_a_gpu_stores_what_it_has(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("training.device=cuda", "training.compile=off")
    assert trainer.model.item_tables.weight.is_cuda
    trainer.train(quiet=True)
    table = stored_tables(saved(trainer))[TABLE]
    assert isinstance(table, ChangedRows)
    assert torch.equal(whole_tensor(table, Path()), trainer.model.item_tables.weight.cpu())
