"""Reads and writes signature.json, which describes a bundle's model: its inputs, known actions, surfaces and origin.

A bundle made for training holds all parameters of the model, and the tables as the run stored them. A bundle made for
serving lacks the parameters that only training needs, and its tables may be rounded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from tackboard.core.config import from_dict, to_dict
from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import CorruptFileError, DataError
from tackboard.core.files import write_json_atomic
from tackboard.core.manifest import read_manifest, verify_manifest
from tackboard.core.vocabulary import Vocabulary

KIND = "bundle"
FILE_NAME = "signature.json"
FORMAT_VERSION = 3
"""Version 2 added `reads` and features.json. Version 3 added `purpose` and `fresh_rows`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """Describes a bundle. `models.description.describe_model` makes `model`; `tables` names the table files."""

    format_version: int
    name: str
    version: str
    id_type: Literal["int64", "string"]
    actions: tuple[str, ...]
    surfaces: tuple[str, ...]
    max_history: int
    model: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    lineage: dict[str, Any]
    user_type: Literal["", "int64", "string"] = ""
    """Type of user ids; empty if the checkpoint did not record it, as in bundles of version 1."""
    reads: tuple[str, ...] = ()
    """The features that the model reads, e.g. history.item. Empty in a bundle of version 1, whose model reads the
    standard features."""
    purpose: Literal["serving", "training"] = "serving"
    """What the bundle was made for. A run can start only from a bundle made for training; both kinds can be served."""
    fresh_rows: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Only in a bundle made for training: says for each table how to make the rows that training has not changed (see
    `checkpoint.stored_rows`)."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The actions and surfaces that the model knows."""
        return Vocabulary(actions=self.actions, surfaces=self.surfaces)


def write_signature(folder: Path, signature: Signature) -> None:
    """Writes signature.json into a bundle folder."""
    write_json_atomic(folder / FILE_NAME, to_dict(signature))


def read_bundle(folder: Path) -> Signature:
    """Verifies every byte of a bundle and returns its signature. This function does not need torch."""
    if (folder / "checkpoints").is_dir():
        raise DataError(
            f"{folder} is a run", allowed="allowed: a bundle", fix=f"make one: tackboard export {folder} --out BUNDLE"
        )
    verify_manifest(folder, KIND)
    return read_signature(folder)


def read_signature(folder: Path) -> Signature:
    """Reads signature.json of a bundle and checks its fields. The bytes of the bundle's files are not verified."""
    path, manifest = folder / FILE_NAME, read_manifest(folder)
    data = read_document(path, {"format_version": int, "model.config_class": str, "model.config": dict})
    version = data["format_version"]
    if version > FORMAT_VERSION:
        raise DataError(
            f"{folder} has signature version {version}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard",
        )
    with blaming(path):
        signature = from_dict(Signature, data, "signature")
    _check_tables(path, signature.tables, [entry["name"] for entry in manifest["files"]])
    return signature


def _check_tables(path: Path, tables: dict[str, dict[str, Any]], files: list[str]) -> None:
    """Raises CorruptFileError if a table names a file that is not in the bundle, or the file of another table."""
    named = [table.get("file") for table in tables.values()]
    for file in named:
        if file not in files or named.count(file) > 1:
            raise CorruptFileError(
                f"{path} is malformed: it names the file {str(file)[:200]}",
                allowed="allowed: each table has a file of its own, and the manifest lists this file",
            )
