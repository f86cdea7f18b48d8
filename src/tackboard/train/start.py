"""Opens the data of a run for its model. If `start.run` names another run, copies that run's parameters into the model.

A model that begins with another run's parameters also takes that run's vocabulary, because the rows of the embeddings
stand for the actions and surfaces of that run. Names that occur only in the new data count as unknown, unless the run
goes on with the other run (see continuation.py). Before any parameter is taken, settings, features and sizes are
compared (see start_point.py).
"""

from __future__ import annotations

import math
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
from tackboard.models.changed_rows import Stored, copy_range, copy_rows
from tackboard.models.table_pieces import shapes_of, tables_in_pieces
from tackboard.train.config import RunConfig, features_for
from tackboard.train.continuation import Growth, as_before, growing, open_grown, take_sums
from tackboard.train.start_point import StartPoint, check_same_meaning, size_shown


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
    elif config.start.is_continued:
        return open_grown(config, StartPoint.find(config.start.run))
    elif config.start.run:
        vocabulary = StartPoint.find(config.start.run).vocabulary
    elif config.start.needs_run:
        raise UsageError(
            f"{config.name} begins with a pretrained model, but no run was named",
            allowed="to begin with random parameters instead: --set start.needs_run=false",
            fix="add --from RUN, where RUN is a run of pretraining: ls runs/",
        )
    source = data.open(features_for(config), vocabulary=vocabulary)
    if vocabulary is not None and checkpoint is None:
        for kind in ("actions", "surfaces"):
            unknown = [name for name in getattr(source.dataset, kind) if name not in getattr(vocabulary, kind)]
            if unknown:
                which = ", ".join(unknown[:8])
                say(f"warning: {config.start.run} does not know these {kind}, which count as unknown: {which}")
    return source


def check_start(model: nn.Module, config: RunConfig, source: SequenceSource) -> None:
    """Raises UsageError if `take_parameters` would raise it. Verifies no byte; the model may be on the meta device."""
    if config.start.run:
        _compare(model, config, source, verify=False)


@torch.no_grad()
def take_parameters(
    model: nn.Module, config: RunConfig, source: SequenceSource, sums: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Gives `model` the parameters that `config.start` names; returns what the checkpoints record of their origin.

    `sums` holds the Adagrad sums of tables, by module name. If the run goes on with the other run, they get that run's
    values. Raises UsageError if the other run was trained with other settings or features, or lacks a parameter, or has
    it in another shape; then no parameter is taken. Parameters that the model does not have are ignored.
    """
    if not config.start.run:
        return {}
    point, stored, prefix, grown = _compare(model, config, source, verify=True)
    wanted, dense, tables = _under(model, prefix), model.state_dict(), tables_in_pieces(model)
    if config.start.is_continued:
        take_sums(sums or {}, stored, grown)
    for name in wanted:
        origin = name.removeprefix(prefix)
        if name in grown:
            grown[name].copy(stored[origin], dense[name])
            if name in tables:
                grown[name].add_fresh(tables[name], point.fresh(origin))
            continue
        if name not in tables:
            copy_rows(stored[origin], dense[name])
            continue
        for piece in tables[name].pieces:
            copy_range(stored[origin], piece.rows_Rd, piece.first_row)
        if (fresh := point.fresh(origin)) is not None:
            # Both runs now have the same fresh rows, so checkpoints of this run need not store the rows that are still
            # fresh.
            tables[name].fresh = fresh
    taken = sum(math.prod(shape) for shape in wanted.values())
    say(f"took {taken:,} parameters from {point.path}{f' for {prefix}' if prefix else ''}")
    is_continued = {"is_continued": True} if config.start.is_continued else {}
    return point.lineage | {"prefix": prefix, "parameters": taken, **is_continued}


def _compare(
    model: nn.Module, config: RunConfig, source: SequenceSource, *, verify: bool
) -> tuple[StartPoint, dict[str, Stored], str, dict[str, Growth]]:
    """Compares a model with the run that it starts from. Returns that run, its tensors, the prefix, and the growth."""
    point = StartPoint.find(config.start.run)
    is_continued = config.start.is_continued
    stored = point.parameters(verify=verify, with_sums=is_continued)
    prefix = "" if is_continued else config.start.prefix or _fitting_prefix(model, stored)
    if not _under(model, prefix):
        raise UsageError(
            f"start.prefix = {prefix} fits no parameter",
            allowed=f"parameters begin with: {', '.join(_beginnings(model))}",
        )
    before = as_before(config, point) if is_continued else config
    check_same_meaning(before, source, point, prefix)
    grown = growing(model, config, before, source.vocabulary, point) if is_continued else {}
    sizes_before = {name: growth.shape_before for name, growth in grown.items()}
    for name, size in (_under(model, prefix) | sizes_before).items():
        origin = name.removeprefix(prefix)
        shape = tuple(stored[origin].shape) if origin in stored else None
        if shape != size:
            found = "which lacks it" if shape is None else f"where it has size {size_shown(shape)}"
            fix = "give the model the settings of that run, or name another start.run or start.prefix"
            if prefix and shapes_of(model).keys() <= stored.keys():
                fix = f"{point.place} has a part {prefix} of its own; to take all its parameters: --set start.prefix="
            raise UsageError(
                f"{name} ({size_shown(size)}) cannot start from {origin} of {point.place}, {found}",
                allowed="allowed: a run of a model with the same settings as the part that takes its parameters",
                fix=fix,
            )
    return point, stored, prefix, grown


def _fitting_prefix(model: nn.Module, stored: Mapping[str, Stored]) -> str:
    """Returns the part of a model, such as `pinfm.`, that has all of its parameters in `stored`.

    Returns "" if the whole model has all of its parameters in `stored`, or if no part has.
    """
    if shapes_of(model).keys() <= stored.keys():
        return ""
    parts = {f"{name}.": _under(model, f"{name}.") for name in _beginnings(model)}
    fitting = [prefix for prefix, part in parts.items() if part and all(name[len(prefix) :] in stored for name in part)]
    return max(fitting, key=lambda prefix: len(parts[prefix]), default="")


def _under(model: nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes_of(model).items() if name.startswith(prefix)}


def _beginnings(model: nn.Module) -> list[str]:
    return sorted({name.partition(".")[0] for name in shapes_of(model)})
