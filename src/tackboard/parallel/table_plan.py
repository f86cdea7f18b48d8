"""Plans which process holds which rows and columns of every sub-table, before anything is allocated.

In: the model's tables, how to divide them, the processes and the memory that each process may use. Out: a `ShardPlan`,
which states the blocks of every process; its warnings; its balance as a report; and the same plan in TorchRec's types
(`torchrec_plan`). The plan is a function of its inputs, so every process makes the same plan by itself.

    row      process r of W holds ⌈rows/W⌉ rows of every sub-table, from row r·⌈rows/W⌉ on; the last may hold fewer
    table    whole sub-tables are dealt; the next goes to the process with the fewest bytes and lookups
    column   every sub-table is cut into at most W blocks of equally many columns, and the blocks are dealt likewise

If several processes have equally little, the next block goes to the process whose host has the least. Bytes are the
bytes of rows plus one fp32 Adagrad sum for each row of a block. (So a table that is divided by column has a sum for
each row of each block.)

Three of the rules come from FBGEMM, and were found by trying (FBGEMM 1.8 on CPU). The width of a block must be a
multiple of 4. All blocks of one process must be equally wide. A process without any rows is possible only if the tables
are divided by table or by column: if they are divided by row, the backward pass of such a process fails.

Decided: TorchRec's EmbeddingShardingPlanner is left out. It was tried with 2 to 8 equal sub-tables on 2 to 4 processes,
our topology, the fused kernel and pooling factors of 4,000. Row-wise and table-wise, its plans hold the same bytes per
process as ours. Column-wise, it does not cut a sub-table of fewer than 256 columns, so the result is a table-wise plan.
If it may choose the way, it chooses row-wise every time, which is our default. It took up to 1.5 s; our plan takes
milliseconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tackboard.core.errors import ConfigError, UsageError, counted, shown_bytes
from tackboard.core.machine import available_memory_bytes
from tackboard.models.tables import STORAGES, TableConfig

ADAGRAD_SUM_BYTES = 4
COLUMN_UNIT = 4
"""FBGEMM holds blocks whose number of columns is a multiple of this number."""
LOPSIDED = 1.2
"""A plan gets a warning if a process has more than the mean of all processes multiplied by this number."""
MAX_HASHES = 64
MAX_PROCESSES = 4096
"""Errors never advise to use more processes than this."""
PROCESSES_SHOWN = 6
SHARDING_TYPES = {"row": "row_wise", "table": "table_wise", "column": "column_wise"}
"""TorchRec's names of the ways to divide tables."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class TableBlock:
    """A block of one sub-table that one process holds."""

    table: str
    sub_table: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """States the blocks of every process."""

    tables: Mapping[str, TableConfig]
    """The model's tables, by module name."""
    sharding: str
    """How the tables are divided: row, table or column."""
    local_size: int
    """Number of processes on each host."""
    items_per_step: int
    """Number of items that a step looks up: the distinct items of each process, added up over all processes."""
    blocks: tuple[tuple[TableBlock, ...], ...]
    """The blocks of each process, by rank; within a process in the order of tables and sub-tables."""

    @property
    def world_size(self) -> int:
        return len(self.blocks)

    def num_bytes(self, rank: int) -> int:
        """Returns the bytes of the rows and Adagrad sums that a process holds."""
        return sum(
            _block_bytes(self.tables[block.table], block.num_rows, block.num_columns) for block in self.blocks[rank]
        )

    def num_rows(self, rank: int) -> int:
        return sum(block.num_rows for block in self.blocks[rank])

    def lookups_per_step(self, rank: int) -> float:
        """Returns the number of rows that all processes together look up in a process's blocks, in one step.

        A hash spreads items evenly over the rows of a sub-table, so this number follows from the number of rows.
        """
        return sum(
            self.items_per_step * block.num_rows / self.tables[block.table].num_rows for block in self.blocks[rank]
        )


