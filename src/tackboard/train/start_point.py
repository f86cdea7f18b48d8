"""Reads what a model begins with: the parameters of another run, from its checkpoint or from a bundle for training.

`StartPoint.find` reads only documents, so a dry run can compare the settings of two runs without reading tables.
`StartPoint.parameters` reads the parameters. `check_same_meaning` compares the two models. Sizes alone would not find
another hash seed, another number of heads or another time scale: the parameters would fit and mean something else.

Decided: settings that only training reads (losses, dropout) may differ, and the new run may read shorter histories.
Tables may start in fp32 from any precision, because no bit is lost. If a user's file defines the model, only tables and
features are compared, because nobody but the model's author knows which other settings decide what parameters mean.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from tackboard.bundle.signature import FILE_NAME as SIGNATURE
from tackboard.bundle.signature import read_bundle, read_signature
from tackboard.checkpoint.parts import group_of
from tackboard.checkpoint.store import KIND as CHECKPOINT
from tackboard.checkpoint.store import Checkpoint, find_checkpoint
from tackboard.checkpoint.stored_rows import fresh_rows_of
from tackboard.checkpoint.trained import STATE, load_trained, read_state, stored_optimizer, stored_parameters
from tackboard.core.config import explain, move_settings, to_dict
from tackboard.core.documents import blaming
from tackboard.core.errors import DataError, UsageError
from tackboard.core.manifest import read_manifest
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.source import SequenceSource
from tackboard.features.feature_set import FeatureSet, read_features
from tackboard.features.standard import features_for_model
from tackboard.models.changed_rows import Stored
from tackboard.models.description import OWN_PREFIX, restore_config
from tackboard.models.interface import ModelConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.stored_parameters import load_tensors
from tackboard.ops.fresh_rows import FreshRows
from tackboard.train.config import RunConfig, features_for

OF_TABLES = tuple(f"tables.{name}" for name in ("method", "num_hashes", "num_rows", "seed", "dim"))
OF_ENCODERS = (
    *("width", "maps", "backbone", "num_time_buckets", "request_time", "request_features"),
    *("use_actions", "use_time_gap", "use_request_time", "request_vector"),
)
OF_RANKERS = (
    *("head.labels", "head.reads", "head.num_cross_layers", "recent", "features"),
    *(f"fusion.{name}" for name in ("kind", "content", "content_width", "learnable_token", "fixed_length")),
)
"""Settings that decide what parameters mean. They are compared if both models have them."""
ALLOWED = "parameters mean the same only in a model with the settings of the run that they come from"


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """A run's checkpoint, or a bundle made for training, from which another run takes parameters."""

    place: str
    """The run, checkpoint or bundle as the user named it."""
    path: Path
    """Folder of the checkpoint or bundle."""
    is_bundle: bool
    settings: dict[str, Any]
    """The settings of the trained model, as JSON."""
    vocabulary: Vocabulary
    id_type: str
    features: FeatureSet | None
    """None if an older version wrote the checkpoint or bundle, and a user's file defines the model."""
    fresh_rows: dict[str, Any]
    lineage: dict[str, Any]
    """The run that trained the parameters, the step, and the snapshot that the run read."""

    @classmethod
    def find(cls, place: str) -> StartPoint:
        """Reads the documents of a run, a checkpoint or a bundle; the bytes of its other files are not verified."""
        path = Path(place)
        if is_bundle := (path / SIGNATURE).is_file():
            signature = read_signature(path)
            if signature.purpose != "training":
                raise UsageError(
                    f"{place} is a bundle made for serving: its tables may be rounded, and it lacks what losses need",
                    allowed=f"allowed: a run, a checkpoint, or a bundle made for training ({_run_of(signature)})",
                    fix="tackboard export RUN --out BUNDLE --for-training",
                )
            described, document, vocabulary = signature.model, path / SIGNATURE, signature.vocabulary
            id_type, fresh_rows, lineage = signature.id_type, signature.fresh_rows, signature.lineage
        else:
            path = find_checkpoint(path)
            if (kind := read_manifest(path)["kind"]) != CHECKPOINT:
                raise DataError(
                    f"{place} is a {kind}", allowed="allowed: a run, a checkpoint, or a bundle for training"
                )
            state, document = read_state(path), path / STATE
            described, vocabulary = state["model"], Vocabulary.from_dict(state["vocabulary"])
            id_type, fresh_rows = state["id_type"], state.get("fresh_rows", {})
            run = path.parent.parent.name
            lineage = {"run": run, "step": state["step"], "snapshot": state["lineage"]["snapshot"]}
        features = read_features(path)
        with blaming(document):
            settings = move_settings(described["config"], ModelConfig.moved_settings)
            if str(described["config_class"]).startswith(OWN_PREFIX):
                config = restore_config(described)
                settings = to_dict(config)
                # Checkpoints from before features.json existed read the standard features.
                features = features or features_for_model(config.reads, vocabulary, config.max_history)
            lineage = {"run": str(lineage["run"]), "step": int(lineage["step"]), "snapshot": str(lineage["snapshot"])}
        return cls(place, path, is_bundle, settings, vocabulary, id_type, features, fresh_rows, lineage)

    def parameters(self, *, verify: bool, with_sums: bool = False) -> dict[str, Stored]:
        """Returns all parameters, mapped into memory. With `verify`, every byte is first compared with the manifest.

        With `with_sums`, the tensors of a checkpoint's optimisers are returned too, such as `adagrad.item_tables`.
        """
        if not self.is_bundle:
            groups = ("dense", "tables", *(["optimizer"] if with_sums else []))
            place: Path | Checkpoint = self.path
            if not verify:
                files = [file for file in self.path.glob("*.safetensors") if group_of(file.stem)[0] in groups]
                tensors = {file.stem: load_tensors(file) for file in files}
                place = Checkpoint(path=self.path, state={"fresh_rows": self.fresh_rows}, tensors=tensors)
            checkpoint = load_trained(place, groups)
            return stored_parameters(checkpoint) | (stored_optimizer(checkpoint) if with_sums else {})
        signature = (read_bundle if verify else read_signature)(self.path)
        names = ["dense.safetensors", *(str(table["file"]) for table in signature.tables.values())]
        files = [self.path / name for name in names]
        return {name: tensor for file in files for name, tensor in load_tensors(file).items()}

    @property
    def num_rows(self) -> int:
        """Number of rows of each sub-table of the trained model."""
        with blaming(self.path):
            return int(self.settings["tables"]["num_rows"])

    def fresh(self, table: str) -> FreshRows | None:
        """Returns the fresh rows of a table, or None if they are not known."""
        if table not in self.fresh_rows:
            return None
        with blaming(self.path):
            return fresh_rows_of(self.fresh_rows, table)[0]


