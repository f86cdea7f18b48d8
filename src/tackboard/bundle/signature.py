"""signature.json: what a bundle's model takes, what it knows, and where it came from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from tackboard.core.config import from_dict, to_dict
from tackboard.core.errors import ConfigError, CorruptFileError, DataError
from tackboard.core.files import read_json, write_json_atomic
from tackboard.core.manifest import verify_manifest
from tackboard.events.vocabulary import Vocabulary

KIND = "bundle"
FORMAT_VERSION = 2
"""2 added `reads` and features.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """A bundle's description. `model` is what `models.interface.describe_model` wrote; `tables` names files."""

    format_version: int
    name: str
    version: str
    id_type: Literal["int64", "string"]
    actions: tuple[str, ...]
    surfaces: tuple[str, ...]
    max_history: int
    model: Any
    tables: Any
    lineage: Any
    user_type: Literal["", "int64", "string"] = ""
    """How users are named; empty in bundles of version 1, which do not say."""
    reads: tuple[str, ...] = ()
    """The features the model reads, e.g. history.item; empty in bundles of version 1, which read the standard ones."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Actions and surfaces the model knows."""
        return Vocabulary(actions=self.actions, surfaces=self.surfaces)


def write_signature(folder: Path, signature: Signature) -> None:
    """Writes signature.json into a bundle folder."""
    write_json_atomic(folder / "signature.json", to_dict(signature))


def read_bundle(folder: Path) -> Signature:
    """Verifies every byte of a bundle and returns its signature. Needs no torch."""
    if (folder / "checkpoints").is_dir():
        raise DataError(
            f"{folder} is a run", allowed="allowed: a bundle", fix=f"make one: tackboard export {folder} --out BUNDLE"
        )
    verify_manifest(folder, KIND)
    data = read_json(folder / "signature.json")
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError(
            f"{folder} has signature version {version}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    try:
        return from_dict(Signature, data, "signature")
    except ConfigError as error:
        raise CorruptFileError(f"{folder / 'signature.json'} is not a signature: {error.got}") from None