def plan_tables(
    tables: Mapping[str, TableConfig],
    sharding: str,
    *,
    world_size: int,
    local_size: int,
    device_type: str = "cpu",
    memory_bytes: Sequence[int] = (),
    items_per_step: int = 0,
) -> ShardPlan:
    """Returns the plan for tables by module name. `memory_bytes` says, by rank, how many bytes a process may use.

    Without `memory_bytes`, memory is not checked. Raises ConfigError if FBGEMM cannot hold the tables in this division,
    and UsageError if a process has too little memory.
    """
    for config in tables.values():
        _check_table(config, sharding, world_size, device_type)
    plan = _divide(tables, sharding, world_size, local_size, items_per_step)
    if memory_bytes:
        _check_memory(plan, memory_bytes)
    return plan


def process_memory_bytes(device: torch.device, local_size: int) -> int:
    """Returns the bytes that one process may use for tables: its GPU's free memory, or its share of the host's.

    On CPU, all processes of a host must call this function before any of them allocates tables.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes() // local_size


def _divide(
    tables: Mapping[str, TableConfig], sharding: str, world_size: int, local_size: int, items_per_step: int
) -> ShardPlan:
    blocks: list[list[TableBlock]] = [[] for _ in range(world_size)]
    if sharding == "row":
        for name, config in tables.items():
            share = math.ceil(config.num_rows / world_size)
            for rank, own in enumerate(blocks):
                first = min(rank * share, config.num_rows)
                rows = {"first_row": first, "num_rows": min(share, config.num_rows - first)}
                columns = {"first_column": 0, "num_columns": config.dim}
                own.extend(TableBlock(table=name, sub_table=k, **rows, **columns) for k in range(config.num_hashes))
    else:
        _deal(blocks, tables, sharding, local_size, items_per_step)
    order = {name: place for place, name in enumerate(tables)}
    ordered = tuple(tuple(sorted(own, key=lambda b: (order[b.table], b.sub_table, b.first_column))) for own in blocks)
    return ShardPlan(
        tables=dict(tables), sharding=sharding, local_size=local_size, items_per_step=items_per_step, blocks=ordered
    )


def _deal(
    blocks: list[list[TableBlock]],
    tables: Mapping[str, TableConfig],
    sharding: str,
    local_size: int,
    items_per_step: int,
) -> None:
    """Deals whole sub-tables, or their blocks of columns, to the processes with the smallest loads."""
    world_size = len(blocks)
    widths = {
        n: c.dim // (_num_column_blocks(c.dim, world_size) if sharding == "column" else 1) for n, c in tables.items()
    }
    sizes = {name: _block_bytes(config, config.num_rows, widths[name]) for name, config in tables.items()}
    # A load is a share of all bytes plus a share of all lookups, scaled to a whole number, so comparisons are exact.
    num_dealt = {name: config.num_hashes * config.dim // widths[name] for name, config in tables.items()}
    all_bytes, all_dealt = sum(sizes[name] * num_dealt[name] for name in tables), sum(num_dealt.values())
    loads, host_loads = [0] * world_size, [0] * math.ceil(world_size / local_size)
    for name in sorted(tables, key=lambda name: -sizes[name]):  # Large blocks first: small blocks fill the gaps.
        config, width = tables[name], widths[name]
        for sub_table in range(config.num_hashes):
            chosen: list[int] = []
            for _ in range(config.dim // width):
                free = [rank for rank in range(world_size) if rank not in chosen]
                rank = min(free, key=lambda rank: (loads[rank], host_loads[rank // local_size], rank))
                chosen.append(rank)
                load = sizes[name] * all_dealt + (all_bytes if items_per_step else 0)
                loads[rank] += load
                host_loads[rank // local_size] += load
            for place, rank in enumerate(sorted(chosen)):
                columns = {"first_column": place * width, "num_columns": width}
                rows = {"first_row": 0, "num_rows": config.num_rows}
                blocks[rank].append(TableBlock(table=name, sub_table=sub_table, **rows, **columns))


def _num_column_blocks(dim: int, world_size: int) -> int:
    """Returns the largest number of equally wide blocks that FBGEMM can hold, at most one for each process."""
    units = max(1, dim // COLUMN_UNIT)
    return max(number for number in range(1, min(units, world_size) + 1) if units % number == 0)


def _block_bytes(config: TableConfig, num_rows: int, num_columns: int) -> int:
    return num_rows * (num_columns * STORAGES[config.storage].itemsize + ADAGRAD_SUM_BYTES)


def _check_table(config: TableConfig, sharding: str, world_size: int, device_type: str) -> None:
    """Raises ConfigError if FBGEMM cannot hold a table in this division."""
    if config.storage == "bf16" and device_type == "cpu":
        raise ConfigError(
            "model.tables.storage is bf16, but FBGEMM has no bf16 tables on CPU",
            allowed="allowed in several processes on CPU: fp32, fp16",
            fix="--set model.tables.storage=fp32",
        )
    if config.dim % COLUMN_UNIT:
        raise ConfigError(
            f"model.tables.dim is {config.dim}, but FBGEMM needs rows whose width is a multiple of {COLUMN_UNIT}",
            allowed=f"allowed in several processes: multiples of {COLUMN_UNIT}",
            fix=f"--set model.tables.dim={COLUMN_UNIT * math.ceil(config.dim / COLUMN_UNIT)}",
        )
    share = math.ceil(config.num_rows / world_size)
    if sharding == "row" and share * (world_size - 1) >= config.num_rows:
        raise ConfigError(
            f"model.tables.num_rows is {config.num_rows}: with {share} for each of {world_size} processes, "
            f"the last process has no row",
            allowed="allowed with parallel.sharding=row: at least one row for each process",
            fix=f"--set model.tables.num_rows={share * world_size}, or --set parallel.sharding=table",
        )


def _check_memory(plan: ShardPlan, memory_bytes: Sequence[int]) -> None:
    """Raises UsageError for the process that lacks the most memory, with the changes that would help."""
    missing = [plan.num_bytes(rank) - there for rank, there in enumerate(memory_bytes)]
    rank = missing.index(max(missing))
    if missing[rank] <= 0:
        return
    parts = dict.fromkeys(plan.tables, 0)
    for block in plan.blocks[rank]:
        parts[block.table] += _block_bytes(plan.tables[block.table], block.num_rows, block.num_columns)
    table = max(parts, key=lambda name: parts[name])
    others = f" ({shown_bytes(plan.num_bytes(rank))} with the other tables)" if len(parts) > 1 else ""
    raise UsageError(
        f"table {table} needs {shown_bytes(parts[table])} on process {rank}{others}",
        allowed=f"process {rank} may use {shown_bytes(memory_bytes[rank])}: {shown_bytes(missing[rank])} are missing",
        fix=", or ".join(_remedies(plan, table, min(memory_bytes))) or "use machines with more memory",
    )


def _remedies(plan: ShardPlan, table: str, memory_bytes: int) -> list[str]:
    """Returns the single changes with which a plan fits into `memory_bytes` per process. Each of them was tried."""

    def fits(*, sharding: str = plan.sharding, world_size: int = plan.world_size, **changes: Any) -> bool:
        tables = {**plan.tables, table: dataclasses.replace(plan.tables[table], **changes)}
        tried = _divide(tables, sharding, world_size, plan.local_size, plan.items_per_step)
        sizes = [tried.num_bytes(rank) for rank in range(world_size)]
        return max(sizes) <= memory_bytes and (sharding != "row" or min(sizes) > 0)

    found = []
    if plan.sharding != "row" and fits(sharding="row"):
        found.append("--set parallel.sharding=row")
    total = sum(plan.num_bytes(rank) for rank in range(plan.world_size))
    least = max(plan.world_size + 1, math.ceil(total / max(1, memory_bytes)))
    numbers = range(least, min(least + MAX_HASHES, MAX_PROCESSES))
    for sharding in dict.fromkeys((plan.sharding, "row")):
        enough = next((number for number in numbers if fits(sharding=sharding, world_size=number)), 0)
        if enough:
            hosts = counted(math.ceil(enough / plan.local_size), "host")
            change = "" if sharding == plan.sharding else f"--set parallel.sharding={sharding} and "
            found.append(f"{change}use {enough} processes with as much memory each ({hosts})")
            break
    if plan.tables[table].storage == "fp32" and fits(storage="fp16"):
        found.append("--set model.tables.storage=fp16")
    low, high = 0, plan.tables[table].num_rows
    while high - low > 1:  # The largest number of rows that fits lies in [low, high).
        middle = (low + high) // 2
        low, high = (middle, high) if fits(num_rows=middle) else (low, middle)
    if low >= plan.world_size:
        found.append(f"--set model.tables.num_rows={low}")
    return found


def torchrec_plan(plan: ShardPlan, table: str, device_type: str = "cpu") -> Any:
    """Returns a table's part of the plan as an EmbeddingModuleShardingPlan with the fused kernel.

    The result is for an EmbeddingCollection in which sub-table i has the name `t{i}`.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding

    result = EmbeddingModuleShardingPlan()
    for sub_table in range(plan.tables[table].num_hashes):
        held = [
            (rank, block)
            for rank, own in enumerate(plan.blocks)
            for block in own
            if (block.table, block.sub_table) == (table, sub_table)
        ]
        device = "cuda:{}" if device_type == "cuda" else device_type
        shards = [
            ShardMetadata(
                shard_offsets=[block.first_row, block.first_column],
                shard_sizes=[block.num_rows, block.num_columns],
                placement=f"rank:{rank}/{device.format(rank % plan.local_size)}",
            )
            for rank, block in held
        ]
        result[f"t{sub_table}"] = ParameterSharding(
            sharding_type=SHARDING_TYPES[plan.sharding],
            compute_kernel="fused",
            ranks=[rank for rank, _ in held],
            sharding_spec=EnumerableShardingSpec(shards),
        )
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessLoad:
    """What one process holds, and how much it has to do. None stands for a number that was not measured."""

    rank: int
    num_rows: int
    num_bytes: int
    lookups_per_step: int
    measured_lookups_per_step: float | None = None
    measured_ms_per_step: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """Compares the processes of a plan. `dataclasses.asdict` makes it JSON."""

    sharding: str
    processes: tuple[ProcessLoad, ...]
    largest_to_mean: dict[str, float]
    """Maps each quantity to its largest value in any process, divided by its mean over all processes."""
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """Returns the report, without the warnings, as the lines of a text table."""
        names = list(self.largest_to_mean)
        rows = [["process", *(name.replace("_", " ") for name in names)]]
        rows += [[str(load.rank), *(_shown(name, getattr(load, name)) for name in names)] for load in self.processes]
        rows += [["largest / mean", *(f"{ratio:.2f}" for ratio in self.largest_to_mean.values())]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def balance_report(
    plan: ShardPlan,
    *,
    measured_lookups_per_step: Sequence[float] = (),
    measured_ms_per_step: Sequence[float] = (),
) -> BalanceReport:
    """Returns what each process holds and does. Measured numbers are given by rank."""
    ranks = range(plan.world_size)
    values: dict[str, list[Any]] = {
        "num_rows": [plan.num_rows(rank) for rank in ranks],
        "num_bytes": [plan.num_bytes(rank) for rank in ranks],
        "lookups_per_step": [round(plan.lookups_per_step(rank)) for rank in ranks],
    }
    warnings = plan_warnings(plan)
    measured = {
        "measured_lookups_per_step": list(measured_lookups_per_step),
        "measured_ms_per_step": list(measured_ms_per_step),
    }
    for name, numbers in measured.items():
        values |= {name: numbers} if numbers else {}
        ratio = _largest_to_mean(numbers)
        if ratio > LOPSIDED:
            rank = numbers.index(max(numbers))
            what = name.removeprefix("measured_").replace("_", " ")
            warnings.append(f"process {rank} has {ratio:.2f} times the mean of all processes in {what}")
    loads = (ProcessLoad(rank=rank, **{name: numbers[rank] for name, numbers in values.items()}) for rank in ranks)
    return BalanceReport(
        sharding=plan.sharding,
        processes=tuple(loads),
        largest_to_mean={name: round(_largest_to_mean(numbers), 4) for name, numbers in values.items()},
        warnings=tuple(warnings),
    )


def plan_warnings(plan: ShardPlan) -> list[str]:
    """Returns what is allowed in this plan but probably not wanted."""
    found = []
    if any(config.storage != "fp32" for config in plan.tables.values()):
        found.append(
            "FBGEMM rounds updates of half-precision tables by random numbers that a repeated or resumed run does not "
            "repeat, so it ends with other bits; with --set model.tables.storage=fp32 it ends with the same bits"
        )
    sizes = [plan.num_bytes(rank) for rank in range(plan.world_size)]
    lookups = [plan.lookups_per_step(rank) for rank in range(plan.world_size)]
    most, least = max(sizes), min(sizes)
    # An unequal deal of whole sub-tables can be avoided, so it is reported even if it is not lopsided.
    if max(_largest_to_mean(sizes), _largest_to_mean(lookups)) > LOPSIDED or (
        plan.sharding == "table" and most > least
    ):
        groups = [[rank for rank, size in enumerate(sizes) if size == share] for share in (most, least)]
        shares = " and ".join(f"{_processes(group)} {_held(plan, group[0])}" for group in groups)
        found.append(f"tables are divided unequally: {shares}; {_advice(plan)}")
    return found


def _held(plan: ShardPlan, rank: int) -> str:
    """Returns what one process holds, for a warning."""
    nouns = {"row": (plan.num_rows(rank), "row"), "table": (len(plan.blocks[rank]), "sub-table")}
    number, noun = nouns.get(plan.sharding, (len(plan.blocks[rank]), "block"))
    return f"{counted(number, noun)} ({shown_bytes(plan.num_bytes(rank))})"


def _processes(ranks: Sequence[int]) -> str:
    """Returns a list of processes with its verb: `process 2 holds` or `processes 0, 1 each hold`."""
    if len(ranks) == 1:
        return f"process {ranks[0]} holds"
    shown = ", ".join(map(str, ranks[:PROCESSES_SHOWN]))
    return f"processes {shown}{f', … ({len(ranks)} in all)' if len(ranks) > PROCESSES_SHOWN else ''} each hold"


def _advice(plan: ShardPlan) -> str:
    """Returns the settings that divide the tables equally."""
    world_size, configs = plan.world_size, list(plan.tables.values())
    if plan.sharding == "row":
        rows = {world_size * math.ceil(config.num_rows / world_size) for config in configs}
        return f"--set model.tables.num_rows={' or '.join(map(str, sorted(rows)))} divides them equally"
    hashes = {config.num_hashes for config in configs}
    around = {k // world_size * world_size for k in hashes} | {-(-k // world_size) * world_size for k in hashes}
    allowed = sorted(number for number in around - hashes if 1 <= number <= MAX_HASHES)
    has_choice = allowed and all(config.method == "mix" for config in configs)
    change = f"--set model.tables.num_hashes={' or '.join(map(str, allowed))}, or " if has_choice else ""
    return f"{change}--set parallel.sharding=row divides them equally"


def _largest_to_mean(numbers: Sequence[float]) -> float:
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0


def _shown(name: str, number: float | None) -> str:
    if number is None:
        return "-"
    if name == "num_bytes":
        return shown_bytes(int(number))
    return f"{number:,.1f}" if name.endswith("ms_per_step") else f"{round(number):,}"
