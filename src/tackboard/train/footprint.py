"""Reports a trained model's bytes by part, the size of its checkpoint, and the share of table rows that have moved.

A row counts as moved if its Adagrad sum (the running sum of squared gradients) is not 0. The rows of items that no
batch has read as an event or a negative still have their first values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tackboard.core.machine import peak_rss_bytes
from tackboard.models.tables import table_parameter_names
from tackboard.train.optimizers import Optimizers


@torch.no_grad()
def footprint(model: nn.Module, optimizers: Optimizers, checkpoint: Path) -> dict[str, Any]:
    """Returns bytes of parameters, optimiser state and checkpoint, the peak memory, and the share of rows moved.

    The peak is the largest use of the GPU's memory if the model is on a GPU, otherwise the largest memory of this
    process. The share is None if no table is trained.
    """
    tables = table_parameter_names(model)
    sums = [table.sums for table in optimizers.tables.values()]
    num_rows = sum(len(each) for each in sums)
    moments = [value for state in optimizers.adamw.state.values() for value in state.values()]
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    return {
        "table_bytes": sum(p.nbytes for name, p in model.named_parameters() if name in tables),
        "table_optimizer_bytes": sum(each.nbytes for each in sums),
        "dense_bytes": sum(p.nbytes for name, p in model.named_parameters() if name not in tables),
        "dense_optimizer_bytes": sum(value.nbytes for value in moments),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else peak_rss_bytes(),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file()),
        "rows_moved_share": sum(int(each.count_nonzero()) for each in sums) / num_rows if num_rows else None,
    }