def check_same_meaning(config: RunConfig, source: SequenceSource, point: StartPoint, prefix: str) -> None:
    """Raises UsageError if parameters of `point` would mean something else in a run of `config` on `source`.

    `prefix` says which part of the model takes them; "" means the whole model. The error names the first setting,
    feature or list of names that differs, with both values. A run that goes on with `point` may have more names.
    """
    _check_settings(config, point, prefix)
    if source.dataset.item_type != point.id_type:
        raise UsageError(
            f"{source.path} has item ids of type {source.dataset.item_type}, but {point.place} was trained with "
            f"{point.id_type}",
            allowed="the rows of the tables belong to the ids of the items",
            fix="import the log with the item ids that the run was trained with",
        )
    names = point.vocabulary.grown(source.vocabulary) if config.start.is_continued else point.vocabulary
    if source.vocabulary != names:
        raise UsageError(
            f"the data was opened with the names {_names(source.vocabulary)}, but {point.place} was trained with "
            f"{_names(point.vocabulary)}",
            allowed="the rows of the embeddings belong to the actions and surfaces of the run",
            fix="open the data with tackboard.train.start.open_source, which takes the names of the run",
        )
    _check_features(config, source, point)


def _check_settings(config: RunConfig, point: StartPoint, prefix: str) -> None:
    wanted, found = to_dict(config.model), point.settings
    is_ours = isinstance(config.model, PinFMConfig) or type(config.model).__module__.startswith(OWN_PREFIX)
    compared = OF_TABLES
    if is_ours:
        compared += OF_ENCODERS if prefix else OF_ENCODERS + OF_RANKERS
    names = [name for name, *_ in explain(config.model)]
    for part in compared:
        for name in names:
            if name == part or name.startswith(f"{part}."):
                now, before = _value(wanted, name), _value(found, name)
                if before is not _ABSENT and _in_order(now) != _in_order(before):
                    raise difference(config, point, name, now, before)
    for name, is_fine in (
        ("tables.storage", lambda now, _before: now == "fp32"),
        ("loss.streaming_frequencies", lambda now, _before: not now),
        ("max_history", lambda now, before: now <= before),
    ):
        now, before = _value(wanted, name), _value(found, name)
        if _ABSENT not in (now, before) and now != before and not is_fine(now, before):
            raise difference(config, point, name, now, before)
    _check_positions(config, point)


