"""The optimisers: row-wise Adagrad updates tables, and AdamW updates dense parameters.

A table's gradient touches few rows. A backward pass stores the ids of the looked-up rows and the gradients of these
rows in the table object (`models.tables`). So no gradient of the size of the whole table is needed. After the guard
has judged the dense gradient, the optimiser applies the stored gradients or drops them. Row-wise Adagrad keeps one
number per row, the running sum of the mean squared gradient. So its state has only 1/dim of the table's size.

A half-precision table is updated in fp32 and rounded stochastically. The gap between two half-precision numbers is
often wider than an update, and rounding to nearest would lose the update. The random bits are a function of (seed,
data step, table, row, column), so a resumed run repeats them.

Decided: table gradients are always clipped element by element before use, and dense gradients by their global norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tackboard.core.config import check
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.hashing import string_id
from tackboard.models.changed_rows import copy_rows
from tackboard.models.tables import HashedTables, table_modules, table_parameter_names
from tackboard.ops.stochastic_rounding import rounding_key
from tackboard.ops.table_rows import row_wise_adagrad_
from tackboard.parallel.sharded_tables import RowsUpdate, ShardedTables


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
    """Number of steps at the beginning in which both rates rise linearly to their peaks."""
    final_share: float = 0.05
    """Share of the peak rate that remains at the end of the cosine schedule."""
    schedule_steps: int = 0
    """Step at which the cosine ends; the rate is constant afterwards. 0 means training.steps."""
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


def learning_rate_shares(steps_S: torch.Tensor, total_steps: int, config: OptimizerConfig) -> torch.Tensor:
    """Returns the share of the peak rate at each of `steps_S` (0-based), in fp64.

    The share rises linearly during warm-up and then falls along a cosine to `final_share`. The cosine ends at
    `schedule_steps`, or at the end of the run if `schedule_steps` is 0.
    """
    steps_S = steps_S.double()
    last_step = config.schedule_steps or total_steps
    progress_S = (steps_S - config.warmup_steps) / max(1, last_step - config.warmup_steps)
    cosine_S = 0.5 * (1.0 + torch.cos(math.pi * progress_S.clamp_max(1.0)))
    falling_S = config.final_share + (1.0 - config.final_share) * cosine_S
    return torch.where(steps_S < config.warmup_steps, (steps_S + 1) / max(1, config.warmup_steps), falling_S)


class RowWiseAdagrad:
    """Row-wise Adagrad for one table. It applies or drops the gradients that the table object has stored.

    If a model also reads the weight without a lookup, for example as its output layer, then `weight.grad` is applied
    too. The learning rate and the rounding key are numbers on the device of the table: set them with `fill_`, which
    does not wait for the device. So a CUDA graph can hold an update.
    """

    def __init__(self, table: HashedTables, clip_element: float, eps: float = 1e-8) -> None:
        self.table = table
        self.clip_element = clip_element
        self.eps = eps
        device = table.weight.device
        self.learning_rate = torch.zeros((), dtype=torch.float32, device=device)
        self.rounding_key = torch.zeros((), dtype=torch.int64, device=device)
        """Decides how this step's updates of a half-precision table are rounded; unused in fp32."""
        self.sums = torch.zeros(len(table.weight), dtype=torch.float32, device=device)

    @torch.no_grad()
    def apply(self, keep: torch.Tensor) -> None:
        """Moves rows by the pending gradients if `keep` (bool, on the device) is true. Always drops these gradients."""
        pending, gradient = list(self.table.pending), self.table.weight.grad
        # The gradients are dropped first, so that they cannot survive an error below and be applied twice.
        self.drop()
        if gradient is not None and gradient.is_sparse:
            pending.append((gradient._indices()[0], gradient._values()))
        elif gradient is not None:
            pending.append((torch.arange(len(gradient), device=gradient.device), gradient))
        if not pending:
            return
        rows_L, gradient_Ld = pending[0]
        if len(pending) > 1:
            rows_L = torch.cat([rows for rows, _ in pending])
            gradient_Ld = torch.cat([gradient.float() for _, gradient in pending])
        row_wise_adagrad_(
            self.table.weight,
            self.sums,
            rows_L,
            gradient_Ld,
            learning_rate=self.learning_rate,
            keep=keep,
            clip_element=self.clip_element,
            eps=self.eps,
            rounding_key=self.rounding_key,
        )

    def drop(self) -> None:
        """Forgets all pending gradients."""
        self.table.pending.clear()
        self.table.weight.grad = None


