"""The logic around CUDA graphs, with a stand-in for the graphs; tests/parity/test_step_graphs.py replays real ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tackboard.batch.batches import Batch
from tackboard.models.tables import HashedTables, TableConfig
from tackboard.train import step_graphs
from tackboard.train.optimizers import OptimizerConfig, Optimizers
from tackboard.train.step_graphs import StepReplay


@dataclasses.dataclass(frozen=True)
class Numbers(Batch):
    """A batch of one tensor."""

    items: torch.Tensor

    def num_examples(self) -> int:
        return len(self.items)


class FakeGraph:
    """Stands for a CUDA graph: what is recorded does not run, and a replay runs it with the recorded tensors."""

    current: Any = None

    def replay(self) -> None:
        self.run()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Replaces CUDA graphs. Returns the list to which steps write whether they ran as usual or in a graph."""
    found: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def record(graph: FakeGraph, **_: Any) -> Iterator[None]:
        FakeGraph.current = graph
        try:
            yield
        finally:
            FakeGraph.current = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    yield found


def make_replay(steps: list[tuple[str, int]]) -> StepReplay:
    def compute(batch: Numbers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        verdict = torch.zeros(1)

        def run(way: str) -> None:
            steps.append((way, int(batch.items.sum())))
            verdict.fill_(float(batch.items.sum()))

        if FakeGraph.current is None:
            run("as usual")
        else:
            FakeGraph.current.run = lambda: run("in a graph")
        return verdict, {"items": verdict}

    return StepReplay(compute, contextlib.nullcontext)


def batch_of(number: int, size: int = 4) -> Numbers:
    return Numbers(torch.arange(size) + number)


def test_the_second_step_of_a_shape_is_recorded_and_later_ones_read_their_own_batch(steps: list) -> None:
    run = make_replay(steps)
    others = [batch_of(number) for number in range(4)]
    verdicts = [run(batch)[0] for batch in others]
    sums = [int(batch.items.sum()) for batch in others]
    assert steps == [("as usual", sums[0]), *(("in a graph", total) for total in sums[1:])]
    assert [int(verdict) for verdict in verdicts] == sums, "a verdict outlives the next replay"
    assert run.num_graphs == 1


def test_another_shape_runs_as_usual_first_and_a_dropped_recording_begins_again(steps: list) -> None:
    run = make_replay(steps)
    for batch in (batch_of(0), batch_of(0), batch_of(1, 7), batch_of(0)):
        run(batch)
    run.forget()
    run(batch_of(0))
    assert [way for way, _ in steps] == ["as usual", "in a graph", "as usual", "in a graph", "as usual"]


def test_only_so_many_shapes_are_recorded(steps: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 1)
    run = make_replay(steps)
    for batch in (batch_of(0), batch_of(0), batch_of(1, 7), batch_of(1, 7)):
        run(batch)
    assert [way for way, _ in steps] == ["as usual", "in a graph", "as usual", "as usual"]


def test_a_step_that_cannot_be_recorded_runs_as_usual(
    steps: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    run = make_replay(steps)
    for _ in range(3):
        run(batch_of(0))
    assert [way for way, _ in steps] == ["as usual"] * 3
    said = capsys.readouterr().err
    assert said.count("not replayed as CUDA graphs") == 1
    assert "operation not permitted" in said


def test_a_recording_that_fails_leaves_no_gradients(steps: list) -> None:
    """For example, memory may run out in the middle. The gradients of a recording were never computed."""
    ends = []
    for is_replayed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([HashedTables(TableConfig(num_hashes=1, num_rows=8, dim=2)), torch.nn.Linear(2, 1)])
        optimizers = Optimizers(model, OptimizerConfig(), total_steps=5)

        def compute(batch: Numbers, model: Any = model, optimizers: Optimizers = optimizers) -> Any:
            model[1](model[0](batch.items[:, None])).sum().backward()
            if FakeGraph.current is not None:
                raise torch.OutOfMemoryError("no memory")
            optimizers.step()
            return torch.zeros(1), {}

        step = StepReplay(compute, optimizers.recording) if is_replayed else compute
        for number in range(3):
            optimizers.prepare(number)
            step(batch_of(0))
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0)
