"""Sums of losses and gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tackboard.parallel.gradients import GradientSum

InRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


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
