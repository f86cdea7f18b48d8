"""Saving by several processes: each writes its rows, and any number of processes loads the same bits again.

A rank is a thread here, and a sharded table is made of plain tensors.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tackboard.checkpoint.store import CheckpointStore, load_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_optimizer, stored_tables
from tackboard.core import files
from tackboard.core.errors import CorruptFileError, DivergedError, StorageError, TackboardError, UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.models.changed_rows import ChangedRows, whole_tensor
from tackboard.models.table_pieces import Piece
from tackboard.models.tables import HashedTables, TableConfig
from tackboard.ops.fresh_rows import FreshRows
from tackboard.parallel.training_world import TrainingWorld
from tackboard.train import saving
from tackboard.train.optimizers import OptimizerConfig, Optimizers
from tackboard.train.saving import Saver

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v2"
K, R, D = 3, 50, 4
TABLE = "tables.weight"
TYPES = {"fp32": torch.float32, "fp16": torch.float16}


class Shards(nn.Module):
    """A table of which this process holds some ranges of rows. Its tensors are outside of the module's state."""

    def __init__(self, ranges: Sequence[tuple[int, int]], storage: str) -> None:
        super().__init__()
        self.fresh = FreshRows(17, 0.1)
        self.num_rows_in_all, self.dim, self.dtype = K * R, D, TYPES[storage]
        self.pieces = []
        for start, end in ranges:
            rows = torch.empty(end - start, D, dtype=self.dtype)
            self.fresh.fill(rows, start)
            self.pieces.append(Piece(start, rows, torch.zeros(end - start)))


def row_wise(rank: int, size: int) -> list[tuple[int, int]]:
    each = -(-R // size)
    return [(k * R + min(R, rank * each), k * R + min(R, (rank + 1) * each)) for k in range(K)]


def table_wise(rank: int, size: int) -> list[tuple[int, int]]:
    return [(k * R, (k + 1) * R) for k in range(K) if k % size == rank]


class Meeting:
    """Where the threads that stand for ranks exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)


@dataclasses.dataclass(frozen=True)
class Ranks(TrainingWorld):
    meeting: Meeting | None = None

    def gather(self, value: Any) -> list[Any]:
        assert self.meeting is not None
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        found = list(self.meeting.values)
        self.meeting.barrier.wait()
        return found


class Process:
    """What one process of a run has."""

    def __init__(self, run: RunDirectory, world: TrainingWorld, table: nn.Module, token: str, timeout_s: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.tables = table
        self.model.dense = nn.Linear(3, 2)
        self.optimizers = Optimizers(self.model, OptimizerConfig(), 10)
        self.store = CheckpointStore(run.checkpoints)
        self.saver = Saver(self.model, self.optimizers, self.store, run, world=world, token=token, timeout_s=timeout_s)

    @property
    def pieces(self) -> list[Piece]:
        return self.saver._pieces(TABLE)

    def move(self, step: int) -> None:
        """Stands for training: moves the dense parameters and the same rows in any layout."""
        self.optimizers.prepare(step)
        self.model.dense(torch.ones(3)).sum().backward()  # type: ignore[operator]
        self.optimizers.adamw.step()
        for piece in self.pieces:
            assert piece.sums_R is not None
            for row in range(step % 11, K * R, 11):
                if 0 <= row - piece.first_row < len(piece.rows_Rd):
                    piece.rows_Rd[row - piece.first_row] = row + step / 8
                    piece.sums_R[row - piece.first_row] += row + step + 1

    def save(self, step: int) -> None:
        state = json.loads((GOLDEN / "state.json").read_text())
        state |= {"step": step, "fresh_rows": self.saver.describe()}
        self.saver.save(step, state, {"features.json": {"x": 1}}, None)
        self.saver.wait()


class Job:
    """The processes of one start of a run."""

    def __init__(
        self,
        run: RunDirectory,
        size: int,
        layout: Callable[[int, int], list[tuple[int, int]]] = row_wise,
        *,
        storage: str = "fp32",
        token: str = "job",
        timeout_s: float = 20.0,
    ) -> None:
        meeting = Meeting(size)
        self.run, self.processes = run, []
        for rank in range(size):
            world = Ranks(rank=rank, size=size, meeting=meeting)
            table: nn.Module = Shards(layout(rank, size), storage)
            if size == 1:
                table = HashedTables(TableConfig(num_hashes=K, num_rows=R, dim=D, storage=storage))
            self.processes.append(Process(run, world, table, token, timeout_s))

    def all(self, do: Callable[[Process], None]) -> list[BaseException | None]:
        """Does something in all processes at once; returns the error of each."""
        errors: list[BaseException | None] = [None] * len(self.processes)

        def one(rank: int) -> None:
            try:
                do(self.processes[rank])
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                errors[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.processes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return errors

    def save(self, step: int) -> Any:
        errors = self.all(lambda process: process.save(step))
        assert not any(errors), errors
        return load_trained(self.run.checkpoints / "latest", ("dense", "tables", "optimizer"))

    def load(self) -> None:
        for process in self.processes:
            process.saver.load(load_trained(self.run.checkpoints / "latest", ("dense", "tables", "optimizer")))

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and sums of the whole table, put together from all processes."""
        weights, sums = torch.full((K * R, D), torch.nan, dtype=self.processes[0].pieces[0].rows_Rd.dtype), []
        sums = torch.full((K * R,), torch.nan)
        for process in self.processes:
            for piece in process.pieces:
                assert piece.sums_R is not None
                place = slice(piece.first_row, piece.first_row + len(piece.rows_Rd))
                weights[place], sums[place] = piece.rows_Rd, piece.sums_R
        assert not weights.isnan().any()
        return weights, sums


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "small", {})


