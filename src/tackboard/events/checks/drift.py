"""How far two snapshots, or two ranges of time, lie apart: old and new events in, one distance per column out.

Every column becomes two lists of shares over the same values. Names (actions, surfaces, hours, popular items, fields of
text) are their own values, the most frequent of the old side and `other`; numbers (gaps, lateness, events per user,
fields) are cut where the old side has its quantiles. Two distances: L∞, the largest difference of a share, and the
Jensen–Shannon divergence with logarithms to base 2, in bits: 0 for equal shares, 1 where no value occurs on both sides,
the same in both directions. Decided: bins come from the old side alone, so that every new snapshot is measured alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tackboard.events.checks.measures import (
    MISSING,
    Floats,
    IdCounts,
    NameCounts,
    Sample,
    Slice,
    columns_of,
    name_columns,
    names_in,
    number_columns,
    numbers_in,
    require_events,
)
from tackboard.events.schema import numpy_column

NUM_NAMES = 100
"""Most frequent names of the old side that count on their own."""
NUM_BINS = 20
OTHER = "(other)"
ITEM = "item"


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one column moved. Shares lie in [0, 1]; `moved` is the value whose share changed most."""

    column: str
    kind: str
    l_infinity: float
    jensen_shannon_bits: float
    moved: str
    old_share: float
    new_share: float


@dataclasses.dataclass(frozen=True)
class Drift:
    """Distances, worst first by Jensen–Shannon, and the columns that only one side has."""

    num_old: int
    num_new: int
    distances: list[Distance]
    only_old: list[str]
    only_new: list[str]


