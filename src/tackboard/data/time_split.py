"""Divides a log at an instant, the cut, so that a model is judged on events that happened after its training.

    first event ───────────── until ── validation slice ── cut ───────────── last event
                 training               judgements during         judged events
                                        training

Leave-last-out (`data.split=last`) cannot show how a model ages: for most users, training reads events of other users
that happened after the judged event. With `data.split=time`, training reads only events that happened before the cut
and were received before it. That holds for the loss, the index, the frequencies, the drawn negatives, the names of
actions and surfaces, and the baselines. If there is a validation slice, training ends where the slice begins.

    a user's events    ● ● ● ● ● ●│● ●│● ●        until │ cut │
                       └ training ┘   └ judged

Decided: a user's training ends at the user's first event that happened or was received at or after `until`. So the
training events of a user are always the first events of the user, even if some events were received late.
Decided: features of a history do not depend on the split, because they only see what was received before the history's
request. Attributes of items and users are not cut: an attribute that was computed from the whole log knows events after
the cut.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import ConfigError
from tackboard.events.dataset import Dataset
from tackboard.events.schema import numpy_column

HOUR_MS = 3_600_000
DEFAULT_CUT = "0.9"
Split = Literal["last", "time"]
_SHARE = re.compile(r"0?\.\d+|[01](\.0*)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """The instants of a split by time, in ms UTC."""

    until_ms: int
    """Training reads events before this instant."""
    cut_ms: int
    """Events from this instant on are judged. The validation slice, if there is one, lies between both instants."""

    @property
    def has_slice(self) -> bool:
        return self.until_ms < self.cut_ms


@dataclasses.dataclass(frozen=True)
class UserCuts:
    """For each of U users, the indices of the events where prediction begins, and where training and the slice end.

    A segment may begin before `first_predicted`. Its events before this index are context and are not predicted.
    """

    first_predicted: NDArray[np.int64]
    train_ends: NDArray[np.int64]
    cut_ends: NDArray[np.int64]

    @classmethod
    def find(
        cls,
        offsets: NDArray[np.int64],
        times: NDArray[np.int64],
        received: NDArray[np.int64],
        split: TimeSplit | None,
        predict_from_ms: int | None,
        last_ends: NDArray[np.int64],
    ) -> UserCuts:
        """`last_ends` says where training ends without a split by time."""
        newest = np.maximum(times, received)
        train_ends = cut_ends = last_ends
        if split is not None:
            train_ends = _first_at_or_after(offsets, newest, split.until_ms)
            cut_ends = _first_at_or_after(offsets, newest, split.cut_ms)
        first = offsets[:-1]
        if predict_from_ms is not None:
            # The run before stopped at each user's first event that happened or was received too late. This run begins
            # there.
            first = _first_at_or_after(offsets, newest, predict_from_ms)
        return cls(np.minimum(first, train_ends), train_ends, cut_ends)


def _first_at_or_after(offsets: NDArray[np.int64], newest: NDArray[np.int64], instant_ms: int) -> NDArray[np.int64]:
    """Returns the index of each user's first event at or after an instant, or the end of the user's events [U]."""
    late = np.append(np.flatnonzero(newest >= instant_ms), len(newest))
    return np.minimum(late[late.searchsorted(offsets[:-1])], offsets[1:])


def resolve_split(dataset: Dataset, cut: str, validation_hours: float) -> TimeSplit:
    """Returns the instants of a split. `cut` is an instant, a share of the events, or empty for the default share.

    Raises ConfigError if no event lies before or after the cut, or if the validation slice leaves no event to train on.
    """
    wanted = cut or DEFAULT_CUT
    first_ms, last_ms = (int(dataset.statistics[name]) for name in ("first_ms", "last_ms"))
    span = f"{shown_instant(first_ms)} to {shown_instant(last_ms)}"
    if _SHARE.fullmatch(wanted):
        share = float(wanted)
        cut_ms = _instant_of_share(dataset, share) if share < 1.0 else last_ms + 1
        fix = "name an instant: --set data.cut=2024-05-01"
    else:
        cut_ms = parse_instant(wanted, "data.cut")
        fix = f"--set data.cut={shown_instant(first_ms + (last_ms - first_ms) * 9 // 10)}, or a share: data.cut=0.9"
    if not first_ms < cut_ms <= last_ms:
        side = "before" if cut_ms <= first_ms else "after"
        raise ConfigError(
            f"data.cut={wanted} ({shown_instant(cut_ms)}) leaves no event {side} it",
            allowed=f"the log reaches from {span}; training needs events before the cut, judging needs events after it",
            fix=fix,
        )
    until_ms = cut_ms - round(validation_hours * HOUR_MS)
    if until_ms <= first_ms:
        raise ConfigError(
            f"data.validation_hours={validation_hours:g} leaves no event to train on: training would end at "
            f"{shown_instant(until_ms)}",
            allowed=f"the log begins at {shown_instant(first_ms)}, and the cut is at {shown_instant(cut_ms)}",
            fix="lower data.validation_hours",
        )
    return TimeSplit(until_ms=until_ms, cut_ms=cut_ms)


def parse_instant(text: str, setting: str) -> int:
    """Returns an ISO 8601 instant in ms UTC; text without a zone means UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"{setting}={text} is not an instant",
            allowed="allowed: an instant such as 2024-05-01 or 2024-05-01T12:00:00Z"
            + (", or a share of the events between 0 and 1, such as 0.9" if setting == "data.cut" else ""),
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def shown_instant(instant_ms: int) -> str:
    """Returns an instant as text that `parse_instant` reads. Zero milliseconds and the time 00:00:00 are left out."""
    moment = datetime.fromtimestamp(instant_ms / 1000, UTC)
    text = moment.isoformat(timespec="milliseconds").removesuffix("+00:00")
    return re.sub(r"T00:00:00\.000$", "", re.sub(r"\.000$", "", text)) if instant_ms % 86_400_000 else text[:10]


def _instant_of_share(dataset: Dataset, share: float) -> int:
    """Returns the time of the first event after this share of the events, in the order of time."""
    parts: Iterable[NDArray[np.int64]] = (numpy_column(table, "time_ms") for table in dataset.event_chunks(["time_ms"]))
    times = np.concatenate(list(parts))
    place = min(int(share * len(times)), len(times) - 1)
    return int(np.partition(times, place)[place])
