"""Replay takes a log of served features and a dataset, and reports every difference between serving and training.

The batch executor computes the features of each logged request again. It sees exactly the events received before the
request. The result is compared bit for bit with the served features. A difference has one of three reasons:

    late        The difference vanishes if the batch executor also sees late events, which happened before the request
                but were received after it. Either the server received these events earlier than the log did, or the
                received times in the dataset are wrong.
    attributes  The feature reads attributes of the user or item, and the dataset has none for the request's time.
    skew        Any other difference. Serving and training compute different values.

Decided: requests with late events are reported even if no feature differs. In that case the served features are right,
and the report explains why the dataset now holds more events before the request than the server saw. Requests of users
who are not in the dataset are counted, but not compared. If no request could be compared, replay ends with an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column, Mask, bits, differing_rows, join_columns, offsets_of, ranges
from tackboard.features.entity_tables import EVENT_COLUMNS, EventTable, find_ids, load_tables
from tackboard.features.feature_set import FeatureSet
from tackboard.features.plan import CANDIDATE, Plan
from tackboard.features.serving_log import (
    LoggedRequest,
    column_digest,
    context_types,
    open_log,
    private_features,
    user_digest,
)
from tackboard.features.types import FeatureType
from tackboard.features.views import Positions

LATE, ATTRIBUTES, SKEW = "late", "attributes", "skew"
REQUESTS_PER_GROUP = 512
CANDIDATES_PER_GROUP = 1 << 18
SHOWN_CHARACTERS = 120
HIDDEN = "(computed from the user's id: not shown)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkewExample:
    """A served and a recomputed value that differ. `item` is the candidate's id, or None for a value of the request."""

    reason: str
    served: str
    recomputed: str
    request_ms: int
    user: str
    item: int | None