def l_infinity(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """The largest difference between two lists of shares."""
    return float(np.abs(old - new).max(initial=0.0))


def jensen_shannon(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """The Jensen–Shannon divergence of two lists of shares, in bits, in [0, 1]."""
    middle = (old + new) / 2
    total = 0.0
    for shares in (old, new):
        some = shares > 0
        total += 0.5 * float((shares[some] * np.log2(shares[some] / middle[some])).sum())
    # Rounding may leave a hair outside.
    return min(max(total, 0.0), 1.0)


def measure_drift(old: Slice, new: Slice) -> Drift:
    """Compares two slices column by column. One without events raises DataError."""
    names = [name for name in name_columns(old.dataset) if name in name_columns(new.dataset)]
    numbers = [name for name in number_columns(old.dataset) if name in number_columns(new.dataset)]
    scale = _Scale(names, numbers)
    scale.learn(old)
    old_counts, new_counts = scale.count(old), scale.count(new)
    distances = [_distance(scale, column, old_counts.shares(column), new_counts.shares(column))
                 for column in (ITEM, *names, *numbers)]  # fmt: skip
    ours, theirs = set(columns_of(old.dataset)), set(columns_of(new.dataset))
    same = {*names, *numbers}
    return Drift(
        num_old=old_counts.num_events,
        num_new=new_counts.num_events,
        distances=sorted(distances, key=lambda one: (-one.jensen_shannon_bits, -one.l_infinity, one.column)),
        only_old=sorted(name for name in old.dataset.fields if name not in theirs or name not in same),
        only_new=sorted(name for name in new.dataset.fields if name not in ours or name not in same),
    )


@dataclasses.dataclass
class _Counts:
    """Counts of one side, by column; each list is as long as the column has values."""

    num_events: int
    values: dict[str, NDArray[np.int64]]

    def shares(self, column: str) -> Floats:
        counts = self.values[column]
        return counts / max(int(counts.sum()), 1)


class _Scale:
    """The values that shares are taken over, learnt from the old side."""

    def __init__(self, names: list[str], numbers: list[str]) -> None:
        self._names, self._numbers = names, numbers
        self._labels: dict[str, dict[str, int]] = {}
        self._bounds: dict[str, Floats] = {}
        self._items: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._item_names: list[str] = []

    def learn(self, part: Slice) -> None:
        """The most frequent names and the bounds of the bins."""
        counts = {name: NameCounts() for name in self._names}
        samples = {name: Sample() for name in self._numbers}
        items = IdCounts()
        for table in part.chunks(columns_of(part.dataset)):
            for name in self._names:
                counts[name].add(names_in(table, name))
            for name in self._numbers:
                samples[name].add(numbers_in(table, name))
            items.add(numpy_column(table, "item_id"))
        for name in self._names:
            self._labels[name] = {label: place for place, label in enumerate(counts[name].top(NUM_NAMES))}
        inner = [place / NUM_BINS for place in range(1, NUM_BINS)]
        self._bounds = {name: np.unique(samples[name].quantiles(inner)) for name in self._numbers}
        ids, number = items.result()
        popular = ids[np.lexsort((ids, -number))[:NUM_NAMES]]
        self._items = np.sort(popular)
        listed = part.dataset.read_items(["item", "item_id"])
        place = np.searchsorted(numpy_column(listed, "item_id"), self._items)
        self._item_names = [str(text) for text in listed["item"].take(place).to_pylist()]

    def count(self, part: Slice) -> _Counts:
        """How often each value occurs in a slice."""
        values = {ITEM: np.zeros(len(self._items) + 1, dtype=np.int64)}
        values |= {name: np.zeros(len(self._labels[name]) + 1, dtype=np.int64) for name in self._names}
        # One place more for what is missing; numbers have one more bin than bounds.
        values |= {name: np.zeros(len(self._bounds[name]) + 2, dtype=np.int64) for name in self._numbers}
        num_events = 0
        for table in part.chunks(columns_of(part.dataset)):
            num_events += table.num_rows
            for name in self._names:
                _count_names(names_in(table, name), self._labels[name], values[name])
            for name in self._numbers:
                _count_numbers(numbers_in(table, name), self._bounds[name], values[name])
            self._count_items(numpy_column(table, "item_id"), values[ITEM])
        require_events(part, num_events)
        return _Counts(num_events, values)

    def label(self, column: str, place: int) -> str:
        """What a value is called."""
        if column == ITEM:
            return self._item_names[place] if place < len(self._item_names) else OTHER
        if column in self._labels:
            labels = list(self._labels[column])
            return labels[place] if place < len(labels) else OTHER
        bounds = self._bounds[column]
        if place > len(bounds):
            return MISSING
        if not len(bounds):
            return "any number"
        if place in (0, len(bounds)):
            return f"above {bounds[-1]:.4g}" if place else f"up to {bounds[0]:.4g}"
        return f"{bounds[place - 1]:.4g} to {bounds[place]:.4g}"

    def kind(self, column: str) -> str:
        """`names` or `numbers`."""
        return "numbers" if column in self._bounds else "names"

    def _count_items(self, items: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        place = np.clip(np.searchsorted(self._items, items), 0, len(self._items) - 1)
        known = self._items[place] == items
        values += np.bincount(np.where(known, place, len(self._items)), minlength=len(values))


def _count_names(counts: Mapping[str, int], labels: Mapping[str, int], values: NDArray[np.int64]) -> None:
    for name, count in counts.items():
        values[labels.get(name, len(labels))] += count


def _count_numbers(numbers: Floats, bounds: Floats, values: NDArray[np.int64]) -> None:
    missing = np.isnan(numbers)
    # A number that equals a bound lies below it: many columns hold few values, and each should be a bin's end.
    values[: len(bounds) + 1] += np.bincount(
        np.searchsorted(bounds, numbers[~missing], side="left"), minlength=len(bounds) + 1
    )
    values[-1] += int(missing.sum())


def _distance(scale: _Scale, column: str, old: Floats, new: Floats) -> Distance:
    most = int(np.abs(old - new).argmax())
    return Distance(
        column=column,
        kind=scale.kind(column),
        l_infinity=l_infinity(old, new),
        jensen_shannon_bits=jensen_shannon(old, new),
        moved=scale.label(column, most),
        old_share=float(old[most]),
        new_share=float(new[most]),
    )