def _check_moments(name: str, parameter: torch.Tensor, entries: dict[str, torch.Tensor]) -> None:
    """Raises DataError unless `entries` has the names and shapes of AdamW's state of a parameter."""
    shapes = {key: value.shape for key, value in entries.items()}
    if shapes != {"step": torch.Size([]), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
        raise DataError(f"the stored optimiser state of {name} has other names or shapes")


def check_multipliers(model: nn.Module, config: OptimizerConfig) -> None:
    """Raises ConfigError if a prefix in `multipliers` fits no parameter of the model."""
    names = [name for name, _ in model.named_parameters()]
    for prefix in config.multipliers:
        if not any(name.startswith(prefix) for name in names):
            raise ConfigError(
                f"optimizer.multipliers names {prefix!r}, but no parameter begins with that",
                allowed=f"parameters begin with: {', '.join(sorted({name.split('.')[0] for name in names}))}",
            )


class Optimizers:
    """All optimisers of a model. `step` moves tables and dense parameters; frozen parameters never move.

    `seed` and the data step decide how updates of half-precision tables are rounded.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        seed: int = 0,
        sharded: Mapping[str, ShardedTables] | None = None,
    ) -> None:
        """`sharded` holds the tables that several processes share, by module name."""
        self.config = config
        self.total_steps = total_steps
        self.seed = seed
        check_multipliers(model, config)
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
            name: RowWiseAdagrad(module, config.clip_table_element)
            for name, module in table_modules(model).items()
            if module.weight.requires_grad
        }
        self.shared: dict[str, RowsUpdate] = {}
        """The updates of tables that several processes share."""
        for name, shared in (sharded or {}).items():
            shared.is_frozen = config.multiplier(f"{name}.weight") == 0.0
            if not shared.is_frozen:
                self.shared[name] = RowsUpdate(shared, config.clip_table_element)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.schedule = learning_rate_shares(torch.arange(max(1, total_steps)), total_steps, config).to(device)
        """The share of the peak rate at each step, on the device. Only the device knows how many steps were good."""
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps that moved parameters."""
        self.share = torch.zeros((), dtype=torch.float64, device=device)
        """The share of the peak rate that the last step used."""
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
            # On a GPU one kernel moves all parameters. On a CPU a loop does, so that a resumed run repeats every bit.
            fused=all(p.is_cuda for p in self.dense.values()),
        )

    def prepare(self, data_step: int) -> None:
        """Clears gradients, and sets how this step's updates of half-precision tables are rounded."""
        for name, table in self.tables.items():
            table.rounding_key.fill_(rounding_key(self.seed, data_step, string_id(name)))
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for table in self.tables.values():
            table.drop()
        for name, shared in self.shared.items():
            rate = self.config.table_learning_rate * self.config.multiplier(f"{name}.weight")
            shared.prepare(float(self._next_share()) * rate)
        self.adamw.zero_grad(set_to_none=True)

    def clip(self) -> torch.Tensor:
        """Clips the dense gradient to the global norm `clip_norm`; returns the norm before clipping, on the device."""
        return torch.nn.utils.clip_grad_norm_(list(self.dense.values()), self.config.clip_norm)

    @torch.no_grad()
    def step(self, keep: torch.Tensor | None = None) -> None:
        """Moves tables and dense parameters if `keep` (bool, on the device; None means true), else drops the gradients.

        The learning rates are those of the schedule's next step. A dropped step does not advance the schedule.
        """
        keep = torch.ones((), dtype=torch.bool, device=self.applied.device) if keep is None else keep
        self.share.copy_(self._next_share())
        for shared in self.shared.values():
            shared.apply(keep)
        for name, table in self.tables.items():
            multiplier = self.config.multiplier(f"{name}.weight".lstrip("."))
            table.learning_rate.copy_(self.share * (self.config.table_learning_rate * multiplier))
            table.apply(keep)
        if self.applied.is_cuda:
            # The fused kernel reads the rate and this flag on the device, and moves nothing if the flag is 1.
            self.adamw.found_inf = (~keep).float()  # type: ignore[attr-defined]
            self._move_dense(self.share.float())
        elif keep:
            self._move_dense(float(self.share))
        self.applied += keep

    def _next_share(self) -> torch.Tensor:
        """Returns the share of the peak rate that the next step uses, on the device."""
        # Indexing by a tensor without dimensions would wait for the device; `take` does not.
        return self.schedule.take(self.applied.clamp_max(len(self.schedule) - 1))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Opens a context in which `step` may be recorded as part of a CUDA graph; its end drops all gradients."""
        for group in self.adamw.param_groups:
            group["capturable"] = True
        try:
            yield
        finally:
            # A recording computes nothing. If it fails, the same step runs as usual, and would add its own gradients to
            # memory that was never written.
            self._drop_gradients()
            # Outside of this context the flag must be off. Otherwise torch would warn of steps that are not recorded.
            for group in self.adamw.param_groups:
                group["capturable"] = False

    def _move_dense(self, share: float | torch.Tensor) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = share * (self.config.dense_learning_rate * group["share"])
        self.adamw.step()

    def wire(self) -> dict[str, Any]:
        """Returns the bytes that this process has sent for lookups, what fp32 would have sent, and the ratio."""
        totals = [shared.tables.wire.report()["total"] for shared in self.shared.values()]
        sent, whole = (sum(total[name] for total in totals) for name in ("payload_bytes", "fp32_bytes"))
        return {"payload_bytes": sent, "fp32_bytes": whole, "share": round(sent / whole, 4) if whole else 1.0}

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
