"""Opens the data of a run for its model, and copies parameters of another run into the model if `start.run` names one.

A model that begins with another run's parameters also takes that run's vocabulary, because the rows of the embeddings
stand for the actions and surfaces of that run. Names that occur only in the new data count as unknown.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tackboard.checkpoint.store import Checkpoint, find_checkpoint
from tackboard.checkpoint.trained import load_trained, read_state, stored_parameters
from tackboard.core.errors import UsageError
from tackboard.core.progress import say
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.config import StepsConfig
from tackboard.data.source import SequenceSource
from tackboard.models.changed_rows import ChangedRows, copy_rows
from tackboard.models.tables import table_modules
from tackboard.train.config import RunConfig, StartConfig, features_for


def open_source(config: RunConfig, checkpoint: Checkpoint | None = None) -> SequenceSource:
    """Opens the data of a run for its model.

    A run that resumes from a checkpoint reads the snapshots that it began with. Such a run does not need the run from
    which its first parameters came.
    """
    data: StepsConfig = config.data
    vocabulary, began_with = None, checkpoint.path if checkpoint is not None else None
    if began_with is not None:
        data = data.at(read_state(began_with)["lineage"])
    elif config.start.run:
        began_with = find_checkpoint(Path(config.start.run))
    if began_with is not None:
        vocabulary = Vocabulary.from_dict(read_state(began_with)["vocabulary"])
    return data.open(features_for(config), vocabulary=vocabulary)


@torch.no_grad()
def take_parameters(model: nn.Module, start: StartConfig) -> int:
    """Gives `model` the parameters of another run; returns the number of parameters (single numbers) taken.

    Raises UsageError if the other run lacks a parameter or has it in another shape; then no parameter is taken.
    Parameters of the other run that the model does not have are ignored.
    """
    if not start.run:
        return 0
    checkpoint = load_trained(find_checkpoint(Path(start.run)))
    stored = stored_parameters(checkpoint)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(start.prefix)}
    if not wanted:
        beginnings = sorted({name.partition(".")[0] for name in model.state_dict()})
        allowed = f"parameters begin with: {', '.join(beginnings)}"
        raise UsageError(f"start.prefix = {start.prefix} fits no parameter", allowed=allowed)
    for name, tensor in wanted.items():
        source = name.removeprefix(start.prefix)
        shape = tuple(stored[source].shape) if source in stored else None
        if shape != tuple(tensor.shape):
            found = "which lacks it" if shape is None else f"where it has size {_size(shape)}"
            raise UsageError(
                f"{name} ({_size(tuple(tensor.shape))}) cannot start from {source} of {start.run}, {found}",
                allowed="allowed: a run of a model with the same settings as the part that takes its parameters",
                fix="give the model the settings of that run, or name another start.run or start.prefix",
            )
    tables = {f"{name}.weight".removeprefix("."): module for name, module in table_modules(model).items()}
    for name, tensor in wanted.items():
        taken_from = stored[name.removeprefix(start.prefix)]
        copy_rows(taken_from, tensor)
        if isinstance(taken_from, ChangedRows) and taken_from.fresh is not None and name in tables:
            # Then both runs have the same fresh rows, and checkpoints of this run need not store these rows.
            tables[name].fresh = taken_from.fresh
    taken = sum(tensor.numel() for tensor in wanted.values())
    say(f"took {taken:,} parameters from {checkpoint.path}")
    return taken


def _size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "1"
