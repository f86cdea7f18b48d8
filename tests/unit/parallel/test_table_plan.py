"""Which process holds which block, what a plan that does not fit says, and what the report counts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from tackboard.core import machine
from tackboard.core.errors import ConfigError, UsageError
from tackboard.models.tables import TableConfig
from tackboard.parallel import table_plan
from tackboard.parallel.config import SHARDINGS
from tackboard.parallel.table_plan import ShardPlan, balance_report, plan_tables, plan_warnings, process_memory_bytes


def config(**changes: Any) -> TableConfig:
    return TableConfig(**{"num_hashes": 4, "num_rows": 100, "dim": 16, **changes})


def planned(table: TableConfig, sharding: str, world_size: int, local_size: int = 8, **more: Any) -> ShardPlan:
    return plan_tables({"items": table}, sharding, world_size=world_size, local_size=local_size, **more)


def cells(plan: ShardPlan) -> dict[tuple[str, int], torch.Tensor]:
    """How many processes hold each value of each sub-table."""
    found = {
        (name, sub_table): torch.zeros(table.num_rows, table.dim, dtype=torch.int64)
        for name, table in plan.tables.items()
        for sub_table in range(table.num_hashes)
    }
    for block in itertools.chain(*plan.blocks):
        rows = slice(block.first_row, block.first_row + block.num_rows)
        columns = slice(block.first_column, block.first_column + block.num_columns)
        found[block.table, block.sub_table][rows, columns] += 1
    return found


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_value_has_one_holder(sharding: str, world_size: int) -> None:
    tables = {"items": config(num_hashes=5, num_rows=101), "small": config(num_hashes=1, num_rows=50, dim=8)}
    plan = plan_tables(tables, sharding, world_size=world_size, local_size=2, items_per_step=10)
    assert all((held == 1).all() for held in cells(plan).values())
    assert sum(plan.num_bytes(rank) for rank in range(world_size)) >= 5 * 101 * (64 + 4) + 50 * (32 + 4)
    widths = [{b.num_columns for b in own if b.table == name} for own in plan.blocks for name in tables]
    assert all(len(found) <= 1 for found in widths)  # FBGEMM holds blocks of one width.
    assert all(width % 4 == 0 for found in widths for width in found)


def test_rows_are_cut_as_torchrec_cuts_them() -> None:
    plan = planned(config(num_hashes=1, num_rows=10), "row", 4)
    assert [(own[0].first_row, own[0].num_rows) for own in plan.blocks] == [(0, 3), (3, 3), (6, 3), (9, 1)]


def test_columns_are_cut_into_multiples_of_four() -> None:
    plan = planned(config(num_hashes=1, dim=24), "column", 4)
    assert [(b.first_column, b.num_columns) for own in plan.blocks for b in own] == [(0, 8), (8, 8), (16, 8)]
    blocks = planned(config(num_hashes=3), "column", 3).blocks  # 16 columns are not cut in three, but in two.
    assert [len(own) for own in blocks] == [2, 2, 2]


def test_sub_tables_are_dealt_to_hosts_in_turn() -> None:
    plan = planned(config(num_hashes=6), "table", 4, local_size=2)
    assert [len(own) for own in plan.blocks] == [2, 1, 2, 1]


def test_a_large_sub_table_leaves_the_small_ones_to_others() -> None:
    tables = {"small": config(num_hashes=4), "large": config(num_hashes=1, num_rows=400)}
    plan = plan_tables(tables, "table", world_size=2, local_size=2)
    assert [{block.table for block in own} for own in plan.blocks] == [{"large"}, {"small"}]
    # If lookups count as well, the holder of the large sub-table also gets a small one.
    plan = plan_tables(tables, "table", world_size=2, local_size=2, items_per_step=10)
    assert [len(own) for own in plan.blocks] == [2, 3]


def test_bytes_are_rows_and_adagrad_sums() -> None:
    assert planned(config(storage="fp16"), "row", 2).num_bytes(0) == 4 * 50 * (16 * 2 + 4)
    assert planned(config(), "column", 2).num_bytes(0) == 4 * 100 * (8 * 4 + 4)


@pytest.mark.parametrize(
    ("table", "sharding", "words"),
    [
        (config(storage="bf16"), "row", ("bf16", "--set model.tables.storage=fp32")),
        (config(dim=6), "table", ("multiple of 4", "--set model.tables.dim=8")),
        (config(num_rows=9), "row", ("the last process has no row", "--set model.tables.num_rows=12")),
    ],
)
def test_what_fbgemm_cannot_hold_is_refused(table: TableConfig, sharding: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(table, sharding, 4)
    assert all(word in str(caught.value) for word in words)


def test_a_gpu_holds_bf16() -> None:
    assert planned(config(storage="bf16"), "row", 2, device_type="cuda").num_bytes(0) == 4 * 50 * (16 * 2 + 4)


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    table = config(num_hashes=8, num_rows=10_000, dim=32)  # 1,320,000 bytes per sub-table
    with pytest.raises(UsageError) as caught:
        planned(table, "table", 3, local_size=3, memory_bytes=[4_500_000, 3_600_000, 3_600_000])
    message = str(caught.value)
    assert "table items needs 4.0 MB on process 1" in message
    assert "process 1 may use 3.6 MB: 360.0 kB are missing" in message
    fix = caught.value.fix
    assert "--set parallel.sharding=row" in fix
    assert "use 4 processes with as much memory each (2 hosts)" in fix
    for change in ({"storage": "fp16"}, {"num_rows": 9090}):
        assert all(f"--set model.tables.{name}={value}" in fix for name, value in change.items())
        planned(dataclasses.replace(table, **change), "table", 3, memory_bytes=[3_600_000] * 3)
    planned(table, "table", 4, memory_bytes=[3_600_000] * 4)
    planned(table, "table", 3, memory_bytes=[3_960_000] * 3)


def test_only_changes_that_help_are_named() -> None:
    with pytest.raises(UsageError) as caught:  # One sub-table is larger than the memory, so more processes do not help.
        planned(config(num_hashes=2, num_rows=10_000, storage="fp16"), "table", 2, memory_bytes=[100_000, 100_000])
    assert caught.value.fix == (
        "--set parallel.sharding=row and use 8 processes with as much memory each (1 host), "
        "or --set model.tables.num_rows=2777"
    )
    planned(config(num_hashes=2, num_rows=10_000, storage="fp16"), "row", 8, memory_bytes=[100_000] * 8)
    with pytest.raises(UsageError, match="use machines with more memory"):
        planned(config(), "row", 2, memory_bytes=[0, 0])


def test_the_other_tables_of_a_process_are_named() -> None:
    tables = {"items": config(num_rows=1000), "authors": config()}
    with pytest.raises(UsageError, match=r"table items needs 136.0 kB on process 0 \(149.6 kB with the other tables\)"):
        plan_tables(tables, "row", world_size=2, local_size=2, memory_bytes=[140_000, 140_000])


def test_an_equal_plan_has_no_warning() -> None:
    for sharding in SHARDINGS:
        plan = planned(config(), sharding, 4, items_per_step=100)
        assert not plan_warnings(plan)
        report = balance_report(plan)
        assert set(report.largest_to_mean.values()) == {1.0}
        assert [load.lookups_per_step for load in report.processes] == ([400] if sharding == "column" else [100]) * 4


def test_a_plan_that_is_unequal_says_who_holds_more() -> None:
    (warning,) = plan_warnings(planned(config(num_hashes=8), "table", 3))
    assert warning == (
        "tables are divided unequally: processes 0, 1 each hold 3 sub-tables (20.4 kB) and process 2 holds 2 "
        "sub-tables (13.6 kB); --set model.tables.num_hashes=6 or 9, or --set parallel.sharding=row "
        "divides them equally"
    )
    (warning,) = plan_warnings(planned(config(num_hashes=1, method="modulo"), "table", 2))
    assert "num_hashes" not in warning
    assert not plan_warnings(planned(config(num_rows=10), "row", 3))  # 4, 4 and 2 rows: 1.2 times the mean
    (warning,) = plan_warnings(planned(config(num_rows=7), "row", 3))  # 3, 3 and 1 rows
    assert "process 2 holds 4 rows" in warning
    assert "--set model.tables.num_rows=9" in warning
    (warning,) = plan_warnings(planned(config(num_hashes=1, dim=4), "column", 20))
    assert "processes 1, 2, 3, 4, 5, 6, … (19 in all) each hold 0 blocks" in warning


def test_half_precision_is_rounded_without_a_key() -> None:
    (warning,) = plan_warnings(planned(config(storage="fp16"), "row", 2))
    assert "that a repeated or resumed run does not repeat" in warning


def test_the_report_compares_what_was_measured() -> None:
    plan = planned(config(), "row", 2, items_per_step=1000)
    report = balance_report(plan, measured_lookups_per_step=[1000.0, 3000.0], measured_ms_per_step=[5.0, 5.5])
    assert report.largest_to_mean["measured_lookups_per_step"] == 1.5
    assert report.warnings == ("process 1 has 1.50 times the mean of all processes in lookups per step",)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["processes"][1] == {
        "rank": 1,
        "num_rows": 200,
        "num_bytes": 13_600,
        "lookups_per_step": 2000,
        "measured_lookups_per_step": 3000.0,
        "measured_ms_per_step": 5.5,
    }
    lines = report.lines()
    assert lines[0].split("  ")[-1] == "measured ms per step"
    assert lines[2].split() == ["1", "200", "13.6", "kB", "2,000", "3,000", "5.5"]
    assert len({len(line) for line in lines}) == 1


def test_processes_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < process_memory_bytes(torch.device("cpu"), 1) <= machine.total_memory_bytes()
    monkeypatch.setattr(table_plan, "available_memory_bytes", lambda: 1001)
    assert process_memory_bytes(torch.device("cpu"), 4) == 250
