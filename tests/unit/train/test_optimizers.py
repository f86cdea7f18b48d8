"""Optimisers: row-wise Adagrad against a plain loop, in every storage; clipping, the schedule, state that is kept."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from tackboard.core.errors import ConfigError
from tackboard.core.hashing import string_id
from tackboard.models.tables import STORAGES, HashedTables, TableConfig
from tackboard.ops.stochastic_rounding import rounding_key, stochastic_round
from tackboard.train.optimizers import OptimizerConfig, Optimizers, RowWiseAdagrad, learning_rate_shares


class Model(nn.Module):
    """One table, one matrix, one vector, one frozen matrix."""

    def __init__(self, storage: str = "fp32") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = HashedTables(TableConfig(num_hashes=2, num_rows=6, dim=3, storage=storage))
        self.linear = nn.Linear(6, 4)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    def loss(self, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self.linear(self.table(rows)).square().sum()


def batch_of(step: int) -> torch.Tensor:
    return torch.tensor([[step % 6, 1], [2, (3 * step) % 6], [2, 1]])


HALVES = ("fp16", "bf16")


def train(model: Model, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        optimizers.prepare(step)
        model.loss(batch_of(step)).backward()
        optimizers.clip()
        optimizers.step()


KEEP = torch.tensor(True)


def table_of(weight: torch.Tensor) -> HashedTables:
    table = HashedTables(TableConfig(num_hashes=1, num_rows=len(weight), dim=weight.shape[1]))
    table.load_state_dict({"weight": weight})
    return table


def test_row_wise_adagrad_equals_a_plain_loop() -> None:
    torch.manual_seed(0)
    table = table_of(torch.randn(5, 3))
    expected, sums = table.weight.detach().clone().double(), [0.0] * 5
    adagrad = RowWiseAdagrad(table, clip_element=0.8)
    for step in range(4):
        adagrad.learning_rate.fill_(0.1 * (step + 1))
        rows = torch.tensor([step, 3, 3])
        factors = torch.randn(3, 3)
        (table(rows[:, None]) * factors).sum().backward()
        adagrad.apply(KEEP)
        gradient = torch.zeros(5, 3, dtype=torch.float64)
        for row, factor in zip(rows.tolist(), factors, strict=True):
            gradient[row] += factor
        for row in {step, 3}:
            clipped = [max(-0.8, min(0.8, float(value))) for value in gradient[row]]
            sums[row] += sum(value * value for value in clipped) / 3
            for column, value in enumerate(clipped):
                expected[row, column] -= 0.1 * (step + 1) * value / (math.sqrt(sums[row]) + 1e-8)
    assert torch.allclose(table.weight.detach().double(), expected, atol=1e-6)
    assert adagrad.sums.tolist() == pytest.approx(sums, abs=1e-6)
    assert table.pending == [] and table.weight.grad is None


@pytest.mark.parametrize("kind", ["two lookups", "two passes", "sparse", "dense", "tied"])
def test_gradients_of_all_kinds_add_up(kind: str) -> None:
    """One lookup of three rows, or the same rows read in two lookups, in two passes or by other means than a lookup."""
    tables = [table_of(torch.arange(12.0).view(4, 3)) for _ in range(2)]
    optimizers = [RowWiseAdagrad(table, clip_element=100.0) for table in tables]
    tables[0](torch.tensor([[1], [1], [3]])).square().sum().backward()
    one = tables[1]
    if kind == "two lookups":
        (one(torch.tensor([[1]])).square().sum() + one(torch.tensor([[3], [1]])).square().sum()).backward()
    elif kind == "two passes":
        one(torch.tensor([[1]])).square().sum().backward()
        one(torch.tensor([[1], [3]])).square().sum().backward()
    elif kind == "tied":
        (one(torch.tensor([[1], [1]])).square().sum() + one.weight[3].square().sum()).backward()
    else:
        rows = torch.tensor([1, 1, 3])
        nn.functional.embedding(rows, one.weight, sparse=kind == "sparse").square().sum().backward()
    for optimizer in optimizers:
        optimizer.learning_rate.fill_(0.5)
        optimizer.apply(KEEP)
    assert tables[0].weight.detach()[1].tolist() != [3.0, 4.0, 5.0]
    assert torch.equal(tables[0].weight, one.weight)
    assert torch.equal(optimizers[0].sums, optimizers[1].sums)


def test_gradients_that_are_not_kept_or_are_dropped_change_nothing() -> None:
    table = table_of(torch.ones(4, 3))
    optimizer = RowWiseAdagrad(table, clip_element=1.0)
    optimizer.learning_rate.fill_(0.5)
    for forget in (lambda: optimizer.apply(torch.tensor(False)), optimizer.drop):
        table(torch.tensor([[2]])).sum().backward()
        assert len(table.pending) == 1
        forget()
        optimizer.apply(KEEP)  # nothing is left
        assert torch.equal(table.weight, torch.ones(4, 3)) and not optimizer.sums.any()


def shares_of(steps: Iterable[int], total_steps: int, config: OptimizerConfig) -> list[float]:
    """The shares of the peak rate as numbers."""
    return learning_rate_shares(torch.tensor(list(steps)), total_steps, config).tolist()


def test_schedule_rises_then_falls_to_its_share() -> None:
    config = OptimizerConfig(warmup_steps=4, final_share=0.1)
    shares = shares_of(range(105), 104, config)
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4] == 1.0
    assert shares[54] == pytest.approx(0.1 + 0.9 / 2)
    assert shares[104] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(shares[4:]))
    assert shares_of([0], 1, OptimizerConfig(warmup_steps=0)) == [1.0]
    assert 0 < shares_of([9], 10, OptimizerConfig(warmup_steps=50))[0] < 1  # shorter than its warm-up


def test_rates_reach_both_optimisers() -> None:
    config = OptimizerConfig(warmup_steps=2, dense_learning_rate=0.01, table_learning_rate=0.2)
    optimizers = Optimizers(Model(), config, total_steps=10)
    optimizers.prepare(0)
    optimizers.step()
    assert float(optimizers.share) == 0.5
    assert float(optimizers.tables["table"].learning_rate) == pytest.approx(0.1)
    assert [group["lr"] for group in optimizers.adamw.param_groups] == [0.005, 0.005]


def test_a_step_that_is_not_kept_moves_nothing_and_uses_no_step_of_the_schedule() -> None:
    plain, judged = Model(), Model()
    judged.load_state_dict(plain.state_dict())
    config = OptimizerConfig(warmup_steps=3)
    optimizers = [Optimizers(model, config, total_steps=10) for model in (plain, judged)]
    train(plain, optimizers[0], range(2))
    for step, keep in ((0, True), (7, False), (1, True)):
        optimizers[1].prepare(step)
        judged.loss(batch_of(step)).backward()
        optimizers[1].clip()
        optimizers[1].step(torch.tensor(keep))
    assert int(optimizers[1].applied) == 2
    assert all(torch.equal(mine, other) for mine, other in zip(plain.parameters(), judged.parameters(), strict=True))
    assert float(optimizers[1].share) == float(optimizers[0].share) == pytest.approx(2 / 3)


def test_only_dense_matrices_are_decayed_and_frozen_ones_left_out() -> None:
    optimizers = Optimizers(Model(), OptimizerConfig(weight_decay=0.3), total_steps=10)
    matrices, others = optimizers.adamw.param_groups
    assert [tuple(p.shape) for p in matrices["params"]] == [(4, 6)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,)]
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert set(optimizers.dense) == {"linear.weight", "linear.bias"}


def test_dense_gradients_are_clipped_by_global_norm_and_the_norm_before_is_returned() -> None:
    model = Model()
    optimizers = Optimizers(model, OptimizerConfig(clip_norm=0.5), total_steps=10)
    optimizers.prepare(0)
    model.loss(batch_of(0), scale=100.0).backward()
    gradients = [p.grad for p in optimizers.dense.values() if p.grad is not None]
    before = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert float(optimizers.clip()) == pytest.approx(before, rel=1e-5)
    assert math.sqrt(sum(float(g.square().sum()) for g in gradients)) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_continued_from_its_state_is_bit_identical(storage: str) -> None:
    config = OptimizerConfig(warmup_steps=3)
    straight = Model(storage)
    train(straight, Optimizers(straight, config, 10, seed=4), range(10))

    first = Model(storage)
    optimizers = Optimizers(first, config, 10, seed=4)
    train(first, optimizers, range(4))
    state = {name: tensor.clone() for name, tensor in optimizers.state().items()}
    parameters = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    train(first, optimizers, range(4, 6))  # goes on, so that a shared tensor would spoil the copy below

    second = Model(storage)
    second.load_state_dict(parameters)
    resumed = Optimizers(second, config, 10, seed=4)
    resumed.load_state(state)
    resumed.applied.fill_(4)
    assert {name: t.tolist() for name, t in resumed.state().items()} == {name: t.tolist() for name, t in state.items()}
    train(second, resumed, range(4, 10))
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize("storage", HALVES)
def test_a_half_table_is_updated_in_fp32_and_rounded_by_seed_step_and_row(storage: str) -> None:
    """Against a plain loop that computes each row's update in fp32 and rounds that row alone."""
    model = Model(storage)
    config = OptimizerConfig(warmup_steps=2, clip_table_element=0.3)
    optimizers = Optimizers(model, config, 5, seed=11)
    dtype, sums = STORAGES[storage], torch.zeros(12)
    for step in range(5):
        before, dense = model.table.weight.detach().clone(), copy.deepcopy(model.linear)
        optimizers.prepare(step)
        share = float(optimizers.schedule[step])
        model.loss(batch_of(step)).backward()
        rows = batch_of(step) + torch.tensor([0, 6])
        vectors = torch.stack([before[pair].flatten() for pair in rows]).float().requires_grad_()
        dense(vectors).square().sum().backward()
        assert vectors.grad is not None
        gradient = torch.zeros(12, 3)
        for pair, value in zip(rows, vectors.grad.view(3, 2, 3), strict=True):
            for row, part in zip(pair.tolist(), value, strict=True):
                gradient[row] += part
        expected, key = before.clone(), rounding_key(11, step, string_id("table"))
        for row in sorted(set(rows.flatten().tolist())):
            clipped = gradient[row].clamp(-0.3, 0.3)
            sums[row] += clipped.square().mean()
            moved = before[row].float() - share * config.table_learning_rate * clipped / (sums[row].sqrt() + 1e-8)
            expected[row] = stochastic_round(moved[None], dtype, torch.tensor([row]), key)[0]
        optimizers.clip()
        assert torch.equal(model.table.weight, before)
        optimizers.step()
        assert torch.equal(model.table.weight, expected), step


