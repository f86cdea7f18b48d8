"""The optimisers: row-wise Adagrad updates tables inside the backward pass, and AdamW updates dense parameters.

A table's gradient touches few rows. The table is updated as soon as autograd has the gradient, and the gradient is
dropped, so memory never holds a second table. The price is that a table update cannot be undone if the dense gradient
turns out bad; the trainer then goes back to a checkpoint. Row-wise Adagrad keeps one number per row, the running sum
of the mean squared gradient. So its state has only 1/dim of the table's size.

A half-precision table is updated in fp32 and rounded stochastically. The gap between two half-precision numbers is
often wider than an update, and rounding to nearest would lose the update. The random bits are a function of (seed,
step, table, row, column), so a resumed run repeats them.

Decided: table gradients are always clipped element by element before use, and dense gradients by their global norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tackboard.core.config import check
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.hashing import string_id
from tackboard.models.changed_rows import copy_rows
from tackboard.models.tables import table_modules, table_parameter_names
from tackboard.ops.stochastic_rounding import rounding_key, stochastic_round


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning rates, decay and clipping."""

    dense_learning_rate: float = 2e-3
    """Peak rate of AdamW for dense parameters."""
    table_learning_rate: float = 0.1
    """Peak rate of row-wise Adagrad for tables."""
    weight_decay: float = 0.01
    """AdamW's weight decay of dense matrices. Vectors, scalars and tables are not decayed."""
    warmup_steps: int = 50
    """Number of steps in which both rates rise linearly from 0."""
    final_share: float = 0.05
    """Share of the peak rate that remains at the end of the cosine schedule."""
    schedule_steps: int = 0
    """Step at which the cosine ends; the rate is constant afterwards. 0 takes training.steps."""
    multipliers: dict[str, float] = dataclasses.field(default_factory=dict)
    """Factors of the learning rates, by prefix of parameter names, such as {"pinfm.": 0.1}. The longest matching prefix
    counts. 0 freezes parameters. Modules whose parameters are all frozen have no dropout."""
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
        check(self.schedule_steps >= 0, "optimizer.schedule_steps", self.schedule_steps, "0 or more")
        for prefix, share in self.multipliers.items():
            check(0 <= share <= 1000, f"optimizer.multipliers.{prefix}", share, "0 to 1000")

    def multiplier(self, name: str) -> float:
        """Returns the factor of the learning rate of a parameter or module."""
        prefixes = [prefix for prefix in self.multipliers if name.startswith(prefix)]
        return self.multipliers[max(prefixes, key=len)] if prefixes else 1.0


