"""The batch executor: features of many requests, each with candidates, from stored data.

Rows may come in any order. They are computed user after user, in chunks that bound memory; what comes back has the
order that was given. A chunk holds whole requests, and a request's values do not depend on which chunk it fell into.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tackboard.features.column import Column, offsets_of, ranges
from tackboard.features.execution import Program
from tackboard.features.frame import Frame
from tackboard.features.plan import CANDIDATE, Plan
from tackboard.features.tables import EntityTable, EventTable, with_default
from tackboard.features.types import ID, TIME
from tackboard.features.views import Positions, View, visible_before

EVENTS_PER_CHUNK = 1 << 22
"""Events that the requests of one chunk see, together, at most; one request may see more."""
CANDIDATES_PER_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """R requests and their C candidates. `request_of` [C] rises; None stands for one candidate per request.

    `context` holds a value per request. `item_ids` None: there are no candidates.
    """

    user_ids: Positions
    request_ms: Positions
    item_ids: Positions | None = None
    request_of: Positions | None = None
    context: Mapping[str, Column] = dataclasses.field(default_factory=dict)

    def candidate_counts(self) -> Positions:
        """Candidates of each request [R]."""
        if self.item_ids is None:
            return np.zeros(len(self.user_ids), dtype=np.int64)
        if self.request_of is None:
            return np.ones(len(self.user_ids), dtype=np.int64)
        return np.bincount(self.request_of, minlength=len(self.user_ids)).astype(np.int64)


class BatchExecutor:
    """Computes a plan over stored tables."""

    def __init__(
        self,
        plan: Plan,
        *,
        events: EventTable | None = None,
        users: EntityTable | None = None,
        items: EntityTable | None = None,
    ) -> None:
        self.plan = plan
        self.program = Program(plan)
        self.events = events
        self.users = users
        self.items = items
        self._sources = [
            (str(node.params["entity"]), str(node.params["column"]), node.params.get("default"))
            for _, node in plan.sources()
        ]

    def compute(self, rows: Rows) -> dict[str, Column]:
        """Every feature: a value per request, or per candidate where the feature is of that level."""
        parts = list(self.chunks(rows))
        if len(parts) == 1 and parts[0][0] is None:
            return parts[0][1]
        requests = np.concatenate([chosen for chosen, _ in parts if chosen is not None])
        first = offsets_of(rows.candidate_counts())
        candidates = ranges(first[requests], np.diff(first)[requests])
        result = {}
        for name, index in self.plan.features.items():
            order = candidates if self.plan.nodes[index].level == CANDIDATE else requests
            joined = join_columns([columns[name] for _, columns in parts])
            back = np.empty(len(order), dtype=np.int64)
            back[order] = np.arange(len(order))
            result[name] = joined.take(back)
        return result

    def chunks(self, rows: Rows) -> Iterator[tuple[Positions | None, dict[str, Column]]]:
        """(positions of the requests, their features) chunk by chunk; None stands for all, in the given order."""
        owners = np.zeros(len(rows.user_ids), dtype=np.int64)
        counts = rows.candidate_counts()
        weight = np.zeros(len(rows.user_ids), dtype=np.int64)
        if self.events is not None:
            owners = self.events.owners_of(rows.user_ids)
            weight = np.where(owners >= 0, np.diff(self.events.offsets)[owners] if len(self.events.user_ids) else 0, 0)
        order = np.argsort(owners, kind="stable")
        bounds = _cuts(weight[order], counts[order])
        if len(bounds) == 2:
            yield None, self._compute(rows, owners)
            return
        first = offsets_of(counts)
        for begin, end in itertools.pairwise(bounds):
            chosen = order[begin:end]
            part = Rows(
                user_ids=rows.user_ids[chosen],
                request_ms=rows.request_ms[chosen],
                item_ids=None if rows.item_ids is None else rows.item_ids[ranges(first[chosen], counts[chosen])],
                request_of=None
                if rows.request_of is None
                else np.repeat(np.arange(len(chosen), dtype=np.int64), counts[chosen]),
                context={name: column.take(chosen) for name, column in rows.context.items()},
            )
            yield chosen, self._compute(part, owners[chosen])

    def _compute(self, rows: Rows, owners: Positions) -> dict[str, Column]:
        num_requests = len(rows.user_ids)
        events, visible = None, _no_events(num_requests)
        if self.events is not None:
            known = owners[owners >= 0]
            low, high = (int(known.min()), int(known.max()) + 1) if len(known) else (0, 0)
            events = self.events.slice(low, high)
            local = np.where(owners >= 0, owners - low, -1)
            visible = visible_before(events.received, events.offsets, local, rows.request_ms)
        num_candidates = 0 if rows.item_ids is None else len(rows.item_ids)
        request_of = rows.request_of
        if request_of is None:
            request_of = np.arange(num_candidates, dtype=np.int64)
        frame = Frame(
            num_requests=num_requests,
            num_candidates=num_candidates,
            request_of=request_of,
            request_ms=rows.request_ms,
            event_times=np.zeros(0, dtype=np.int64) if events is None else events.times,
            visible=visible,
            columns=self._columns(rows, request_of, events),
        )
        return self.program.run(frame)

    def _columns(self, rows: Rows, request_of: Positions, events: EventTable | None) -> dict[tuple[str, str], Column]:
        columns: dict[tuple[str, str], Column] = {}
        item_ids = np.zeros(0, dtype=np.int64) if rows.item_ids is None else rows.item_ids
        for entity, name, default in self._sources:
            key = (entity, name)
            if entity == "event" and events is not None:
                columns[key] = events.columns[name]
            elif entity == "request":
                columns[key] = Column(TIME, rows.request_ms)
            elif entity == "context" and name in rows.context:
                column = rows.context[name]
                columns[key] = column if default is None else with_default(column, default)
            elif name == "id" and entity in ("user", "item"):
                columns[key] = Column(ID, rows.user_ids if entity == "user" else item_ids)
            elif entity == "user" and self.users is not None:
                columns[key] = self.users.lookup(name, rows.user_ids, rows.request_ms, default)
            elif entity == "item" and self.items is not None:
                columns[key] = self.items.lookup(name, item_ids, rows.request_ms[request_of], default)
        return columns


def join_columns(parts: Sequence[Column]) -> Column:
    """Columns of one type, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    present = None
    if any(part.present is not None for part in parts):
        present = np.concatenate([part.mask for part in parts])
    if first.fields is not None:
        fields = {name: join_columns([part.fields[name] for part in parts if part.fields]) for name in first.fields}
        return Column(first.type, first.values, present=present, fields=fields)
    dictionary = None
    values = [part.values for part in parts]
    if first.dictionary is not None:
        texts = [part.dictionary for part in parts if part.dictionary is not None]
        dictionary = np.concatenate(texts)
        shift = offsets_of(np.array([len(text) for text in texts], dtype=np.int64))
        values = [codes + start for codes, start in zip(values, shift[:-1], strict=True)]
    offsets = None
    if first.offsets is not None:
        offsets = offsets_of(np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None]))
    return Column(first.type, np.concatenate(values), present=present, offsets=offsets, dictionary=dictionary)


def _cuts(weight: Positions, counts: Positions) -> list[int]:
    """Where chunks begin and end, so that none is above its budget unless it is a single request."""
    bounds, events, candidates = [0], 0, 0
    if int(weight.sum()) <= EVENTS_PER_CHUNK and int(counts.sum()) <= CANDIDATES_PER_CHUNK:
        return [0, len(weight)]
    for position, (seen, count) in enumerate(zip(weight.tolist(), counts.tolist(), strict=True)):
        if position > bounds[-1] and (events + seen > EVENTS_PER_CHUNK or candidates + count > CANDIDATES_PER_CHUNK):
            bounds.append(position)
            events, candidates = 0, 0
        events, candidates = events + seen, candidates + count
    return [*bounds, len(weight)]


def _no_events(num_rows: int) -> View:
    nothing = np.zeros(num_rows, dtype=np.int64)
    return View(None, nothing, nothing, nothing, np.zeros(2, dtype=np.int64))
