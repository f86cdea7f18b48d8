"""The processes of test_table_plan.py: each makes the planned tables with TorchRec and prints what it holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed, multiprocessing
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ShardingEnv

from tackboard.models.tables import STORAGES as TYPES
from tackboard.models.tables import TableConfig
from tackboard.parallel.table_plan import plan_tables, torchrec_plan

STORAGES = {"fp32": torchrec.DataType.FP32, "fp16": torchrec.DataType.FP16}


def held(table: TableConfig, sharding: str) -> dict[str, Any]:
    """Compares the blocks and bytes of this process with the plan, and a lookup with the whole tables."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    plan = plan_tables({"items": table}, sharding, world_size=world_size, local_size=world_size)
    configs = [
        torchrec.EmbeddingConfig(
            name=f"t{k}",
            embedding_dim=table.dim,
            num_embeddings=table.num_rows,
            feature_names=[f"f{k}"],
            data_type=STORAGES[table.storage],
        )
        for k in range(table.num_hashes)
    ]
    collection = torchrec.EmbeddingCollection(tables=configs, device=torch.device("meta"))
    adagrad = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    env = ShardingEnv.from_process_group(distributed.group.WORLD)
    sharded = EmbeddingCollectionSharder(adagrad).shard(
        collection, torchrec_plan(plan, "items"), env, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(0)
    shape = (table.num_hashes, table.num_rows, table.dim)
    whole = torch.randn(shape, generator=generator).to(TYPES[table.storage]).float()
    blocks, num_bytes = [], 0
    for name, tensor in sharded.state_dict().items():
        sub_table = int(name.split(".")[1].removeprefix("t"))
        for shard in tensor.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            assert shard.tensor.shape == (rows, columns)
            shard.tensor.copy_(whole[sub_table][row : row + rows, column : column + columns])
            blocks.append([sub_table, row, rows, column, columns])
            num_bytes += shard.tensor.nbytes
    for state in sharded.fused_optimizer.state_dict()["state"].values():
        num_bytes += sum(shard.tensor.nbytes for sums in state.values() for shard in sums.local_shards())
    ids = torch.randint(table.num_rows, (table.num_hashes, 5), generator=torch.Generator().manual_seed(rank))
    lengths = torch.ones(ids.numel(), dtype=torch.int64)
    keys = [f"f{k}" for k in range(table.num_hashes)]
    found = sharded(torchrec.KeyedJaggedTensor(keys=keys, values=ids.flatten(), lengths=lengths)).wait()
    error = max((found[f"f{k}"].values() - whole[k][ids[k]]).abs().max().item() for k in range(table.num_hashes))
    sum(found[key].values().float().square().sum() for key in keys).backward()
    planned = [[b.sub_table, b.first_row, b.num_rows, b.first_column, b.num_columns] for b in plan.blocks[rank]]
    return {
        "blocks": sorted(blocks),
        "planned_blocks": planned,
        "num_bytes": num_bytes,
        "planned_bytes": plan.num_bytes(rank),
        "error": error,
    }


def run(rank: int, world_size: int, folder: str, cases: list[dict[str, Any]]) -> None:
    meeting = (Path(folder) / str(world_size)).as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    results = [held(TableConfig(**case["table"]), case["sharding"]) for case in cases]
    gathered: list[Any] = [None] * world_size
    distributed.all_gather_object(gathered, results)
    if rank == 0:
        print(json.dumps(gathered), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    # The processes are forks, so TorchRec is imported once.
    for size in (2, 3, 4):
        arguments = (size, sys.argv[1], json.loads(sys.argv[2]))
        multiprocessing.start_processes(run, arguments, nprocs=size, start_method="fork")
