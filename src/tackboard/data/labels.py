"""Labels impressions from events. For each action, the label of an impression is 1, 0 or not known yet.

These are the rules (docs/labels.md has an example):

    joined        an action is joined to the impression with the same user, request and item if
                  0 <= time of the action - time of the impression <= the action's window
    repeated      several joined actions of one impression make one positive
    late          an action after its window makes no positive
    early         an action before its impression makes no positive
    not shown     an action on an item that its request did not show makes no positive
    negative      the window closed before the end of the log, and no action was joined
    unknown       the window is still open at the end of the log, and no action was joined yet

The end of the log is the largest received_ms that is not more than a day in the future. A window is closed if the end
of the log lies after the last millisecond of the window. An item that a request showed twice is one impression, with
the smallest position and the earliest time. Every action and impression that these rules leave out is counted. The work
is done one bucket of users at a time, so memory does not grow with the log.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.core.errors import UsageError
from tackboard.core.hashing import string_id
from tackboard.core.keyed_random import bits
from tackboard.events.columns import one_array
from tackboard.events.dataset import LABEL
from tackboard.events.impressions import NO_POSITION, common_codes, positions_of
from tackboard.events.schema import NAMES, encode, numpy_column

UNKNOWN = -1
"""Value in arrays for a label that is not known yet; files have null instead."""
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
MAX_WINDOW_MS = 36_500 * UNITS_MS["d"]
_WINDOW = re.compile(r"(\d{1,15})(ms|s|m|h|d)")

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Label:
    """An action, and the time after an impression within which the action counts."""

    action: str
    window_ms: int

    @property
    def column(self) -> str:
        """Name of the label's column in requests.parquet."""
        return LABEL + self.action


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """Settings of a label job: which labels to make, and for which candidates."""

    labels: tuple[Label, ...]
    """One or more actions with their windows, sorted by action."""
    shown: str | None = None
    """Action that means that an item was shown; None if the dataset has impressions.parquet."""
    negatives: int | None = None
    """Largest number of negatives to keep per request, drawn at random; None keeps all."""
    seed: int = 0
    """Seed of the draw of negatives."""

    def __post_init__(self) -> None:
        # The labels are sorted, so that the same labels in another order make the same snapshot.
        object.__setattr__(self, "labels", tuple(sorted(self.labels, key=lambda label: label.action)))
        actions = [label.action for label in self.labels]
        if not actions:
            raise UsageError("there is no label", fix="give one or more, e.g. --label save=7d --label click=30m")
        doubles = [action for action in actions if actions.count(action) > 1]
        if doubles:
            raise UsageError(f"the action {doubles[0]} has two labels", fix="give each action one window")
        if self.shown in actions:
            raise UsageError(
                f"--shown {self.shown} and --label {self.shown} together give every shown item the label 1",
                fix="leave one of the two options out",
            )
        if self.negatives is not None and self.negatives < 1:
            raise UsageError(f"--negatives {self.negatives} is too small", allowed="allowed: 1 or more")


def parse_label(text: str) -> Label:
    """Reads a label such as `save=7d`, which is Label("save", 604_800_000). Any other form raises UsageError."""
    action, _, window = text.rpartition("=")
    if not action:
        raise UsageError(f"cannot read --label {text}", allowed="allowed: ACTION=WINDOW, e.g. --label save=7d")
    return Label(action, parse_window(window, f"of --label {text}", f"--label {action}=7d"))


def parse_window(window: str, of: str, example: str) -> int:
    """Reads a length of time such as `7d`, and returns it in ms. An error says of which option (`of`) it is."""
    found = _WINDOW.fullmatch(window)
    window_ms = int(found.group(1)) * UNITS_MS[found.group(2)] if found else 0
    if not 1 <= window_ms <= MAX_WINDOW_MS:
        raise UsageError(
            f"cannot read the window {window!r} {of}",
            allowed="allowed: a whole number and ms, s, m (minutes), h or d, from 1ms to 36500d",
            fix=f"for example {example}",
        )
    return window_ms


@dataclasses.dataclass
class LabelCounts:
    """Counts of a label. The first three fields count impressions before negatives are drawn; the others count actions.

    Every event with the label's action is counted once. An event that is the first to be joined to its impression is
    counted in `positives`. Every other event is counted in one of the last five fields.
    """

    positives: int = 0
    negatives: int = 0
    not_known_yet: int = 0
    actions_repeated: int = 0
    actions_late: int = 0
    actions_early: int = 0
    actions_not_shown: int = 0
    actions_without_request: int = 0


@dataclasses.dataclass
class LabelJobCounts:
    """Counts of a label job.

    `candidates` + `negatives_left_out` + `impressions_repeated` is the number of impressions with a request and a user.
    """

    requests: int = 0
    candidates: int = 0
    negatives_left_out: int = 0
    impressions_repeated: int = 0
    impressions_without_request: int = 0
    impressions_without_user: int = 0
    events_in_future: int = 0
    """Events whose received time lies more than a day in the future. They do not move the end of the log."""
    labels: dict[str, LabelCounts] = dataclasses.field(default_factory=dict)


