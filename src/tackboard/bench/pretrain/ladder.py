"""Defines the ladder: the optimisations of the training step, in the order in which the bench adds them.

A rung is one optimisation. The first measurement has no rung, every later measurement adds one rung, and the last
measurement is `tackboard train` as it is. A rung is switched off by settings of the run, or by a context that replaces
the fast operation by its slow twin, which computes the same result:

    Rung("blocks", "the loss in blocks", off=replaced("tackboard.ops.contrastive:choose", slow_twin))

An optimisation must not change results. So every rung has a tolerance: the largest allowed relative difference between
the loss after the timed steps and the same loss in the first measurement.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tackboard.core.config import apply_overrides
from tackboard.core.errors import UsageError
from tackboard.ops import contrastive_blocked, contrastive_reference
from tackboard.train.config import RunConfig

Off = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which the slow twin replaces the fast operation."""


@dataclass(frozen=True)
class Rung:
    """One optimisation: `name` on the command line, `words` in tables, and how it is switched on and off."""

    name: str
    words: str
    off: Off | None = None
    settings_off: Sequence[str] = ()
    """Settings of the form `a.b=c` that switch this optimisation off."""
    settings_on: Sequence[str] = ()
    """Settings that switch this optimisation on; empty if the optimisation is on by default."""
    devices: Sequence[str] = field(default=("cpu", "cuda"))
    """Types of devices on which this optimisation does something."""
    tolerance: float = 1e-3
    """Largest allowed relative difference to the first measurement, in the loss after the timed steps."""


def replaced(place: str, value: Any) -> Off:
    """Returns a switch that puts `value` at `place`. A place has the form "module:name" or "module:Class.name".

    `value` may also be a string that names the place of another object. The switch then puts that object at `place`.
    The modules are imported when the switch is used.
    """

    @contextmanager
    def switch() -> Iterator[None]:
        target, _, last = place.rpartition("." if "." in place.partition(":")[2] else ":")
        new = _find(value) if isinstance(value, str) and ":" in value else value
        owner = _find(target)
        fast = getattr(owner, last)
        setattr(owner, last, new)
        try:
            yield
        finally:
            setattr(owner, last, fast)

    return switch


def _find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


RUNGS = (
    Rung(
        "threads",
        "all cores for tensor work",
        settings_off=["training.num_threads=1"],
        settings_on=["training.num_threads=0"],
        devices=["cpu"],
    ),
    Rung("workers", "a thread that prepares the next window", settings_off=["data.num_workers=0"]),
    Rung(
        "memory",
        "freed memory is kept for the next step",
        off=replaced("tackboard.train.trainer:keep_freed_memory", bool),
        devices=["cpu"],
    ),
    Rung(
        "loss",
        "scores of the loss in blocks, gradients in the same pass",
        off=replaced("tackboard.ops.contrastive:choose", lambda _: contrastive_reference.contrastive_loss),
        devices=["cpu"],
    ),
    Rung(
        "groups",
        "attention in one padded grid for each group of rows of similar length",
        off=replaced("tackboard.batch.row_layout:cuts_of", lambda lengths: [len(lengths)]),
        devices=["cpu"],
    ),
    Rung(
        "bf16",
        "matrix products in bf16",
        settings_off=["training.precision=fp32"],
        settings_on=["training.precision=bf16"],
        devices=["cuda"],
        tolerance=2e-2,
    ),
    Rung(
        "compile",
        "layers and loss compiled by torch",
        settings_off=["training.compile=off"],
        settings_on=["training.compile=on"],
        devices=["cuda"],
        tolerance=2e-2,
    ),
    Rung(
        "shapes",
        "batches padded to sizes that repeat",
        settings_off=["training.pad_shapes=off"],
        settings_on=["training.pad_shapes=on"],
        devices=["cuda"],
        tolerance=2e-2,
    ),
    Rung(
        "attention-kernel",
        "attention of packed rows without padding",
        off=replaced("tackboard.ops.packed_attention:choose", lambda *_: "grouped"),
        devices=["cuda"],
        tolerance=2e-2,
    ),
    Rung(
        "loss-kernel",
        "one kernel for all work between the matrix products of the loss",
        off=replaced("tackboard.ops.contrastive:choose", lambda _: contrastive_blocked.contrastive_loss),
        devices=["cuda"],
        tolerance=2e-2,
    ),
    Rung(
        "negatives",
        "scores of negatives only, not of all items of the batch",
        off=replaced("tackboard.models.pinfm:listed_negatives", lambda *_, **__: None),
        tolerance=2e-2,
    ),
    Rung(
        "graph",
        "steps replayed as CUDA graphs",
        settings_off=["training.cuda_graphs=off"],
        settings_on=["training.cuda_graphs=auto"],
        devices=["cuda"],
        tolerance=2e-2,
    ),
)
"""The optimisations, in the order in which they are added."""


def rungs_of(device_type: str) -> tuple[Rung, ...]:
    """Returns the rungs that do something on a type of device."""
    return tuple(rung for rung in RUNGS if device_type in rung.devices)


def without(config: RunConfig, names: Sequence[str], device_type: str, stack: ExitStack) -> RunConfig:
    """Returns `config` without the rungs `names`. Their slow twins stay in place until `stack` is closed.

    All other rungs of this type of device are on. Raises UsageError if a name is not a rung of this type of device.
    """
    rungs = rungs_of(device_type)
    if unknown := set(names).difference(rung.name for rung in rungs):
        known = ", ".join(rung.name for rung in rungs)
        raise UsageError(f"there is no rung {', '.join(sorted(unknown))}", allowed=f"allowed: {known}")
    settings: list[str] = []
    for rung in rungs:
        if rung.name not in names:
            settings += rung.settings_on
            continue
        settings += rung.settings_off
        if rung.off is not None:
            stack.enter_context(rung.off())
    return apply_overrides(config, settings)
