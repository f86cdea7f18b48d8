"""Keeps the measures of a log's catalogue beside the snapshot, so that only one run makes the pass over the events.

This module takes an open source and returns the measures of events/checks/turnover.py. They are stored in the same way
as the counts of index.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tackboard.data.source import SequenceSource
from tackboard.data.stored_counts import StoredCounts, counted_once
from tackboard.events.checks.turnover import Turnover, measure_turnover

VERSION = 1
"""Version of the stored measures. Raise the version if a change of the code gives other measures for the same log."""
OPTIONAL = {"half_life_ms"}
"""Measures that may be None. A measure that is None is not stored."""


def turnover_once(source: SequenceSource) -> Turnover:
    """Returns the stored measures of a dataset. If there are none, measures the dataset and stores the result."""
    names = [field.name for field in dataclasses.fields(Turnover)]

    def count() -> StoredCounts:
        measured = dataclasses.asdict(measure_turnover(source.dataset))
        return StoredCounts({}, {name: value for name, value in measured.items() if value is not None})

    def fits(found: StoredCounts) -> bool:
        missing = set(names) - set(found.figures)
        is_whole = missing <= OPTIONAL and min(found.figures[name] for name in set(names) - missing) >= 0
        return is_whole and found.figures["num_events"] == source.dataset.num_events

    counts = counted_once(source.dataset, {"measures": "turnover", "measures_version": VERSION}, count, fits)
    measures: dict[str, Any] = {name: counts.figures.get(name) for name in names}
    return Turnover(**measures)
