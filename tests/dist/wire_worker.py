"""One of two processes that look rows up in shared tables and train them, at every precision on the wire.

Run by test_wire.py, with the environment that torchrun sets: `wire_worker.py ANSWERS`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from tackboard.parallel.config import PRECISIONS, ParallelConfig
from tackboard.parallel.wire import WireCounter, codecs, id_type

CPU = torch.device("cpu")
NUM_ROWS, WIDTH = 100, 32
NAMES = ["t0", "t1"]
NUM_IDS = {0: (70, 30), 1: (50, 90)}
"""Rank → ids that it asks of each table."""
PAIRS = [(precision, precision) for precision in PRECISIONS] + [("fp32", "fp8"), ("mx4", "fp32")]
WAYS = {
    "row": lambda _: row_wise(compute_kernel="fused"),
    "table": lambda number: table_wise(rank=number, compute_kernel="fused"),
    "column": lambda _: column_wise(ranks=[0, 1], compute_kernel="fused"),
}
handed_over: list[tuple[str, int]] = []
"""Type and bytes of each tensor that this process handed to an all-to-all."""


def count_messages() -> None:
    real = distributed.all_to_all_single

    def counted(output: torch.Tensor, input: torch.Tensor, *others: Any, **named: Any) -> Any:
        handed_over.append((str(input.dtype).removeprefix("torch."), input.nbytes))
        return real(output, input, *others, **named)

    distributed.all_to_all_single = counted


def make_tables(sharding: str, registry: Any) -> Any:
    """Two tables; each row's values depend on its position only."""
    tables = EmbeddingCollection(
        tables=[
            EmbeddingConfig(num_embeddings=NUM_ROWS, embedding_dim=WIDTH, name=name, feature_names=[name])
            for name in NAMES
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-12},
        qcomm_codecs_registry=registry,
    )
    plan = construct_module_sharding_plan(
        tables,
        {name: WAYS[sharding](number) for number, name in enumerate(NAMES)},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    sharded = sharder.shard(tables, plan, ShardingEnv.from_process_group(distributed.group.WORLD), CPU)
    whole = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.1
    for table, part in parts(sharded):
        row, column = table.local_metadata.shard_offsets
        part.copy_(whole[row : row + part.shape[0], column : column + part.shape[1]])
    return sharded


def parts(tables: Any) -> list[tuple[Any, torch.Tensor]]:
    return [
        pair
        for lookup in tables._lookups
        for kernel in lookup._emb_modules
        for pair in zip(kernel._config.embedding_tables, kernel.split_embedding_weights(), strict=True)
    ]


def step(tables: Any, rank: int, num_ids: tuple[int, int], type_: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One step: the rows that were looked up, and how the rows of this process changed.

    Gradients differ in size by four powers of ten. Adagrad's first step takes the size away, so each row counts alike.
    """
    generator = torch.Generator().manual_seed(10 + rank)
    ids = KeyedJaggedTensor(
        keys=NAMES,
        values=torch.randint(0, NUM_ROWS, (sum(num_ids),), generator=generator).to(type_),
        lengths=torch.tensor(num_ids, dtype=type_),
    )
    before = [part.clone() for _, part in parts(tables)]
    found = tables(ids)
    rows_ND = torch.cat([found[name].values() for name in NAMES])
    gradient_ND = torch.randn(rows_ND.shape, generator=generator)
    rows_ND.backward(gradient_ND * torch.logspace(-7, -3, len(rows_ND))[:, None])
    changes = [(part - old).reshape(-1) for (_, part), old in zip(parts(tables), before, strict=True)]
    return rows_ND.detach(), torch.cat([*changes, torch.empty(0)])


def relative_error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm()) if wanted.numel() else 0.0


def run(sharding: str, pair: tuple[str, str], rank: int, truth: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    config = ParallelConfig(forward_precision=pair[0], backward_precision=pair[1])
    type_ = id_type(NUM_ROWS)
    counter = WireCounter(type_.itemsize)
    width = WIDTH // 2 if sharding == "column" else WIDTH
    tables = make_tables(sharding, codecs(config, width=width, device=CPU, counter=counter))
    handed_over.clear()
    rows_ND, change = step(tables, rank, NUM_IDS[rank], type_)
    return {
        "sharding": sharding,
        "forward": pair[0],
        "backward": pair[1],
        "row_error": relative_error(truth[0], rows_ND),
        "update_error": relative_error(truth[1], change),
        "report": counter.report(),
        "handed_over": list(handed_over),
    }


def run_without_ids(sharding: str, rank: int) -> dict[str, Any]:
    """Rank 1 asks for nothing. Returns whether rows stayed finite and how often a row changed."""
    config = ParallelConfig(forward_precision="fp8", backward_precision="mx4")
    tables = make_tables(sharding, codecs(config, width=WIDTH, device=CPU))
    rows_ND, change = step(tables, rank, (40, 0) if rank == 0 else (0, 0), torch.int32)
    return {"sharding": sharding, "rows": len(rows_ND), "changed": int(change.count_nonzero())}


def run_with_infinity(precision: str, rank: int) -> int:
    """Rank 0 sends an infinite gradient for row 99, which rank 1 holds. Returns this process's values that broke."""
    config = ParallelConfig(backward_precision=precision)
    tables = make_tables("row", codecs(config, width=WIDTH, device=CPU))
    num = 1 if rank == 0 else 0
    asked = torch.full((num,), 99, dtype=torch.int32)
    ids = KeyedJaggedTensor(keys=NAMES, values=asked, lengths=torch.tensor([num, 0], dtype=torch.int32))
    rows_ND = tables(ids)["t0"].values()
    rows_ND.backward(torch.full_like(rows_ND, torch.inf))
    return sum(int((~part.isfinite()).sum()) for _, part in parts(tables))


def main(answers: Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    set_gradient_division(False)
    count_messages()
    rank = distributed.get_rank()
    found: dict[str, Any] = {"runs": [], "plain_messages": {}}
    for sharding in WAYS:
        plain = make_tables(sharding, None)
        handed_over.clear()
        truth = step(plain, rank, NUM_IDS[rank], torch.int64)
        found["plain_messages"][sharding] = list(handed_over)
        found["runs"] += [run(sharding, pair, rank, truth) for pair in PAIRS]
    found["without_ids"] = [run_without_ids(sharding, rank) for sharding in ("row", "table")]
    found["broken"] = {precision: run_with_infinity(precision, rank) for precision in PRECISIONS}
    answers.with_suffix(f".{rank}").write_text(json.dumps(found))
    distributed.barrier()
    # A thread of gloo may still hold tensors. If it lets go while Python shuts down, it ends the process with SIGABRT
    # (seen once in ten runs on busy cores; TorchRec keeps the group alive after destroy_process_group).
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
