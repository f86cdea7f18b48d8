"""Measures how long lookup, backward pass and row-wise update of tables take in our code, plain PyTorch and FBGEMM.

The input is the size of the tables, the number of items of a step, and a device. The output is milliseconds per step.
All contenders begin with the same rows and get the same gradients. The rows of a contender are compared with ours after
its first step, before its steps are timed. FBGEMM takes part on a GPU if it is installed. Plain PyTorch (a sparse
gradient that is coalesced) takes part with fp32 tables only, because it has no stochastic rounding.

The output also has a floor: the time to move the bytes that no implementation can avoid, in sectors of 32 bytes. The
lookup reads the row ids and the distinct rows, and writes the vectors. The update reads the gradients, and reads and
writes the distinct rows and their running sums (one sector each). The bandwidth is measured by copying a large tensor
on the same device.

Shapes: M items, k sub-tables, D = k × d, d width of a row.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tackboard.core.config import check
from tackboard.models.tables import STORAGES, HashedTables, TableConfig
from tackboard.train.optimizers import RowWiseAdagrad

SECTOR_BYTES = 32
LEARNING_RATE, EPS, FIRST_VALUE = 0.05, 1e-8, 0.5
CLIP = 1e6
"""All gradients are far below this limit, so none is clipped. FBGEMM would clip them at another point of the step."""
NUM_COMPARED = 1000
"""Number of items whose rows are compared after the first step."""
NUM_BATCHES = 4
"""Number of different batches that the timed steps repeat, so that caches do not hold the rows of a step."""
Step = Callable[[torch.Tensor, torch.Tensor], None]
Read = Callable[[torch.Tensor], torch.Tensor]
"""A step takes rows [M, k] and the gradient of their vectors [M, D]. A read takes rows and returns their vectors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpeedConfig:
    """The size of one measurement. The defaults are the sizes of the published comparison with FBGEMM on a GPU."""

    num_items: int = 65_536
    """Number of items of a step. Each item reads one row of every sub-table."""
    num_tables: int = 8
    """Number of sub-tables."""
    num_rows: int = 20_000_000
    """Number of rows of one sub-table."""
    dim: int = 32
    """Width of a row."""
    storage: str = "fp32"
    """Precision of the rows: fp32, fp16 or bf16."""
    skew: float = 1.0
    """A row is num_rows × u ** skew, with a uniform random u. 1 makes all rows equally likely; 2 favours low rows."""
    repeats: int = 50
    """Number of timed steps."""
    copied_bytes: int = 1 << 30
    """Size of the tensor whose copy gives the bandwidth."""

    def __post_init__(self) -> None:
        for name in ("num_items", "num_tables", "num_rows", "dim", "repeats", "copied_bytes"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        check(self.storage in STORAGES, "storage", self.storage, ", ".join(STORAGES))
        check(self.skew >= 1, "skew", self.skew, "1 or more")


def measure_tables(config: TableSpeedConfig, device: torch.device) -> dict[str, Any]:
    """Returns milliseconds of one step by contender, the floor, and the floor divided by the time of each contender."""
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (config.num_items, config.num_tables)
    batches = [
        (
            torch.rand(shape, dtype=torch.float64, generator=generator, device=device) ** config.skew * config.num_rows
        ).long()
        for _ in range(NUM_BATCHES)
    ]
    gradient_MD = torch.randn(config.num_items, config.num_tables * config.dim, generator=generator, device=device)
    contenders: dict[str, Callable[[], tuple[Step, Read]]] = {"ours": lambda: _ours(config, device)}
    if config.storage == "fp32":
        contenders["plain"] = lambda: _plain(config, device)
    if device.type == "cuda" and importlib.util.find_spec("fbgemm_gpu") is not None:
        contenders["fbgemm"] = lambda: _fbgemm(config, device)
    times_ms: dict[str, float] = {}
    differences: dict[str, float] = {}
    expected = None
    for name, make in contenders.items():  # One at a time, because one contender's tables may fill half of the memory.
        step, read = make()
        step(batches[0], gradient_MD)
        with torch.no_grad():
            moved = read(batches[0][:NUM_COMPARED])
        expected = moved if expected is None else expected
        differences[name] = float((moved - expected).abs().max())
        times_ms[name] = _milliseconds(step, batches, gradient_MD, config.repeats)
        del step, read
    floor_bytes = compulsory_bytes(config, batches[0])
    bytes_per_s = copy_bandwidth(config.copied_bytes, device)
    floor_ms = floor_bytes / bytes_per_s * 1e3
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "config": dataclasses.asdict(config),
        "ms": times_ms,
        "largest_difference": differences,
        "floor_bytes": floor_bytes,
        "bandwidth_gb_per_s": bytes_per_s / 1e9,
        "floor_ms": floor_ms,
        "share_of_floor": {name: floor_ms / value for name, value in times_ms.items()},
    }


