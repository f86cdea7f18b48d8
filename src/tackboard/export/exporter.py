"""Makes a bundle from a checkpoint. A bundle holds safetensors, JSON and text files, and no executable code.

    <bundle>/  dense.safetensors · tables/<name>.safetensors · features.json · signature.json · card.md · MANIFEST.json

Tables are stored in fp16 by default, as in the published system; dense parameters stay fp32. The parameters are checked
against their model before anything is written. The bundle is written into a temporary folder and then renamed, so that
no incomplete bundle is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tackboard.bundle.signature import FILE_NAME as SIGNATURE
from tackboard.bundle.signature import FORMAT_VERSION, KIND, Signature, write_signature
from tackboard.checkpoint.store import Checkpoint, save_tensors
from tackboard.checkpoint.trained import STATE, load_trained, stored_tables
from tackboard.core.config import suggest
from tackboard.core.documents import blaming
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import new_directory, write_text_atomic
from tackboard.core.manifest import write_manifest
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.feature_set import FILE_NAME as FEATURES
from tackboard.features.feature_set import FeatureSet, read_features
from tackboard.features.standard import check_reads, features_for_model
from tackboard.models.changed_rows import Stored, whole_tensor
from tackboard.models.description import describe_model, restore_config
from tackboard.models.interface import build_model
from tackboard.models.stored_parameters import check_fit

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}


def export_bundle(
    path: Path | Checkpoint, bundle: Path, *, name: str, version: str, tables: str, code_file: Path | None = None
) -> dict[str, Any]:
    """Writes the folder `bundle` from a checkpoint and returns a summary. An existing folder is not overwritten.

    `tables` is fp32 or fp16. `code_file` is the file of a user's own model, or None if the user named no file.
    """
    if tables not in PRECISIONS:
        close = suggest(tables, PRECISIONS)
        fix = f"did you mean {close}?" if close else ""
        raise UsageError(f"--tables {tables} is not a precision", allowed="allowed: fp32, fp16", fix=fix)
    if not version.isdigit():
        raise UsageError(f"--version {version} is not a whole number", fix="give a whole number, e.g. --version 1")
    checkpoint = load_trained(path)
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    state = checkpoint.path / STATE
    with blaming(state):
        config = restore_config(checkpoint.state["model"], code_file, of_run=True)
    stored = stored_tables(checkpoint)
    check_fit(config, vocabulary, {**checkpoint.tensors["dense"], **stored}, state)
    config = config.serving()
    _keep_served(checkpoint, config)
    features = read_features(checkpoint.path)
    if features is None:
        with blaming(state):
            features = features_for_model(config.reads, vocabulary, config.max_history)
    check_reads(config.reads, features, checkpoint.path / FEATURES)
    signature = _signature(checkpoint, stored, config.max_history, features, name, version, tables)
    with new_directory(bundle) as folder:
        save_tensors(checkpoint.tensors["dense"], folder / "dense.safetensors")
        (folder / "tables").mkdir()
        for parameter, table in stored.items():
            rows_Rd = whole_tensor(table, checkpoint.path).to(PRECISIONS[tables])
            if not bool(torch.isfinite(rows_Rd).all()):
                raise DataError(f"{parameter} does not fit into {tables}", fix="use --tables fp32")
            save_tensors({parameter: rows_Rd}, folder / signature.tables[parameter]["file"])
        features.write(folder)
        write_signature(folder, signature)
        write_text_atomic(folder / "card.md", _card(signature, checkpoint, stored))
        tensors = ["dense.safetensors", *(table["file"] for table in signature.tables.values())]
        meant = [*tensors, FEATURES, SIGNATURE, "card.md"]
        write_manifest(folder, KIND, {"name": name, "version": version}, meant=meant)
    num_bytes = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    return {
        "bundle": str(bundle),
        "name": name,
        "version": version,
        "tables": tables,
        "bytes": num_bytes,
        "code_file": str(code_file) if code_file else checkpoint.state["model"].get("code_file"),
    }


def _signature(
    checkpoint: Checkpoint,
    stored: Mapping[str, Stored],
    max_history: int,
    features: FeatureSet,
    name: str,
    version: str,
    tables: str,
) -> Signature:
    state = checkpoint.state
    model = {key: value for key, value in state["model"].items() if key != "code_file"}
    return Signature(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        id_type=state["id_type"],
        user_type=state.get("user_type", ""),
        actions=tuple(state["vocabulary"]["actions"]),
        surfaces=tuple(state["vocabulary"]["surfaces"]),
        max_history=max_history,
        reads=tuple(features.reads()),
        model=model,
        tables={
            parameter: {"file": f"tables/{parameter}.safetensors", "dtype": tables, "shape": list(weight.shape)}
            for parameter, weight in stored.items()
        },
        lineage={
            "run": checkpoint.path.parent.parent.name,
            "step": state["step"],
            "snapshot": state["lineage"]["snapshot"],
            "exported": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def _keep_served(checkpoint: Checkpoint, config: Any) -> None:
    """Removes dense parameters that only training needs: those that a model built from `config` does not have."""
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    with torch.device("meta"):
        served = build_model(config, vocabulary).state_dict()
    dense = checkpoint.tensors["dense"]
    checkpoint.tensors["dense"] = {name: tensor for name, tensor in dense.items() if name in served}
    checkpoint.state["model"] = describe_model(config)


def _card(signature: Signature, checkpoint: Checkpoint, stored: Mapping[str, Stored]) -> str:
    num_dense = sum(tensor.numel() for tensor in checkpoint.tensors["dense"].values())
    num_table = sum(table.numel() for table in stored.values())
    lineage = signature.lineage
    return f"""# {signature.name}, version {signature.version}

- Model: `{signature.model["config_class"]}`, {num_table:,} table parameters, {num_dense:,} dense parameters.
- Trained to step {lineage["step"]} by run `{lineage["run"]}` on snapshot `{lineage["snapshot"]}`.
- Reads up to {signature.max_history} events of a history; item ids are {signature.id_type}.
- Actions it knows: {", ".join(signature.actions)}. Surfaces: {", ".join(signature.surfaces)}. Others count as unknown.
- Scores rank candidates for one user; they are not probabilities and not comparable between versions.
"""
