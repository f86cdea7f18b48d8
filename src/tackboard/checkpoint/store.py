"""Keeps the checkpoints of one run, each with groups of named tensors and a JSON state. Loading detects damaged files.

    checkpoints/step-00000200/   <group>.safetensors … · state.json · features.json · MANIFEST.json
                                 <group>-r00003.safetensors         if several processes wrote it (see parts.py)
    checkpoints/latest           -> step-00000200
    checkpoints/best             -> step-00000100        if the run is validated during training

A checkpoint is written into a temporary folder, hashed, fsynced and renamed into place; then `latest` is replaced. A
kill at any instant leaves every `step-*` complete, and `latest` points at one of them. The newest two checkpoints and
the best are kept; older checkpoints are removed only after the new checkpoint is complete. Decided: the files are
safetensors and JSON, and nothing is unpickled. The bytes of every `Checkpoint` object have been verified. Callers pass
the object on, so that a command hashes no file twice. The tensors are memory-mapped and take no memory before use.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tackboard.checkpoint.parts import SharedSave, group_of
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.files import (
    new_directory,
    reach,
    read_json,
    remove_directory,
    remove_leftovers,
    replace_symlink,
    write_json_atomic,
)
from tackboard.core.manifest import MANIFEST, verify_manifest, write_manifest
from tackboard.core.progress import say
from tackboard.models.stored_parameters import load_tensors

KIND = "checkpoint"
LATEST, BEST = "latest", "best"
Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder, its JSON state, and its tensors by group."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]
    among: tuple[Path, ...] = ()
    """All checkpoints that were in the folder when `find_latest` chose this checkpoint."""


class CheckpointStore:
    """Writes and finds the checkpoints in one folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        step: int,
        groups: Mapping[str, Tensors],
        state: Mapping[str, Any],
        documents: Mapping[str, Mapping[str, Any]] | None = None,
        best: int | None = None,
        shared: SharedSave | None = None,
    ) -> Path:
        """Writes the checkpoint of `step` and points `latest` at it. An intact checkpoint of the same step is kept.

        `documents` holds further JSON files, by name. `best` is the step of the best checkpoint, if there is one. If
        several processes write the checkpoint, then the process of rank 0 calls `save` with `shared`, and all others
        call `save_part`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{step:08d}"
        if final.exists() and not _is_intact(final):
            # The run skipped this damaged checkpoint when it was resumed, and has now reached the same step again.
            remove_directory(final)
        if not final.exists():
            with new_directory(final) as temporary:
                meant = _write_groups(groups, temporary)
                for name, document in (documents or {}).items():
                    write_json_atomic(temporary / name, dict(document))
                write_json_atomic(temporary / "state.json", dict(state))
                hashes = shared.move_parts(temporary) if shared is not None else {}
                meant += [*(documents or {}), "state.json", *hashes]
                write_manifest(temporary, KIND, {"step": step}, meant=meant, hashes=hashes)
        elif shared is not None:
            shared.wait_for_parts()
        self.point_latest(final)
        self.point_best(best)
        self._prune(final)
        if shared is not None:
            shared.release()
        return final

    def save_part(self, groups: Mapping[str, Tensors], shared: SharedSave) -> None:
        """Writes the part of a process whose rank is not 0; returns when the checkpoint is complete."""
        own = shared.part(shared.rank)
        own.mkdir(parents=True)
        shared.seal_part(_write_groups(groups, own))
        shared.wait_for_checkpoint(self.folder / f"step-{shared.step:08d}")

    def clean(self) -> None:
        """Removes the files of killed writers. The caller must hold the run's lock."""
        remove_leftovers(self.folder)
        for path in self.folder.glob(".step-*.parts-*"):
            shutil.rmtree(path, ignore_errors=True)

    def point_latest(self, path: Path) -> None:
        """Points `latest` at `path`, a checkpoint of this folder."""
        replace_symlink(self.folder / LATEST, path.name)

    def point_best(self, step: int | None) -> None:
        """Points `best` at the checkpoint of a step, or removes `best` if that checkpoint does not exist."""
        path = self.folder / f"step-{step or 0:08d}"
        if step is None or not (path / MANIFEST).is_file():
            (self.folder / BEST).unlink(missing_ok=True)
        else:
            replace_symlink(self.folder / BEST, path.name)

    def find_latest(self, known: Checkpoint | None = None) -> Checkpoint | None:
        """Returns the newest intact checkpoint, or None. A damaged checkpoint is skipped with a warning.

        `known` is an earlier result. It is returned at once if the folder still has the same checkpoints.
        """
        complete = self.complete()
        if known is not None and known.among == tuple(complete):
            return known
        for path in reversed(complete):
            try:
                manifest = verify_manifest(path, KIND)
            except CorruptFileError as error:
                say(f"warning: skipping {path.name}: {error.got}")
                continue
            return dataclasses.replace(_read(path, manifest), among=tuple(complete))
        return None

    def complete(self) -> list[Path]:
        """Returns the checkpoints that were renamed into place, oldest first. They are not verified."""
        return sorted(path for path in self.folder.glob("step-*") if (path / MANIFEST).is_file())

    def _prune(self, newest: Path) -> None:
        # A checkpoint of a later step than `newest` is damaged: the run skipped it. Damaged checkpoints do not count
        # among the `keep` newest, because otherwise `newest` itself could be removed.
        best = (self.folder / BEST).resolve().name
        for path in [path for path in self.complete() if path.name <= newest.name][: -self.keep]:
            if path.name != best:
                remove_directory(path)


