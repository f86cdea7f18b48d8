"""The measurement of tables runs on a CPU at a small size, and its floor is counted as it says."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tackboard.bench.pretrain.table_speed import TableSpeedConfig, compulsory_bytes, measure_tables
from tackboard.core.errors import ConfigError

SMALL = TableSpeedConfig(num_items=300, num_tables=3, num_rows=500, dim=8, repeats=3, copied_bytes=1 << 20, skew=2.0)


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
def test_contenders_agree_and_are_timed(storage: str) -> None:
    found = measure_tables(dataclasses.replace(SMALL, storage=storage), torch.device("cpu"))
    assert set(found["ms"]) == ({"ours", "plain"} if storage == "fp32" else {"ours"})
    assert all(value > 0 for value in found["ms"].values())
    assert max(found["largest_difference"].values()) < 1e-5
    assert found["floor_ms"] == pytest.approx(found["floor_bytes"] / found["bandwidth_gb_per_s"] / 1e6)
    assert found["share_of_floor"]["ours"] == pytest.approx(found["floor_ms"] / found["ms"]["ours"])
    json.dumps(found)


def test_the_floor_counts_sectors() -> None:
    rows = torch.tensor([[1, 2], [1, 3]])
    config = TableSpeedConfig(num_items=2, num_tables=2, dim=9, storage="fp16")
    # Three distinct rows of 18 bytes, one sector each: read twice, written once; a sum in a sector, read and written.
    # Four vectors of 9 fp32 numbers are written and their gradients read; four row numbers of 8 bytes are read.
    assert compulsory_bytes(config, rows) == 3 * 5 * 32 + 2 * 4 * 9 * 4 + 4 * 8


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_items"):
        TableSpeedConfig(num_items=0)
    with pytest.raises(ConfigError, match="storage"):
        TableSpeedConfig(storage="int8")
