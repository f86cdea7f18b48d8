"""Estimates what a run needs, without training: parameters, bytes, steps and disk space.

The estimate writes nothing except the index of the data, which the run will need (see data/index.py).
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from tackboard.batch import SequenceBatch
from tackboard.core.errors import UsageError
from tackboard.core.machine import total_memory_bytes
from tackboard.data.source import SequenceSource
from tackboard.data.steps import NumberedSteps
from tackboard.models.interface import build_model
from tackboard.models.tables import table_parameter_names
from tackboard.train.config import RunConfig
from tackboard.train.trainer import choose_device

KEPT_CHECKPOINTS = 3
"""Number of checkpoints on disk at one time: a run keeps two while it writes a third. A run with judgements also keeps
its best checkpoint."""


def estimate_run(
    config: RunConfig, source: SequenceSource, runs: Path, steps: NumberedSteps[Any] | None = None
) -> dict[str, Any]:
    """Returns the sizes of a run, without allocating the model. Raises UsageError if the run cannot fit.

    `steps` holds the numbered steps of the config's data over `source`, or None if they do not exist yet.
    """
    device = choose_device(config.training.device)
    with torch.device("meta"):
        model = build_model(config.model, source.vocabulary)
    tables = table_parameter_names(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_table = sum(size for name, size in sizes.items() if name in tables)
    num_dense = sum(sizes.values()) - num_table
    table_rows = sum(p.shape[0] for name, p in model.named_parameters() if name in tables)
    steps = steps or config.data.steps(source, config.model.tables, config.seed)
    # Memory holds tables as they are stored, buffers, one Adagrad sum per row, and for each dense parameter the weight,
    # the gradient and two AdamW moments.
    kept_bytes = sum(t.nbytes for name, t in model.state_dict().items() if name in tables or name not in sizes)
    memory = kept_bytes + 4 * table_rows + 16 * num_dense
    checkpoint = kept_bytes + 4 * table_rows + 12 * num_dense
    num_kept = KEPT_CHECKPOINTS + bool(config.training.validate_every)
    free_disk = shutil.disk_usage(_existing(runs)).free
    # A model for a GPU is first made in the machine's memory; the optimiser's sums are made on the GPU.
    places = {"this machine": (total_memory_bytes(), memory)}
    if device.type == "cuda":
        parameters = kept_bytes + 4 * num_dense
        places = {
            "this machine": (total_memory_bytes(), parameters),
            "its GPU": (torch.cuda.get_device_properties(device).total_memory, memory),
        }
    for place, (there, needed) in places.items():
        if needed > there:
            raise UsageError(
                f"the model needs {_size(needed)}",
                allowed=f"{place} has {_size(there)}",
                fix="lower model.tables.num_rows or model.tables.dim, or set model.tables.storage to fp16",
            )
    if num_kept * checkpoint > free_disk:
        raise UsageError(
            f"checkpoints need {_size(num_kept * checkpoint)}",
            allowed=f"{runs} has {_size(free_disk)} free",
            fix="free some space, or choose another --runs",
        )
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
        # The loss of an untrained model, for which every item is equally likely, and a label of 1 as likely as 0.
        "first_loss_expected": round(
            math.log(max(2, len(source.catalogue) if config.data.batch_type is SequenceBatch else 2)), 2
        ),
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path
