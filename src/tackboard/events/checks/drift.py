"""This module measures how far the events of two snapshots, or of two ranges of time, differ in each column.

The two sets of events are the old side and the new side. For each column, each value's share is computed on both sides.
If the column holds names (actions, surfaces, hours, items, fields of text or booleans), the values are the most
frequent names of the old side, and `(other)`. If the column holds numbers (gaps, lateness, events per user, fields),
the values are bins between the quantiles of the old side. There are two distances. L∞ is the largest difference between
the two shares of a value. The Jensen–Shannon divergence is in bits (logarithm to base 2). It is 0 if all shares are
equal, and 1 if no value occurs on both sides. Decided: names and bins come from the old side alone, so that all new
snapshots are measured with the same values. If the sides are swapped, the values change, and so does the distance.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import DataError
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
)
from tackboard.events.schema import numpy_column

NUM_NAMES = 100
"""Largest number of names of a column that are counted one by one. All other names count as `(other)`."""
NUM_BINS = 20
OTHER = "(other)"
ITEM = "item"


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far the sides differ in a column. Shares are in [0, 1]. `moved` is the value whose share differs most."""

    column: str
    kind: str
    l_infinity: float
    jensen_shannon_bits: float
    moved: str
    old_share: float
    new_share: float


@dataclasses.dataclass(frozen=True)
class Drift:
    """The distances of all columns, largest Jensen–Shannon divergence first, and the fields that were not compared.

    A field is not compared if one side lacks it, or if it holds names on one side and numbers on the other side.
    """

    num_old: int
    num_new: int
    distances: list[Distance]
    only_old: list[str]
    only_new: list[str]


def l_infinity(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """Returns the largest difference between two lists of shares."""
    return float(np.abs(old - new).max(initial=0.0))


def jensen_shannon(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """Returns the Jensen–Shannon divergence of two lists of shares, in bits, in [0, 1]."""
    middle = (old + new) / 2
    total = 0.0
    for shares in (old, new):
        some = shares > 0
        total += 0.5 * float((shares[some] * np.log2(shares[some] / middle[some])).sum())
    # Rounding may leave the sum slightly outside [0, 1].
    return min(max(total, 0.0), 1.0)


def measure_drift(old: Slice, new: Slice) -> Drift:
    """Compares two slices column by column. A slice without events raises DataError."""
    names = [name for name in name_columns(old.dataset) if name in name_columns(new.dataset)]
    numbers = [name for name in number_columns(old.dataset) if name in number_columns(new.dataset)]
    scale = _Scale(names, numbers)
    scale.learn(old)
    old_counts, new_counts = scale.count(old), scale.count(new)
    columns = (ITEM, *names, *numbers)
    distances = [_distance(scale, column, old_counts[column], new_counts[column]) for column in columns]
    compared = set(old.dataset.fields) & set(new.dataset.fields) & set(columns)
    return Drift(
        # Every event has one item, so the counts of the items add up to the number of events.
        num_old=int(old_counts[ITEM].sum()),
        num_new=int(new_counts[ITEM].sum()),
        distances=sorted(distances, key=lambda one: (-one.jensen_shannon_bits, -one.l_infinity, one.column)),
        only_old=sorted(set(old.dataset.fields) - compared),
        only_new=sorted(set(new.dataset.fields) - compared),
    )


class _Scale:
    """The values (names or bins) whose shares are compared. `learn` takes them from the old side."""

    def __init__(self, names: list[str], numbers: list[str]) -> None:
        self._names, self._numbers = names, numbers
        self._labels: dict[str, dict[str, int]] = {}
        self._bounds: dict[str, Floats] = {}
        self._items: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._item_names: list[str] = []

    def learn(self, part: Slice) -> None:
        """Finds the most frequent names and the bounds of the bins."""
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

    def count(self, part: Slice) -> dict[str, NDArray[np.int64]]:
        """Returns, for each column, the number of times that each value occurs in a slice."""
        values = {ITEM: np.zeros(len(self._items) + 1, dtype=np.int64)}
        values |= {name: np.zeros(len(self._labels[name]) + 1, dtype=np.int64) for name in self._names}
        # N bounds give N + 1 bins. One more place counts the missing values.
        values |= {name: np.zeros(len(self._bounds[name]) + 2, dtype=np.int64) for name in self._numbers}
        for table in part.chunks(columns_of(part.dataset)):
            for name in self._names:
                labels = self._labels[name]
                for label, count in names_in(table, name).items():
                    values[name][labels.get(label, len(labels))] += count
            for name in self._numbers:
                _count_numbers(numbers_in(table, name), self._bounds[name], values[name])
            items = numpy_column(table, "item_id")
            place = np.clip(np.searchsorted(self._items, items), 0, len(self._items) - 1)
            known = self._items[place] == items
            values[ITEM] += np.bincount(np.where(known, place, len(self._items)), minlength=len(values[ITEM]))
        if not values[ITEM].any():
            raise DataError(f"{part.dataset.path} has no event in this range", fix="give another range, or no range")
        return values

    def label(self, column: str, place: int) -> str:
        """Returns a value of a column as text for people."""
        if column not in self._bounds:
            labels = self._item_names if column == ITEM else list(self._labels[column])
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
        """Returns `names` or `numbers`."""
        return "numbers" if column in self._bounds else "names"


def _count_numbers(numbers: Floats, bounds: Floats, values: NDArray[np.int64]) -> None:
    missing = np.isnan(numbers)
    # A number that equals a bound counts in the lower bin, so it never shares a bin with larger numbers.
    values[: len(bounds) + 1] += np.bincount(
        np.searchsorted(bounds, numbers[~missing], side="left"), minlength=len(bounds) + 1
    )
    values[-1] += int(missing.sum())


def _distance(scale: _Scale, column: str, *counts: NDArray[np.int64]) -> Distance:
    old, new = (one / max(int(one.sum()), 1) for one in counts)
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
