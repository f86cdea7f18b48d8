"""Defines the guard of a run, which drops steps with a bad loss or gradient, and lists the data steps to skip.

A step is bad if its loss or its dense gradient is not finite, or if the norm of the dense gradient spikes. The guard
judges on the device, after the backward pass and before any parameter moves. The optimisers get the verdict as a flag
on the device: in a bad step nothing moves, and the learning-rate schedule does not advance. So a GPU never waits until
the host has read a loss. The trainer reads the verdicts later, several at a time, and then notes the data steps to
skip. If more than `max_bad_steps` of `window` steps are bad, the run has diverged and ends.

Decided: a model may have state beyond its parameters (buffers such as streaming frequencies). The forward pass of a bad
step has already changed this state. So the run goes back to its last checkpoint and skips that step's data. The number
of spikes goes back too, so in such a run a lasting rise of the norm is never let through.

A checkpoint carries the guard's state, so a resumed run decides as an uninterrupted run would.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from tackboard.core.config import check
from tackboard.core.errors import DivergedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The settings of the guard: when a step is bad, and the number of bad steps that are tolerated."""

    spike_factor: float = 20.0
    """A dense gradient norm above this multiple of its running mean is a spike. Each spike doubles the
    multiple until the next good step, because a rise that stays is not a spike."""
    settle_steps: int = 50
    """Number of good steps before the guard looks for spikes. Before that, the running mean is not reliable."""
    max_bad_steps: int = 5
    """Number of bad steps within the window that are tolerated. One more bad step ends the run with exit code 4."""
    window: int = 200
    """Number of steps within which bad steps are counted."""

    def __post_init__(self) -> None:
        check(self.spike_factor > 1, "guard.spike_factor", self.spike_factor, "above 1")
        check(self.settle_steps >= 1, "guard.settle_steps", self.settle_steps, "1 or more")
        check(self.max_bad_steps >= 0, "guard.max_bad_steps", self.max_bad_steps, "0 or more")
        check(self.window >= 1, "guard.window", self.window, "1 or more")


class Verdict(NamedTuple):
    """The guard's verdict on one step, as scalars on the device."""

    loss: torch.Tensor
    norm: torch.Tensor
    limit: torch.Tensor
    """The largest norm that was allowed; infinite before the guard looks for spikes."""
    keep: torch.Tensor
    """Whether the step is good and its updates are applied (bool)."""

    def packed(self) -> torch.Tensor:
        """Returns the four scalars as one tensor, so that the host can read many steps at once."""
        return torch.stack([scalar.double() for scalar in self])


class Guard:
    """Judges losses and gradient norms on the device, and remembers the data steps to skip."""

    def __init__(self, config: GuardConfig, device: torch.device | None = None) -> None:
        self.config = config
        self.mean_norm = torch.zeros((), dtype=torch.float64, device=device)
        """Running mean of the norms of good steps."""
        self.num_norms = torch.zeros((), dtype=torch.int64, device=device)
        self.num_spikes = torch.zeros((), dtype=torch.int64, device=device)
        """Number of spikes since the last good step."""
        self.skipped: list[int] = []
        """Data steps that are never read again."""

    @torch.no_grad()
    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> Verdict:
        """Judges a step by its loss and the norm of its dense gradient. A good norm enters the running mean."""
        is_settled = self.num_norms >= self.config.settle_steps
        factor = self.config.spike_factor * torch.exp2(self.num_spikes.double())
        limit = torch.where(is_settled, factor * self.mean_norm, math.inf)
        loss, norm = loss.detach(), norm.double()
        keep = loss.isfinite() & norm.isfinite() & (norm <= limit)
        is_spike = norm.isfinite() & (norm > limit)
        self.num_spikes.copy_(torch.where(keep, 0, self.num_spikes + is_spike))
        self.num_norms += keep
        share = self.num_norms.double().reciprocal().clamp_min(0.02)
        self.mean_norm.copy_(torch.where(keep, self.mean_norm + share * (norm - self.mean_norm), self.mean_norm))
        return Verdict(loss, norm, limit, keep)

    @staticmethod
    def reason(loss: float, norm: float, limit: float) -> str:
        """Says why a step is bad."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        return f"gradient norm {norm:.3g} is above {limit:.3g}" if math.isfinite(norm) else f"gradient norm is {norm}"

    def skip(self, data_step: int, reason: str) -> None:
        """Marks a data step as bad, so that it is never read again. Raises DivergedError if too many steps were bad."""
        self.skipped.append(data_step)
        recent = [step for step in self.skipped if step > data_step - self.config.window]
        if len(recent) > self.config.max_bad_steps:
            raise DivergedError(
                f"{len(recent)} of the last {self.config.window} steps were bad: {reason}",
                allowed=f"allowed: guard.max_bad_steps = {self.config.max_bad_steps}",
                fix="lower optimizer.dense_learning_rate or optimizer.table_learning_rate, or look at the data",
            )

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores."""
        return {
            "mean_norm": float(self.mean_norm),
            "num_norms": int(self.num_norms),
            "num_spikes": int(self.num_spikes),
            # This is a copy, because a thread writes the checkpoint while later steps add to the list. If a later step
            # were stored, a resumed run would skip the step without judging it and would not count its spike.
            "skipped": list(self.skipped),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads the state of a checkpoint. Steps that were skipped after that checkpoint stay skipped."""
        self.mean_norm.fill_(float(state["mean_norm"]))
        self.num_norms.fill_(int(state["num_norms"]))
        self.num_spikes.fill_(int(state.get("num_spikes", 0)))  # Older versions did not count spikes.
        self.skipped = sorted(set(self.skipped) | set(state["skipped"]))
