"""Computes the floor of a pretraining step: the seconds of the work that every implementation must do.

The module takes a PinFM (on any device, even torch's meta device), the counts of a batch and the peaks of a device. It
returns a list of parts (`FloorItem`) with their formulas. The floor is the sum of the parts. This list was committed
before the step was optimised, so the floor could not be fitted to the result of an optimisation.

`FORMULAS` says what each part counts. Its letters are explained below. The time of a matrix product is measured on this
device, for exactly its shape. All other work takes the time to read and write its bytes, at the bandwidth of a large
copy. Attention also has a time for its FLOP, at the speed of a large product; the longer of the two times counts.
Numbers have the precision of matrix products unless a formula says fp32. Table rows, and the running sums that the
optimiser keeps for them, are counted in whole memory sectors (32 bytes on a GPU, 64 bytes on a CPU), because memory is
read in sectors.

Decided: work that can be fused into its neighbour is free (activations, biases, dropout, masks, the softmax, the copy
of the batch). The times of the parts are added up, because the parts depend on each other and cannot overlap. Padding
is never counted. MFU (model FLOP utilisation) counts only the backbone and the projections, without recomputed
products.

Shapes: N events, B rows, T tokens (events and start tokens), C causal pairs of tokens in the same row, A tokens that
predict, R softmax sums of the loss, M distinct items, Q negatives, U distinct table rows, D width, E width of all rows
of an item together, and `a` the width of all heads together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tackboard.batch import SequenceBatch
from tackboard.core.errors import UsageError
from tackboard.models.losses import negative_log_weights
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import table_parameter_names
from tackboard.models.targets import future_token_pairs, join_pairs, multi_token_pairs, next_token_pairs

FORMULAS = {
    "backbone products": "for every linear layer: T × in × out, forward, gradient of input, gradient of weight",
    "projections": "the same for φ_in over N events, φ_out over A tokens, ψ over M items",
    "attention": "per layer the slower of 14·C·a FLOP (2 products forward, 5 backward, one of them recomputed) and "
    "12·T·a numbers (4 forward, 8 backward)",
    "loss": "4 products of R × Q × D: scores, the scores again, gradient of tokens, gradient of items",
    "norms and residuals": "for each half of a layer: T·D × (5 fp32 numbers of the residual stream, 4 numbers of the "
    "branch and its norm); the final norm counts half as much as half a layer",
    "unit vectors": "(N + A + M)·D × 5 numbers: 2 forward, 3 backward",
    "events": "2·N·E numbers (event vectors and their gradients), M·E fp32 numbers (gradients of items)",
    "table rows": "lookup: U rows, M·E numbers, 8 bytes per row id; update: M·E fp32 gradients, U rows and U sums read "
    "and written",
    "dense optimiser": "per dense parameter 8 fp32 numbers (gradient twice; weight and two moments read and written) "
    "and a half-precision copy",
}
"""What each part of the floor counts."""
SECTOR_BYTES = {"cpu": 64, "cuda": 32}
FP32_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The counts that the letters of the module's docstring stand for, from real batches."""

    num_events: int
    num_rows: int
    causal_pairs: int
    num_predicting: int
    num_sums: int
    num_items: int
    num_negatives: int
    num_table_rows: int

    @property
    def num_tokens(self) -> int:
        return self.num_events + self.num_rows

    @classmethod
    def of(cls, batch: SequenceBatch, config: PinFMConfig) -> Counts:
        """Counts one batch."""
        loss = config.loss
        parts = [next_token_pairs(batch)]
        if loss.multi_token_weight:
            parts.append(multi_token_pairs(batch, loss.multi_token_window, loss.multi_token_share))
        if loss.future_token_weight:
            parts.append(future_token_pairs(batch, loss.future_token_anchor, loss.future_token_window))
        pairs = join_pairs(parts)
        num_predicting = len(torch.unique(pairs.tokens))
        # If no item of the user is a negative, all pairs of a token have the same negatives, and share one softmax sum.
        shares_sums = loss.mask_same_user and not loss.later_negatives
        weights = negative_log_weights(batch, in_batch=loss.in_batch_negatives, correct_popularity=False)
        tokens_B = batch.lengths() + 1
        tables = torch.arange(config.tables.num_hashes, device=batch.items.device) * config.tables.num_rows
        return cls(
            num_events=batch.num_events,
            num_rows=batch.num_rows,
            causal_pairs=int((tokens_B * (tokens_B + 1) // 2).sum()),
            num_predicting=num_predicting,
            num_sums=num_predicting if shares_sums else len(pairs),
            num_items=len(batch.item_ids),
            num_negatives=int((weights > -torch.inf).sum()),
            num_table_rows=len(torch.unique(batch.item_rows + tables)),
        )

    @classmethod
    def mean(cls, counts: Sequence[Counts]) -> Counts:
        """Returns the mean of the counts of several batches."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: round(sum(getattr(one, name) for one in counts) / len(counts)) for name in names})


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product [rows, inner] × [inner, columns] that a step computes `count` times."""

    rows: int
    inner: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of all `count` products."""
        return 2 * self.rows * self.inner * self.columns * self.count


class Speeds(Protocol):
    """The measured speeds of a device; `peaks.Peaks` measures them."""

    @property
    def flops_per_s(self) -> float:
        """FLOP per second of a large square product."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a large copy reads and writes."""

    def product_seconds(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of one product of this shape."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloorItem:
    """One line of the floor. Products take their measured time; other work takes the longer of FLOP and byte time."""

    name: str
    products: tuple[Product, ...] = ()
    flops: int = 0
    bytes: int = 0

    def seconds(self, speeds: Speeds) -> float:
        """Returns the least number of seconds that a device with these speeds needs."""
        at_shape = sum(one.count * speeds.product_seconds(one.rows, one.inner, one.columns) for one in self.products)
        return at_shape + max(self.flops / speeds.flops_per_s, self.bytes / speeds.bytes_per_s)

    @property
    def total_flops(self) -> int:
        return self.flops + sum(product.flops for product in self.products)


def floor_items(model: nn.Module, counts: Counts, *, number_bytes: int, device_type: str) -> list[FloorItem]:
    """Returns the floor's items. `number_bytes` is the size of a number in matrix products: 4 (fp32) or 2 (bf16).

    Raises UsageError if the model is not a PinFM.
    """
    if not isinstance(model, PinFM):
        raise UsageError(f"the floor of {type(model).__name__} is unknown", allowed="allowed: a PinFM")
    width, items_width, tokens = model.config.width, model.item_tables.width, counts.num_tokens
    layers = _layers(model)
    halves = 2 * len(layers) + 0.5  # The final norm has no residual sum after it.
    per_half = 5 * FP32_BYTES + 4 * number_bytes
    vectors = counts.num_events + counts.num_predicting + counts.num_items
    tables = table_parameter_names(model)
    dense = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tables)
    per_dense = 8 * FP32_BYTES + (number_bytes if number_bytes < FP32_BYTES else 0)
    events_bytes = 2 * counts.num_events * items_width * number_bytes + counts.num_items * items_width * FP32_BYTES
    return [
        FloorItem(name="backbone products", products=_thrice(model.decoder, tokens)),
        FloorItem(
            name="projections",
            products=(
                *_thrice(model.phi_in, counts.num_events),
                *_thrice(model.phi_out, counts.num_predicting),
                *_thrice(model.psi, counts.num_items),
            ),
        ),
        FloorItem(
            name="attention",
            flops=sum(14 * counts.causal_pairs * _heads_width(layer, width) for layer in layers),
            bytes=sum(12 * tokens * _heads_width(layer, width) * number_bytes for layer in layers),
        ),
        FloorItem(name="loss", products=_loss_products(counts, width)),
        FloorItem(name="norms and residuals", bytes=round(halves * tokens * width * per_half)),
        FloorItem(name="unit vectors", bytes=5 * vectors * width * number_bytes),
        FloorItem(name="events", bytes=events_bytes),
        FloorItem(name="table rows", bytes=_table_bytes(model, counts, number_bytes, SECTOR_BYTES[device_type])),
        FloorItem(name="dense optimiser", bytes=dense * per_dense),
    ]


def model_flops(items: Sequence[FloorItem]) -> int:
    """Returns the FLOP that MFU counts: backbone with attention, and projections, without the recomputed product."""
    found = {item.name: item.total_flops for item in items}
    return found["backbone products"] + found["projections"] + found["attention"] * 6 // 7


def floor_result(items: Sequence[FloorItem], speeds: Speeds) -> dict[str, Any]:
    """Returns the floor as JSON: milliseconds, FLOP and bytes of each item, and the total in milliseconds."""
    lines = {
        item.name: {"ms": 1000 * item.seconds(speeds), "gflop": item.total_flops / 1e9, "mb": item.bytes / 1e6}
        for item in items
    }
    return {
        "items": {name: {key: round(value, 4) for key, value in line.items()} for name, line in lines.items()},
        "total_ms": round(sum(line["ms"] for line in lines.values()), 4),
        "model_gflop": round(model_flops(items) / 1e9, 3),
        "peak_gflop_per_s": round(speeds.flops_per_s / 1e9, 1),
        "copy_gb_per_s": round(speeds.bytes_per_s / 1e9, 2),
    }


def _thrice(module: nn.Module, rows: int) -> tuple[Product, ...]:
    """Returns the products of all linear layers in `module`: forward, gradient of the input, gradient of the weight."""
    shapes: dict[tuple[int, int, int], int] = {}
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            wide, narrow = layer.out_features, layer.in_features
            for shape in ((rows, narrow, wide), (rows, wide, narrow), (narrow, rows, wide)):
                shapes[shape] = shapes.get(shape, 0) + 1
    return tuple(Product(*shape, count) for shape, count in shapes.items())


def _loss_products(counts: Counts, width: int) -> tuple[Product, ...]:
    sums, negatives = counts.num_sums, counts.num_negatives
    return (
        Product(sums, width, negatives, count=2),
        Product(sums, negatives, width),
        Product(negatives, sums, width),
    )


def _layers(model: PinFM) -> list[nn.Module]:
    return list(model.decoder.layers_in_order())  # type: ignore[operator]


def _heads_width(layer: nn.Module, width: int) -> int:
    """Returns the width of all heads of a layer together: the input width of its output map."""
    out = getattr(layer, "out", None) or getattr(layer, "attention_out", None)
    return out.in_features if isinstance(out, nn.Linear) else width


def _table_bytes(model: PinFM, counts: Counts, number_bytes: int, sector: int) -> int:
    tables = model.item_tables
    row_bytes = -(-tables.dim * tables.weight.element_size() // sector) * sector
    looked_up = counts.num_items * tables.width
    lookup = counts.num_table_rows * row_bytes + looked_up * number_bytes + 8 * counts.num_items * tables.num_hashes
    update = looked_up * FP32_BYTES + 2 * counts.num_table_rows * (row_bytes + sector)
    return lookup + update
