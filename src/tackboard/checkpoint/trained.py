"""Loads the checkpoint of a training run and checks the fields of its state.json.

`store` accepts any tensors and any JSON. This module checks the content, for evaluation, export and the trainer.
Decided: data lies outside of runs, so `lineage.dataset` may name any folder, like the setting `dataset` of a recipe.
The folder is verified like any other dataset. `lineage.snapshot` names a folder inside the dataset's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tackboard.checkpoint.parts import group_of, part_name
from tackboard.checkpoint.store import Checkpoint, load_checkpoint
from tackboard.checkpoint.stored_rows import decode, merge
from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.manifest import stays_inside
from tackboard.models.changed_rows import Stored

STATE = "state.json"
FORMAT_VERSION = 2
"""In version 2, a table may be stored as only its changed rows. This form is used if it takes fewer bytes."""
FORMAT_VERSION_OF_PARTS = 3
"""In version 3, several processes have stored parts of the tables. A run of one process still writes version 2."""
PARTED = ("tables", "optimizer")
"""The groups of tensors that are stored in parts if several processes train."""
FIELDS = {
    "format_version": int,
    "step": int,
    "data_step": int,
    "num_tokens": int,
    "last_loss": float | None,
    "guard.mean_norm": float,
    "guard.num_norms": int,
    "guard.skipped": tuple[int, ...],
    "config": dict,
    "model.config_class": str,
    "model.config": dict,
    "vocabulary.actions": tuple[str, ...],
    "vocabulary.surfaces": tuple[str, ...],
    "id_type": Literal["int64", "string"],
    "lineage.dataset": str,
    "lineage.snapshot": str,
}
OPTIONAL = {
    "order_version": int,
    "fresh_rows": dict,
    "num_parts": int,
    "num_threads": int,
    "guard.num_spikes": int,
    "user_type": Literal["", "int64", "string"],
    "validation.best_loss": float | None,
    "validation.best_step": int | None,
    "validation.num_worse": int,
    "model.code_file": str,
    "model.code_sha256": str,
    "lineage.end_ms": int,
    "started_from.run": str,
    "started_from.step": int,
    "started_from.snapshot": str,
    "started_from.prefix": str,
    "started_from.is_continued": bool,
}
"""Fields that older versions did not write."""


def load_trained(path: Path | Checkpoint, groups: tuple[str, ...] = ("dense", "tables")) -> Checkpoint:
    """Verifies a checkpoint if necessary, checks its state and reads the tensors of `groups`, which must all exist."""
    checkpoint = load_checkpoint(path, groups)
    num_parts = read_state(checkpoint.path).get("num_parts", 1)
    for group in groups:
        needed = [] if num_parts > 1 and group == "tables" else [group]
        if num_parts > 1 and group in PARTED:
            needed += [part_name(group, rank) for rank in range(num_parts)]
        for name in needed:
            if name not in checkpoint.tensors:
                raise CorruptFileError(f"{checkpoint.path / name}.safetensors is missing")
        for name in checkpoint.tensors:
            if group_of(name)[0] == group and name not in needed:
                raise CorruptFileError(f"{checkpoint.path / name}.safetensors is not one of the {num_parts} parts")
    return checkpoint


def stored_parameters(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Returns all parameters of a checkpoint that `load_trained` has read. A table may be given by its changed rows."""
    return checkpoint.tensors["dense"] | stored_tables(checkpoint)


def stored_tables(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Returns the tables of a checkpoint that `load_trained` has read."""
    return _decoded(checkpoint, "tables")


def stored_optimizer(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Returns the optimisers' tensors of a checkpoint that `load_trained` has read."""
    return _decoded(checkpoint, "optimizer")


def _decoded(checkpoint: Checkpoint, group: str) -> dict[str, Stored]:
    whole: dict[str, Stored] = {}
    parts: list[dict[str, Stored]] = []
    for name, tensors in sorted(checkpoint.tensors.items()):
        if group_of(name)[0] == group:
            with blaming(checkpoint.path / f"{name}.safetensors"):
                stored = decode(tensors, checkpoint.state.get("fresh_rows", {}))
            if name == group:
                whole = stored
            else:
                parts.append(stored)
    with blaming(checkpoint.path / group):
        merged = merge(parts)
        if both := sorted(merged.keys() & whole.keys()):
            raise DataError(f"{both[0]} is stored twice")
    return whole | merged


def read_state(folder: Path) -> dict[str, Any]:
    """Reads state.json of a checkpoint's folder and checks every field."""
    path = folder / STATE
    state = read_document(path, FIELDS, OPTIONAL)
    if state["format_version"] > FORMAT_VERSION_OF_PARTS:
        raise DataError(
            f"{path} has format version {state['format_version']}",
            allowed=f"allowed: up to {FORMAT_VERSION_OF_PARTS}",
            fix="use a newer tackboard",
        )
    if min(state["step"], state["data_step"], state["num_tokens"], *state["guard"]["skipped"], 0) < 0:
        raise CorruptFileError(f"{path} is malformed: a number of steps or tokens is below 0")
    if state.get("num_parts", 1) < 1:
        raise CorruptFileError(f"{path} is malformed: num_parts = {state['num_parts']}", allowed="allowed: 1 or more")
    snapshot = state["lineage"]["snapshot"]
    if not stays_inside(snapshot) or "/" in snapshot or "\0" in state["lineage"]["dataset"]:
        raise CorruptFileError(
            f"{path} is malformed: lineage.snapshot = {snapshot!r}", allowed="allowed: the name of one folder"
        )
    return state