def _write_groups(groups: Mapping[str, Tensors], folder: Path) -> list[str]:
    """Writes each group to a file; returns the names of the files."""
    names = []
    for group, tensors in groups.items():
        name = f"{group}.safetensors"
        reach(f"{name}:before-write")
        save_tensors(tensors, folder / name)
        reach(f"{name}:after-write")
        names.append(name)
    return names


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Writes named tensors as safetensors. A failing disk raises OSError with an errno, as in any other write."""
    stored = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    places: set[int] = set()
    for key, tensor in stored.items():
        # Safetensors cannot share data between tensors, so tied weights are written once under each name.
        place = tensor.untyped_storage().data_ptr()
        stored[key] = tensor.clone() if place in places else tensor
        places.add(place)
    try:
        save_file(stored, path)
    except SafetensorError as error:
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    # The library makes files that only their owner can read, but a server may run as another user.
    path.chmod(0o644)


def _is_intact(path: Path) -> bool:
    try:
        verify_manifest(path, KIND)
    except DataError:
        return False
    return True


def load_checkpoint(path: Path | Checkpoint, groups: tuple[str, ...] | None = None) -> Checkpoint:
    """Verifies every byte of a checkpoint, then reads its state and all tensors, or only the tensors of `groups`.

    The name of a group also stands for its parts: `tables` includes `tables-r00003`. A `Checkpoint` is already verified
    and is returned as it is.
    """
    if isinstance(path, Checkpoint):
        return path
    path = path.resolve()
    return _read(path, verify_manifest(path, KIND), groups)


def _read(path: Path, manifest: Mapping[str, Any], groups: tuple[str, ...] | None = None) -> Checkpoint:
    names = [entry["name"] for entry in manifest["files"] if "/" not in entry["name"]]
    present = [name.removesuffix(".safetensors") for name in names if name.endswith(".safetensors")]
    wanted = [group for group in present if groups is None or group_of(group)[0] in groups]
    tensors = {group: load_tensors(path / f"{group}.safetensors") for group in wanted}
    return Checkpoint(path=path, state=read_json(path / "state.json"), tensors=tensors)


def find_checkpoint(path: Path) -> Path:
    """Returns the best checkpoint of a run if `best` exists, otherwise the newest. Nothing is verified.

    `path` is a run's folder or its folder of checkpoints. If `path` is itself a checkpoint, `path` is returned.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist", allowed="allowed: a run or checkpoint folder", fix="ls runs/")
    if (path / MANIFEST).is_file():
        return path.resolve()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    for name in (BEST, LATEST):
        if (folder / name / MANIFEST).is_file():
            return (folder / name).resolve()
    complete = CheckpointStore(folder).complete()
    if not complete:
        raise DataError(f"{path} holds no complete checkpoint", allowed="allowed: a run or checkpoint folder")
    return complete[-1]
