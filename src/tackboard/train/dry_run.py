"""Estimates what a run needs, without training: parameters, bytes, steps and disk space.

A checkpoint stores the rows of a table that training has changed, so its size grows during a run. The estimate is an
upper bound: training can change only the rows of the catalogue's items, and every changed row may be stored. Decided: a
run is refused only if it surely cannot fit. If only the upper bound does not fit, the run gets a warning; before each
checkpoint the real size is compared with the disk and the memory (see saving.py).

The estimate writes nothing except the index of the data, which the run will need (see data/index.py).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tackboard.batch import SequenceBatch
from tackboard.checkpoint.copies import stored_bytes
from tackboard.core.errors import UsageError, shown_bytes
from tackboard.core.machine import total_memory_bytes
from tackboard.core.progress import say
from tackboard.data.request_loader import RequestSource
from tackboard.data.source import SequenceSource
from tackboard.data.steps import NumberedSteps
from tackboard.models.interface import build_model
from tackboard.models.tables import HashedTables, table_modules, table_parameter_names
from tackboard.parallel.sharded_tables import plan_of
from tackboard.parallel.table_plan import balance_report
from tackboard.parallel.training_world import ALONE, TrainingWorld
from tackboard.train.config import RunConfig
from tackboard.train.devices import choose_device
from tackboard.train.optimizers import check_multipliers
from tackboard.train.start import check_start

KEPT_CHECKPOINTS = 3
"""Number of checkpoints on disk at one time: a run keeps two while it writes a third. A run with judgements also keeps
its best checkpoint."""


def estimate_run(
    config: RunConfig,
    source: SequenceSource,
    runs: Path,
    steps: NumberedSteps[Any] | None = None,
    *,
    is_resumed: bool = False,
    world: TrainingWorld = ALONE,
) -> dict[str, Any]:
    """Returns the sizes of a run, without allocating the model.

    If several processes (`world`) train together, the memory is that of one host, or of one GPU, with its part of the
    tables. The division of the tables is then printed.

    Raises UsageError if the run cannot fit, if its model does not suit the data, or if the model cannot take the
    parameters that the config's `start` names. `steps` holds the numbered steps of the config's data over `source`, or
    None if they do not exist yet.
    """
    device = choose_device(config.training.device) if world.is_alone else world.device
    with torch.device("meta"):
        model = build_model(config.model, source.vocabulary)
    _check(model, config, source, is_resumed=is_resumed)
    if not world.is_alone:
        _print_division(model, config, world)
    tables = table_parameter_names(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_table = sum(size for name, size in sizes.items() if name in tables)
    num_dense = sum(sizes.values()) - num_table
    table_rows = sum(module.weight.shape[0] for module in table_modules(model).values())
    steps = steps or config.data.steps(source, config.model.tables, config.seed)
    # Memory holds the tables as they are stored, the buffers, and one Adagrad sum per row. For each dense parameter it
    # holds the weight, the gradient and two AdamW moments.
    kept_bytes = sum(t.nbytes for name, t in model.state_dict().items() if name in tables or name not in sizes)
    table_bytes = sum(model.get_parameter(name).nbytes for name in tables)
    # The checkpoint of step 0 is the smallest: it has buffers and dense parameters, but no moments of AdamW.
    buffers = kept_bytes - table_bytes
    # The processes of a host together hold the host's part of the tables; each has its own copy of everything else.
    num_parts, num_copies = world.size // world.local_size, world.local_size
    if device.type == "cuda":
        num_parts, num_copies = world.size, 1
    memory = (table_bytes + 4 * table_rows) // num_parts + num_copies * (buffers + 16 * num_dense)
    least = buffers + 4 * num_dense
    checkpoint = buffers + 12 * num_dense
    for module in table_modules(model).values():
        checkpoint += _table_bytes(module, None if config.start.run else len(source.catalogue))
    num_kept = KEPT_CHECKPOINTS + bool(config.training.validate_every)
    surely_new = 1 if is_resumed else num_kept  # The older checkpoints of a resumed run are on the disk already.
    free_disk = shutil.disk_usage(_existing(runs)).free
    # A GPU's dense part is first made in the machine's memory; tables are made on the GPU.
    host, places = memory, {"this machine": (total_memory_bytes(), memory)}
    if device.type == "cuda":
        host = least
        places = {
            "this machine": (total_memory_bytes(), least),
            "its GPU": (torch.cuda.get_device_properties(device).total_memory, memory),
        }
    _check_room(places, surely_new * least, free_disk, runs)
    if num_kept * checkpoint > free_disk:
        needed = f"{num_kept} checkpoints may need up to {shown_bytes(num_kept * checkpoint)}"
        say(f"warning: {needed}, and {runs} has {shown_bytes(free_disk)} free")
    if host + checkpoint > total_memory_bytes():
        needed = f"the run and the copy for a checkpoint may need up to {shown_bytes(host + checkpoint)}"
        say(f"warning: {needed} of memory, and this machine has {shown_bytes(total_memory_bytes())}")
    return {
        "events": source.dataset.num_events,
        "users": source.dataset.num_users,
        "items": len(source.catalogue),
        "training_tokens": steps.plan.total_tokens,
        "steps_per_epoch": steps.plan.steps_per_epoch,
        "epochs": round(config.training.steps / steps.plan.steps_per_epoch, 2),
        "table_parameters": num_table,
        "dense_parameters": num_dense,
        "state_bytes": memory,
        "checkpoint_bytes": checkpoint,
        "peak_host_bytes": host + checkpoint,
        # An untrained model finds all items (or both labels) equally likely. Its loss is the log of their number.
        "first_loss_expected": round(
            math.log(max(2, len(source.catalogue) if config.data.batch_type is SequenceBatch else 2)), 2
        ),
    }


def _print_division(model: nn.Module, config: RunConfig, world: TrainingWorld) -> None:
    """Prints what each process would hold, and how many rows it would give out in a step."""
    most_items = config.data.tokens_per_step + getattr(config.data, "uniform_negatives", 0)
    plan = plan_of(model, world, config.parallel, items_per_step=most_items)
    for line in balance_report(plan).lines():
        say(line)


def _check_room(places: Mapping[str, tuple[int, int]], least_on_disk: int, free_disk: int, runs: Path) -> None:
    """Raises UsageError if memory or disk are surely too small. `places` holds (its bytes, bytes needed) by name."""
    for place, (there, needed) in places.items():
        if needed > there:
            raise UsageError(
                f"the model needs {shown_bytes(needed)}",
                allowed=f"{place} has {shown_bytes(there)}",
                fix="lower model.tables.num_rows or model.tables.dim, or set model.tables.storage to fp16",
            )
    if least_on_disk > free_disk:
        raise UsageError(
            f"checkpoints need {shown_bytes(least_on_disk)}",
            allowed=f"{runs} has {shown_bytes(free_disk)} free",
            fix="free some space, or choose another --runs",
        )


def _check(model: nn.Module, config: RunConfig, source: SequenceSource, *, is_resumed: bool) -> None:
    """Raises UsageError if the run's settings name parameters, labels or another run that do not fit."""
    check_multipliers(model, config.optimizer)
    if isinstance(source, RequestSource):
        config.model.check_labels(source.labels)
    if not is_resumed:  # A resumed run takes its parameters from its own checkpoint.
        check_start(model, config, source)


def _table_bytes(module: HashedTables, num_items: int | None) -> int:
    """Returns the largest stored size of a table and its Adagrad sums. `num_items` is None if any row may be stored."""
    num_changed = num_rows = module.weight.shape[0]
    if num_items is not None:
        num_changed = module.num_hashes * min(module.num_rows, num_items)
    sums = torch.empty(num_rows, device="meta")
    return stored_bytes(module.weight, num_changed) + stored_bytes(sums, num_changed)


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path
