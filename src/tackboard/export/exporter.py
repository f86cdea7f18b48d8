"""Makes a bundle from a checkpoint. A bundle holds safetensors, JSON and text files, and no executable code.

    <bundle>/  dense.safetensors · tables/<name>.safetensors · features.json · signature.json · card.md · MANIFEST.json

Tables are stored in fp16 by default, as in the published system; dense parameters stay fp32. A bundle for training has
all parameters, and the tables as the run stored them. So a new run begins with the same bits whether it starts from the
bundle or from the original run. The states of optimisers are not part of a bundle. The parameters are checked against
their model before anything is written. The bundle is written into a temporary folder and then renamed, so that no
incomplete bundle is left behind.
"""

from __future__ import annotations

import dataclasses
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
from tackboard.models.interface import ModelConfig, build_model
from tackboard.models.stored_parameters import check_fit
from tackboard.models.tables import STORAGES

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}


def export_bundle(
    path: Path | Checkpoint,
    bundle: Path,
    *,
    name: str,
    version: str,
    tables: str = "",
    for_training: bool = False,
    code_file: Path | None = None,
) -> dict[str, Any]:
    """Writes the folder `bundle` from a checkpoint and returns a summary. An existing folder is not overwritten.

    `tables` is fp32, fp16 or empty. If it is empty, tables are stored in fp16, or, with `for_training`, in the run's
    own precision. `code_file` is the file of a user's own model, or None if the user named no file.
    """
    _check_options(version, tables, for_training=for_training)
    checkpoint = load_trained(path)
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    state = checkpoint.path / STATE
    with blaming(state):
        config = restore_config(checkpoint.state["model"], code_file, of_run=True)
    stored = stored_tables(checkpoint)
    check_fit(config, vocabulary, {**checkpoint.tensors["dense"], **stored}, state)
    config = config if for_training else config.serving()
    _keep_parameters(checkpoint, config)
    features = read_features(checkpoint.path)
    if features is None:
        with blaming(state):
            features = features_for_model(config.reads, vocabulary, config.max_history)
    check_reads(config.reads, features, checkpoint.path / FEATURES)
    precisions = {
        parameter: table.dtype if for_training else PRECISIONS[tables or "fp16"] for parameter, table in stored.items()
    }
    signature = _signature(checkpoint, stored, config.max_history, features, name, version, precisions)
    if for_training:
        fresh = checkpoint.state.get("fresh_rows", {})
        signature = dataclasses.replace(signature, purpose="training", fresh_rows=fresh)
    with new_directory(bundle) as folder:
        save_tensors(checkpoint.tensors["dense"], folder / "dense.safetensors")
        (folder / "tables").mkdir()
        for parameter, table in stored.items():
            rows_Rd = whole_tensor(table, checkpoint.path).to(precisions[parameter])
            if not bool(torch.isfinite(rows_Rd).all()):
                raise DataError(f"{parameter} does not fit into {tables or 'fp16'}", fix="use --tables fp32")
            save_tensors({parameter: rows_Rd}, folder / signature.tables[parameter]["file"])
        features.write(folder)
        write_signature(folder, signature)
        write_text_atomic(folder / "card.md", _card(signature, checkpoint, stored, config))
        tensors = ["dense.safetensors", *(table["file"] for table in signature.tables.values())]
        meant = [*tensors, FEATURES, SIGNATURE, "card.md"]
        write_manifest(folder, KIND, {"name": name, "version": version}, meant=meant)
    num_bytes = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    return {
        "bundle": str(bundle),
        "name": name,
        "version": version,
        "tables": ", ".join(sorted({table["dtype"] for table in signature.tables.values()})) or "none",
        "purpose": signature.purpose,
        "bytes": num_bytes,
        "code_file": str(code_file) if code_file else checkpoint.state["model"].get("code_file"),
    }


def _check_options(version: str, tables: str, *, for_training: bool) -> None:
    if for_training and tables:
        raise UsageError(
            f"--tables {tables} and --for-training contradict each other",
            allowed="a bundle for training keeps the tables in the precision of the run",
            fix="leave out --tables",
        )
    if tables and tables not in PRECISIONS:
        close = suggest(tables, PRECISIONS)
        fix = f"did you mean {close}?" if close else ""
        raise UsageError(f"--tables {tables} is not a precision", allowed="allowed: fp32, fp16", fix=fix)
    if not version.isdigit():
        raise UsageError(f"--version {version} is not a whole number", fix="give a whole number, e.g. --version 1")


def _signature(
    checkpoint: Checkpoint,
    stored: Mapping[str, Stored],
    max_history: int,
    features: FeatureSet,
    name: str,
    version: str,
    precisions: Mapping[str, torch.dtype],
) -> Signature:
    state = checkpoint.state
    names = {dtype: precision for precision, dtype in STORAGES.items()}
    began = {"started_from": state["started_from"]} if state.get("started_from") else {}
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
            parameter: {
                "file": f"tables/{parameter}.safetensors",
                "dtype": names.get(precisions[parameter], str(precisions[parameter]).removeprefix("torch.")),
                "shape": list(weight.shape),
            }
            for parameter, weight in stored.items()
        },
        lineage={
            "run": checkpoint.path.parent.parent.name,
            "step": state["step"],
            "snapshot": state["lineage"]["snapshot"],
            "exported": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **began,
        },
    )


def _keep_parameters(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Removes the dense parameters that a model built from `config` does not have."""
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    with torch.device("meta"):
        kept = build_model(config, vocabulary).state_dict()
    dense = checkpoint.tensors["dense"]
    checkpoint.tensors["dense"] = {name: tensor for name, tensor in dense.items() if name in kept}
    checkpoint.state["model"] = describe_model(config)


def _card(signature: Signature, checkpoint: Checkpoint, stored: Mapping[str, Stored], config: ModelConfig) -> str:
    num_dense = sum(tensor.numel() for tensor in checkpoint.tensors["dense"].values())
    num_table = sum(table.numel() for table in stored.values())
    lineage = signature.lineage
    lines = [
        f"Model: `{signature.model['config_class']}`, {num_table:,} table parameters, {num_dense:,} dense parameters.",
        f"Trained to step {lineage['step']} by run `{lineage['run']}` on snapshot `{lineage['snapshot']}`.",
    ]
    if began := lineage.get("started_from"):
        part = f"The parameters under `{began['prefix']}`" if began.get("prefix") else "Its parameters"
        how = "It goes on with" if began.get("is_continued") else f"{part} were initialised from"
        lines.append(
            f"{how} step {began['step']} of run `{began['run']}`, which was trained on snapshot `{began['snapshot']}`."
        )
    lines += [
        f"Reads up to {signature.max_history} events of a history; item ids are {signature.id_type}.",
        f"The model knows the actions {', '.join(signature.actions)} and the surfaces {', '.join(signature.surfaces)}. "
        "All others count as unknown.",
        config.meaning_of_scores,
    ]
    if signature.purpose == "training":
        lines.append("Made for training: a run can start from this bundle with `tackboard train RECIPE --from BUNDLE`.")
    return f"# {signature.name}, version {signature.version}\n\n" + "".join(f"- {line}\n" for line in lines)
