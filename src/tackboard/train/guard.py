"""Defines the guard of a run, which detects bad losses and gradients, and remembers the data to skip.

A non-finite loss is caught before `backward`. No parameter has moved yet, and the step's data is skipped. A model with
other state, such as streaming frequencies, also goes back to the last checkpoint. A non-finite or spiking dense
gradient is caught after `backward`, when the tables have moved already. So the run goes back to its last checkpoint and
skips that step's data. If more than `max_bad_steps` of `window` steps are bad, the run has diverged and ends.

A checkpoint carries the guard's state, so a resumed run decides as an uninterrupted run would.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tackboard.core.config import check
from tackboard.core.errors import DivergedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The settings of the guard: when a step is bad, and the number of bad steps that are tolerated."""

    spike_factor: float = 20.0
    """A dense gradient norm above this multiple of its running mean is a spike."""
    settle_steps: int = 50
    """Number of steps before the guard looks for spikes. After fewer steps the running mean says little."""
    max_bad_steps: int = 5
    """Number of bad steps within the window that are tolerated. One more bad step ends the run with exit code 4."""
    window: int = 200
    """Number of steps within which bad steps are counted."""

    def __post_init__(self) -> None:
        check(self.spike_factor > 1, "guard.spike_factor", self.spike_factor, "above 1")
        check(self.settle_steps >= 1, "guard.settle_steps", self.settle_steps, "1 or more")
        check(self.max_bad_steps >= 0, "guard.max_bad_steps", self.max_bad_steps, "0 or more")
        check(self.window >= 1, "guard.window", self.window, "1 or more")


class Guard:
    """Judges losses and gradient norms, and remembers the data steps to skip."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.mean_norm = 0.0
        self.num_norms = 0
        self.skipped: list[int] = []
        """Data steps that are never read again."""

    def judge_loss(self, loss: float) -> str | None:
        """Returns why a loss is bad, or None if it is good."""
        return None if math.isfinite(loss) else f"loss is {loss}"

    def judge_norm(self, norm: float) -> str | None:
        """Returns why a dense gradient norm is bad, or None if it is good. A good norm enters the running mean."""
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        limit = self.config.spike_factor * self.mean_norm
        if self.num_norms >= self.config.settle_steps and norm > limit:
            return f"gradient norm {norm:.3g} is above {limit:.3g}"
        self.num_norms += 1
        share = max(0.02, 1.0 / self.num_norms)
        self.mean_norm += share * (norm - self.mean_norm)
        return None

    def skip(self, data_step: int, reason: str) -> None:
        """Marks a data step, so that it is never read again. Raises DivergedError if too many steps were bad."""
        self.skipped.append(data_step)
        recent = [step for step in self.skipped if step > data_step - self.config.window]
        if len(recent) > self.config.max_bad_steps:
            raise DivergedError(
                f"{len(recent)} of the last {self.config.window} steps were bad: {reason}",
                allowed=f"allowed: guard.max_bad_steps = {self.config.max_bad_steps}",
                fix="lower optimizer.dense_learning_rate or optimizer.table_learning_rate, or look at the data",
            )

    def state(self) -> dict[str, Any]:
        return {"mean_norm": self.mean_norm, "num_norms": self.num_norms, "skipped": self.skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads the state of a checkpoint. Steps that were skipped after that checkpoint stay skipped."""
        self.mean_norm = float(state["mean_norm"])
        self.num_norms = int(state["num_norms"])
        self.skipped = sorted(set(self.skipped) | set(state["skipped"]))
