"""Defines the settings of training in several processes. Nothing here imports torch.distributed or TorchRec."""

from __future__ import annotations

import dataclasses

from tackboard.core.config import check

SHARDINGS = ("row", "table")
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "mx4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How tables are divided among processes, and what processes send each other. A single process ignores this."""

    sharding: str = "row"
    """How tables are divided: `row` gives each process a range of rows of every sub-table, `table` gives it whole
    sub-tables."""
    forward_precision: str = "fp32"
    """Precision of looked-up rows on the wire: fp32, fp16, bf16, fp8, int8 or mx4."""
    backward_precision: str = "fp32"
    """Precision of the rows' gradients on the wire: fp32, fp16, bf16, fp8, int8 or mx4."""
    timeout_s: float = 600.0
    """Longest time in seconds for which a process waits for another. Then it stops, and its error names the other."""

    def __post_init__(self) -> None:
        check(self.sharding in SHARDINGS, "parallel.sharding", self.sharding, ", ".join(SHARDINGS))
        for name in ("forward_precision", "backward_precision"):
            value = getattr(self, name)
            check(value in PRECISIONS, f"parallel.{name}", value, ", ".join(PRECISIONS))
        check(1 <= self.timeout_s <= 86400, "parallel.timeout_s", self.timeout_s, "1 to 86400 seconds")
