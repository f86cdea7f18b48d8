"""The parts that processes contribute to a loss, to gradients and to figures. Other processes are played by a world."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tackboard.models.interface import LossOutput
from tackboard.parallel.gradients import GradientSum, mean_figures, part_of_mean
from tackboard.parallel.training_world import ALONE, TrainingWorld

InRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class WithAnother(TrainingWorld):
    """A world of two processes. The other one gives `other` in each sum, and `told` in each gathering."""

    size: int = 2
    other: float = 0.0
    told: Any = None

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(self.other)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.told]


def test_a_mean_counts_by_its_examples() -> None:
    output = LossOutput(torch.tensor(4.0), {})
    part, total = part_of_mean(output, 3, WithAnother(other=9.0))
    assert (float(part), float(total)) == (1.0, 12.0)
    part, total = part_of_mean(output._replace(weight=torch.tensor(1.0)), 3, WithAnother(other=9.0))
    assert float(part) == pytest.approx(0.4)
    assert float(total) == 10.0
    part, total = part_of_mean(output, 3, ALONE)
    assert (float(part), float(total)) == (4.0, 3.0)


def test_the_mean_of_nothing_counts_nothing() -> None:
    weight = torch.ones(2, requires_grad=True)
    nothing = weight[:0].mean()
    assert nothing.isnan()
    part, total = part_of_mean(LossOutput(nothing, {}), 0, WithAnother(other=9.0))
    assert (part.item(), total.item()) == (0.0, 9.0)
    part.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]


def test_figures_are_means_over_the_processes_that_have_them() -> None:
    figures: dict[str, float | torch.Tensor] = {"a": torch.tensor(1.0), "b": 2.0}
    assert mean_figures(figures, 10, ALONE) == {"a": 1.0, "b": 2.0}
    assert mean_figures(figures, 10, WithAnother(told=(30, {"a": 5.0}))) == {"a": 4.0, "b": 2.0}
    assert mean_figures({}, 0, WithAnother(told=(30, {"a": 5.0}))) == {"a": 5.0}
    assert mean_figures(figures, 10, WithAnother(told=(0, {"a": 0.0, "b": 0.0}))) == {"a": 1.0, "b": 2.0}


def test_a_parameter_may_lie_transposed_in_memory() -> None:
    parameter = nn.Parameter(torch.randn(3, 4).t())
    (parameter * torch.arange(12.0).view(4, 3)).sum().backward()
    assert parameter.grad is not None and not parameter.grad.is_contiguous()
    GradientSum([parameter], WithAnother(other=1.0)).add(torch.tensor(0.0), [True])
    assert torch.equal(parameter.grad, torch.arange(12.0).view(4, 3) + 1)


def test_gradients_and_losses_are_added(in_ranks: InRanks) -> None:
    def work(world: Any) -> Any:
        used, of_one, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        used.grad = torch.full((2,), 10.0**world.rank)
        if world.rank == 1:
            of_one.grad = torch.full((2,), 7.0)
        total = GradientSum([used, of_one, unused], world)
        tokens, is_stopping, has_gradient = total.agree(5 + world.rank, is_stopping=world.rank == 2)
        loss = total.add(torch.tensor(0.5 + world.rank), has_gradient)
        return tokens, is_stopping, has_gradient, loss, used.grad, of_one.grad, unused.grad

    for tokens, is_stopping, has_gradient, loss, used, of_one, unused in in_ranks(3, work):
        assert (tokens, is_stopping, has_gradient) == (18, True, [True, True, False])
        assert loss == 4.5
        assert used.tolist() == [111.0, 111.0] and of_one.tolist() == [7.0, 7.0]
        assert unused is None, "the optimiser would decay a parameter that has a gradient of zeros"


def test_a_bad_number_reaches_every_rank(in_ranks: InRanks) -> None:
    def work(world: Any) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.tensor([float("nan") if world.rank else 1.0])
        total = GradientSum([parameter], world)
        _, _, has_gradient = total.agree(1, is_stopping=False)
        total.add(torch.tensor(1.0), has_gradient)
        assert parameter.grad is not None
        return parameter.grad

    assert all(gradient.isnan().all() for gradient in in_ranks(2, work))
