"""Sums losses, dense gradients and counts over the processes of a step.

The loss of each process is its part of the loss of the whole step, already divided by the number of targets of all
processes. So losses and gradients are added, not averaged. Decided: loss and gradients are summed together, as one
tensor, and every process gets the same bits. So the guards (`train.guard`) of all processes judge a step alike, and the
dense parameters of all processes stay equal without being sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tackboard.models.interface import LossOutput
from tackboard.parallel.training_world import TrainingWorld


def part_of_mean(output: LossOutput, num_examples: int, world: TrainingWorld) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this process's part of the mean loss over the examples of all processes, and their total weight.

    `output` is the mean over the `num_examples` examples of this process. A process without an example has the part 0,
    even if its loss is NaN, as a mean over no examples may be.
    """
    loss = output.loss
    own = loss.new_tensor(num_examples) if output.weight is None else output.weight.detach().to(loss)
    total = world.sum_(own.clone())
    return torch.where(own > 0, loss * (own / total.clamp_min(1e-9)), 0.0), total


def mean_figures(
    figures: Mapping[str, float | torch.Tensor], num_tokens: int, world: TrainingWorld
) -> dict[str, float]:
    """Returns the means of figures over the processes that have them, weighted by the tokens of each process.

    A process that has nothing to learn from in a step may lack a figure, so names and values travel together.
    """
    told = world.gather((num_tokens, {name: float(value) for name, value in figures.items()}))
    if world.is_alone:
        return told[0][1]
    means = {}
    for name in dict.fromkeys(name for _, found in told for name in found):
        pairs = [(tokens, found[name]) for tokens, found in told if name in found and tokens]
        if pairs:
            means[name] = sum(tokens * value for tokens, value in pairs) / sum(tokens for tokens, _ in pairs)
    return means


class GradientSum:
    """Adds up the gradients of a fixed list of parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: TrainingWorld) -> None:
        self.parameters = list(parameters)
        self.world = world

    def agree(self, num_tokens: int, *, is_stopping: bool) -> tuple[int, bool, list[bool]]:
        """Returns the tokens of all processes, whether any of them is asked to stop, and which parameters have a
        gradient in any process. Call this after the backward pass."""
        has_gradient = [parameter.grad is not None for parameter in self.parameters]
        told = self.world.sum_(torch.tensor([num_tokens, is_stopping, *has_gradient]))
        return int(told[0]), bool(told[1]), [bool(number) for number in told[2:].tolist()]

    @torch.no_grad()
    def add(self, loss: torch.Tensor, has_gradient: Sequence[bool]) -> torch.Tensor:
        """Replaces the gradients by their sums over all processes; returns the sum of the losses.

        A parameter that has no gradient in any process still has none afterwards, so the optimiser does not change it.
        """
        chosen = [parameter for parameter, has in zip(self.parameters, has_gradient, strict=True) if has]
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
        joined = torch.cat([loss.detach().float().view(1), *(gradient.float().reshape(-1) for gradient in gradients)])
        self.world.sum_(joined)
        parts = joined[1:].split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return joined[0]
