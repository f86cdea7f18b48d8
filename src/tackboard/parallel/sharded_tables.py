"""Divides a model's tables among the processes of a run, with TorchRec.

A model declares `HashedTables`. `shard_tables` replaces each of them by a `ShardedTables`: each process keeps its part
of the rows, sends the row ids that it needs to the processes that hold the rows, and gets the rows back. Fresh
rows are a function of (key, row, column), so every process makes its own part, and the same table begins with the same
rows on any number of processes.

Decided: looked-up rows are leaves of the model's graph. FBGEMM would update a row as soon as its gradient arrives,
before the guard (`train.guard`) has judged the step. Here `RowsUpdate.apply` sends the gradients back after the guard's
verdict, and sends zeros if the step is bad; row-wise Adagrad does not change a row whose gradient is zero. So a bad
step changes no row, as in one process, and no run has to go back to a checkpoint. The price: gradients of rows are not
sent while the gradients of the dense part are still being computed.

Decided: TorchRec's module is not a submodule of the model, so `state_dict` and `parameters` hold dense parameters only.
Tables are saved and loaded by their pieces (`Piece`), whose positions do not depend on the number of processes.

Shapes: M distinct items, k hash functions, D width of the concatenation, R rows of a piece, d width of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tackboard.core.errors import UsageError
from tackboard.core.progress import say
from tackboard.models.table_pieces import Piece
from tackboard.models.tables import STORAGES, HashedTables, TableConfig, table_modules
from tackboard.ops.fresh_rows import FreshRows
from tackboard.parallel.config import ParallelConfig
from tackboard.parallel.table_plan import (
    BalanceReport,
    ShardPlan,
    balance_report,
    plan_tables,
    plan_warnings,
    process_memory_bytes,
    torchrec_plan,
)
from tackboard.parallel.training_world import TrainingWorld
from tackboard.parallel.wire import WireCounter, codecs, id_type

EPS = 1e-8
"""Added to the root of an Adagrad sum, as in `train.optimizers.RowWiseAdagrad`."""


class ShardedTables(nn.Module):
    """Looks rows up in all processes; has the same `forward` as `HashedTables`."""

    def __init__(
        self, name: str, plan: ShardPlan, fresh: FreshRows, world: TrainingWorld, parallel: ParallelConfig
    ) -> None:
        super().__init__()
        self.plan = plan
        """The division of all tables of the model."""
        self.config = config = plan.tables[name]
        self.num_hashes, self.num_rows, self.dim = config.num_hashes, config.num_rows, config.dim
        self.fresh = fresh
        self.world = world
        self._names = [f"t{number}" for number in range(config.num_hashes)]
        self._id_type = id_type(config.num_rows)
        self.wire = WireCounter(self._id_type.itemsize)
        """Counts the bytes that this process sends."""
        # In a list, so that torch does not register TorchRec's module as a part of the model.
        self._engine = [_torchrec_tables(name, plan, world, parallel, self.wire)]
        self._kernels = [kernel for lookup in self._engine[0]._lookups for kernel in lookup._emb_modules]
        self.pieces = sorted(self._own_pieces(), key=lambda piece: piece.first_row)
        self.is_frozen = False
        """Whether training leaves the rows as they are."""
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Looked-up rows as TorchRec gave them, and the same rows as the model read them."""
        self.fill()

    @property
    def width(self) -> int:
        return self.num_hashes * self.dim

    @property
    def num_rows_in_all(self) -> int:
        """Number of rows of the whole table."""
        return self.num_hashes * self.num_rows

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored rows."""
        return STORAGES[self.config.storage]

    def fill(self) -> None:
        """Gives this process's rows their fresh values, and sets their Adagrad sums to 0."""
        for piece in self.pieces:
            self.fresh.fill(piece.rows_Rd, piece.first_row)
            if piece.sums_R is not None:
                piece.sums_R.zero_()

    def forward(self, item_rows_MK: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the vectors [M, D] of items from their row ids [M, k], as fp32 or bf16. A negative id gives zeros.

        Every process of the run must call this the same number of times.
        """
        vectors_MD = self._lookup(item_rows_MK)
        if not torch.is_grad_enabled() or self.is_frozen:
            return vectors_MD.detach().to(dtype)
        leaf_MD = vectors_MD.detach().to(dtype).requires_grad_()
        self.pending.append((vectors_MD, leaf_MD))
        return leaf_MD

    def _lookup(self, item_rows_MK: torch.Tensor) -> torch.Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        # All ids of a sub-table are one list, so that one length travels with them and not one for each id.
        lengths_K = torch.full((self.num_hashes,), len(item_rows_MK), dtype=self._id_type, device=item_rows_MK.device)
        ids = KeyedJaggedTensor(
            keys=self._names, values=item_rows_MK.clamp_min(0).T.reshape(-1).to(self._id_type), lengths=lengths_K
        )
        found = self._engine[0](ids)
        vectors_MD = torch.cat([found[name].values() for name in self._names], dim=1).float()
        return vectors_MD * (item_rows_MK[:, :1] >= 0)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the rate of the next update. FBGEMM reads it at the lookup, so call this before `forward`."""
        for kernel in self._kernels:
            kernel.emb_module.set_learning_rate(rate)

    def _own_pieces(self) -> list[Piece]:
        pieces = []
        for kernel in self._kernels:
            rows = kernel.split_embedding_weights()
            sums = [states[0] for states in kernel.emb_module.split_optimizer_states()]
            for table, rows_Rd, sums_R in zip(kernel._config.embedding_tables, rows, sums, strict=True):
                start = self._names.index(table.name) * self.num_rows + table.local_metadata.shard_offsets[0]
                pieces.append(Piece(start, rows_Rd.detach(), sums_R.detach().view(-1)))
        return pieces


class RowsUpdate:
    """Sends the gradients of looked-up rows to the processes that hold these rows; those processes update the rows.

    It has the methods of `train.optimizers.RowWiseAdagrad`.
    """

    def __init__(self, tables: ShardedTables, clip_element: float) -> None:
        self.tables = tables
        self.clip_element = clip_element

    def prepare(self, learning_rate: float) -> None:
        """Sets the rate of the next step, and forgets what was looked up."""
        self.drop()
        self.tables.set_learning_rate(learning_rate)

    def apply(self, keep: torch.Tensor) -> None:
        """Updates rows by the gradients of the lookups since the last step. If `keep` is false, no row changes."""
        pending = list(self.tables.pending)
        self.drop()
        for vectors_MD, leaf_MD in pending:
            gradient_MD = torch.zeros_like(leaf_MD) if leaf_MD.grad is None else leaf_MD.grad
            gradient_MD = gradient_MD.to(vectors_MD.dtype).clamp(-self.clip_element, self.clip_element)
            vectors_MD.backward(torch.where(keep, gradient_MD, 0.0))

    def drop(self) -> None:
        """Forgets all lookups."""
        self.tables.pending.clear()


def shard_tables(model: nn.Module, world: TrainingWorld, parallel: ParallelConfig) -> dict[str, ShardedTables]:
    """Replaces all tables of a model by tables that the processes share; returns them by module name.

    The model's own tables must be on the meta device, so that no process ever holds a whole table.
    """
    declared, sharded = table_modules(model), {}
    if not declared:
        return {}
    plan = plan_of(model, world, parallel)
    for warning in plan_warnings(plan):
        say(f"warning: {warning}")
    for name, module in declared.items():
        tables = ShardedTables(name, plan, module.fresh, world, parallel)
        for owner in list(model.modules()):  # A model may hold its tables under several names.
            for attribute, child in list(owner.named_children()):
                if child is module:
                    setattr(owner, attribute, tables)
        sharded[name] = tables
    return sharded


def measured_balance(
    tables: Mapping[str, ShardedTables], world: TrainingWorld, num_steps: int, busy_s: float
) -> BalanceReport | None:
    """Returns what each process holds and did in `num_steps` steps, or None without tables. All processes call this.

    Lookups are the rows that a process sent to all processes, including the rows that it gave to itself. `busy_s` is
    the CPU time of this process: a process that waits for another one is not busy.
    """
    if not tables or not num_steps:
        return None
    rows = sum(table.wire.traffic["forward"].rows for table in tables.values())
    found = world.gather((rows / num_steps, 1000 * busy_s / num_steps))
    lookups, busy_ms = zip(*found, strict=True)
    plan = next(iter(tables.values())).plan
    return balance_report(plan, measured_lookups_per_step=lookups, measured_ms_per_step=busy_ms)


def plan_of(model: nn.Module, world: TrainingWorld, parallel: ParallelConfig, *, items_per_step: int = 0) -> ShardPlan:
    """Returns the division of a model's tables. Raises UsageError in all processes if any has too little memory.

    `items_per_step` is the largest number of items that a step looks up, in all processes together. If it is 0, the
    plan does not take lookups into account.
    """
    return plan_tables(
        {name: _config_of(module) for name, module in table_modules(model).items()},
        parallel.sharding,
        world_size=world.size,
        local_size=world.local_size,
        device_type=world.device.type,
        memory_bytes=world.gather(process_memory_bytes(world.device, world.local_size)),
        items_per_step=items_per_step,
    )


def _config_of(module: HashedTables) -> TableConfig:
    storage = next(name for name, dtype in STORAGES.items() if dtype is module.weight.dtype)
    return TableConfig(
        num_hashes=module.num_hashes,
        num_rows=module.num_rows,
        dim=module.dim,
        init_std=module.fresh.std,
        storage=storage,
    )


def _torchrec_tables(
    name: str, plan: ShardPlan, world: TrainingWorld, parallel: ParallelConfig, counter: WireCounter
) -> Any:
    """Makes TorchRec's sharded module of a table, whose rows have no values yet. All processes call this together."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.distributed.comm_ops import set_gradient_division
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.types import ShardingEnv
        from torchrec.modules.embedding_configs import DataType
    except ImportError as error:
        raise UsageError(
            f"training in {world.size} processes needs TorchRec: {error}",
            allowed="one process trains without it",
            fix="make distributed",
        ) from None
    # TorchRec asks torch whether code is being traced, and torch warns that its answer may change in a later version.
    # This turns the warning off.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # The loss is already divided by the number of targets of all processes, so gradients are sums.
    set_gradient_division(False)
    config = plan.tables[name]
    types = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                num_embeddings=config.num_rows,
                embedding_dim=config.dim,
                name=f"t{number}",
                feature_names=[f"t{number}"],
                data_type=types[config.storage],
            )
            for number in range(config.num_hashes)
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.0, "eps": EPS},
        qcomm_codecs_registry=codecs(parallel, width=config.dim, device=world.device, counter=counter),
    )
    environment = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    return sharder.shard(collection, torchrec_plan(plan, name, world.device.type), environment, world.device)