def requests_schema(labels: Sequence[Label], request_type: pa.DataType) -> pa.Schema:
    """Returns the schema of requests.parquet."""
    fields = [
        ("request", request_type),
        ("user_id", pa.int64()),
        ("time_ms", pa.int64()),
        ("surface", NAMES),
        ("item_id", pa.list_(pa.int64())),
        ("position", pa.list_(pa.int32())),
        ("weight", pa.list_(pa.float32())),
    ]
    return pa.schema([*fields, *((label.column, pa.list_(pa.int8())) for label in labels)])


def label_bucket(
    config: LabelConfig, impressions: pa.Table, events: pa.Table, end_ms: int, counts: LabelJobCounts
) -> pa.Table:
    """Returns requests with labelled candidates, sorted by (user_id, time_ms, request), and updates `counts`.

    `impressions` has the columns `impressions.COLUMNS`, and every row has a request. `events` has user_id, item_id,
    time_ms, request, action and surface, in the order of the dataset. Both tables belong to the same users and hold all
    rows of these users. The candidates of a request are sorted by position, then by time.
    """
    keys = RequestKeys(impressions, events)
    shown = _distinct(impressions, keys)
    counts.impressions_repeated += impressions.num_rows - len(shown.row)
    labels = {label.action: _label(label, shown, keys, events, end_ms, counts) for label in config.labels}
    # Sorts requests by user, time and request, and candidates by position, time and item.
    order = np.lexsort((shown.item, shown.time, shown.position, shown.request, shown.request_ms, shown.user))
    shown = shown.take(order)
    labels = {action: values[order] for action, values in labels.items()}
    request_of, _ = _runs(shown.request)
    requests = one_array(impressions["request"]).take(pa.array(shown.row))
    weight, keep = np.ones(len(order), dtype=np.float32), np.ones(len(order), dtype=bool)
    if config.negatives is not None:
        stacked = np.stack(list(labels.values()))
        negative = ~(stacked == 1).any(axis=0) & (stacked == 0).any(axis=0)
        draw = bits(config.seed, shown.user, _numbers(requests), shown.item) if len(order) else np.zeros(0, np.uint64)
        keep, weight = _draw_negatives(negative, request_of, draw, shown.item, config.negatives)
        counts.negatives_left_out += int((~keep).sum())
        shown, weight, requests = shown.take(np.flatnonzero(keep)), weight[keep], requests.filter(pa.array(keep))
        labels = {action: values[keep] for action, values in labels.items()}
    _, starts = _runs(shown.request)
    counts.requests += len(starts)
    counts.candidates += len(shown.item)
    offsets = pa.array(np.append(starts, len(shown.item)).astype(np.int32))

    def grouped(values: pa.Array) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, values)

    position = pa.array(shown.position, mask=shown.position == NO_POSITION).cast(pa.int32())
    columns: list[Any] = [
        requests.take(pa.array(starts)),
        pa.array(shown.user[starts]),
        pa.array(shown.request_ms[starts]),
        first_of_requests(encode(events["surface"]), keys.of_events, shown.request[starts]).cast(NAMES),
        grouped(pa.array(shown.item)),
        grouped(position),
        grouped(pa.array(weight)),
        *(grouped(pa.array(values, mask=values == UNKNOWN)) for values in labels.values()),
    ]
    return pa.table(columns, schema=requests_schema(config.labels, impressions.schema.field("request").type))


class RequestKeys:
    """Numbers the distinct requests in the order of (user, request). The number of an event without a request is -1."""

    def __init__(self, impressions: pa.Table, events: pa.Table) -> None:
        of_impressions, of_events = common_codes(impressions["request"], events["request"])
        users = np.concatenate([numpy_column(impressions, "user_id"), numpy_column(events, "user_id")])
        ranks = _ranks(users, np.concatenate([of_impressions, of_events]))
        self.of_impressions = ranks[: len(of_impressions)]
        self.of_events = np.where(of_events < 0, -1, ranks[len(of_impressions) :])


@dataclasses.dataclass(frozen=True)
class _Shown:
    """Holds M distinct impressions. `request` has numbers of `RequestKeys`; `row` has row numbers of `impressions`."""

    user: Ints
    request: Ints
    request_ms: Ints
    item: Ints
    time: Ints
    position: Ints
    row: Ints

    def take(self, chosen: Ints) -> _Shown:
        return _Shown(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))


