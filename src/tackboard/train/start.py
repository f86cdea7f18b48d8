"""Opens the data of a run for its model, and copies parameters of another run into the model if `start.run` names one.

A model that begins with another run's parameters also takes that run's vocabulary, because the rows of the embeddings
stand for the actions and surfaces of that run. Names that occur only in the new data count as unknown. Before any
parameter is taken, settings, features and sizes are compared (see start_point.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tackboard.checkpoint.store import Checkpoint
from tackboard.checkpoint.trained import read_state
from tackboard.core.errors import UsageError
from tackboard.core.progress import say
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.config import StepsConfig
from tackboard.data.source import SequenceSource
from tackboard.models.changed_rows import Stored, copy_rows
from tackboard.models.interface import build_model
from tackboard.models.tables import table_modules
from tackboard.train.config import RunConfig, StartConfig, features_for
from tackboard.train.start_point import StartPoint, check_same_meaning


def start_from(config: RunConfig, place: str) -> RunConfig:
    """Returns the config of a run that begins with the parameters of `place`: a run, a checkpoint or a bundle.

    If the recipe names no prefix and the other model is a part of this one, such as the `pinfm` of a ranker, then the
    prefix of that part is chosen.
    """
    config = dataclasses.replace(config, start=dataclasses.replace(config.start, run=place))
    if config.start.prefix:
        return config
    point = StartPoint.find(place)
    with torch.device("meta"):
        wanted = build_model(config.model, point.vocabulary).state_dict().keys()
    prefix = _fitting_prefix(wanted, point.parameters(verify=False))
    if prefix:
        say(f"the parameters of {place} become those under {prefix} (start.prefix={prefix})")
    return dataclasses.replace(config, start=dataclasses.replace(config.start, prefix=prefix))


def open_source(config: RunConfig, checkpoint: Checkpoint | None = None) -> SequenceSource:
    """Opens the data of a run for its model.

    A run that resumes from a checkpoint reads the snapshots that it began with. Such a run does not need the run from
    which its first parameters came.
    """
    data: StepsConfig = config.data
    vocabulary = None
    if checkpoint is not None:
        state = read_state(checkpoint.path)
        data, vocabulary = data.at(state["lineage"]), Vocabulary.from_dict(state["vocabulary"])
    elif config.start.run:
        vocabulary = StartPoint.find(config.start.run).vocabulary
    source = data.open(features_for(config), vocabulary=vocabulary)
    if vocabulary is not None and checkpoint is None:
        for kind in ("actions", "surfaces"):
            unknown = [name for name in getattr(source.dataset, kind) if name not in getattr(vocabulary, kind)]
            if unknown:
                which = ", ".join(unknown[:8])
                say(f"warning: {config.start.run} does not know these {kind}, which count as unknown: {which}")
    return source


def check_start(model: nn.Module, config: RunConfig, source: SequenceSource) -> None:
    """Raises UsageError if `take_parameters` would. The model needs no memory, and no byte is verified."""
    if config.start.run:
        point = StartPoint.find(config.start.run)
        check_same_meaning(config, source, point)
        _wanted(model, config.start, point.parameters(verify=False))


@torch.no_grad()
def take_parameters(model: nn.Module, config: RunConfig, source: SequenceSource) -> dict[str, Any]:
    """Gives `model` the parameters that `config.start` names; returns what the checkpoints record of their origin.

    Raises UsageError if the other run was trained with other settings or features, or lacks a parameter, or has it in
    another shape; then no parameter is taken. Parameters that the model does not have are ignored.
    """
    if not config.start.run:
        return {}
    point = StartPoint.find(config.start.run)
    check_same_meaning(config, source, point)
    stored = point.parameters(verify=True)
    wanted = _wanted(model, config.start, stored)
    tables = {f"{name}.weight".removeprefix("."): module for name, module in table_modules(model).items()}
    for name, tensor in wanted.items():
        origin = name.removeprefix(config.start.prefix)
        copy_rows(stored[origin], tensor)
        if name in tables and (fresh := point.fresh(origin)) is not None:
            # Then both runs have the same fresh rows, and checkpoints of this run need not store these rows.
            tables[name].fresh = fresh
    taken = sum(tensor.numel() for tensor in wanted.values())
    say(f"took {taken:,} parameters from {point.path}")
    return point.lineage | {"prefix": config.start.prefix, "parameters": taken}


def _wanted(model: nn.Module, start: StartConfig, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Returns the model's tensors under the prefix. Raises UsageError unless `stored` has them in the same shapes."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(start.prefix)}
    if not wanted:
        beginnings = sorted({name.partition(".")[0] for name in model.state_dict()})
        allowed = f"parameters begin with: {', '.join(beginnings)}"
        raise UsageError(f"start.prefix = {start.prefix} fits no parameter", allowed=allowed)
    for name, tensor in wanted.items():
        origin = name.removeprefix(start.prefix)
        shape = tuple(stored[origin].shape) if origin in stored else None
        if shape != tuple(tensor.shape):
            found = "which lacks it" if shape is None else f"where it has size {_size(shape)}"
            fix = "give the model the settings of that run, or name another start.run or start.prefix"
            if shape is None and wanted.keys() <= stored.keys():
                fix = f"{start.run} has a part {start.prefix} of its own; to take all parameters: --set start.prefix="
            elif prefix := _fitting_prefix(model.state_dict().keys(), stored):
                fix = f"--set start.prefix={prefix}" if prefix != start.prefix else fix
            raise UsageError(
                f"{name} ({_size(tuple(tensor.shape))}) cannot start from {origin} of {start.run}, {found}",
                allowed="allowed: a run of a model with the same settings as the part that takes its parameters",
                fix=fix,
            )
    return wanted


def _fitting_prefix(names: Any, stored: Mapping[str, Stored]) -> str:
    """Returns the part of a model, such as `pinfm.`, that has all of its parameters in `stored`; "" if there is none.

    A model that has all parameters itself needs no prefix.
    """
    if set(names) <= stored.keys():
        return ""
    beginnings = {f"{name.partition('.')[0]}." for name in names}
    parts = {prefix: {name.removeprefix(prefix) for name in names if name.startswith(prefix)} for prefix in beginnings}
    fitting = [prefix for prefix, part in sorted(parts.items()) if part <= stored.keys()]
    return max(fitting, key=lambda prefix: len(parts[prefix]), default="")


def _size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "1"