def as_stored(checkpoint: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tables, optimizer = stored_tables(checkpoint), stored_optimizer(checkpoint)
    return whole_tensor(tables[TABLE], Path()), whole_tensor(optimizer["adagrad.tables"], Path())


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("storage", TYPES)
@pytest.mark.parametrize("layouts", [(row_wise, table_wise), (table_wise, row_wise)])
def test_any_number_of_processes_loads_the_same_bits(run: RunDirectory, storage: str, layouts: Any) -> None:
    """3 → 2 → 1 → 4, and some rows that a run begins with without a sum. 4 table-wise: one has no piece at all."""
    job = Job(run, 3, layouts[0], storage=storage)
    for process in job.processes:
        for piece in process.pieces:
            if piece.first_row <= 40 < piece.first_row + len(piece.rows_Rd):
                piece.rows_Rd[40 - piece.first_row] = 0.25
    job.all(lambda process: process.saver.begin())
    for number, size in enumerate((3, 2, 1, 4)):
        if number:
            before = job.whole()
            moments = job.processes[-1].optimizers.state()
            job = Job(run, size, layouts[number % 2], storage=storage, token=f"job{number}")
            job.load()
            assert same(job.whole(), before)
            for process in job.processes:
                found = process.optimizers.state()
                assert all(torch.equal(found[name], moments[name]) for name in found if name.startswith("adamw."))
        for process in job.processes:
            process.move(number)
        checkpoint = job.save(number)
        assert same(as_stored(checkpoint), job.whole())
        assert checkpoint.state["format_version"] == (2 if size == 1 else 3)
        assert checkpoint.state.get("num_parts", 1) == size
        table = stored_tables(checkpoint)[TABLE]
        assert isinstance(table, ChangedRows)
        rows = sorted(row for part in table.parts for row in part.rows_N.tolist())
        moved = {row for step in range(number + 1) for row in range(step % 11, K * R, 11)}
        assert rows == sorted(moved | {40}), "no other row is written"
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    assert sorted(path.name for path in run.checkpoints.glob("step-00000003/*.safetensors")) == sorted(
        ["dense.safetensors", "optimizer.safetensors"]
        + [f"{group}-r{rank:05d}.safetensors" for group in ("tables", "optimizer") for rank in range(4)]
    )


def test_one_process_with_several_pieces_writes_what_one_table_does(run: RunDirectory, tmp_path: Path) -> None:
    one = Job(run, 1)
    other = RunDirectory.create(tmp_path / "other", "small", {})
    two = Process(other, TrainingWorld(), Shards(row_wise(0, 1), "fp32"), "", 1.0)
    assert len(two.pieces) == K
    table = one.processes[0].saver.tables[TABLE]
    table.fresh = FreshRows(17, 0.1)
    table.fresh.fill(table.pieces[0].rows_Rd)
    for step in range(10):  # In the end so many rows are moved that the whole table is smaller.
        for process in (*one.processes, two):
            process.move(step)
            process.save(step)
        for name in ("dense", "tables", "optimizer", "state"):
            paths = [r.checkpoints / "latest" / f"{name}.safetensors" for r in (run, other)]
            paths = paths if name != "state" else [path.with_name("state.json") for path in paths]
            assert paths[0].read_bytes() == paths[1].read_bytes()
    assert isinstance(stored_tables(load_checkpoint(other.checkpoints / "latest"))[TABLE], torch.Tensor)


def test_rows_of_another_precision_are_all_written(run: RunDirectory) -> None:
    first = Job(run, 2, storage="fp16")
    first.processes[0].move(1)
    first.save(1)
    second = Job(run, 3, storage="fp32", token="second")
    second.load()
    checkpoint = second.save(2)
    assert same(as_stored(checkpoint), second.whole())
    assert sum(len(part.rows_N) for part in stored_tables(checkpoint)[TABLE].parts) == K * R


def test_a_number_that_is_not_finite_stops_all_with_one_error(run: RunDirectory) -> None:
    job = Job(run, 3)
    job.save(0)
    piece = job.processes[2].pieces[1]
    assert piece.sums_R is not None
    piece.rows_Rd[3], piece.sums_R[3] = torch.nan, 1.0
    errors = job.all(lambda process: process.save(1))
    assert {str(error) for error in errors} == {str(errors[0])}
    assert isinstance(errors[0], DivergedError) and "tables.weight holds non-finite values at step 1" in str(errors[0])
    assert job.run.checkpoints.joinpath("latest").resolve().name == "step-00000000"


def test_too_little_room_stops_all_with_one_error(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(run, 2)
    for process in job.processes:
        process.move(1)
    with monkeypatch.context() as patch:
        patch.setattr(saving.shutil, "disk_usage", lambda _path: type("", (), {"free": 100}))
        errors = job.all(lambda process: process.save(1))
        assert all(isinstance(error, StorageError) for error in errors) and str(errors[0]) == str(errors[1])
    with monkeypatch.context() as patch:
        patch.setattr(saving, "available_memory_bytes", lambda: 10)
        errors = job.all(lambda process: process.save(1))
        assert all(isinstance(error, UsageError) for error in errors) and "the copy of rank 0" in str(errors[1])
    job.save(1)


def fail_at(point: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the writer that comes to a point fail there. Returns the points that are passed."""
    passed = []

    def observer(reached: str) -> None:
        passed.append(reached)
        if reached == point:
            raise OSError(5, "Input/output error", point)

    monkeypatch.setattr(files, "observer", observer)
    return passed


@pytest.mark.parametrize(
    "point",
    ["tables-r00002.safetensors:before-write", "optimizer-r00002.safetensors:after-fsync", "r00002:before-seal"],
)
def test_a_part_that_is_missing_is_named_within_the_time_limit(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    job = Job(run, 3, timeout_s=0.4)
    job.save(0)
    with monkeypatch.context() as patch:
        fail_at(point, patch)
        errors = job.all(lambda process: process.save(1))
    assert all(isinstance(error, StorageError) for error in errors), errors
    assert "rank 2 of 3 has not written its part within 0.4 s" in str(errors[0])
    assert "rank 0 of 3 has not put it together" in str(errors[1])
    assert "Input/output error" in str(errors[2]) and "step 1 could not be written" in str(errors[2])
    assert job.run.checkpoints.joinpath("latest").resolve().name == "step-00000000"
    # The same processes try again, beside what is left of the first attempt.
    for process in job.processes:
        process.saver.timeout_s = 20.0
        process.move(1)
    assert same(as_stored(job.save(1)), job.whole())
    job.processes[0].store.clean()
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


def test_parts_of_a_killed_run_are_not_taken(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Job(run, 2, timeout_s=0.2)
    killed.processes[1].move(5)
    with monkeypatch.context() as patch:
        fail_at("tables-r00000.safetensors:before-write", patch)
        assert all(killed.all(lambda process: process.save(4)))
    (left,) = run.checkpoints.glob(".step-00000004.parts-*")
    assert (left / "r00001" / "MANIFEST.json").is_file()
    job = Job(run, 2, token="again")
    checkpoint = job.save(4)
    assert same(as_stored(checkpoint), job.whole()) and not same(job.whole(), killed.whole())
    assert left.exists()
    job.processes[0].store.clean()
    assert not left.exists()


def test_a_step_that_is_saved_already_is_kept(run: RunDirectory) -> None:
    job = Job(run, 2)
    job.save(1)
    again = Job(run, 2, token="again")
    again.processes[1].move(3)
    assert same(as_stored(again.save(1)), job.whole())
    assert not list(run.checkpoints.glob(".step-*"))


def test_a_flipped_bit_in_any_file_is_found(run: RunDirectory) -> None:
    job = Job(run, 3)
    for process in job.processes:
        process.move(1)
    path = job.save(1).path
    names = sorted(each.name for each in path.iterdir())
    assert len(names) == 2 + 6 + 3
    for name in names:
        data = bytearray(path.joinpath(name).read_bytes())
        data[len(data) // 2] ^= 4
        path.joinpath(name).write_bytes(data)
        with pytest.raises(CorruptFileError, match=name):
            load_trained(path, ("dense", "tables", "optimizer"))
        data[len(data) // 2] ^= 4
        path.joinpath(name).write_bytes(data)
    load_trained(path, ("dense", "tables", "optimizer"))


def test_a_bit_that_flips_between_two_processes_is_found(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(run, 2, timeout_s=0.4)
    job.processes[1].move(1)

    def flip(point: str) -> None:
        if point == "tables-r00001.safetensors:before-move":
            (path,) = run.checkpoints.glob(".step-*/r00001/tables-r00001.safetensors")
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(files, "observer", flip)
    errors = job.all(lambda process: process.save(1))
    assert isinstance(errors[0], StorageError) and "tables-r00001.safetensors has changed since" in str(errors[0])
    assert isinstance(errors[1], TackboardError)
    assert not list(run.checkpoints.glob("step-*"))
