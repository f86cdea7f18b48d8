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
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import DataError, UsageError
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
SECOND_BITS = 37
"""Number of bits of an instant in seconds since 1970. A log ends by the year 5138 (events/times.py), and a window has
at most 36,500 days, so instants need no more bits."""
STEPS_AT_ONCE = 1 << 20
"""Versions are made for groups of items that have about this many steps with events."""
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
) -> Iterator[tuple[pa.Table, dict[str, int]]]:
    """Yields the versions of the live counts in parts, and how often each count changes in the part.

    The tables have the columns item_id, valid_from_ms and one column per count, and are sorted by the first two. An
    item without an event that counts has no version. The events are read once per count, one bucket at a time. After
    that, memory holds 16 bytes for each step of each count in which an item has events, and one part.
    """
    ids = numpy_column(dataset.read_items(["item_id"]), "item_id")
    if len(ids) >> 63 - SECOND_BITS:
        raise DataError(f"{dataset.path} has {len(ids):,} items", allowed=f"allowed: below {1 << 63 - SECOND_BITS:,}")
    entries = {config.name: _entries(dataset, ids, config, quiet=quiet) for config in configs}
    longest = max((keys for keys, _ in entries.values()), key=len)
    cuts = np.unique(longest[::STEPS_AT_ONCE] >> SECOND_BITS)[1:].tolist()
    for first, last in itertools.pairwise([0, *cuts, len(ids)]):
        changes = {}
        for config in configs:
            keys, numbers = entries[config.name]
            part = slice(*np.searchsorted(keys, [first << SECOND_BITS, last << SECOND_BITS]).tolist())
            changes[config.name] = _changes(keys[part], numbers[part], config)
        yield _versions(ids, changes), {name: len(keys) for name, (keys, _) in changes.items()}


def _entries(dataset: Dataset, ids: Ints, config: LiveCountConfig, *, quiet: bool) -> tuple[Ints, Ints]:
    """Returns the keys at which events enter the window, sorted, and the number of events of each.

    The upper bits of a key are the place of the item in `ids`, the lower bits an instant, in seconds since 1970.
    """
    found, step_s = IdCounts(), config.every_ms // 1000
    with Progress(f"counting {config.name}", total=dataset.num_events, unit="events", quiet=quiet) as progress:
        for events in dataset.event_chunks(["item_id", "action", "time_ms", "received_ms"]):
            progress.advance(events.num_rows)
            known_at = np.maximum(numpy_column(events, "time_ms"), numpy_column(events, "received_ms"))
            chosen = has_action(events, config.actions)
            places = find_ids(ids, numpy_column(events, "item_id")[chosen])
            # The events of a step enter when the step ends.
            found.add((places << SECOND_BITS) + (known_at[chosen] // config.every_ms + 1) * step_s)
    return found.result()


def _changes(keys: Ints, numbers: Ints, config: LiveCountConfig) -> tuple[Ints, Ints]:
    """Returns the keys at which a count changes, sorted, and the count from then on."""
    keys, numbers = np.concatenate([keys, keys + config.window_ms // 1000]), np.concatenate([numbers, -numbers])
    # A stable sort merges two sorted arrays in linear time.
    order = np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    sums = np.add.reduceat(numbers, starts) if len(starts) else numbers
    # Every event enters and leaves, so the changes of an item add up to 0, and the next item begins at 0.
    return keys[starts][sums != 0], np.cumsum(sums[sums != 0])


def _versions(ids: Ints, changes: dict[str, tuple[Ints, Ints]]) -> pa.Table:
    versions = np.unique(np.concatenate([keys for keys, _ in changes.values()]))
    places = versions >> SECOND_BITS
    columns = {"item_id": ids[places], VALID_FROM: (versions & (1 << SECOND_BITS) - 1) * 1000}
    for name, (keys, counts) in changes.items():
        last = np.searchsorted(keys, versions, side="right") - 1
        # Before its first change, a count of an item is 0. If no change is earlier, `last` is -1, the appended element.
        is_known = np.append(keys, -1)[last] >> SECOND_BITS == places
        columns[name] = np.where(is_known, np.append(counts, 0)[last], 0)
    return pa.table(columns)


def settings_of(config: LiveCountConfig) -> dict[str, Any]:
    """Returns the settings without the name, as attributes.json holds them."""
    settings = dataclasses.asdict(config) | {"actions": list(config.actions)}
    settings.pop("name")
    return settings


def config_of(name: str, made: dict[str, Any]) -> LiveCountConfig:
    """Returns the config of a live count from what attributes.json says about it."""
    actions = tuple(str(action) for action in made["actions"])
    return LiveCountConfig(name=name, window_ms=int(made["window_ms"]), step_ms=int(made["step_ms"]), actions=actions)
