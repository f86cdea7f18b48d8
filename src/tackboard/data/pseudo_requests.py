"""Makes requests from a log that does not say what was shown. The positive of a request is an item that a user chose,
and its negatives are items from other events of the same hour.

    requests.parquet        one row per chosen event, as request_layout.py writes it, with the labels
    pseudo_requests.json    the rules, the SHA-256 of the events, and the counts; labels.json is removed
    layout.json             gains `requests`: the rows of requests.parquet that belong to each bucket

These are the rules (docs/labels.md explains them):

    request      the user and time of a chosen event. An event is chosen if it is the user's first with its item. The
                 settings may choose only each user's newest events or only events since a time, and may also choose
                 repeats. Several events of a user on one item at one time make one request.
    time         the event's time, or its received time if that is earlier. A history holds the events received strictly
                 before this time, so neither the event itself nor other events of the same instant are visible.
    candidates   the event's item (label 1), and others (label 0) drawn one after another from the pool, each with a
                 probability proportional to its number of events in the pool; no item twice, and no item that the user
                 ever engaged with. The settings may ask for further labels, one per action. Such a label is 1 for
                 the event's item if an event of the request has this action.
    pool         the events of the same hour (UTC), before and after the request, or all events of the log
    order        random; positions are null, because the log does not say what was shown

Decided: repeats are left out unless the settings ask for them. A repeat is an event on an item that the user had
engaged with before. No drawn item is in the user's history. So if repeats were kept, every candidate that is in
the history would have the label 1. A model would learn this instead of the user's taste.

Every draw is keyed by (seed, user, time, item), so the same log gives the same requests on every machine. Memory grows
by about 30 bytes per event of the log; everything else is done one bucket of users at a time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.documents import read_document
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import reach, write_json_atomic
from tackboard.core.keyed_random import bits, uniform
from tackboard.core.progress import Progress
from tackboard.data.labels import UNITS_MS, Label, requests_schema
from tackboard.data.request_layout import LABELS, PSEUDO
from tackboard.events.columns import has_action, one_array
from tackboard.events.dataset import EVENTS, REQUESTS, Dataset
from tackboard.events.impressions import check_action
from tackboard.events.layout import FILE_NAME as LAYOUT
from tackboard.events.layout import Layout
from tackboard.events.schema import NAMES, encode, is_field_name, numpy_column
from tackboard.events.staging import check_newest, derive_snapshot
from tackboard.features.column import offsets_of
from tackboard.features.entity_tables import find_ids

VERSION = 2
"""Version 1 had no rule `repeats` and always kept repeats."""
POOLS = ("hour", "all")
DRAWS_AT_ONCE = 1 << 20
"""Largest number of draws from the pool in memory at a time."""
_DRAWS_PER_CANDIDATE = 4
"""Number of draws from the pool per wanted candidate. If candidates are still missing, `_rest` draws them."""
_STREAM_DRAW, _STREAM_REST, _STREAM_ORDER = 81, 82, 83
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PseudoRequestConfig:
    """Settings of a job that makes requests from events."""

    candidates: int = 100
    """Number of candidates of a request in addition to the chosen item."""
    pool: str = "hour"
    """Where these candidates are drawn from: `hour`, the events of the same hour, or `all`, all events."""
    per_user: int | None = None
    """Number of newest events per user that become requests; None means all."""
    since_ms: int | None = None
    """Only events at or after this time (ms UTC) become requests; None means all."""
    actions: tuple[str, ...] = ()
    """Only events with these actions become requests or are in the pool; empty means all actions."""
    repeats: bool = False
    """Whether events on items that the user had engaged with before become requests too."""
    label: str = "next"
    """Name of the label."""
    also: tuple[str, ...] = ()
    """Actions that get labels of their own besides `label`: 1 for the chosen item if an event of the request has the
    action."""
    seed: int = 0
    """Seed of every draw."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(sorted(self.actions)))
        if not 1 <= self.candidates <= 10_000:
            raise UsageError(f"--candidates is {self.candidates}", allowed="allowed: 1 to 10,000")
        if self.pool not in POOLS:
            raise UsageError(f"--from is {self.pool!r}", allowed=f"allowed: {', '.join(POOLS)}")
        if self.per_user is not None and self.per_user < 1:
            raise UsageError(f"--per-user is {self.per_user}", allowed="allowed: 1 or more")
        if self.per_user is None and self.since_ms is None:
            raise UsageError("no events were chosen", fix="give --per-user N, --since TIME or both")
        for option, name in (("--label", self.label), *(("--also", action) for action in self.also)):
            if not is_field_name(name):
                raise UsageError(f"{option} {name!r} is not a name", allowed="allowed: a Python name, e.g. next")
        if len(set(self.labels)) < len(self.labels):
            raise UsageError(
                f"--also names {', '.join(self.also)}",
                allowed=f"allowed: each action once, and not the name of the label, {self.label}",
            )

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label, *self.also)


