"""The batch executor computes the features of many requests and their candidates from stored data.

Requests may be given in any order. The executor computes them user by user, in chunks that limit memory, and returns
the results in the given order. A request is never split between chunks. The values of a request do not depend on the
chunk in which the request is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from tackboard.core.errors import DataError, UsageError
from tackboard.events.dataset import Dataset
from tackboard.features.column import Column, join_columns, offsets_of, ranges
from tackboard.features.entity_tables import EntityTable, EventTable, Lookup, load_tables, with_default
from tackboard.features.execution import Program
from tackboard.features.folding import FoldedTable, fold
from tackboard.features.frame import Frame
from tackboard.features.plan import CANDIDATE, Plan
from tackboard.features.types import ID, TIME
from tackboard.features.views import Positions, no_events, visible_before

EVENTS_PER_CHUNK = 1 << 22
"""Largest number of events in a chunk. If a user has several requests in the chunk, the user's events count once for
each request. A chunk with only one request may have more events."""
CANDIDATES_PER_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRows:
    """Holds R requests and their C candidates. If `item_ids` is None, there are no candidates.

    `request_of` [C] holds the position of each candidate's request, in ascending order. If `request_of` is None, every
    request has exactly one candidate. The columns in `context` have one value per request.
    """

    user_ids: Positions
    request_ms: Positions
    item_ids: Positions | None = None
    request_of: Positions | None = None
    context: Mapping[str, Column] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        count, of = 0 if self.item_ids is None else len(self.item_ids), self.request_of
        fits = self.item_ids is None or count == len(self.user_ids)
        if of is not None:
            rises = len(of) == count and not (of[1:] < of[:-1]).any()
            fits = rises and (count == 0 or (of[0] >= 0 and of[-1] < len(self.user_ids)))
        if not fits:
            raise UsageError(
                "candidates do not fit their requests", allowed="give one request_of per candidate, in ascending order"
            )

    def candidate_counts(self) -> Positions:
        """Returns the number of candidates of each request [R]."""
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
        if events is None and plan.reads_events:
            index = next(index for index, node in enumerate(plan.nodes) if node.op == "events")
            raise DataError(
                f"feature {plan.readers(index)[0]} reads events, but the table of events is not in the data"
            )
        self.plan = plan
        self.events = events
        given = {"user": users, "item": items}
        self.tables: dict[str, list[EntityTable | FoldedTable]] = {
            entity: [] if table is None else [*table.parts()] for entity, table in given.items()
        }
        self._prepare(plan)

    @classmethod
    def over(cls, dataset: Dataset, plan: Plan) -> BatchExecutor:
        """Makes an executor over a dataset. Loads only the columns that `plan` reads."""
        events, users, items = load_tables(dataset, plan)
        return cls(plan, events=events, users=users, items=items)

    def _prepare(self, plan: Plan) -> None:
        self.program = Program(plan)
        self._sources = [
            (str(node.params["entity"]), str(node.params["column"]), node.params.get("default"))
            for _, node in plan.sources()
        ]

    def _fold(self, entity: str, num_rows: int) -> None:
        """Folds the entity's tables (see folding.py), except tables with more rows than the batch (`num_rows`)."""
        for place, table in enumerate(self.tables[entity]):
            if isinstance(table, EntityTable) and num_rows >= len(table.ids):
                plan, self.tables[entity][place] = fold(self.program.plan, entity, table)
                self._prepare(plan)

    def compute(self, rows: RequestRows) -> dict[str, Column]:
        """Returns all features by name: a value per candidate for features of candidate level, else one per request."""
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

    def chunks(self, rows: RequestRows) -> Iterator[tuple[Positions | None, dict[str, Column]]]:
        """Yields (positions of the chunk's requests, features of these requests) for each chunk.

        If a single chunk holds all requests in their given order, the positions are None.
        """
        self._fold("user", len(rows.user_ids))
        self._fold("item", 0 if rows.item_ids is None else len(rows.item_ids))
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
            part = RequestRows(
                user_ids=rows.user_ids[chosen],
                request_ms=rows.request_ms[chosen],
                item_ids=None if rows.item_ids is None else rows.item_ids[ranges(first[chosen], counts[chosen])],
                request_of=None
                if rows.request_of is None
                else np.repeat(np.arange(len(chosen), dtype=np.int64), counts[chosen]),
                context={name: column.take(chosen) for name, column in rows.context.items()},
            )
            yield chosen, self._compute(part, owners[chosen])

    def _compute(self, rows: RequestRows, owners: Positions) -> dict[str, Column]:
        num_requests = len(rows.user_ids)
        events, visible = None, no_events(num_requests)
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

    def _columns(
        self, rows: RequestRows, request_of: Positions, events: EventTable | None
    ) -> dict[tuple[str, str], Column]:
        columns: dict[tuple[str, str], Column] = {}
        item_ids = np.zeros(0, dtype=np.int64) if rows.item_ids is None else rows.item_ids
        ids = {"user": rows.user_ids, "item": item_ids}
        lookups: dict[tuple[str, int], Lookup] = {}
        for entity, name, default in self._sources:
            key = (entity, name)
            if entity == "event" and events is not None and name in events.columns:
                columns[key] = events.columns[name]
            elif entity == "request":
                columns[key] = Column(TIME, rows.request_ms)
            elif entity == "context" and name in rows.context:
                column = rows.context[name]
                columns[key] = column if default is None else with_default(column, default)
            elif name == "id" and entity in ids:
                columns[key] = Column(ID, ids[entity])
            elif entity in ids:
                times = rows.request_ms if entity == "user" else rows.request_ms[request_of]
                for place, table in enumerate(self.tables[entity]):
                    if name in table.columns:
                        if (entity, place) not in lookups:
                            lookups[entity, place] = table.lookup(ids[entity], times)
                        columns[key] = lookups[entity, place](name, default)
        return columns


def _cuts(weight: Positions, counts: Positions) -> list[int]:
    """Returns the bounds of the chunks. Only a chunk with a single request may exceed the limits."""
    bounds, events, candidates = [0], 0, 0
    if int(weight.sum()) <= EVENTS_PER_CHUNK and int(counts.sum()) <= CANDIDATES_PER_CHUNK:
        return [0, len(weight)]
    for position, (seen, count) in enumerate(zip(weight.tolist(), counts.tolist(), strict=True)):
        if position > bounds[-1] and (events + seen > EVENTS_PER_CHUNK or candidates + count > CANDIDATES_PER_CHUNK):
            bounds.append(position)
            events, candidates = 0, 0
        events, candidates = events + seen, candidates + count
    return [*bounds, len(weight)]