def compulsory_bytes(config: TableSpeedConfig, rows_MK: torch.Tensor) -> int:
    """Returns the bytes that a step must read and write; see the module's docstring."""
    num_distinct = sum(len(torch.unique(column)) for column in rows_MK.unbind(1))
    row_bytes = config.dim * STORAGES[config.storage].itemsize
    row_sectors = -(-row_bytes // SECTOR_BYTES) * SECTOR_BYTES
    vectors = config.num_items * config.num_tables * config.dim * torch.float32.itemsize
    return num_distinct * (3 * row_sectors + 2 * SECTOR_BYTES) + 2 * vectors + rows_MK.numel() * rows_MK.itemsize


def copy_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Returns bytes per second, read and written, of the fastest of ten copies."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(10):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / min(seconds)


def _ours(config: TableSpeedConfig, device: torch.device) -> tuple[Step, Read]:
    with device:
        table = HashedTables(
            TableConfig(num_hashes=config.num_tables, num_rows=config.num_rows, dim=config.dim, storage=config.storage)
        )
    with torch.no_grad():
        table.weight.fill_(FIRST_VALUE)
    optimizer = RowWiseAdagrad(table, CLIP, EPS)
    optimizer.learning_rate.fill_(LEARNING_RATE)
    keep = torch.ones((), dtype=torch.bool, device=device)

    def step(rows_MK: torch.Tensor, gradient_MD: torch.Tensor) -> None:
        table(rows_MK).backward(gradient_MD)
        optimizer.apply(keep)

    return step, table


def _plain(config: TableSpeedConfig, device: torch.device) -> tuple[Step, Read]:
    num_rows = config.num_tables * config.num_rows
    weight = torch.full((num_rows, config.dim), FIRST_VALUE, device=device, requires_grad=True)
    sums = torch.zeros(num_rows, device=device)
    first_rows_K = torch.arange(config.num_tables, device=device) * config.num_rows

    def step(rows_MK: torch.Tensor, gradient_MD: torch.Tensor) -> None:
        functional.embedding(rows_MK + first_rows_K, weight, sparse=True).flatten(1).backward(gradient_MD)
        assert weight.grad is not None
        gradient, weight.grad = weight.grad.coalesce(), None
        with torch.no_grad():
            rows, values = gradient.indices()[0], gradient.values().clamp(-CLIP, CLIP)
            sums[rows] = total = sums[rows] + values.square().mean(dim=1)
            weight[rows] -= LEARNING_RATE * values / (total.sqrt() + EPS).unsqueeze(1)

    return step, lambda rows_MK: functional.embedding(rows_MK + first_rows_K, weight).flatten(1)


def _fbgemm(config: TableSpeedConfig, device: torch.device) -> tuple[Step, Read]:
    """Makes FBGEMM's fused tables, which update their rows inside the backward pass, with FBGEMM's own rounding."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (config.num_rows, config.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [place] * config.num_tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weights_precision=SparseType.from_dtype(STORAGES[config.storage]),
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        stochastic_rounding=config.storage != "fp32",
        device=device,
    )
    weights = tables.split_embedding_weights()
    for weight in weights:
        weight.detach().fill_(FIRST_VALUE)
    offsets = torch.arange(config.num_items * config.num_tables + 1, device=device)

    def step(rows_MK: torch.Tensor, gradient_MD: torch.Tensor) -> None:
        tables(indices=rows_MK.T.reshape(-1), offsets=offsets).backward(gradient_MD)

    def read(rows_MK: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight[rows_M] for weight, rows_M in zip(weights, rows_MK.unbind(1), strict=True)], 1).float()

    return step, read


def _milliseconds(step: Step, batches: list[torch.Tensor], gradient_MD: torch.Tensor, repeats: int) -> float:
    """Returns the median time of `repeats` steps, measured by CUDA events on a GPU and by the clock on a CPU."""
    for rows_MK in batches:
        step(rows_MK, gradient_MD)
    if not gradient_MD.is_cuda:
        times = []
        for number in range(repeats):
            started = time.perf_counter()
            step(batches[number % len(batches)], gradient_MD)
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for number, mark in enumerate(marks[1:]):
        step(batches[number % len(batches)], gradient_MD)
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(earlier.elapsed_time(later) for earlier, later in itertools.pairwise(marks))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
