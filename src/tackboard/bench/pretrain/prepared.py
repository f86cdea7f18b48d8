"""Writes the first batches and the initial parameters of the model, for the rival that the bench compares with us.

The module takes a config and a source of data, and writes one safetensors file. A rival reads the file before its clock
starts. The module also returns our loss on the first batch. The bench reports the rival's times only if the rival has
the same loss. Decided: if the tables have more than LARGEST_BYTES, all parameters are left out, because a file of large
tables would take longer to write than everything else. The rival then starts from random parameters, and its loss is
not compared.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tackboard.bench.pretrain.floor import Counts
from tackboard.core.errors import UsageError
from tackboard.core.machine import usable_cores
from tackboard.data.source import SequenceSource
from tackboard.models.interface import build_model
from tackboard.models.losses import negative_log_weights
from tackboard.models.pinfm import PinFMConfig
from tackboard.train.config import RunConfig

MOST_BATCHES = 16
LARGEST_BYTES = 1 << 30
RIVAL_FIELDS = ("offsets", "users", "items", "item_rows")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The written file, the mean sizes of its batches (see `Counts`), and our loss on the first batch (None if the file
    has no parameters)."""

    path: Path
    counts: Counts
    first_loss: float | None


def prepare(config: RunConfig, source: SequenceSource, path: Path, *, num_batches: int, is_half: bool) -> Prepared:
    """Writes at most MOST_BATCHES batches to `path`. Raises UsageError if the model is not a PinFM."""
    model_config = config.model
    if not isinstance(model_config, PinFMConfig):
        raise UsageError(f"{type(model_config).__name__} is not measured", allowed="allowed: a PinFM")
    steps = config.data.steps(source, model_config.tables, config.seed)
    batches = [batch for _, batch in steps.iterate(range(min(num_batches, MOST_BATCHES)), 0)]
    tensors: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(batches):
        weights_M = negative_log_weights(batch, in_batch=model_config.loss.in_batch_negatives)
        negatives_K = torch.nonzero(weights_M > -torch.inf).squeeze(1)
        fields = {name: getattr(batch, name) for name in RIVAL_FIELDS} | batch.columns
        fields |= {"negatives": negatives_K, "log_weights": weights_M[negatives_K]}
        tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in fields.items()}
    first_loss, has_parameters = None, table_bytes(model_config) <= LARGEST_BYTES
    if has_parameters:
        torch.manual_seed(config.seed)
        model: Any = build_model(model_config, source.vocabulary)
        tensors |= {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            first_loss = float(model.eval().loss(batches[0]).loss)
    setting = rival_setting(config, source, len(batches)) | {"is_half": is_half, "has_parameters": has_parameters}
    save_file(tensors, path, metadata={"setting": json.dumps(setting)})
    return Prepared(path, Counts.mean([Counts.of(batch, model_config) for batch in batches]), first_loss)


def table_bytes(config: PinFMConfig) -> int:
    """Returns the bytes of the tables in fp32."""
    return 4 * config.tables.num_hashes * config.tables.num_rows * config.tables.dim


def rival_setting(config: RunConfig, source: SequenceSource, num_batches: int) -> dict[str, Any]:
    """Returns the sizes and learning rates that the rival reads."""
    model, tables = config.model, config.model.tables
    return {
        "num_batches": num_batches,
        "num_threads": config.training.num_threads or usable_cores(),
        "width": model.width,
        "num_layers": model.backbone.num_layers,
        "num_heads": model.backbone.num_heads,
        "num_hashes": tables.num_hashes,
        "num_rows": tables.num_rows,
        "dim": tables.dim,
        "num_actions": source.vocabulary.num_actions,
        "num_surfaces": source.vocabulary.num_surfaces,
        "num_time_buckets": model.num_time_buckets,
        "max_positions": model.max_history + 1,
        "dense_learning_rate": config.optimizer.dense_learning_rate,
        "table_learning_rate": config.optimizer.table_learning_rate,
        "clip_norm": config.optimizer.clip_norm,
    }


def has_rival(config: RunConfig) -> bool:
    """Returns whether the rival implements the model and the loss of `config`."""
    model = config.model
    if not isinstance(model, PinFMConfig):
        return False
    plain = PinFMConfig(
        tables=model.tables,
        width=model.width,
        max_history=model.max_history,
        num_time_buckets=model.num_time_buckets,
        backbone=dataclasses.replace(
            type(model.backbone)(), num_layers=model.backbone.num_layers, num_heads=model.backbone.num_heads
        ),
        loss=dataclasses.replace(type(model.loss)(), in_batch_negatives=False),
    )
    is_all_positive = not config.data.positive_actions
    return model == plain and is_all_positive and model.num_time_buckets > 0
