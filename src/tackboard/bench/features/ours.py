"""The contender `tackboard` of `tackboard bench features` computes the features of `set.py` with our executors.

Contenders take the tables of `data.py` and return one column per feature, with a value per request or per candidate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tackboard.bench.features.data import World
from tackboard.bench.features.set import features
from tackboard.features.arrow import from_arrow, to_table
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column
from tackboard.features.entity_tables import EntityTable, EventTable
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.types import STRING, TIME

Answer = dict[str, Column]


def split(answer: Answer) -> tuple[pa.Table, pa.Table]:
    """Returns (features of requests, features of candidates) as Arrow tables."""
    levels = {feature.name: feature.level for feature in features.features()}
    rows = {name: column for name, column in answer.items() if levels[name] == "candidate"}
    return to_table({name: column for name, column in answer.items() if name not in rows}), to_table(rows)


class BatchContender:
    """Computes the features of many requests with few candidates each, with the batch executor."""

    def __init__(self, world: World) -> None:
        plan = features.plan
        self.events = EventTable.from_arrow(world.events, plan)
        self.users = EntityTable.from_arrow(world.users, "user", plan)
        self.items = EntityTable.from_arrow(world.items, "item", plan)
        self.rows = RequestRows(
            user_ids=world.requests["user_id"].to_numpy(),
            request_ms=world.requests["request_ms"].to_numpy(),
            item_ids=world.rows["item_id"].to_numpy(),
            request_of=world.rows["request"].to_numpy(),
            context={"device": from_arrow(world.requests["device"], STRING)},
        )

    def compute(self) -> Answer:
        """Computes all features. This call is timed."""
        # Every call makes a new executor, because an executor keeps the features of items that it has computed.
        executor = BatchExecutor(features.plan, events=self.events, users=self.users, items=self.items)
        return executor.compute(self.rows)

    to_arrow = staticmethod(split)


class OnlineContender:
    """Computes the features of one request at a time, with the online executor.

    If `prepared` is true, the constructor already computes the features that depend only on an item.
    """

    def __init__(self, world: World, *, prepared: bool) -> None:
        plan = features.plan
        items = EntityTable.from_arrow(world.items, "item", plan)
        self.executor = OnlineExecutor(plan, items=items if prepared else None)
        events = EventTable.from_arrow(world.events, plan)
        users = EntityTable.from_arrow(world.users, "user", plan)
        devices = from_arrow(world.requests["device"], STRING)
        starts = np.searchsorted(world.rows["request"].to_numpy(), np.arange(world.requests.num_rows + 1))
        self.requests: list[dict[str, Any]] = []
        for number, (user_id, request_ms) in enumerate(
            zip(world.requests["user_id"].to_pylist(), world.requests["request_ms"].to_pylist(), strict=True)
        ):
            owner = int(events.owners_of(np.array([user_id]))[0])
            history = events.slice(owner, owner + 1)
            of_user = users.lookup(np.array([user_id]), None)
            item_ids = world.rows["item_id"].to_numpy()[starts[number] : starts[number + 1]]
            request = {
                "history": {**history.columns, "time": Column(TIME, history.times)},
                "request_ms": request_ms,
                "user_id": user_id,
                "item_ids": item_ids,
                "user": {name: of_user(name, None) for name in users.columns},
                "context": {"device": devices.take(np.array([number]))},
            }
            if not prepared:
                of_items = items.lookup(item_ids, None)
                request["item"] = {name: _as_sent(of_items(name, None)) for name in items.columns}
            self.requests.append(request)

    def compute(self, number: int) -> Answer:
        """Computes all features of one request. This call is timed."""
        return self.executor.compute(**self.requests[number])

    to_arrow = staticmethod(split)


def _as_sent(column: Column) -> Column:
    """Returns a column as a request would send it: its dictionary holds only strings that occur in the column."""
    return column if column.dictionary is None else Column.of(column.type, column.to_pylist())