@dataclasses.dataclass(kw_only=True)
class FeatureResult:
    """The result of comparing one feature."""

    compared: int = 0
    mismatches: dict[str, int] = dataclasses.field(default_factory=lambda: {SKEW: 0, LATE: 0, ATTRIBUTES: 0})
    examples: list[SkewExample] = dataclasses.field(default_factory=list)

    @property
    def num_mismatches(self) -> int:
        """The number of values that differ, for any reason."""
        return sum(self.mismatches.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateRequest:
    """A request with late events, which are events that happened before the request and were received after it."""

    user: str
    request_ms: int
    num_events: int
    first_time_ms: int
    first_received_ms: int


@dataclasses.dataclass(kw_only=True)
class ReplayReport:
    """The result of a replay. `late_requests` and `examples` hold only the first few cases; the counts are complete."""

    num_files: int = 0
    torn_files: list[str] = dataclasses.field(default_factory=list)
    feature_sets: list[str] = dataclasses.field(default_factory=list)
    num_requests: int = 0
    num_compared: int = 0
    num_unknown_users: int = 0
    num_late: int = 0
    late_requests: list[LateRequest] = dataclasses.field(default_factory=list)
    num_without_attributes: int = 0
    not_compared: dict[str, str] = dataclasses.field(default_factory=dict)
    features: dict[str, FeatureResult] = dataclasses.field(default_factory=dict)

    @property
    def num_values(self) -> int:
        """The number of compared values of all features."""
        return sum(result.compared for result in self.features.values())

    @property
    def num_mismatches(self) -> int:
        """The number of values that differ, summed over all features."""
        return sum(result.num_mismatches for result in self.features.values())

    def worst(self) -> tuple[str, FeatureResult]:
        """Returns the feature with the most differences whose reason is skew. In a tie, the feature with more
        differences in total wins."""
        return max(self.features.items(), key=lambda entry: (entry[1].mismatches[SKEW], entry[1].num_mismatches))

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON, with the totals."""
        totals = {"num_values": self.num_values, "num_mismatches": self.num_mismatches}
        return totals | dataclasses.asdict(self)

    def text(self) -> str:
        """Returns the report as text for people."""
        lines = [
            f"{self.num_requests:,} requests in {self.num_files} files, feature set {', '.join(self.feature_sets)}",
            f"{self.num_compared:,} requests compared, {self.num_values:,} values, {self.num_mismatches:,} differ",
        ]
        lines += [f"{name}: its last line was cut short, usually by a killed server" for name in self.torn_files]
        if self.num_unknown_users:
            lines.append(f"{self.num_unknown_users:,} requests not compared: the dataset does not know their users")
        if self.num_without_attributes:
            lines.append(f"{self.num_without_attributes:,} requests for which the dataset has no attributes")
        lines += [f"feature {name} not compared: {reason}" for name, reason in self.not_compared.items()]
        for name, result in self.features.items():
            if result.num_mismatches:
                lines += _feature_lines(name, result)
        if self.num_late:
            lines.append(
                f"{self.num_late:,} requests have late events (happened before the request, received after it):"
            )
            lines += [_late_line(late) for late in self.late_requests]
        return "\n".join(lines)


def replay(
    log: Path, dataset: Dataset, key: bytes, *, max_requests: int | None = None, num_examples: int = 3
) -> ReplayReport:
    """Compares the served features in `log` (a folder or a file) with features computed from `dataset`.

    The report lists at most `num_examples` late requests, and at most `num_examples` examples per feature. Raises
    DataError if a log file is damaged or was written with another key, or if no request could be compared.
    """
    files = open_log(log, key)
    report = ReplayReport(num_files=len(files))
    users = _Users(dataset, key)
    replayers: dict[str, _Replayer] = {}
    for file in files:
        if file.features is not None:
            name = file.features.hash
            if name not in replayers:
                replayers[name] = _Replayer(file.features, dataset, users, key, report, num_examples)
            for group in _groups(file.records(), report, max_requests):
                replayers[name].compare(group)
        if file.is_torn:
            report.torn_files.append(str(file.path))
    if report.num_requests and not report.num_compared:
        raise DataError(
            f"none of the {report.num_requests:,} requests could be compared: the dataset knows none of their users",
            fix="give the dataset that holds the log's users",
        )
    if not report.num_requests:
        raise DataError(f"{log} holds no complete record", fix="wait until the server has logged a request")
    return report


class _Users:
    """Finds users of the dataset by their keyed hash.

    Keeps the first 8 bytes of every hash, sorted by value, and the user ids in the same order.
    """

    def __init__(self, dataset: Dataset, key: bytes) -> None:
        ids = np.asarray(dataset.read_users(["user_id"])["user_id"].to_numpy(), dtype=np.int64)
        digests = b"".join(user_digest(key, user_id) for user_id in ids.tolist())
        heads = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)[:, 0]
        order = np.argsort(heads, kind="stable")
        self._heads, self._ids, self._key = heads[order], ids[order], key

    def find(self, digest: bytes) -> int | None:
        """Returns the id of the user with this keyed hash, or None."""
        head = np.frombuffer(digest[:8], dtype="<u8")[0] if len(digest) >= 8 else np.uint64(0)
        for place in range(int(np.searchsorted(self._heads, head)), len(self._heads)):
            if self._heads[place] != head:
                return None
            if user_digest(self._key, int(self._ids[place])) == digest:
                return int(self._ids[place])
        return None


class _Group:
    """Holds requests of known users for the batch executor. `request_of` [C] is the request of each candidate."""

    def __init__(
        self, requests: Sequence[LoggedRequest], user_ids: Positions, context: Mapping[str, FeatureType]
    ) -> None:
        self.requests = requests
        self.counts = np.array([len(request.item_ids) for request in requests], dtype=np.int64)
        self.request_of = np.repeat(np.arange(len(requests), dtype=np.int64), self.counts)
        self.rows = RequestRows(
            user_ids=user_ids,
            request_ms=np.array([request.request_ms for request in requests], dtype=np.int64),
            item_ids=np.concatenate([request.item_ids for request in requests]),
            request_of=self.request_of,
            context={name: _context_column(requests, name, type_) for name, type_ in context.items()},
        )


class _Replayer:
    """Computes the features of one feature set again and writes the differences into the report."""

    def __init__(
        self, features: FeatureSet, dataset: Dataset, users: _Users, key: bytes, report: ReplayReport, num_examples: int
    ) -> None:
        self.report = report
        self.key = key
        self.users = users
        self.num_examples = num_examples
        report.feature_sets.append(f"{features.name} version {features.version} ({features.hash[:12]})")
        absent = _absent_columns(dataset, features.plan)
        report.not_compared |= {
            name: f"the feature reads {what}, which the dataset does not have" for name, what in absent.items()
        }
        names = [name for name in features.plan.features if name not in absent]
        if not names:
            raise DataError(
                f"the dataset does not have {next(iter(absent.values()))}: no logged feature can be compared",
                fix="give the dataset that this model was trained on",
            )
        self.plan = features.plan.trimmed(names)
        self.private = private_features(self.plan)
        self.context = context_types(self.plan)
        self.events, user_table, item_table = load_tables(dataset, self.plan)
        self.tables = {"user": user_table, "item": item_table}
        self.attribute_readers = {
            entity: self.plan.column_readers(entity, lambda column: column != "id") for entity in self.tables
        }
        for name in names:
            report.features.setdefault(name, FeatureResult())

    def compare(self, requests: Sequence[LoggedRequest]) -> None:
        """Compares the served features of `requests` with recomputed features."""
        found = [self.users.find(request.user) for request in requests]
        known = [request for request, user_id in zip(requests, found, strict=True) if user_id is not None]
        self.report.num_unknown_users += len(requests) - len(known)
        self.report.num_compared += len(known)
        if not known:
            return
        user_ids = np.array([user_id for user_id in found if user_id is not None], dtype=np.int64)
        group = _Group(known, user_ids, self.context)
        events = None if self.events is None else _events_of(self.events, user_ids)
        if events is not None:
            self._note_late(group, events)
        lacking = self._lacking(group)
        recomputed = self._compute(group, events)
        differing = {name: self._differing(name, group, recomputed[name]) for name in self.plan.features}
        for name in self.plan.features:
            self.report.features[name].compared += len(group.request_of if self._per_candidate(name) else known)
        if any(len(places) for places in differing.values()):
            with_late = recomputed if events is None else self._compute(group, _with_late(events))
            for name, places in differing.items():
                is_late = ~np.isin(places, self._differing(name, group, with_late[name]))
                reasons = np.where(is_late, LATE, np.where(lacking[name][places], ATTRIBUTES, SKEW))
                self._note(name, group, places, reasons, recomputed[name])

    def _compute(self, group: _Group, events: EventTable | None) -> dict[str, Column]:
        executor = BatchExecutor(self.plan, events=events, users=self.tables["user"], items=self.tables["item"])
        return executor.compute(group.rows)

    def _per_candidate(self, name: str) -> bool:
        """Whether a feature is compared per candidate. A feature that reads the user's id is compared per request."""
        return self.plan.nodes[self.plan.features[name]].level == CANDIDATE and name not in self.private

    def _differing(self, name: str, group: _Group, recomputed: Column) -> Positions:
        """Returns the positions (of candidates or of requests) at which a feature differs from the served value."""
        if name not in self.private:
            return differing_rows(join_columns([request.features[name] for request in group.requests]), recomputed)
        is_candidate = self.plan.nodes[self.plan.features[name]].level == CANDIDATE
        bounds = offsets_of(group.counts if is_candidate else np.ones_like(group.counts))
        differ = [
            column_digest(self.key, recomputed.take(np.arange(start, end))) != request.digests[name]
            for request, start, end in zip(group.requests, bounds[:-1], bounds[1:], strict=True)
        ]
        return np.flatnonzero(np.array(differ, dtype=np.bool_))

    def _lacking(self, group: _Group) -> dict[str, Mask]:
        """Returns, for each feature, a mask of the rows for which the dataset lacks attributes that the feature reads.

        Adds the number of requests with absent attributes to the report.
        """
        num_requests = len(group.requests)
        users, items = np.zeros(num_requests, dtype=np.bool_), np.zeros(len(group.request_of), dtype=np.bool_)
        rows = group.rows
        if self.tables["user"] is not None:
            users = self.tables["user"].places(rows.user_ids, rows.request_ms) < 0
        if self.tables["item"] is not None and rows.item_ids is not None:
            items = self.tables["item"].places(rows.item_ids, rows.request_ms[group.request_of]) < 0
        any_item = np.bincount(group.request_of[items], minlength=num_requests) > 0
        self.report.num_without_attributes += int((users | any_item).sum())
        result = {}
        for name in self.plan.features:
            of_user = users & (name in self.attribute_readers["user"])
            reads_item = name in self.attribute_readers["item"]
            if self._per_candidate(name):
                result[name] = of_user[group.request_of] | (items & reads_item)
            else:
                result[name] = of_user | (any_item & reads_item)
        return result

    def _note_late(self, group: _Group, events: EventTable) -> None:
        """Counts the requests that have late events, and lists the first few of these requests in the report."""
        owners = events.owners_of(group.rows.user_ids)
        for request, owner in zip(group.requests, owners.tolist(), strict=True):
            if owner < 0:
                continue
            chosen = slice(int(events.offsets[owner]), int(events.offsets[owner + 1]))
            times, received = events.times[chosen], events.received[chosen]
            late = np.flatnonzero((times < request.request_ms) & (received >= request.request_ms))
            if not len(late):
                continue
            self.report.num_late += 1
            if len(self.report.late_requests) < self.num_examples:
                self.report.late_requests.append(
                    LateRequest(
                        user=request.user.hex(),
                        request_ms=request.request_ms,
                        num_events=len(late),
                        first_time_ms=int(times[late[0]]),
                        first_received_ms=int(received[late[0]]),
                    )
                )

    def _note(self, name: str, group: _Group, places: Positions, reasons: Any, recomputed: Column) -> None:
        result = self.report.features[name]
        for reason in result.mismatches:
            result.mismatches[reason] += int((reasons == reason).sum())
        per_candidate = self._per_candidate(name)
        for place, reason in zip(places.tolist(), reasons.tolist(), strict=True):
            if len(result.examples) >= self.num_examples:
                return
            number = int(group.request_of[place]) if per_candidate else place
            request = group.requests[number]
            within = place - int(offsets_of(group.counts)[number]) if per_candidate else 0
            served, again = HIDDEN, HIDDEN
            if name not in self.private:
                served, again = _as_text(request.features[name], within, recomputed, place)
            result.examples.append(
                SkewExample(
                    reason=reason,
                    served=served,
                    recomputed=again,
                    request_ms=request.request_ms,
                    user=request.user.hex(),
                    item=int(request.item_ids[within]) if per_candidate else None,
                )
            )


def _groups(
    records: Iterator[LoggedRequest], report: ReplayReport, max_requests: int | None
) -> Iterator[list[LoggedRequest]]:
    """Yields the records in groups that fit into memory. The report counts the records. Stops at `max_requests`."""
    group: list[LoggedRequest] = []
    num_candidates = 0
    for record in records:
        if max_requests is not None and report.num_requests >= max_requests:
            break
        report.num_requests += 1
        group.append(record)
        num_candidates += len(record.item_ids)
        if len(group) >= REQUESTS_PER_GROUP or num_candidates >= CANDIDATES_PER_GROUP:
            yield group
            group, num_candidates = [], 0
    if group:
        yield group


def _absent_columns(dataset: Dataset, plan: Plan) -> dict[str, str]:
    """Returns the features that need a column that the dataset lacks, and maps each to its first absent column."""
    stored: dict[str, set[str]] = {"event": {*EVENT_COLUMNS, *dataset.fields}}
    for entity in ("user", "item"):
        history, newest = dataset.path / f"{entity}_history.parquet", dataset.path / f"{entity}s.parquet"
        stored[entity] = {"id", *pq.read_schema(history if history.exists() else newest).names}
    absent: dict[str, str] = {}
    for index, node in plan.sources():
        entity, column = str(node.params["entity"]), str(node.params["column"])
        if entity in stored and column not in stored[entity]:
            for name in plan.readers(index):
                absent.setdefault(name, f"{'events' if entity == 'event' else entity}.{column}")
    return absent


def _context_column(requests: Sequence[LoggedRequest], name: str, type_: FeatureType) -> Column:
    nothing = Column.of(type_, [None])
    return join_columns([request.context.get(name, nothing) for request in requests])


def _events_of(events: EventTable, user_ids: Positions) -> EventTable:
    """Returns the events of the given users only."""
    chosen = np.unique(user_ids)
    owners = find_ids(events.user_ids, chosen)
    owners = owners[owners >= 0]
    lengths = np.diff(events.offsets)[owners]
    window = ranges(events.offsets[owners], lengths)
    return EventTable(
        user_ids=events.user_ids[owners],
        offsets=offsets_of(lengths),
        times=events.times[window],
        received=events.received[window],
        columns={name: column.take(window) for name, column in events.columns.items()},
    )


def _with_late(events: EventTable) -> EventTable:
    """Returns the same events, as if every event had been received at the moment it happened, or earlier."""
    return dataclasses.replace(events, received=np.minimum(events.received, events.times))


def _as_text(served: Column, served_row: int, recomputed: Column, row: int) -> tuple[str, str]:
    """Returns two different values as texts. If the texts would be the same, the bits of the values are added."""
    one, other = served.take(np.array([served_row])), recomputed.take(np.array([row]))
    texts = [repr(column.to_pylist()[0]) for column in (one, other)]
    if texts[0] == texts[1] and one.fields is None:
        texts = [
            f"{text} (bits {bits(column).tobytes().hex()})" for text, column in zip(texts, (one, other), strict=True)
        ]
    # If the values are long, show the part in which they begin to differ.
    pairs = enumerate(zip(*texts, strict=False))
    same = next((place for place, (left, right) in pairs if left != right), 0)
    start = 0 if same < SHOWN_CHARACTERS - 20 else same - 20
    shown = [("…" if start else "") + text[start : start + SHOWN_CHARACTERS] for text in texts]
    return shown[0], shown[1]


def _feature_lines(name: str, result: FeatureResult) -> list[str]:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in result.mismatches.items() if count)
    lines = [f"feature {name}: {result.num_mismatches:,} of {result.compared:,} values differ ({reasons})"]
    for example in result.examples:
        item = "" if example.item is None else f", item {example.item}"
        lines.append(
            f"  {example.reason}: served {example.served}, recomputed {example.recomputed}; "
            f"request at {example.request_ms}, user {example.user}{item}"
        )
    return lines


def _late_line(late: LateRequest) -> str:
    return (
        f"  request at {late.request_ms}, user {late.user}: {late.num_events:,} late events, "
        f"the first happened at {late.first_time_ms} and was received at {late.first_received_ms}"
    )
