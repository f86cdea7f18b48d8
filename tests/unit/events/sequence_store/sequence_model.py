"""What a store should hold, as plain lists: the slow twin that the tests compare with. Also: events to fill one."""

from __future__ import annotations

from typing import Any

from tackboard.events.sequence_store.config import StoreConfig

FIELDS = {"request": "int", "position": "int", "dwell": "float", "is_paid": "bool", "query": "string"}
SMALL = StoreConfig(fields=FIELDS, max_events=50, max_recent=7, chunk_events=10)
"""So small that a few dozen events fill the buffer, many chunks and the cap."""


def event(time_ms: int, item_id: int = 1, **values: Any) -> dict[str, Any]:
    """An event with every field given."""
    usual = {
        "item_id": item_id,
        "action": "click",
        "surface": "home",
        "time_ms": time_ms,
        "received_ms": time_ms,
        "request": None,
        "position": None,
        "dwell": None,
        "is_paid": None,
        "query": None,
    }
    return {**usual, **values}


class Model:
    """What a store should hold: a plain list per user. The slow twin that tests compare with."""

    def __init__(self, max_events: int) -> None:
        self.max_events = max_events
        self.users: dict[int, list[dict[str, Any]]] = {}

    def append(self, user: int, events: list[dict[str, Any]]) -> int:
        """Takes events in; how many were duplicates."""
        held = self.users.setdefault(user, [])
        num_duplicates = 0
        for new in events:
            if any(_identity(new) == _identity(old) for old in held):
                num_duplicates += 1
            else:
                held.append(new)
        held.sort(key=lambda e: e["time_ms"])
        del held[: -self.max_events]
        return num_duplicates

    def read(
        self,
        user: int,
        last: int | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        received_before_ms: int | None = None,
    ) -> list[dict[str, Any]]:
        found = [
            e
            for e in self.users.get(user, [])
            if (since_ms is None or e["time_ms"] >= since_ms)
            and (until_ms is None or e["time_ms"] < until_ms)
            and (received_before_ms is None or e["received_ms"] < received_before_ms)
        ]
        return found if last is None else found[-last:]


def _identity(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "received_ms"}