@pytest.mark.parametrize(("storage", "tolerance"), [("fp16", 0.01), ("bf16", 0.05)])
def test_a_half_table_goes_where_the_full_one_goes(storage: str, tolerance: float) -> None:
    """Hundreds of updates below the gap of the format: on average they arrive; rounded to nearest, none would."""
    moved = {}
    for kind in ("fp32", storage):
        torch.manual_seed(0)
        table = HashedTables(TableConfig(num_hashes=1, num_rows=200, dim=4, storage=kind))
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizers = Optimizers(table, OptimizerConfig(table_learning_rate=0.004, warmup_steps=0), 300)
        for step in range(300):
            optimizers.prepare(step)
            table(torch.arange(200)[:, None]).sum().backward()
            optimizers.step()
        moved[kind] = float(table.weight.detach().float().mean()) - 1.0
    assert moved["fp32"] < -0.05
    assert moved[storage] == pytest.approx(moved["fp32"], rel=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
@pytest.mark.parametrize("storage", STORAGES)
def test_a_table_trains_on_the_gpu_as_on_the_cpu(storage: str) -> None:
    """Rows looked up once have the same gradient on both, so the same bits; sums over repeats may be rounded apart."""
    weights, losses = [], []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        table = HashedTables(TableConfig(num_hashes=4, num_rows=5000, dim=16, storage=storage)).to(device)
        optimizers = Optimizers(table, OptimizerConfig(warmup_steps=0), 40, seed=3)
        target = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)).to(device)
        rows = torch.stack(
            [torch.randperm(5000, generator=torch.Generator().manual_seed(n))[:500] for n in range(4)], 1
        )
        for step in range(40):
            optimizers.prepare(step)
            loss = (table(rows.to(device)) - target).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            optimizers.step()
            if step == 0:
                weights.append(table.weight.detach().clone().cpu())
        assert table.weight.device.type == device
        assert losses[-1] < 0.2 * losses[-40]
    torch.testing.assert_close(weights[0], weights[1], rtol=2e-2 if storage == "bf16" else 2e-3, atol=1e-4)
    assert losses[:40] == pytest.approx(losses[40:], rel=0.02)


