"""How parameters move: row-wise Adagrad for tables inside the backward, AdamW for the rest.

A table's gradient touches few rows, so its update is applied the moment autograd has it and the gradient is dropped:
peak memory never holds a second table. The price is that a table update cannot be taken back when the dense gradient
turns out bad; guard.py rolls back to a checkpoint instead. Row-wise Adagrad keeps one number per row, the running sum
of the mean squared gradient, which is what makes its state 1/dim of the table.

Decided: table gradients are clipped element by element before they are used, on every path; dense ones by global norm.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

from tackboard.core.config import check
from tackboard.models.tables import table_modules, table_parameter_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning rates, decay and clipping."""

    dense_learning_rate: float = 2e-3
    """Peak rate of AdamW for dense parameters."""
    table_learning_rate: float = 0.1
    """Peak rate of row-wise Adagrad for tables."""
    weight_decay: float = 0.01
    """AdamW's decay of dense matrices; vectors, scalars and tables are not decayed."""
    warmup_steps: int = 50
    """Steps over which both rates rise linearly from 0."""
    final_share: float = 0.05
    """Share of the peak rate where the cosine ends."""
    clip_norm: float = 1.0
    """Largest global norm of the dense gradient."""
    clip_table_element: float = 1.0
    """Largest absolute value of one element of a table gradient."""

    def __post_init__(self) -> None:
        for name in ("dense_learning_rate", "table_learning_rate", "clip_norm", "clip_table_element"):
            check(getattr(self, name) > 0, f"optimizer.{name}", getattr(self, name), "above 0")
        check(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        check(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")
        check(0 <= self.final_share <= 1, "optimizer.final_share", self.final_share, "0 to 1")


def learning_rate_share(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Share of the peak rate at `step` (0-based): linear warm-up, then a cosine down to `final_share`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.final_share + (1.0 - config.final_share) * cosine


class RowWiseAdagrad:
    """Row-wise Adagrad over one sparse-gradient parameter, applied inside the backward."""

    def __init__(self, weight: nn.Parameter, clip_element: float, eps: float = 1e-8) -> None:
        self.weight = weight
        self.clip_element = clip_element
        self.eps = eps
        self.learning_rate = 0.0
        self.sums = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        weight.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, weight: torch.Tensor) -> None:
        gradient = weight.grad
        if gradient is None:
            return
        # Dropped first: it must not survive an error below and be applied twice.
        weight.grad = None
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        rows, values = gradient.indices()[0], gradient.values().float()
        values = values.clamp(-self.clip_element, self.clip_element)
        sums = self.sums[rows] + values.square().mean(dim=1)
        self.sums[rows] = sums
        weight[rows] -= (self.learning_rate * values / (sums.sqrt() + self.eps).unsqueeze(1)).to(weight.dtype)


class Optimizers:
    """All optimisers of a model: tables move during `backward`, dense parameters on `step`."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.tables = {
            name: RowWiseAdagrad(module.weight, config.clip_table_element)
            for name, module in table_modules(model).items()
        }
        tables = table_parameter_names(model)
        self.dense = {name: p for name, p in model.named_parameters() if name not in tables and p.requires_grad}
        matrices = [p for p in self.dense.values() if p.dim() >= 2]
        others = [p for p in self.dense.values() if p.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.dense_learning_rate,
            betas=(0.9, 0.98),
        )

    def prepare(self, step: int) -> float:
        """Sets the rates of `step` and clears dense gradients; returns the share of the peak rate."""
        share = learning_rate_share(step, self.total_steps, self.config)
        for table in self.tables.values():
            table.learning_rate = share * self.config.table_learning_rate
        for group in self.adamw.param_groups:
            group["lr"] = share * self.config.dense_learning_rate
        self.adamw.zero_grad(set_to_none=True)
        return share

    def clip(self) -> float:
        """Clips the dense gradient to its global norm and returns the norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(list(self.dense.values()), self.config.clip_norm))

    def step(self) -> None:
        """Moves the dense parameters."""
        self.adamw.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs, as named tensors."""
        tensors = {f"adagrad.{name}": table.sums for name, table in self.tables.items()}
        for name, parameter in self.dense.items():
            for key, value in self.adamw.state.get(parameter, {}).items():
                tensors[f"adamw.{name}.{key}"] = value
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes over what `state` gave."""
        self.adamw.state.clear()
        for name, table in self.tables.items():
            table.sums.copy_(tensors[f"adagrad.{name}"])
        for name, parameter in self.dense.items():
            prefix = f"adamw.{name}."
            entries = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if entries:
                self.adamw.state[parameter] = {
                    key: value.clone() if key == "step" else value.clone().to(parameter.device)
                    for key, value in entries.items()
                }