def _check_positions(config: RunConfig, point: StartPoint) -> None:
    """Compares the number of learned positions, which is max_history + 1 unless model.num_positions gives it."""
    wanted, found = to_dict(config.model), point.settings
    if "num_positions" not in wanted or "num_positions" not in found:
        return
    if _value(wanted, "backbone.positions") == "learned":
        now, before = (one["num_positions"] or one["max_history"] + 1 for one in (wanted, found))
        if now != before:
            raise difference(config, point, "num_positions", now, before)


def _check_features(config: RunConfig, source: SequenceSource, point: StartPoint) -> None:
    if point.features is None:
        return
    features = source.features
    if config.start.is_continued:  # New names change the hashes of actions and surfaces, so they are left out here.
        features = features_for(config)(point.vocabulary)
    now = features.read_hashes(config.model.max_history)
    before = point.features.read_hashes(int(point.settings["max_history"]))
    for read in sorted(now.keys() & before.keys()):
        if now[read] != before[read]:
            raise UsageError(
                f"the feature {read} is computed in another way ({now[read][:12]}) than in {point.place} "
                f"({before[read][:12]})",
                allowed="a pretrained model reads the features that it was trained with",
                fix=f"use the features of that run: --set data.features={point.place}, or its file of features",
            )


def difference(
    config: RunConfig, point: StartPoint, name: str, now: Any, before: Any, allowed: str = ALLOWED
) -> UsageError:
    """Returns the error that says that the setting `model.name` differs from that of `point`."""
    also = ""
    if name == "max_history" and hasattr(config.data, "max_history"):
        also = f" --set data.max_history={_shown(before)}"
    return UsageError(
        f"model.{name} is {_shown(now)}, but {point.place} was trained with {_shown(before)}",
        allowed=allowed,
        fix=f"--set {shlex.quote(f'model.{name}={_shown(before)}')}{also}",
    )


_ABSENT = object()


def _value(settings: Any, name: str) -> Any:
    """Returns the value at `a.b` in nested settings, or `_ABSENT`."""
    for part in name.split("."):
        if not isinstance(settings, dict) or part not in settings:
            return _ABSENT
        settings = settings[part]
    return settings


def _in_order(value: Any) -> Any:
    """Turns a dictionary into a list, so that a comparison sees its order, for example that of a ranker's features."""
    return list(value.items()) if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    """Returns a value in the form that `--set` takes."""
    return value if isinstance(value, str) else json.dumps(value)


def size_shown(shape: tuple[int, ...]) -> str:
    """Returns a shape for a message: `4 × 8`."""
    return " × ".join(map(str, shape)) or "1"


def _names(vocabulary: Vocabulary) -> str:
    return f"{', '.join(vocabulary.actions)} / {', '.join(vocabulary.surfaces)}"


def _run_of(signature: Any) -> str:
    return f"this one is of the run {signature.lineage.get('run', 'without a name')}"
