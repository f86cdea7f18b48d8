"""Counts the events of each item in the last so many hours, at every instant of the log: the live counts of the items.

    step 1 h, window 3 h         09:00     10:00     11:00     12:00     13:00     14:00
    events of the item             ├─ x x ───┼─────────┼── x ────┼─────────┼─────────┤
    count from this instant on     0         2         2         3         1         1

Instants are whole multiples of the step since 1970. The count that is valid from instant b holds exactly the events
that became known in [b - window, b). An event is known when it happened or, if that is later, when it was received. So
a request never sees an event that became known at or after its own time, and it misses only events that became known
less than a step before. A version is stored only where a count of the item changes, so an event adds at most two
versions.

Decided: instants have a step, because a window without steps would have two versions for nearly every event. Decided:
live counts have a file of their own (live_counts.parquet). In the history of the other attributes, each of their many
versions would repeat all texts, lists and vectors of the item.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import UsageError
from tackboard.core.progress import Progress
from tackboard.data.labels import UNITS_MS, parse_window
from tackboard.events.attributes import VALID_FROM
from tackboard.events.checks.measures import IdCounts
from tackboard.events.columns import has_action
from tackboard.events.dataset import Dataset
from tackboard.events.schema import numpy_column
from tackboard.features.entity_tables import find_ids

Ints = NDArray[np.int64]
STEPS = 12
"""Number of steps in a window, if no step is given."""
EXAMPLE = "--live-counts reads_24h=24h"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveCountConfig:
    """Settings of one live count."""

    name: str
    """Name of the attribute."""
    window_ms: int
    """An event counts for so long after it became known."""
    step_ms: int | None = None
    """The count changes only at whole multiples of this time since 1970; None means a twelfth of the window."""
    actions: tuple[str, ...] = ()
    """Only events with these actions count; empty means all actions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(sorted(self.actions)))
        step_ms = self.window_ms / STEPS if self.step_ms is None else self.step_ms
        # With whole seconds, the product of an instant's number and the number of items fits into 64 bits.
        if step_ms < UNITS_MS["s"] or step_ms % UNITS_MS["s"] or self.window_ms % step_ms:
            given = "a twelfth of the window" if self.step_ms is None else "--step"
            raise UsageError(
                f"the live count {self.name} has a window of {self.window_ms / 1000:g} s and a step of "
                f"{step_ms / 1000:g} s ({given})",
                allowed="allowed: a step of whole seconds that divides the window",
                fix="for example --step 5m",
            )
        object.__setattr__(self, "step_ms", int(step_ms))

    @property
    def every_ms(self) -> int:
        """The step: `step_ms`, which is never None after construction."""
        assert self.step_ms is not None
        return self.step_ms


def parse_live_counts(texts: Sequence[str], step: str | None, actions: Sequence[str]) -> tuple[LiveCountConfig, ...]:
    """Reads live counts such as `reads_24h=24h`, which all have the given step and actions."""
    step_ms = None if step is None else parse_window(step, "of --step", "--step 5m")
    configs = []
    for text in texts:
        name, _, window = text.partition("=")
        if not name:
            raise UsageError(f"cannot read --live-counts {text}", allowed=f"allowed: NAME=WINDOW, e.g. {EXAMPLE}")
        window_ms = parse_window(window, f"of --live-counts {text}", EXAMPLE)
        configs.append(LiveCountConfig(name=name, window_ms=window_ms, step_ms=step_ms, actions=tuple(actions)))
    return tuple(configs)


def count_history(
    dataset: Dataset, configs: Sequence[LiveCountConfig], *, quiet: bool = False
) -> tuple[pa.Table, dict[str, int]]:
    """Returns the versions of the live counts, and how often each count changes.

    The table has the columns item_id, valid_from_ms and one column per count, and is sorted by the first two. An item
    without an event that counts has no version. The events are read once per count, one bucket at a time.
    """
    ids = numpy_column(dataset.read_items(["item_id"]), "item_id")
    changes = {config.name: _changes(*_bins(dataset, ids, config, quiet=quiet), len(ids), config) for config in configs}
    step_ms = math.gcd(*(config.every_ms for config in configs))
    every_instant = np.concatenate([instants for _, instants, _ in changes.values()])
    first_ms = int(every_instant.min())
    num_instants = (int(every_instant.max()) - first_ms) // step_ms + 1
    keys = {
        name: places * num_instants + (instants - first_ms) // step_ms
        for name, (places, instants, _) in changes.items()
    }
    versions = np.unique(np.concatenate(list(keys.values())))
    places, instants = np.divmod(versions, num_instants)
    columns = {"item_id": ids[places], VALID_FROM: first_ms + instants * step_ms}
    for name, (own_places, _, numbers) in changes.items():
        last = np.searchsorted(keys[name], versions, side="right") - 1
        # Before the first change of a count, its window holds no event of the item. If there is no change at all, or
        # none before, `last` is -1 and finds the appended -1.
        is_known = np.append(own_places, -1)[last] == places
        columns[name] = np.where(is_known, np.append(numbers, 0)[last], 0)
    return pa.table(columns), {name: len(numbers) for name, (_, _, numbers) in changes.items()}


def _bins(dataset: Dataset, ids: Ints, config: LiveCountConfig, *, quiet: bool) -> tuple[Ints, Ints]:
    """Counts the events of each item in each step. A key is the step's number × number of items + the item's place."""
    found = IdCounts()
    with Progress(f"counting {config.name}", total=dataset.num_events, unit="events", quiet=quiet) as progress:
        for events in dataset.event_chunks(["item_id", "action", "time_ms", "received_ms"]):
            progress.advance(events.num_rows)
            known_at = np.maximum(numpy_column(events, "time_ms"), numpy_column(events, "received_ms"))
            chosen = has_action(events, config.actions)
            places = find_ids(ids, numpy_column(events, "item_id")[chosen])
            found.add(known_at[chosen] // config.every_ms * len(ids) + places)
    return found.result()


def _changes(bins: Ints, numbers: Ints, num_items: int, config: LiveCountConfig) -> tuple[Ints, Ints, Ints]:
    """Returns (place of the item, instant in ms, count from then on) of every change, sorted by place and instant."""
    steps, places = np.divmod(bins, num_items)
    # The events of a step count from the next step on, and leave a window later.
    steps = np.concatenate([steps + 1, steps + 1 + config.window_ms // config.every_ms])
    places, numbers = np.concatenate([places, places]), np.concatenate([numbers, -numbers])
    order = np.lexsort((steps, places))
    steps, places, numbers = steps[order], places[order], numbers[order]
    is_first = np.append(True, (steps[1:] != steps[:-1]) | (places[1:] != places[:-1]))[: len(steps)]
    starts = np.flatnonzero(is_first)
    numbers = np.add.reduceat(numbers, starts)
    kept = numbers != 0
    starts = starts[kept]
    # Every event enters and leaves, so the changes of an item add up to 0, and the next item begins at 0.
    return places[starts], steps[starts] * config.every_ms, np.cumsum(numbers[kept])


def settings_of(config: LiveCountConfig) -> dict[str, Any]:
    """Returns the settings without the name, as attributes.json holds them."""
    settings = dataclasses.asdict(config) | {"actions": list(config.actions)}
    settings.pop("name")
    return settings


def config_of(name: str, made: dict[str, Any]) -> LiveCountConfig:
    """Returns the config of a live count from what attributes.json says about it."""
    actions = tuple(str(action) for action in made["actions"])
    return LiveCountConfig(name=name, window_ms=int(made["window_ms"]), step_ms=int(made["step_ms"]), actions=actions)
