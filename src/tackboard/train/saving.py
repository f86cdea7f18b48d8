"""Saves the state of a run in checkpoints while training goes on, and loads it from a checkpoint.

A checkpoint is made in two parts. First, everything that is to be written is copied. Training waits only for this copy.
Then a thread writes, hashes, fsyncs and renames the files (`checkpoint.store`) while training goes on. Only one
checkpoint is written at a time: the next checkpoint waits until it is complete. If the thread fails, the next `save` or
`wait` raises the thread's error.

A row of a table is fresh if it has its random initial values, which a key determines. Two kinds of rows are written:
rows whose Adagrad sum is not 0, and rows that were not fresh when the run began. The optimiser moves only rows of the
first kind. Rows of the second kind exist if the run began with the rows of another run. Decided: the table is not
compared with its fresh rows at each checkpoint, because the comparison would take longer than the copy.

Before anything is copied or written, the free disk space and memory are compared with what the checkpoint needs.

If several processes train, each writes the changed rows of its pieces of the tables, always with their positions. The
process of rank 0 also writes everything that is the same in all processes (`checkpoint.parts`). Before the copy, the
main threads exchange messages, so that all processes stop with the same error. The writing threads agree through files
alone. A checkpoint loads in any number of processes, because each process takes the rows of its pieces from the parts
that all processes wrote.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tackboard.checkpoint.background import Background
from tackboard.checkpoint.copies import Copies, IsChanged, RowBlock, stored_bytes
from tackboard.checkpoint.parts import SharedSave, part_name
from tackboard.checkpoint.store import Checkpoint, CheckpointStore
from tackboard.checkpoint.stored_rows import SUMS, describe, encode, fresh_rows_of, is_smaller
from tackboard.checkpoint.trained import FORMAT_VERSION_OF_PARTS, stored_optimizer, stored_parameters
from tackboard.core.documents import blaming
from tackboard.core.errors import DivergedError, StorageError, UsageError, shown_bytes
from tackboard.core.files import storage_error
from tackboard.core.machine import LARGEST_KEPT_BYTES, available_memory_bytes, freed_memory_bytes
from tackboard.core.rundir import RunDirectory
from tackboard.models.changed_rows import ChangedRows, Stored, copy_range, rows_within
from tackboard.models.stored_parameters import load_parameters
from tackboard.models.table_pieces import Piece, tables_in_pieces
from tackboard.parallel.training_world import ALONE, TrainingWorld
from tackboard.train.optimizers import Optimizers

INTACT = "the checkpoints before it are intact"


class Saver:
    """Saves and loads the parameters and the optimiser state of one run."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        store: CheckpointStore,
        run: RunDirectory,
        *,
        world: TrainingWorld = ALONE,
        token: str = "",
        timeout_s: float = 600.0,
    ) -> None:
        """`token` is the same in all processes of `world`, and new at each start. A single process needs no token.

        A process that waits for another one gives up after `timeout_s`.
        """
        self.model = model
        self.optimizers = optimizers
        self.store = store
        self.run = run
        self.world = world
        self.token = token
        self.timeout_s = timeout_s
        assert world.is_alone or token
        self.tables = tables_in_pieces(model)
        """Tables by the names of their parameters."""
        self._given: dict[str, list[torch.Tensor]] = {}
        """For each table, one flag per row of each piece. The flag is set if the row was not fresh when the run began.
        After `load`, only rows whose Adagrad sum is still 0 have the flag. A table whose rows were all fresh has no
        entry."""
        self._whole: set[str] = set()
        """Tables of which every row is always written."""
        self.lost = threading.Event()
        """Set this event when another process is known to be lost, so that no writer waits for that process."""
        self._background = Background()
        self._saved_step: int | None = None
        self._num_saves = 0
        self._kept_bytes = 0
        """Bytes of the last copy whose memory this process keeps for the next copy. They count as used, not as free."""

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete on disk. Raises its writer's error, if any."""
        try:
            self._background.wait()
        except BaseException:
            self._saved_step = None  # The state of that step is not on disk.
            raise

    def begin(self) -> None:
        """Compares all tables of a new run with their fresh rows. Call this when the run has its first parameters."""
        for name, table in self.tables.items():
            pieces = self._pieces(name)
            self._note_given(name, [table.fresh.differing(piece.rows_Rd, piece.first_row) for piece in pieces])

    def describe(self) -> dict[str, Any]:
        """Returns the value of `fresh_rows` for state.json."""
        return describe({name: (table.fresh, table.num_rows_in_all) for name, table in self.tables.items()})

    def save(
        self, step: int, state: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]], best: int | None
    ) -> None:
        """Copies the state and begins to write the checkpoint of `step`, after the previous checkpoint is complete.

        All processes call this at the same step. Raises DivergedError if a parameter is not finite, StorageError if the
        disk is too small, and UsageError if the memory is too small. These errors are raised in all processes. If the
        writer of the previous checkpoint failed, raises that writer's error.
        """
        self.wait()
        if step == self._saved_step:
            return
        blocks = {name: self._blocks(name) for name in self.tables}
        blocks |= {_sums_of(name): self._sum_blocks(name) for name in self.tables}
        counts = {name: [block.count() for block in own] for name, own in blocks.items()}
        self._check_room(step, blocks, counts)
        copies = Copies()
        groups = self._copied(copies, blocks, counts)
        if bad := next(filter(None, self.world.gather(copies.finish())), None):
            # A batch reads few rows, so a non-finite row may stay unnoticed for long. Such a table is never saved.
            raise DivergedError(
                f"{bad} holds non-finite values at step {step}",
                allowed="the last checkpoint is intact",
                fix="start a new run with lower learning rates",
            )
        self._num_saves += 1
        shared = None
        if not self.world.is_alone:
            state = {**state, "format_version": FORMAT_VERSION_OF_PARTS, "num_parts": self.world.size}
            shared = SharedSave(
                folder=self.store.folder,
                step=step,
                rank=self.world.rank,
                size=self.world.size,
                token=f"{self.token}-{self._num_saves}",
                timeout_s=self.timeout_s,
                lost=self.lost,
            )
        self._background.start(lambda: self._write(step, groups, state, documents, best, shared))
        self._saved_step = step

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads the parameters and the optimiser state of a checkpoint, written by any number of processes.

        Tables are filled in place, and each process fills its own pieces.
        """
        path, described = checkpoint.path, checkpoint.state.get("fresh_rows", {})
        parameters = stored_parameters(checkpoint)
        load_parameters(self.model, parameters, path)
        with blaming(path / "optimizer.safetensors"):
            optimizer = stored_optimizer(checkpoint)
            self.optimizers.load_state(optimizer)
            for name, table in self.tables.items():
                for piece in table.pieces:
                    if piece.sums_R is not None:
                        copy_range(optimizer[_sums_of(name)], piece.sums_R, piece.first_row)
        self._saved_step = None
        self._given.clear()
        self._whole.clear()
        for name, table in self.tables.items():
            if name in described:
                with blaming(path / "state.json"):
                    table.fresh = fresh_rows_of(described, name)[0]
            self._note_loaded(name, parameters[name])

    def _note_loaded(self, name: str, stored: Stored) -> None:
        if not isinstance(stored, ChangedRows) or stored.dtype != self.tables[name].dtype:
            # It is not known which rows of this table are fresh.
            self._whole.add(name)
            return
        given = []
        for piece in self._pieces(name):
            end = piece.first_row + len(piece.rows_Rd)
            found = [part.rows_N[rows_within(part.rows_N, piece.first_row, end)] for part in stored.parts]
            rows_N = torch.cat(found).to(piece.rows_Rd.device, torch.int64) - piece.first_row
            given.append(rows_N if piece.sums_R is None else rows_N[piece.sums_R[rows_N] == 0])
        self._note_given(name, given)

    def _note_given(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """Notes the positions of rows in the pieces of a table."""
        pieces, number = self._pieces(name), sum(map(len, given))
        num_rows = sum(len(piece.rows_Rd) for piece in pieces)
        if not is_smaller(number, num_rows, self.tables[name].dim * self.tables[name].dtype.itemsize):
            self._whole.add(name)
        elif number:
            self._given[name] = [
                torch.zeros(len(piece.rows_Rd), dtype=torch.bool, device=piece.rows_Rd.device) for piece in pieces
            ]
            for is_given_R, rows_N in zip(self._given[name], given, strict=True):
                is_given_R[rows_N] = True

    def _pieces(self, name: str) -> list[Piece]:
        """Returns this process's pieces of a table, with their Adagrad sums. A frozen table has none."""
        optimizer = self.optimizers.tables.get(name.removesuffix("weight").removesuffix("."))
        pieces = self.tables[name].pieces
        if optimizer is None:
            return list(pieces)
        # These optimisers move tables that lie in one process, as one piece.
        return [dataclasses.replace(piece, sums_R=optimizer.sums) for piece in pieces]

    def _blocks(self, name: str) -> list[RowBlock]:
        """Returns the rows of a table that this process holds, and which of them are to be written."""
        pieces, is_whole = self._pieces(name), name in self._whole
        given: Sequence[torch.Tensor | None] = self._given.get(name, [None] * len(pieces))
        return [
            RowBlock(piece.first_row, piece.rows_Rd, _is_changed(piece.sums_R, flags, is_whole=is_whole))
            for piece, flags in zip(pieces, given, strict=True)
        ]

    def _sum_blocks(self, name: str) -> list[RowBlock]:
        """Returns the Adagrad sums of a table that this process holds. Those that are not 0 are to be written."""
        pieces = self._pieces(name)
        return [RowBlock(p.first_row, p.sums_R, _is_changed(p.sums_R, None)) for p in pieces if p.sums_R is not None]

    def _dense(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.tables}

    def _moments(self) -> dict[str, torch.Tensor]:
        """Returns the optimisers' tensors other than the sums of tables."""
        return {name: tensor for name, tensor in self.optimizers.state().items() if not name.startswith(SUMS)}

    def _copied(
        self, copies: Copies, blocks: Mapping[str, list[RowBlock]], counts: Mapping[str, list[list[int]]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Returns copies of everything that this process stores, by group (file)."""
        tables: dict[str, Stored] = {}
        sums: dict[str, Stored] = {}
        for name, table in self.tables.items():
            # A process may hold no piece of a table, or of no table at all.
            for own, stored, shown, fresh in (
                (name, tables, name, table.fresh),
                (_sums_of(name), sums, f"sums of {name}", None),
            ):
                if blocks[own]:
                    stored[own] = copies.rows(
                        shown, blocks[own], counts[own], table.num_rows_in_all, fresh, may_be_whole=self.world.is_alone
                    )
        same: dict[str, dict[str, torch.Tensor]] = {}
        if self.world.is_first:
            parameters = {name for name, _ in self.model.named_parameters()}
            same["dense"] = {
                name: copies.whole(name, tensor, must_be_finite=name in parameters)
                for name, tensor in self._dense().items()
            }
            same["optimizer"] = {name: copies.whole(name, tensor) for name, tensor in self._moments().items()}
        if self.world.is_alone:
            return {
                "dense": same["dense"],
                "tables": encode(tables),
                "optimizer": encode(sums) | same["optimizer"],
            }
        rank = self.world.rank
        return {**same, part_name("tables", rank): encode(tables), part_name("optimizer", rank): encode(sums)}

    def _write(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        documents: Mapping[str, Mapping[str, Any]],
        best: int | None,
        shared: SharedSave | None,
    ) -> None:
        """Writes a checkpoint, or the part of this process. Runs in a thread."""
        try:
            if shared is not None and not self.world.is_first:
                self.store.save_part(groups, shared)
                return
            self.store.save(step, groups, state, documents, best=best, shared=shared)
        except OSError as error:
            known = storage_error(error, _failure(step), allowed=INTACT, fix=self._advice())
            raise (known or error) from None
        self.run.log_event("checkpoint", step=step)

    def _check_room(
        self, step: int, blocks: Mapping[str, list[RowBlock]], counts: Mapping[str, list[list[int]]]
    ) -> None:
        """Raises an error if the disk or the memory is too small for the checkpoint; the error names both sizes.

        All processes raise the error, even if only one of them has too little.
        """
        sizes = []
        if self.world.is_first:
            sizes += [tensor.nbytes for tensor in (*self._dense().values(), *self._moments().values())]
        for name, table in self.tables.items():
            for own in (name, _sums_of(name)):
                if blocks[own]:
                    number, like = sum(map(sum, counts[own])), blocks[own][0].tensor_Rd
                    alone = self.world.is_alone
                    sizes.append(stored_bytes(like, number, table.num_rows_in_all, may_be_whole=alone))
        self.store.folder.mkdir(parents=True, exist_ok=True)
        needed = sum(sizes)
        is_pinned = any(parameter.is_cuda for parameter in self.model.parameters())
        if is_pinned:  # Torch rounds pinned memory up to a power of 2, and keeps it for the next checkpoint.
            needed = sum(1 << max(0, size - 1).bit_length() for size in sizes)
        # On a CPU the heap keeps freed memory (`keep_freed_memory`), except that of the largest tensors.
        kept = self._kept_bytes if is_pinned else min(self._kept_bytes, freed_memory_bytes())
        available = available_memory_bytes() + kept
        free = shutil.disk_usage(self.store.folder).free
        self._compare_room(step, self.world.gather((sum(sizes), free, needed, available)))
        self._kept_bytes = needed if is_pinned else sum(size for size in sizes if size < LARGEST_KEPT_BYTES)

    def _compare_room(self, step: int, found: Sequence[tuple[int, int, int, int]]) -> None:
        """Compares the bytes (of files, free on disk, of copies, free in memory) of all processes."""
        to_write, free = sum(each[0] for each in found), min(each[1] for each in found)
        if to_write > free:
            raise StorageError(
                f"{_failure(step)}: {os.strerror(errno.ENOSPC)}: {self.store.folder}",
                allowed=f"it needs {shown_bytes(to_write)}, and {shown_bytes(free)} are free; {INTACT}",
                fix=self._advice(),
            )
        for rank, (_, _, needed, available) in enumerate(found):
            if needed * self.world.local_size > available:  # The processes of a machine share one memory.
                copy = "the copy" if self.world.is_alone else f"the copy of rank {rank}"
                raise UsageError(
                    f"{copy} for the checkpoint of step {step} needs {shown_bytes(needed)} of this machine's memory",
                    allowed=f"{shown_bytes(available // self.world.local_size)} are free; {INTACT}",
                    fix=f"free some memory or use a larger machine, then continue with: --resume {self.run.path}",
                )

    def _advice(self) -> str:
        return f"free some space or repair the disk, then continue with: --resume {self.run.path}"


def _is_changed(sums_R: torch.Tensor | None, given_R: torch.Tensor | None, *, is_whole: bool = False) -> IsChanged:
    """Returns a function that says which rows of a piece to write: all, or those with a sum that is not 0 or a flag."""
    if is_whole or (sums_R is None and given_R is None):
        return lambda place: torch.full((place.stop - place.start,), is_whole)
    if sums_R is None:
        assert given_R is not None
        return lambda place: given_R[place]
    if given_R is None:
        return lambda place: sums_R[place] != 0
    return lambda place: (sums_R[place] != 0) | given_R[place]


def _sums_of(name: str) -> str:
    """Returns the name of the Adagrad sums of a table: `adagrad.item_tables`."""
    return SUMS + name.removesuffix("weight").removesuffix(".")


def _failure(step: int) -> str:
    return f"the checkpoint of step {step} could not be written"
