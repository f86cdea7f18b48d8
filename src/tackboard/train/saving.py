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
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tackboard.checkpoint.background import Background
from tackboard.checkpoint.copies import Copies, IsChanged, count_rows, stored_bytes
from tackboard.checkpoint.store import Checkpoint, CheckpointStore
from tackboard.checkpoint.stored_rows import SUMS, describe, encode, fresh_rows_of, is_smaller
from tackboard.checkpoint.trained import stored_optimizer, stored_parameters
from tackboard.core.documents import blaming
from tackboard.core.errors import DivergedError, StorageError, UsageError
from tackboard.core.files import storage_error
from tackboard.core.machine import LARGEST_KEPT_BYTES, available_memory_bytes, freed_memory_bytes
from tackboard.core.rundir import RunDirectory
from tackboard.models.changed_rows import ChangedRows, Stored
from tackboard.models.stored_parameters import load_parameters
from tackboard.models.tables import HashedTables, table_modules
from tackboard.train.optimizers import Optimizers

INTACT = "the checkpoints before it are intact"


class Saver:
    """Saves and loads the parameters and the optimiser state of one run."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, store: CheckpointStore, run: RunDirectory) -> None:
        self.model = model
        self.optimizers = optimizers
        self.store = store
        self.run = run
        self.tables = {f"{name}.weight".removeprefix("."): module for name, module in table_modules(model).items()}
        """Tables by the names of their parameters."""
        self._given: dict[str, torch.Tensor] = {}
        """Table → a flag per row, which is set if the row was not fresh when the run began; after `load`, only if its
        Adagrad sum is still 0. A table whose rows were all fresh has no entry."""
        self._whole: set[str] = set()
        """Tables that are always written whole."""
        self._background = Background()
        self._saved_step: int | None = None
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
        for name, module in self.tables.items():
            self._note_given(name, module.fresh.differing(module.weight.detach()))

    def describe(self) -> dict[str, Any]:
        """Returns the value of `fresh_rows` for state.json."""
        return describe({name: (module.fresh, module.weight.shape[0]) for name, module in self.tables.items()})

    def save(
        self, step: int, state: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]], best: int | None
    ) -> None:
        """Copies the state and begins to write the checkpoint of `step`, after the previous checkpoint is complete.

        Raises DivergedError if a parameter is not finite, StorageError or UsageError if the disk or the memory is too
        small, and the error of the previous checkpoint's writer if it failed.
        """
        self.wait()
        if step == self._saved_step:
            return
        counts = {name: self._count(name) for name in self.tables}
        sum_counts = {name: count_rows(len(sums), _has_sum(sums)) for name, sums in self._sums().items()}
        self._check_room(step, counts, sum_counts)
        copies = Copies()
        groups = self._copied(copies, counts, sum_counts)
        if bad := copies.finish():
            # A batch reads few rows, so a non-finite row may stay unnoticed for long. Such a table is never saved.
            raise DivergedError(
                f"{bad} holds non-finite values at step {step}",
                allowed="the last checkpoint is intact",
                fix="start a new run with lower learning rates",
            )
        self._background.start(lambda: self._write(step, groups, state, documents, best))
        self._saved_step = step

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads the parameters and the optimiser state of a checkpoint. Tables are filled in place."""
        path, described = checkpoint.path, checkpoint.state.get("fresh_rows", {})
        parameters = stored_parameters(checkpoint)
        load_parameters(self.model, parameters, path)
        with blaming(path / "optimizer.safetensors"):
            self.optimizers.load_state(stored_optimizer(checkpoint))
        self._saved_step = None
        self._given.clear()
        self._whole.clear()
        for name, module in self.tables.items():
            if name in described:
                with blaming(path / "state.json"):
                    module.fresh = fresh_rows_of(described, name)[0]
            self._note_loaded(name, module, parameters[name])

    def _note_loaded(self, name: str, module: HashedTables, stored: Stored) -> None:
        if not isinstance(stored, ChangedRows) or stored.dtype != module.weight.dtype:
            # It is not known which rows of this table are fresh.
            self._whole.add(name)
            return
        rows_N = stored.rows_N.to(module.weight.device, torch.int64)
        if (sums := self._sums().get(name)) is not None:
            rows_N = rows_N[sums[rows_N] == 0]
        self._note_given(name, rows_N)

    def _note_given(self, name: str, rows_N: torch.Tensor) -> None:
        weight = self.tables[name].weight
        if not is_smaller(len(rows_N), weight.shape[0], weight.shape[1] * weight.itemsize):
            self._whole.add(name)
        elif len(rows_N):
            self._given[name] = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
            self._given[name][rows_N] = True

    def _sums(self) -> dict[str, torch.Tensor]:
        """Returns the Adagrad sums by the names of the tables' parameters. A frozen table has none."""
        tables = self.optimizers.tables.items()
        return {f"{name}.weight".removeprefix("."): table.sums for name, table in tables}

    def _is_changed(self, name: str) -> IsChanged:
        sums, given = self._sums().get(name), self._given.get(name)
        if sums is None and given is None:
            return lambda place: torch.zeros(place.stop - place.start, dtype=torch.bool)
        if given is None:
            assert sums is not None
            return _has_sum(sums)
        if sums is None:
            return lambda place: given[place]
        return lambda place: (sums[place] != 0) | given[place]

    def _count(self, name: str) -> list[int]:
        num_rows = self.tables[name].weight.shape[0]
        return [num_rows] if name in self._whole else count_rows(num_rows, self._is_changed(name))

    def _dense(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.tables}

    def _moments(self) -> dict[str, torch.Tensor]:
        """Returns the optimisers' tensors other than the sums of tables."""
        return {name: tensor for name, tensor in self.optimizers.state().items() if not name.startswith(SUMS)}

    def _copied(
        self, copies: Copies, counts: Mapping[str, list[int]], sum_counts: Mapping[str, list[int]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Returns copies of everything that the checkpoint stores, by group (file)."""
        parameters = {name for name, _ in self.model.named_parameters()}
        tables = {
            name: copies.rows(name, module.weight, self._is_changed(name), counts[name], module.fresh)
            for name, module in self.tables.items()
        }
        sums = {
            f"{SUMS}{name.removesuffix('weight').removesuffix('.')}": copies.rows(
                f"sums of {name}", sums, _has_sum(sums), sum_counts[name], None
            )
            for name, sums in self._sums().items()
        }
        return {
            "dense": {
                name: copies.whole(name, tensor, must_be_finite=name in parameters)
                for name, tensor in self._dense().items()
            },
            "tables": encode(tables),
            "optimizer": encode(sums | {name: copies.whole(name, t) for name, t in self._moments().items()}),
        }

    def _write(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        documents: Mapping[str, Mapping[str, Any]],
        best: int | None,
    ) -> None:
        """Writes a checkpoint. Runs in a thread."""
        try:
            self.store.save(step, groups, state, documents, best=best)
        except OSError as error:
            known = storage_error(error, _failure(step), allowed=INTACT, fix=self._advice())
            raise (known or error) from None
        self.run.log_event("checkpoint", step=step)

    def _check_room(self, step: int, counts: Mapping[str, list[int]], sum_counts: Mapping[str, list[int]]) -> None:
        """Raises an error if the disk or the memory is too small for the checkpoint; the error names both sizes."""
        sizes = [tensor.nbytes for tensor in (*self._dense().values(), *self._moments().values())]
        sizes += [stored_bytes(module.weight, sum(counts[name])) for name, module in self.tables.items()]
        sizes += [stored_bytes(sums, sum(sum_counts[name])) for name, sums in self._sums().items()]
        needed = sum(sizes)
        self.store.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.store.folder).free
        if needed > free:
            raise StorageError(
                f"{_failure(step)}: {os.strerror(errno.ENOSPC)}: {self.store.folder}",
                allowed=f"it needs {shown_bytes(needed)}, and {shown_bytes(free)} are free; {INTACT}",
                fix=self._advice(),
            )
        is_pinned = any(parameter.is_cuda for parameter in self.model.parameters())
        if is_pinned:  # Torch rounds pinned memory up to a power of 2, and keeps it for the next checkpoint.
            needed = sum(1 << max(0, size - 1).bit_length() for size in sizes)
        # On a CPU the heap keeps freed memory (`keep_freed_memory`), except that of the largest tensors.
        kept = self._kept_bytes if is_pinned else min(self._kept_bytes, freed_memory_bytes())
        available = available_memory_bytes() + kept
        if needed > available:
            raise UsageError(
                f"the copy for the checkpoint of step {step} needs {shown_bytes(needed)} of this machine's memory",
                allowed=f"{shown_bytes(available)} are free; {INTACT}",
                fix=f"free some memory or use a larger machine, then continue with: --resume {self.run.path}",
            )
        self._kept_bytes = needed if is_pinned else sum(size for size in sizes if size < LARGEST_KEPT_BYTES)

    def _advice(self) -> str:
        return f"free some space or repair the disk, then continue with: --resume {self.run.path}"


def shown_bytes(num_bytes: int) -> str:
    """Returns a size for a message: `1.5 GB`, `2.0 MB` or `3.1 kB`."""
    size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= pair[0]), (1e3, "kB"))
    return f"{num_bytes / size:.1f} {unit}"


def _has_sum(sums: torch.Tensor) -> IsChanged:
    return lambda place: sums[place] != 0


def _failure(step: int) -> str:
    return f"the checkpoint of step {step} could not be written"