def learning_rate_share(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Returns the share of the peak rate at `step` (0-based): linear warm-up, then a cosine down to `final_share`.

    The cosine ends at `schedule_steps`, or at the end of the run if `schedule_steps` is 0.
    """
    last_step = config.schedule_steps or total_steps
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, last_step - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.final_share + (1.0 - config.final_share) * cosine


class RowWiseAdagrad:
    """Row-wise Adagrad for one table, applied inside the backward pass.

    The gradient arrives at `leaf`: the weight itself, unless the table has half precision
    (`HashedTables.gradient_leaf`).
    """

    def __init__(
        self, weight: nn.Parameter, clip_element: float, eps: float = 1e-8, leaf: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.clip_element = clip_element
        self.eps = eps
        self.learning_rate = 0.0
        self.rounding_key = 0
        """Decides how this step's updates of a half-precision table are rounded; unused in fp32."""
        self.sums = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        (weight if leaf is None else leaf).register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        if gradient is None:
            return
        # The gradient is dropped first, so that it cannot survive an error below and be applied twice.
        leaf.grad = None
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        rows, values = gradient.indices()[0], gradient.values().float()
        values = values.clamp(-self.clip_element, self.clip_element)
        sums = self.sums[rows] + values.square().mean(dim=1)
        self.sums[rows] = sums
        change = self.learning_rate * values / (sums.sqrt() + self.eps).unsqueeze(1)
        # Checkpoints store the rows that have a sum. The square of a gradient below 1e-23 is 0: such a row stays fresh.
        change = torch.where(sums.unsqueeze(1) != 0, change, 0.0)
        weight = self.weight
        if weight.dtype in (torch.float16, torch.bfloat16):
            moved = weight[rows].float() - change
            weight[rows] = stochastic_round(moved, weight.dtype, rows, self.rounding_key)
        else:
            weight[rows] -= change.to(weight.dtype)


def _check_moments(name: str, parameter: torch.Tensor, entries: dict[str, torch.Tensor]) -> None:
    """Raises DataError unless `entries` has the names and shapes of AdamW's state of a parameter."""
    shapes = {key: value.shape for key, value in entries.items()}
    if shapes != {"step": torch.Size([]), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
        raise DataError(f"the stored optimiser state of {name} has other names or shapes")


class Optimizers:
    """All optimisers of a model. Tables move during `backward`, dense parameters on `step`, frozen parameters never.

    `seed` and the step decide how updates of half-precision tables are rounded.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int, seed: int = 0) -> None:
        self.config = config
        self.total_steps = total_steps
        self.seed = seed
        names = [name for name, _ in model.named_parameters()]
        for prefix in config.multipliers:
            if not any(name.startswith(prefix) for name in names):
                raise ConfigError(
                    f"optimizer.multipliers names {prefix!r}, but no parameter begins with that",
                    allowed=f"parameters begin with: {', '.join(sorted({name.split('.')[0] for name in names}))}",
                )
        for name, parameter in model.named_parameters():
            if config.multiplier(name) == 0.0:
                parameter.requires_grad_(False)
        self.frozen = [
            module
            for name, module in model.named_modules()
            if name and config.multiplier(f"{name}.") == 0.0 and not any(p.requires_grad for p in module.parameters())
        ]
        """Modules whose parameters are all frozen."""
        self.tables = {
            name: RowWiseAdagrad(module.weight, config.clip_table_element, leaf=module.gradient_leaf)
            for name, module in table_modules(model).items()
            if module.weight.requires_grad
        }
        tables = table_parameter_names(model)
        self.dense = {name: p for name, p in model.named_parameters() if name not in tables and p.requires_grad}
        shares = dict.fromkeys([1.0, *config.multipliers.values()])
        groups: list[dict[str, Any]] = []
        for share in shares:
            own = [parameter for name, parameter in self.dense.items() if config.multiplier(name) == share]
            matrices, others = [p for p in own if p.dim() >= 2], [p for p in own if p.dim() < 2]
            groups.append({"params": matrices, "weight_decay": config.weight_decay, "share": share})
            groups.append({"params": others, "weight_decay": 0.0, "share": share})
        self.adamw = torch.optim.AdamW(
            groups,
            lr=config.dense_learning_rate,
            betas=(0.9, 0.98),
            # On a GPU one kernel updates all parameters. On a CPU a loop does, so that resumed runs keep their bits.
            fused=all(p.is_cuda for p in self.dense.values()),
        )

    def prepare(self, step: int) -> float:
        """Sets the rates and the rounding key of `step` and clears gradients; returns the share of the peak rate."""
        share = learning_rate_share(step, self.total_steps, self.config)
        for name, table in self.tables.items():
            table.learning_rate = (
                share * self.config.table_learning_rate * self.config.multiplier(f"{name}.weight".lstrip("."))
            )
            table.rounding_key = rounding_key(self.seed, step, string_id(name))
        for group in self.adamw.param_groups:
            group["lr"] = share * self.config.dense_learning_rate * group["share"]
        self.adamw.zero_grad(set_to_none=True)
        return share

    def clip(self) -> float:
        """Clips the dense gradient to the global norm `clip_norm`; returns the norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(list(self.dense.values()), self.config.clip_norm))

    def step(self) -> None:
        """Moves the dense parameters."""
        self.adamw.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Returns everything that a resumed run needs, as named tensors."""
        tensors = {f"adagrad.{name}": table.sums for name, table in self.tables.items()}
        for name, parameter in self.dense.items():
            for key, value in self.adamw.state.get(parameter, {}).items():
                tensors[f"adamw.{name}.{key}"] = value
        return tensors

    def load_state(self, tensors: Mapping[str, Any]) -> None:
        """Loads the tensors that `state` returned. The sums of a table may be given by their changed rows."""
        self.adamw.state.clear()
        for name, table in self.tables.items():
            copy_rows(tensors[f"adagrad.{name}"], table.sums)
        for name, parameter in self.dense.items():
            prefix = f"adamw.{name}."
            entries = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if entries:
                _check_moments(name, parameter, entries)
                self.adamw.state[parameter] = {
                    # Only the fused optimiser keeps its step count on the device of the parameter.
                    key: value.clone()
                    if key == "step" and not parameter.is_cuda
                    else value.clone().to(parameter.device)
                    for key, value in entries.items()
                }