def test_a_frozen_table_stays_where_it_is() -> None:
    model = Model()
    model.table.requires_grad_(requires_grad=False)
    before = model.table.weight.clone()
    optimizers = Optimizers(model, OptimizerConfig(), 10)
    train(model, optimizers, range(3))
    assert torch.equal(model.table.weight, before)
    assert model.table.pending == []
    assert "table.weight" not in optimizers.dense
    assert not any(name.startswith("adagrad") for name in optimizers.state())


def test_multipliers_find_a_table_by_its_parameter_and_freeze_only_what_stands_still() -> None:
    model = nn.ModuleDict({"p": Model()})
    shares = {"p.": 0.0, "p.table.weight": 0.1, "p.linear.": 0.5}
    optimizers = Optimizers(model, OptimizerConfig(multipliers=shares, warmup_steps=0, final_share=1.0), 10)
    optimizers.prepare(0)
    optimizers.step()
    assert float(optimizers.tables["p.table"].learning_rate) == pytest.approx(
        0.1 * OptimizerConfig().table_learning_rate
    )
    assert optimizers.frozen == [], "what moves is inside of p"
    still = nn.ModuleDict({"p": Model(), "q": nn.Linear(2, 2)})
    assert Optimizers(still, OptimizerConfig(multipliers={"p.": 0.0}), 10).frozen == [*still["p"].modules()]


def test_the_cosine_may_end_before_or_after_the_run() -> None:
    config = OptimizerConfig(warmup_steps=4, final_share=0.1, schedule_steps=54)
    until = shares_of(range(55), 54, dataclasses.replace(config, schedule_steps=0))
    assert shares_of(range(55), 104, config) == until
    assert set(shares_of(range(54, 104), 104, config)) == {0.1}
    assert shares_of(range(20), 20, config) == until[:20]  # stopped early


def test_going_back_to_a_state_without_moments_forgets_them() -> None:
    """A roll-back to step 0 must not keep the moments of the steps that are taken back."""
    model = Model()
    optimizers = Optimizers(model, OptimizerConfig(), 10)
    fresh = {name: tensor.clone() for name, tensor in optimizers.state().items()}
    train(model, optimizers, range(3))
    optimizers.load_state(fresh)
    assert set(optimizers.state()) == set(fresh) == {"adagrad.table"}
    assert not optimizers.tables["table"].sums.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dense_learning_rate": 0.0},
        {"clip_norm": -1.0},
        {"final_share": 1.5},
        {"warmup_steps": -1},
        {"schedule_steps": -1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OptimizerConfig(**wrong)  # type: ignore[arg-type]
