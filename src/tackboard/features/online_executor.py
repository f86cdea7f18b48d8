"""The online executor computes the features of one request with thousands of candidates.

With each request, the caller gives the user's history, the time and the context. Attributes of the user and of the
candidates come from tables in memory, or from the caller. Values that do not depend on the candidate are computed once
per request, and each kernel handles all candidates in one call. The online executor and the batch executor share the
code in execution.py and the kernels, so they give the same values, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tackboard.core.errors import UsageError
from tackboard.features.column import Column
from tackboard.features.entity_tables import EntityTable, with_default
from tackboard.features.execution import Program
from tackboard.features.folding import FoldedRequestTable, fold
from tackboard.features.frame import Frame
from tackboard.features.plan import Plan
from tackboard.features.types import ID, TIME
from tackboard.features.views import Positions, View

Columns = Mapping[str, Column]
_NOTHING = np.zeros(0, dtype=np.int64)
_ZERO = np.zeros(1, dtype=np.int64)
_IDS = (("user", "id"), ("item", "id"))


class OnlineExecutor:
    """Computes a plan for one request at a time. `compute` may be called from several threads.

    `users` and `items` are tables in memory. If a table is given, the attributes come from that table, and expressions
    that depend only on these attributes are computed once, in the constructor. If no table is given, the caller
    gives the attributes with each request.
    """

    def __init__(self, plan: Plan, *, users: EntityTable | None = None, items: EntityTable | None = None) -> None:
        self.plan = plan
        self.tables: list[tuple[str, FoldedRequestTable]] = []
        for entity, whole in (("user", users), ("item", items)):
            for table in [] if whole is None else whole.parts():
                plan, folded = fold(plan, entity, table)
                self.tables.append((entity, folded.for_requests()))
        self.program = Program(plan)
        self._needs_times = plan.needs_event_times
        # Holds (entity, column, default) of each column that the caller gives with a request.
        self._given: list[tuple[str, str, Any]] = []
        looked_up = {(entity, name) for entity, folded_table in self.tables for name in folded_table.names}
        for _, node in plan.sources():
            entity, name = str(node.params["entity"]), str(node.params["column"])
            if (entity, name) not in looked_up and entity != "request" and (entity, name) not in _IDS:
                self._given.append((entity, name, node.params.get("default")))

    def compute(
        self,
        *,
        history: Columns | None = None,
        request_ms: int | None = None,
        user_id: int = 0,
        item_ids: Positions = _NOTHING,
        user: Columns | None = None,
        item: Columns | None = None,
        context: Columns | None = None,
    ) -> dict[str, Column]:
        """Returns all features by name: one value per candidate for features of candidate level, else one value.

        `history` holds the columns of the user's events: the columns that the plan reads, and `time` if the plan needs
        times. The events must be sorted by (time, order).
        """
        given = {"event": history or {}, "user": user or {}, "item": item or {}, "context": context or {}}
        times = _times(history or {}, needed=self._needs_times)
        moment = None if request_ms is None else np.array([request_ms], dtype=np.int64)
        ids = {"user": np.array([user_id], dtype=np.int64), "item": item_ids}
        columns = {("user", "id"): Column(ID, ids["user"]), ("item", "id"): Column(ID, item_ids)}
        if moment is not None:
            columns["request", "time"] = Column(TIME, moment)
        for entity, table in self.tables:
            for name, column in table.read(ids[entity], request_ms).items():
                columns[entity, name] = column
        num_rows = {"event": len(times), "user": 1, "item": len(item_ids), "context": 1}
        for entity, name, default in self._given:
            brought = given[entity].get(name)
            if brought is None:
                continue
            if len(brought) != num_rows[entity]:
                raise UsageError(
                    f"{entity}.{name} has {len(brought)} values", allowed=f"give {num_rows[entity]} values"
                )
            columns[entity, name] = brought if default is None else with_default(brought, default)
        end = np.array([len(times)], dtype=np.int64)
        frame = Frame(
            num_requests=1,
            num_candidates=len(item_ids),
            request_of=None,
            request_ms=moment,
            event_times=times,
            visible=View(None, _ZERO, end, _ZERO, np.array([0, len(times)], dtype=np.int64)),
            columns=columns,
        )
        return self.program.run(frame)


def _times(history: Columns, *, needed: bool) -> Positions:
    """Returns the times of the events, or zeros if the history has no times and the features do not need them."""
    if "time" in history:
        return history["time"].values
    if needed and history:
        raise UsageError(
            "the history has no times, and these features depend on them", allowed="give the times of the history"
        )
    return np.zeros(len(next(iter(history.values()))), dtype=np.int64) if history else _NOTHING