def _distinct(impressions: pa.Table, keys: RequestKeys) -> _Shown:
    """Returns one impression per request and item, sorted by both, with its smallest position and earliest time."""
    items, times = numpy_column(impressions, "item_id"), numpy_column(impressions, "time_ms")
    order = np.lexsort((items, keys.of_impressions))
    requests, items = keys.of_impressions[order], items[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (requests[1:] != requests[:-1]) | (items[1:] != items[:-1])
    starts = np.flatnonzero(new)
    time = np.minimum.reduceat(times[order], starts) if len(starts) else times
    position = np.minimum.reduceat(positions_of(impressions)[order], starts) if len(starts) else items
    request_of, request_starts = _runs(requests[starts])
    request_ms = np.minimum.reduceat(time, request_starts)[request_of] if len(starts) else times
    return _Shown(
        user=numpy_column(impressions, "user_id")[order[starts]],
        request=requests[starts],
        request_ms=request_ms,
        item=items[starts],
        time=time,
        position=position,
        row=order[starts],
    )


def _label(
    label: Label, shown: _Shown, keys: RequestKeys, events: pa.Table, end_ms: int, counts: LabelJobCounts
) -> NDArray[np.int8]:
    """Returns 1, 0 or UNKNOWN for each impression in `shown`, which is sorted by request and item."""
    chosen = np.flatnonzero(pc.equal(events["action"], label.action).to_numpy())
    count = counts.labels.setdefault(label.action, LabelCounts())
    with_request = chosen[keys.of_events[chosen] >= 0]
    count.actions_without_request += len(chosen) - len(with_request)
    items, times = numpy_column(events, "item_id")[with_request], numpy_column(events, "time_ms")[with_request]
    impression = _find(shown, keys.of_events[with_request], items)
    found = impression >= 0
    count.actions_not_shown += int((~found).sum())
    impression = impression[found]
    after_ms = times[found] - shown.time[impression]
    early, late = after_ms < 0, after_ms > label.window_ms
    count.actions_early += int(early.sum())
    count.actions_late += int(late.sum())
    joined = impression[~early & ~late]
    values = np.where(end_ms - shown.time > label.window_ms, 0, UNKNOWN).astype(np.int8)
    values[joined] = 1
    num_positive = int((values == 1).sum())
    count.actions_repeated += len(joined) - num_positive
    count.positives += num_positive
    count.negatives += int((values == 0).sum())
    count.not_known_yet += int((values == UNKNOWN).sum())
    return values


def _find(shown: _Shown, requests: Ints, items: Ints) -> Ints:
    """Returns the index in `shown` of each (request, item), or -1 if the item was not shown."""
    num_shown = len(shown.item)
    ranks = _ranks(np.concatenate([shown.request, requests]), np.concatenate([shown.item, items]))
    impression_of = np.full(len(ranks), -1, dtype=np.int64)
    impression_of[ranks[:num_shown]] = np.arange(num_shown)
    return impression_of[ranks[num_shown:]]


def _draw_negatives(
    negative: NDArray[np.bool_], request_of: Ints, draw: NDArray[np.uint64], item: Ints, most: int
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Returns which candidates to keep, and their weights.

    A request keeps all positives, and at most `most` negatives: those with the smallest numbers in `draw`.

    The weight of a kept negative is the number of the request's negatives divided by the number of kept negatives. So
    the total weight of a request's negatives stays the same.
    """
    keep, weight = ~negative, np.ones(len(negative), dtype=np.float32)
    chosen = np.flatnonzero(negative)
    chosen = chosen[np.lexsort((item[chosen], draw[chosen], request_of[chosen]))]
    run_of, starts = _runs(request_of[chosen])
    sizes = np.diff(np.append(starts, len(chosen)))
    place = np.arange(len(chosen)) - starts[run_of] if len(chosen) else chosen
    keep[chosen[place < most]] = True
    weight[chosen] = (sizes / np.minimum(sizes, most))[run_of]
    return keep, weight


def first_of_requests(values: pa.Array, requests: Ints, wanted: Ints) -> pa.Array:
    """Returns, for each request number in `wanted`, the value of the request's first event, or null if it has none."""
    known, first = np.unique(requests, return_index=True)
    place = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    if not len(known):
        return pa.nulls(len(wanted), values.type)
    return values.take(pa.array(first[place], mask=known[place] != wanted))


def _numbers(requests: pa.Array) -> Ints:
    """Converts request ids to int64 keys for random numbers."""
    if pa.types.is_integer(requests.type):
        return np.asarray(requests.to_numpy())
    encoded = requests.dictionary_encode()
    hashed = np.array([string_id(text) for text in encoded.dictionary.to_pylist()], dtype=np.int64)
    return np.asarray(hashed[encoded.indices.to_numpy()])


def _ranks(first: Ints, second: Ints) -> Ints:
    """Returns the place of each pair (first, second) among the sorted distinct pairs."""
    order = np.lexsort((second, first))
    new = np.zeros(len(order), dtype=np.int64)
    new[1:] = (first[order][1:] != first[order][:-1]) | (second[order][1:] != second[order][:-1])
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.cumsum(new)
    return ranks


def _runs(values: Ints) -> tuple[Ints, Ints]:
    """Numbers the groups of consecutive equal values. Returns each value's group, and where each group starts."""
    new = np.ones(len(values), dtype=bool)
    new[1:] = values[1:] != values[:-1]
    return np.cumsum(new) - 1, np.flatnonzero(new)
