"""The online executor computes features of one request with thousands of candidates.

With each request, the caller gives the user's history, the time and the context. Attributes of the user and of the
candidates come from a table in memory, or the caller gives them too. The user's side is computed once, and the
candidates' side is vectorised. The executor runs the same kernels as the batch executor in the same loop, and gives
equal bits.
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

    `users` and `items` are tables in memory. If a table is given, attributes come from it, and expressions that depend
    only on these attributes are computed once, in the constructor. Otherwise attributes come with each request.
    """

    def __init__(self, plan: Plan, *, users: EntityTable | None = None, items: EntityTable | None = None) -> None:
        self.plan = plan
        self.tables: dict[str, FoldedRequestTable] = {}
        for entity, table in (("user", users), ("item", items)):
            if table is not None:
                plan, folded = fold(plan, entity, table)
                self.tables[entity] = folded.for_requests()
        self.program = Program(plan)
        self._needs_times = plan.needs_event_times
        # The columns that come with a request: (entity, column, default).
        self._given: list[tuple[str, str, Any]] = []
        for _, node in plan.sources():
            entity, name = str(node.params["entity"]), str(node.params["column"])
            looked_up = entity in self.tables and name in self.tables[entity].names
            if not looked_up and entity != "request" and (entity, name) not in _IDS:
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
        """Returns every feature: a value per candidate for features of candidate level, else one value.

        `history` holds the user's events in the order (time, order): the column `time` and the columns that the plan
        reads.
        """
        given = {"event": history or {}, "user": user or {}, "item": item or {}, "context": context or {}}
        times = _times(history or {}, needed=self._needs_times)
        moment = None if request_ms is None else np.array([request_ms], dtype=np.int64)
        ids = {"user": np.array([user_id], dtype=np.int64), "item": item_ids}
        columns = {("user", "id"): Column(ID, ids["user"]), ("item", "id"): Column(ID, item_ids)}
        if moment is not None:
            columns["request", "time"] = Column(TIME, moment)
        for entity, table in self.tables.items():
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
    """Returns the times of the events. A history may lack times if the features need only the order of the events."""
    if "time" in history:
        return history["time"].values
    if needed and history:
        raise UsageError(
            "the history has no times, and these features depend on them", allowed="give the times of the history"
        )
    return np.zeros(len(next(iter(history.values()))), dtype=np.int64) if history else _NOTHING
