"""TorchRec's processes hold exactly the blocks and the bytes that the plan states."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.models.tables import TableConfig
from tackboard.parallel.table_plan import plan_tables, torchrec_plan

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed: make distributed"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
# Neither the rows, nor the sub-tables, nor the columns of the first table can be divided among 2, 3 or 4 processes.
UNEVEN = {"num_hashes": 5, "num_rows": 101, "dim": 12}
CASES = [
    *({"sharding": sharding, "table": UNEVEN} for sharding in ("row", "table", "column")),
    *({"sharding": sharding, "table": UNEVEN | {"num_hashes": 1, "dim": 8}} for sharding in ("table", "column")),
    {"sharding": "column", "table": {"num_hashes": 3, "num_rows": 64, "dim": 16}},
    {"sharding": "row", "table": {"num_hashes": 2, "num_rows": 64, "dim": 16, "storage": "fp16"}},
]


def test_torchrec_holds_what_the_plan_states(tmp_path: Path) -> None:
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("table_plan_process.py"), tmp_path, json.dumps(CASES)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    worlds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert [len(world) for world in worlds] == [2, 3, 4]
    for world in worlds:
        for case, *results in zip(CASES, *world, strict=True):
            for rank, result in enumerate(results):
                assert result["blocks"] == result["planned_blocks"], (case, rank, len(world))
                assert result["num_bytes"] == result["planned_bytes"], (case, rank, len(world))
                assert result["error"] == 0, (case, rank, len(world))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Imports of FBGEMM try what is deprecated.
def test_the_plan_is_the_one_that_torchrec_makes() -> None:
    import torchrec
    from torchrec.distributed import sharding_plan

    table, world_size = TableConfig(num_hashes=5, num_rows=101, dim=24), 3
    configs = [
        torchrec.EmbeddingConfig(name=f"t{k}", embedding_dim=24, num_embeddings=101, feature_names=[f"f{k}"])
        for k in range(5)
    ]
    collection = torchrec.EmbeddingCollection(tables=configs, device=torch.device("meta"))
    for device_type in ("cpu", "cuda"):
        generators: dict[str, list[Any]] = {
            "row": [sharding_plan.row_wise(compute_kernel="fused") for _ in range(5)],
            "table": [sharding_plan.table_wise(rank=k % 3, compute_kernel="fused") for k in range(5)],
            "column": [sharding_plan.column_wise(ranks=[0, 1, 2], compute_kernel="fused") for _ in range(5)],
        }
        for sharding, chosen in generators.items():
            theirs = sharding_plan.construct_module_sharding_plan(
                collection,
                {f"t{k}": generator for k, generator in enumerate(chosen)},
                local_size=world_size,
                world_size=world_size,
                device_type=device_type,
            )
            plan = plan_tables({"items": table}, sharding, world_size=world_size, local_size=world_size)
            if sharding == "column":  # 24 columns make 6 units of 4, so each of 3 processes holds 8 columns.
                assert {block.num_columns for own in plan.blocks for block in own} == {8}
            assert torchrec_plan(plan, "items", device_type) == theirs, (device_type, sharding)