@dataclasses.dataclass
class PseudoRequestCounts:
    """Counts of a job that makes requests from events."""

    requests: int = 0
    candidates: int = 0
    """Candidates of all requests, including the chosen items."""
    requests_short: int = 0
    """Requests with fewer other candidates than asked for, because the pool had no more."""
    candidates_missing: int = 0
    """Number of candidates that these requests lack in total."""
    events_repeated: int = 0
    """Events left out because another event with the same user, item and time comes before them in the log."""
    repeats_left_out: int = 0
    """Events left out because the user had engaged with the item before."""
    repeats_kept: int = 0
    """Requests whose chosen item the user had engaged with before, if `repeats` is set."""


@dataclasses.dataclass(frozen=True)
class PseudoRequests:
    """The result of a job: the snapshot, the rules and the counts."""

    path: Path
    config: PseudoRequestConfig
    counts: PseudoRequestCounts


def make_pseudo_requests(dataset: Dataset, config: PseudoRequestConfig, *, quiet: bool = False) -> PseudoRequests:
    """Makes a new snapshot of `dataset` with requests made from events, and points `latest` at the new snapshot.

    `dataset` must be the newest snapshot. Requests that it already has are replaced. If they were made by the same
    rules, no snapshot is made. After an error or a kill, the old snapshot stays in use.
    """
    check_newest(dataset)
    for option, actions in (("--action", config.actions), ("--also", config.also)):
        for action in actions:
            check_action(dataset, action, f"{option} {action}")
    if left_out := [action for action in config.also if config.actions and action not in config.actions]:
        raise UsageError(
            f"--also names {left_out[0]!r}, but --action leaves its events out, so its label would always be 0",
            allowed=f"allowed: {', '.join(config.actions)}",
            fix=f"add --action {left_out[0]}",
        )
    (events,) = [str(entry["sha256"]) for entry in dataset.manifest["files"] if entry["name"] == EVENTS]
    rules = {**dataclasses.asdict(config), "actions": list(config.actions), "also": list(config.also)}
    stored = read_pseudo_requests(dataset.path)
    if stored is not None and stored.config == config and _document(dataset.path)["events"] == events:
        return stored

    def fill(staging: Path) -> tuple[str, ...]:
        with Progress("making requests", total=2 * dataset.num_events, unit="events", quiet=quiet) as progress:
            pool = _Pool.of(dataset, config, progress)
            layout, counts = _write_rows(dataset, config, pool, staging / REQUESTS, progress)
        layout.write(staging)
        content = {"version": VERSION, "rules": rules, "events": events, "counts": dataclasses.asdict(counts)}
        write_json_atomic(staging / PSEUDO, content)
        return written

    written = (REQUESTS, PSEUDO, LAYOUT)
    path = derive_snapshot(dataset, "pseudo_requests", rules, replaced=(*written, LABELS), fill=fill)
    result = read_pseudo_requests(path)
    assert result is not None
    return result


def read_pseudo_requests(snapshot: Path) -> PseudoRequests | None:
    """Reads pseudo_requests.json of a snapshot folder. Returns None if the snapshot has no such requests."""
    content = _document(snapshot)
    if not content:
        return None
    rules = {"repeats": content["version"] == 1, **content["rules"]}
    rules |= {name: tuple(rules.get(name, ())) for name in ("actions", "also")}
    return PseudoRequests(snapshot, PseudoRequestConfig(**rules), PseudoRequestCounts(**content["counts"]))


def _document(snapshot: Path) -> dict[str, Any]:
    path = snapshot / PSEUDO
    fields = {
        "version": int,
        "rules": dict[str, Any],
        "rules.actions": tuple[str, ...],
        "events": str,
        "counts": dict[str, int],
    }
    content = read_document(path, fields) if path.exists() else {}
    if content.get("version", 0) > VERSION:
        raise DataError(f"{path} has version {content['version']}", allowed=f"allowed: up to {VERSION}")
    return content


