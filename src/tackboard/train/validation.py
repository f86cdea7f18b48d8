"""Judges the model during training: computes the loss on held-out data, keeps the best step, and may end training.

A judgement is the model's own loss on held-out data, without dropout, as the mean over positives or known labels.
Batches have step numbers as in training, and every judgement starts with the same random seed. So two judgements of the
same parameters give the same number.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tackboard.core.errors import DataError
from tackboard.data.prefetch import on_device
from tackboard.data.steps import NumberedSteps
from tackboard.parallel.gradients import part_of_mean
from tackboard.parallel.training_world import ALONE, TrainingWorld


class Validation:
    """The judgements of a run so far."""

    def __init__(self, patience: int = 0) -> None:
        """Training ends after `patience` judgements in a row without a better loss; with 0 it never ends early."""
        self.patience = patience
        self.best_loss = math.inf
        self.best_step: int | None = None
        self.num_worse = 0

    @property
    def is_over(self) -> bool:
        """Whether training should end, because the last `patience` judgements found no better loss."""
        return bool(self.patience) and self.num_worse >= self.patience

    def note(self, step: int, loss: float) -> bool:
        """Records a judgement; returns whether it is the best so far. NaN is never the best."""
        is_better = loss < self.best_loss
        self.num_worse = 0 if is_better else self.num_worse + 1
        if is_better:
            self.best_loss, self.best_step = loss, step
        return is_better

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores."""
        best = self.best_loss if self.best_step is not None else None
        return {"best_loss": best, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads what `state` returned, or the empty dict of a checkpoint without judgements."""
        best = state.get("best_loss")
        self.best_loss = math.inf if best is None else float(best)
        self.best_step = state.get("best_step")
        self.num_worse = int(state.get("num_worse", 0))


@torch.no_grad()
def mean_loss(
    model: Any, judges: NumberedSteps[Any], device: torch.device, max_steps: int, world: TrainingWorld = ALONE
) -> float:
    """Returns the mean loss of a model over the held-out steps `judges`, or over the first `max_steps` of them.

    If several processes train together, each has its share of every step, and all return the mean of all shares.
    """
    gives_parts = getattr(model, "share_items", None) is not None
    model.eval()
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.manual_seed(0)
    total, weight = 0.0, 0.0
    for _, batch in on_device(judges.iterate(range(min(max_steps, judges.plan.first_step(1)))), device):
        num_examples = int(world.sum_(torch.tensor(batch.num_examples())))
        if num_examples:
            output = model.loss(batch)
            if gives_parts:  # The loss is already this process's part of the mean over all examples.
                part, size = output.loss, float(num_examples)
            else:
                part, whole = part_of_mean(output, batch.num_examples(), world)
                size = float(whole)
            total += size * float(world.sum_(part.clone()))
            weight += size
    if not weight:
        raise DataError(
            "the users of data.validation_share have no event or label to predict", fix="raise data.validation_share"
        )
    return total / weight
