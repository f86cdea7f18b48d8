"""Tables that several processes share. How they train is tested in tests/dist/test_training.py, with real processes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tackboard.core.errors import ConfigError, UsageError
from tackboard.models.tables import HashedTables, TableConfig, rows_on
from tackboard.parallel.config import ParallelConfig
from tackboard.parallel.sharded_tables import RowsUpdate, plan_of, shard_tables
from tackboard.parallel.training_world import TrainingWorld


class Pair(TrainingWorld):
    """The first of two processes, which never waits for the second."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def model_of(**settings: Any) -> torch.nn.Module:
    with rows_on("meta"):
        return torch.nn.ModuleDict({"tables": HashedTables(TableConfig(num_hashes=2, num_rows=10, **settings))})


PAIR = Pair(rank=0, size=2, local_size=2)


def test_the_plan_says_who_holds_what() -> None:
    plan = plan_of(model_of(dim=8), PAIR, ParallelConfig())
    assert [(block.first_row, block.num_rows) for block in plan.blocks[1]] == [(5, 5), (5, 5)]
    with pytest.raises(ConfigError, match="multiple of 4"):
        plan_of(model_of(dim=6), PAIR, ParallelConfig())


def test_without_torchrec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchrec", "fbgemm_gpu", "fbgemm_gpu.split_embedding_configs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="make distributed"):
        shard_tables(model_of(dim=8), PAIR, ParallelConfig())


def test_a_model_without_tables_needs_nothing() -> None:
    assert shard_tables(torch.nn.Linear(1, 1), PAIR, ParallelConfig()) == {}


def looked_up(gradient: list[float] | None) -> tuple[Any, torch.Tensor]:
    """Stand-ins: tables whose lookup is a tensor that remembers its gradient, as TorchRec's would send it."""
    rows = torch.zeros(1, 2, requires_grad=True)
    vectors = rows * 1.0
    leaf = vectors.detach().requires_grad_()
    leaf.grad = None if gradient is None else torch.tensor([gradient])
    tables = SimpleNamespace(pending=[(vectors, leaf)], set_learning_rate=lambda rate: None)
    return tables, rows


@pytest.mark.parametrize(
    ("gradient", "keep", "sent"),
    [
        ([0.5, -3.0], True, [0.5, -1.0]),
        ([0.5, -3.0], False, [0.0, 0.0]),
        ([float("nan"), float("inf")], False, [0.0, 0.0]),
        (None, True, [0.0, 0.0]),
    ],
)
def test_gradients_are_clipped_and_sent_only_if_the_step_is_good(
    gradient: list[float] | None, keep: bool, sent: list[float]
) -> None:
    tables, rows = looked_up(gradient)
    RowsUpdate(tables, clip_element=1.0).apply(torch.tensor(keep))
    assert rows.grad is not None and rows.grad.tolist() == [sent]
    assert tables.pending == []


def test_a_new_step_forgets_old_lookups() -> None:
    tables, rows = looked_up([1.0, 1.0])
    RowsUpdate(tables, clip_element=1.0).prepare(0.1)
    assert tables.pending == [] and rows.grad is None