@dataclasses.dataclass(frozen=True)
class _Pool:
    """Holds the items of the events of each hour, as places in `item_ids`, which is sorted.

    The events of hours[h] have the items items[starts[h]:starts[h + 1]], sorted. The distinct items of hours[h] are
    distinct[distinct_starts[h]:distinct_starts[h + 1]], and `frequencies` holds the number of events of each of them.
    With the pool `all`, all events belong to one hour with the number 0.
    """

    item_ids: Ints
    hours: Ints
    starts: Ints
    items: NDArray[np.int32]
    distinct_starts: Ints
    distinct: NDArray[np.int32]
    frequencies: NDArray[np.int32]
    is_one_hour: bool

    @classmethod
    def of(cls, dataset: Dataset, config: PseudoRequestConfig, progress: Progress) -> _Pool:
        item_ids = numpy_column(dataset.read_items(["item_id"]), "item_id")
        is_one_hour = config.pool == "all"
        parts = []
        for events in dataset.event_chunks(["item_id", "time_ms", "action"]):
            chosen = has_action(events, config.actions)
            hours = _hours(numpy_column(events, "time_ms")[chosen], is_one_hour=is_one_hour)
            parts.append(hours * len(item_ids) + find_ids(item_ids, numpy_column(events, "item_id")[chosen]))
            progress.advance(events.num_rows)
        keys = np.concatenate(parts)
        del parts
        keys.sort()
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        hours = np.unique(keys[first] // len(item_ids))
        starts = np.append(np.searchsorted(keys, hours * len(item_ids)), len(keys))
        return cls(
            item_ids=item_ids,
            hours=hours,
            starts=starts.astype(np.int64),
            items=(keys % len(item_ids)).astype(np.int32),
            distinct_starts=np.searchsorted(first, starts).astype(np.int64),
            distinct=(keys[first] % len(item_ids)).astype(np.int32),
            frequencies=np.diff(np.append(first, len(keys))).astype(np.int32),
            is_one_hour=is_one_hour,
        )

    def hours_of(self, times: Ints) -> Ints:
        """Returns the index of the hour of each time. Each of these hours must have an event."""
        return find_ids(self.hours, _hours(times, is_one_hour=self.is_one_hour))


def _hours(times: Ints, *, is_one_hour: bool) -> Ints:
    """Returns the number of the hour of each time; 0 if all times count as one hour."""
    return np.zeros_like(times) if is_one_hour else times // UNITS_MS["h"]


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Holds R chosen events of a bucket: `item` is a place in the pool's item_ids, `hour` a place in its hours."""

    row: Ints
    user: Ints
    time: Ints
    item: Ints
    hour: Ints
    user_number: Ints
    """Number of the user within the bucket."""

    def take(self, part: slice | Ints) -> _Chosen:
        return _Chosen(*(getattr(self, field.name)[part] for field in dataclasses.fields(self)))


class _Owned:
    """Says which users of a bucket engaged with which items, at any time."""

    def __init__(self, user_numbers: Ints, items: Ints, num_items: int) -> None:
        self._num_items = num_items
        self._keys = np.unique(user_numbers * num_items + items)

    def holds(self, user_numbers: Ints, items: Ints) -> NDArray[np.bool_]:
        return find_ids(self._keys, (user_numbers * self._num_items + items).ravel()).reshape(items.shape) >= 0


def _numbers_of(users: Ints) -> Ints:
    """Returns the number of each event's user. The users of a bucket are numbered from 0."""
    return np.cumsum(np.append(False, users[1:] != users[:-1]))[: len(users)]


def _instants(users: Ints, times: Ints, items: Ints) -> Ints:
    """Returns a number for each event. Events of one user on one item at one time, and only these, have the same."""
    order = np.lexsort((items, times, users))
    is_new = np.zeros(len(order), dtype=bool)
    for column in (users, times, items):
        is_new[1:] |= column[order[1:]] != column[order[:-1]]
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(is_new)
    return numbers


def _is_repeat(users: Ints, items: Ints, request_ms: Ints) -> NDArray[np.bool_]:
    """Returns whether each event is a repeat: whether the user had engaged with the item before.

    `request_ms` holds the time of the request that each event would make. An event is a repeat if this time is later
    than that of another event of the same user with the same item. A history holds only events received before the
    request, so the history of an event that is not a repeat never contains the event's item.
    """
    order = np.lexsort((request_ms, items, users))
    same = np.zeros(len(order), dtype=bool)
    same[1:] = (users[order[1:]] == users[order[:-1]]) & (items[order[1:]] == items[order[:-1]])
    starts = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    is_repeat = np.zeros(len(order), dtype=bool)
    is_repeat[order] = request_ms[order] > request_ms[order[starts]]
    return is_repeat


def _choose(events: pa.Table, config: PseudoRequestConfig, pool: _Pool, counts: PseudoRequestCounts) -> _Chosen:
    """Returns the events that become requests, in the order of the bucket."""
    users, times = numpy_column(events, "user_id"), numpy_column(events, "time_ms")
    items = find_ids(pool.item_ids, numpy_column(events, "item_id"))
    chosen = has_action(events, config.actions)
    if config.since_ms is not None:
        chosen &= times >= config.since_ms
    rows = np.flatnonzero(chosen)
    # A stable search finds the first row of each request.
    _, first = np.unique(_instants(users, times, items)[rows], return_index=True)
    counts.events_repeated += len(rows) - len(first)
    rows = rows[np.sort(first)]
    is_repeat = _is_repeat(users, items, np.minimum(times, numpy_column(events, "received_ms")))
    if not config.repeats:
        counts.repeats_left_out += int(is_repeat[rows].sum())
        rows = rows[~is_repeat[rows]]
    if config.per_user is not None:
        ends = np.searchsorted(users[rows], users[rows], side="right")
        rows = rows[ends - np.arange(len(rows)) <= config.per_user]
    counts.repeats_kept += int(is_repeat[rows].sum())
    return _Chosen(rows, users[rows], times[rows], items[rows], pool.hours_of(times[rows]), _numbers_of(users)[rows])


def _draw(config: PseudoRequestConfig, pool: _Pool, chosen: _Chosen, owned: _Owned) -> list[Ints]:
    """Draws the other candidates of each request. Returns their places in the pool's item_ids, in the order drawn."""
    counter = np.arange(_DRAWS_PER_CANDIDATE * config.candidates, dtype=np.int64)
    user, time, item = (each[:, None] for each in (chosen.user, chosen.time, pool.item_ids[chosen.item]))
    start, end = pool.starts[chosen.hour][:, None], pool.starts[chosen.hour + 1][:, None]
    draws = uniform(config.seed, _STREAM_DRAW, user, time, item, counter)
    drawn = pool.items[start + np.minimum((draws * (end - start)).astype(np.int64), end - start - 1)].astype(np.int64)
    by_item = np.argsort(drawn, axis=1, kind="stable")
    in_order = np.take_along_axis(drawn, by_item, axis=1)
    is_first = np.ones(drawn.shape, dtype=bool)
    is_first[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    accepted = np.zeros(drawn.shape, dtype=bool)
    np.put_along_axis(accepted, by_item, is_first, axis=1)
    accepted &= ~owned.holds(chosen.user_number[:, None], drawn)
    accepted &= np.cumsum(accepted, axis=1) <= config.candidates
    found = [drawn[row][mask] for row, mask in enumerate(accepted)]
    for row in np.flatnonzero(accepted.sum(axis=1) < config.candidates).tolist():
        more = _rest(config, pool, chosen.take(slice(row, row + 1)), owned, found[row])
        found[row] = np.concatenate([found[row], more])
    return found


def _rest(config: PseudoRequestConfig, pool: _Pool, request: _Chosen, owned: _Owned, found: Ints) -> Ints:
    """Draws the remaining candidates of one request, among the items of the pool that are left.

    Each item gets a random time, exponentially distributed with the item's frequency as the rate. The earliest items
    win. They have the same distribution as further draws from the pool that reject the items found before.
    """
    hour = int(request.hour[0])
    part = slice(int(pool.distinct_starts[hour]), int(pool.distinct_starts[hour + 1]))
    items, frequencies = pool.distinct[part].astype(np.int64), pool.frequencies[part]
    free = ~owned.holds(request.user_number, items) & ~np.isin(items, found)
    items, frequencies = items[free], frequencies[free]
    true = int(pool.item_ids[request.item[0]])
    key = (int(request.user[0]), int(request.time[0]), true, pool.item_ids[items])
    waits = -np.log1p(-uniform(config.seed, _STREAM_REST, *key)) / frequencies if len(items) else items
    return items[np.argsort(waits, kind="stable")[: config.candidates - len(found)]]


def _write_rows(
    dataset: Dataset, config: PseudoRequestConfig, pool: _Pool, path: Path, progress: Progress
) -> tuple[Layout, PseudoRequestCounts]:
    """Writes requests.parquet bucket by bucket. A bucket with requests is one row group."""
    reach(f"{REQUESTS}:before-write")
    stored = pq.read_schema(dataset.events_path)
    names = ["user_id", "item_id", "time_ms", "received_ms", "action", "surface"]
    has_request = "request" in stored.names
    labels = [Label(name, 0) for name in config.labels]
    schema = requests_schema(labels, stored.field("request").type if has_request else pa.int64())
    counts, num_rows, num_events = PseudoRequestCounts(), [], 0
    with pq.ParquetWriter(path, schema) as writer:
        for events in dataset.event_chunks([*names, "request"] if has_request else names):
            if not has_request:
                numbers = np.arange(num_events, num_events + events.num_rows)
                events = events.append_column("request", pa.array(numbers))
            chosen = _choose(events, config, pool, counts)
            table, num_others = _requests_of(config, pool, events, chosen, schema)
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)
            num_rows.append(table.num_rows)
            num_events += events.num_rows
            counts.requests += table.num_rows
            counts.candidates += table.num_rows + int(num_others.sum())
            counts.requests_short += int((num_others < config.candidates).sum())
            counts.candidates_missing += int((config.candidates - num_others).sum())
            reach(f"{REQUESTS}:after-group")
            progress.advance(events.num_rows)
    reach(f"{REQUESTS}:after-write")
    if not counts.requests:
        raise DataError(f"no event of {dataset.path} became a request", fix="give an earlier --since, or leave it out")
    offsets = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int64)
    layout = dataset.layout
    return Layout(layout.first_users, {**layout.offsets, "requests": offsets}), counts


