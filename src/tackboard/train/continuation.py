"""Goes on with the model of another run on newer data: says which events are new, and how the model grows.

A run with `start.is_continued` begins like any other run that takes the parameters of a run (start.py), except that

- it predicts only the events that the other run did not have (`data.predict_from`); earlier events are context,
- names that only the new data has are appended to the names of the other run, so old indices keep their meaning,
- tables may have more rows. With the method `mix`, each old row is copied to every new row that serves its ids, so
  every item keeps its vector. With `modulo`, fresh rows are added (`batch.rows.can_grow`),
- tables keep their Adagrad sums, so a row that has learned much keeps its small steps.

The schedule, AdamW's moments and the guard's running mean begin anew. No list says which tensors grow: the model is
built in the old and in the new size on torch's meta device, which allocates no memory, and the shapes are compared. So
a user's own model grows too. The rows of new names keep the random values of the new model, which depend on the new
run's seed and names.

Shapes: R rows, d width of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tackboard.batch import can_grow
from tackboard.checkpoint.stored_rows import SUMS
from tackboard.checkpoint.trained import STATE, read_state
from tackboard.core.documents import blaming
from tackboard.core.errors import DataError, UsageError
from tackboard.core.progress import say
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.loader import DataConfig
from tackboard.data.source import SequenceSource, snapshot_path
from tackboard.data.time_split import shown_instant
from tackboard.events.dataset import open_dataset
from tackboard.models.changed_rows import ROWS_AT_ONCE, Stored, copy_range, copy_rows
from tackboard.models.interface import build_model
from tackboard.models.table_pieces import TableInPieces, shapes_of
from tackboard.ops.fresh_rows import FreshRows
from tackboard.parallel.training_world import TrainingWorld
from tackboard.train.config import RunConfig, features_for
from tackboard.train.start_point import StartPoint, difference, size_shown


@dataclasses.dataclass(frozen=True)
class Growth:
    """How a tensor of another run becomes a larger tensor of the new model."""

    shape_before: tuple[int, ...]
    is_spread: bool
    """If True, each old row is copied to f neighbouring rows: row r gets the old row r // f. The sub-tables lie one
    after another, so this rule holds for all sub-tables at once. If False, the old rows become the first rows."""

    @torch.no_grad()
    def copy(self, stored: Stored, target_Rd: torch.Tensor) -> None:
        """Copies the rows of a stored tensor into a larger tensor. Rows that get no copy keep their values."""
        num_before = stored.shape[0]
        if not self.is_spread:
            copy_range(stored, target_Rd[:num_before], 0)
            return
        factor = target_Rd.shape[0] // num_before
        for start in range(0, num_before, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, num_before)
            rows_Bd = target_Rd.new_empty((end - start, *target_Rd.shape[1:]))
            copy_range(stored, rows_Bd, start)
            target_Rd[start * factor : end * factor].unflatten(0, (-1, factor)).copy_(rows_Bd.unsqueeze(1))

    def add_fresh(self, table: TableInPieces, fresh: FreshRows | None) -> None:
        """Gives added rows of a table the fresh rows of the other run, so that checkpoints need not hold them."""
        if self.is_spread or fresh is None:
            return
        table.fresh = fresh
        for piece in table.pieces:
            num_before = self.shape_before[0] - piece.first_row
            fresh.fill(piece.rows_Rd[num_before:], self.shape_before[0])


def with_instant(config: RunConfig, recorded: Mapping[str, Any] | None = None) -> RunConfig:
    """Returns the config of a run that goes on with another run, with `data.predict_from` set: where new events begin.

    An instant that the user gave is kept. If this run is being resumed, `recorded` is the config that it recorded; the
    instant is taken from there, so the other run is not needed any more. All other configs are returned unchanged.
    """
    if not config.start.is_continued:
        return config
    if not isinstance(config.data, DataConfig):
        raise UsageError(
            f"{config.name} cannot go on with {config.start.run}: data is a {type(config.data).__name__}",
            allowed="allowed: DataConfig, because only the times of a log's events show which events are new",
            fix=f"begin with the parameters of that run: --from {config.start.run}",
        )
    if config.data.predict_from:
        return config
    if recorded is None:
        instant = _end_of(StartPoint.find(config.start.run))
    else:
        instant = recorded.get("data", {}).get("predict_from", "")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, predict_from=instant))


def check_alone(config: RunConfig, world: TrainingWorld) -> None:
    """Raises UsageError, in every process, if several processes would go on with a run."""
    if config.start.is_continued and not world.is_alone:
        error = UsageError(
            f"{world.size} processes cannot go on with {config.start.run}",
            allowed="allowed: one process; several processes can only begin with the parameters of a run (--from)",
            fix=f"start one process, or give --from {config.start.run} in place of --continue",
        )
        error.is_common = True
        raise error


def _end_of(point: StartPoint) -> str:
    """Returns the instant at which the training data of a run ended."""
    _check_is_run(point)
    lineage = read_state(point.path)["lineage"]
    with blaming(point.path / STATE):
        if "end_ms" in lineage:
            return shown_instant(lineage["end_ms"])
    # Older versions did not record the end. All of their runs read the whole log.
    try:
        dataset = open_dataset(snapshot_path(lineage), verify=False)
    except DataError:
        raise UsageError(
            f"{point.place} does not say when its data ended, and its snapshot {snapshot_path(lineage)} is gone",
            allowed="a run predicts only events that the run before it did not have",
            fix="name the instant from which events are new: --set data.predict_from=INSTANT",
        ) from None
    return shown_instant(int(dataset.statistics["last_ms"]) + 1)


def _check_is_run(point: StartPoint) -> None:
    if point.is_bundle:
        raise UsageError(
            f"{point.place} is a bundle, which lacks the states of the optimisers",
            allowed="allowed: a run or a checkpoint",
            fix=f"name the run (this bundle is of {point.lineage['run']}), or only take the parameters: "
            f"--from {point.place}",
        )


def open_grown(config: RunConfig, point: StartPoint) -> SequenceSource:
    """Opens the data of a run that goes on with `point`. Raises DataError if no event is new.

    In the vocabulary, the names of `point` come first.
    """
    _check_is_run(point)
    features = features_for(config)
    source: SequenceSource = config.data.open(features)
    if source.predict_from_ms is not None and source.predict_from_ms >= source.end_ms:
        raise DataError(
            f"{source.path} has nothing new for {point.place}: training would predict events from "
            f"{shown_instant(source.predict_from_ms)} on, and the training data ends at {shown_instant(source.end_ms)}",
            allowed="a run goes on with another run on a newer snapshot, or with a later data.cut",
            fix="import the newer events, or name an earlier instant: --set data.predict_from=INSTANT",
        )
    if source.predict_from_ms is not None:
        say(f"going on with {point.place}: events from {shown_instant(source.predict_from_ms)} on are new")
    grown = point.vocabulary.grown(source.vocabulary)
    for kind in ("actions", "surfaces"):
        if new := getattr(grown, kind)[len(getattr(point.vocabulary, kind)) :]:
            say(f"{point.place} does not know these {kind}, which are added: {', '.join(new[:8])}")
    if (status := RunDirectory(point.path.parent.parent).status) not in ("done", "new"):
        say(f"warning: {point.place} is not finished ({status}): the new run does not make up for its missing steps")
    if grown == source.vocabulary:
        return source
    path = source.path
    source = config.data.open(features, dataset=source.dataset, vocabulary=grown)
    source.path = path  # The folder as the user named it.
    return source


def as_before(config: RunConfig, point: StartPoint) -> RunConfig:
    """Returns the config with as many table rows as `point` has. Raises UsageError if tables cannot grow from that."""
    tables, num_before = config.model.tables, point.num_rows
    if not can_grow(tables, num_before):
        more = "a multiple of it" if tables.method == "mix" else "more"
        allowed = f"allowed: {num_before}, or {more}, so that every item keeps its rows"
        raise difference(config, point, "tables.num_rows", tables.num_rows, num_before, allowed)
    model = dataclasses.replace(config.model, tables=dataclasses.replace(tables, num_rows=num_before))
    return dataclasses.replace(config, model=model)


def growing(
    model: nn.Module, config: RunConfig, before: RunConfig, names: Vocabulary, point: StartPoint
) -> dict[str, Growth]:
    """Returns, for each tensor of `model` that is larger than in `point`, how the tensor grows.

    `before` is what `as_before` returned for `config`, and `names` are the names of the new model. Raises UsageError if
    a tensor changes its size in any other way than by one row per new name, or with the rows of the tables.
    """
    with torch.device("meta"):
        old = shapes_of(build_model(before.model, point.vocabulary))
        named = shapes_of(build_model(before.model, names))
    rows_before, tables = before.model.tables.num_rows, config.model.tables
    known = point.vocabulary
    by_names = {(known.num_actions, names.num_actions), (known.num_surfaces, names.num_surfaces)}
    found = {}
    for name, now in shapes_of(model).items():
        was = old.get(name, ())
        if now == was:
            continue
        fits = name in old and len(was) == len(now) > 0 and was[1:] == now[1:]
        has_more_rows = named.get(name) == was
        if fits and has_more_rows:
            num_tables, rest = divmod(was[0], rows_before)
            fits = not rest and now[0] == num_tables * tables.num_rows
        elif fits:
            fits = named[name] == now and (was[0], now[0]) in by_names
        if not fits:
            raise UsageError(
                f"{name} would have size {size_shown(now)}, but has size {size_shown(was)} in {point.place}",
                allowed="allowed: a tensor that grows by one row per new name, or with the rows of the tables",
                fix="leave out --continue and train anew, or give the model the sizes of that run",
            )
        found[name] = Growth(was, is_spread=has_more_rows and tables.method == "mix")
    return found


def take_sums(sums: Mapping[str, torch.Tensor], stored: Mapping[str, Stored], grown: Mapping[str, Growth]) -> None:
    """Copies the stored Adagrad sums of tables into `sums`, by module name; `grown` says which tables grow.

    A table that was frozen in the other run has no stored sums, so its sums stay 0.
    """
    for module, sums_R in sums.items():
        if (origin := stored.get(f"{SUMS}{module}")) is None:
            continue
        if growth := grown.get(f"{module}.weight".removeprefix(".")):
            growth.copy(origin, sums_R)
        else:
            copy_rows(origin, sums_R)
