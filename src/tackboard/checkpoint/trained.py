"""Loads the checkpoint of a training run and checks the fields of its state.json.

`store` accepts any tensors and any JSON. This module checks the content, for evaluation, export and the trainer.
Decided: data lies outside of runs, so `lineage.dataset` may name any folder, like the setting `dataset` of a recipe.
The folder is verified like any other dataset. `lineage.snapshot` names a folder inside the dataset's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tackboard.checkpoint.store import Checkpoint, load_checkpoint
from tackboard.checkpoint.stored_rows import decode
from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.manifest import stays_inside
from tackboard.models.changed_rows import Stored

STATE = "state.json"
FORMAT_VERSION = 2
"""In version 2, a table may be stored as only its changed rows. This form is used if it takes fewer bytes."""
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
    "num_threads": int,
    "guard.num_spikes": int,
    "user_type": Literal["", "int64", "string"],
    "validation.best_loss": float | None,
    "validation.best_step": int | None,
    "validation.num_worse": int,
    "model.code_file": str,
    "model.code_sha256": str,
    "started_from.run": str,
    "started_from.step": int,
    "started_from.snapshot": str,
    "started_from.prefix": str,
}
"""Fields that older versions did not write."""


def load_trained(path: Path | Checkpoint, groups: tuple[str, ...] = ("dense", "tables")) -> Checkpoint:
    """Verifies a checkpoint if necessary, checks its state and reads the tensors of `groups`, which must all exist."""
    checkpoint = load_checkpoint(path, groups)
    for group in groups:
        if group not in checkpoint.tensors:
            raise CorruptFileError(f"{checkpoint.path / group}.safetensors is missing")
    read_state(checkpoint.path)
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
    with blaming(checkpoint.path / f"{group}.safetensors"):
        return decode(checkpoint.tensors[group], checkpoint.state.get("fresh_rows", {}))


def read_state(folder: Path) -> dict[str, Any]:
    """Reads state.json of a checkpoint's folder and checks every field."""
    path = folder / STATE
    state = read_document(path, FIELDS, OPTIONAL)
    if state["format_version"] > FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {state['format_version']}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    if min(state["step"], state["data_step"], state["num_tokens"], *state["guard"]["skipped"], 0) < 0:
        raise CorruptFileError(f"{path} is malformed: a number of steps or tokens is below 0")
    snapshot = state["lineage"]["snapshot"]
    if not stays_inside(snapshot) or "/" in snapshot or "\0" in state["lineage"]["dataset"]:
        raise CorruptFileError(
            f"{path} is malformed: lineage.snapshot = {snapshot!r}", allowed="allowed: the name of one folder"
        )
    return state