def _requests_with(action: str, events: pa.Table, places: Ints) -> NDArray[np.bool_]:
    """Returns, for each event, whether an event of the same request has an action. `places` holds the items' places."""
    instants = _instants(numpy_column(events, "user_id"), numpy_column(events, "time_ms"), places)
    found = np.zeros(len(instants), dtype=bool)
    found[instants[has_action(events, [action])]] = True
    return np.asarray(found[instants])


def _requests_of(
    config: PseudoRequestConfig, pool: _Pool, events: pa.Table, chosen: _Chosen, schema: pa.Schema
) -> tuple[pa.Table, Ints]:
    """Returns a bucket's requests and the number of drawn items of each request. Requests are sorted by user, time and
    row of the event."""
    places = find_ids(pool.item_ids, numpy_column(events, "item_id"))
    owned = _Owned(_numbers_of(numpy_column(events, "user_id")), places, len(pool.item_ids))
    request_ms = np.minimum(chosen.time, numpy_column(events, "received_ms")[chosen.row])
    by_time = np.lexsort((chosen.row, request_ms, chosen.user))
    chosen, request_ms = chosen.take(by_time), request_ms[by_time]
    step = max(1, DRAWS_AT_ONCE // (_DRAWS_PER_CANDIDATE * config.candidates))
    parts = [slice(first, first + step) for first in range(0, len(chosen.row), step)]
    drawn = [found for part in parts for found in _draw(config, pool, chosen.take(part), owned)]
    num_others = np.array([len(found) for found in drawn], dtype=np.int64)
    # The arrays hold the chosen items of all requests, then all drawn items. `order` groups them by request.
    request_of = np.concatenate([np.arange(len(drawn)), np.repeat(np.arange(len(drawn)), num_others)])
    items = pool.item_ids[np.concatenate([chosen.item, *drawn])]
    is_true = np.arange(len(items)) < len(drawn)
    user, time, true = (each[request_of] for each in (chosen.user, chosen.time, pool.item_ids[chosen.item]))
    keys = bits(config.seed, _STREAM_ORDER, user, time, true, items) if len(items) else items
    order = np.lexsort((items, keys, request_of))
    offsets = pa.array(offsets_of(num_others + 1).astype(np.int32))
    rows = pa.array(chosen.row)
    lists = {
        "item_id": pa.array(items[order]),
        "position": pa.nulls(len(items), pa.int32()),
        "weight": pa.array(np.ones(len(items), dtype=np.float32)),
        Label(config.label, 0).column: pa.array(is_true[order].astype(np.int8)),
    }
    for action in config.also:
        has_action = _requests_with(action, events, places)[chosen.row]
        lists[Label(action, 0).column] = pa.array((is_true & has_action[request_of])[order].astype(np.int8))
    columns = {
        "request": one_array(events["request"]).take(rows),
        "user_id": pa.array(chosen.user),
        "time_ms": pa.array(request_ms),
        "surface": encode(events["surface"]).take(rows).cast(NAMES),
        **{name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()},
    }
    return pa.table([columns[name] for name in schema.names], schema=schema), num_others
