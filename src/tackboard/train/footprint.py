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
from tackboard.models.table_pieces import tables_in_pieces
from tackboard.models.tables import table_parameter_names
from tackboard.parallel.training_world import ALONE, TrainingWorld
from tackboard.train.optimizers import Optimizers


@torch.no_grad()
def footprint(
    model: nn.Module, optimizers: Optimizers, checkpoint: Path, world: TrainingWorld = ALONE
) -> dict[str, Any]:
    """Returns bytes of parameters, optimiser state and checkpoint, the peak memory, and the share of rows moved.

    The peak is the largest use of the GPU's memory if the model is on a GPU, otherwise the largest memory of this
    process. The share is None if no table is trained. If several processes train together, all of them call this, and
    tables are counted with the rows of all processes.
    """
    tables = table_parameter_names(model)
    pieces = [piece for table in tables_in_pieces(model).values() for piece in table.pieces]
    sums = [table.sums for table in optimizers.tables.values()]
    of_pieces = [piece.sums_R for shared in optimizers.shared.values() for piece in shared.tables.pieces]
    sums += [sums_R for sums_R in of_pieces if sums_R is not None]
    table_bytes, sum_bytes, num_rows, num_moved = world.sum_(
        torch.tensor(
            [
                sum(piece.rows_Rd.nbytes for piece in pieces),
                sum(each.nbytes for each in sums),
                sum(len(each) for each in sums),
                sum(int(each.count_nonzero()) for each in sums),
            ]
        )
    ).tolist()
    moments = [value for state in optimizers.adamw.state.values() for value in state.values()]
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    return {
        "table_bytes": table_bytes,
        "table_optimizer_bytes": sum_bytes,
        "dense_bytes": sum(p.nbytes for name, p in model.named_parameters() if name not in tables),
        "dense_optimizer_bytes": sum(value.nbytes for value in moments),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else peak_rss_bytes(),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file()),
        "rows_moved_share": num_moved / num_rows if num_rows else None,
    }
