"""This module defines the settings and the columns of a sequence store. They are fixed when the store is made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tackboard.core.config import did_you_mean
from tackboard.core.errors import CorruptFileError, UsageError
from tackboard.events.schema import FIELD_KINDS, FIELD_NAME_RULE, RESERVED_NAMES, is_field_name

BUILT_IN = {"item_id": "int", "action": "name", "surface": "name", "time_ms": "int", "received_ms": "int"}
"""Columns that every store has, and their kinds. A `name` is a string from a list that the whole store shares."""
KINDS = tuple(dict.fromkeys(FIELD_KINDS.values()))
MAX_FIELDS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The settings declare a store's columns and limit the number of events that it keeps for each user."""

    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps the name of each further column to its kind: `int`, `float`, `bool` or `string`. Declare `request` and
    `position` here if the store should keep them."""
    max_events: int = 16_000
    """Largest number of events that the store keeps for a user. The store drops the oldest events first."""
    max_recent: int = 64
    """Largest number of events in a user's buffer. The buffer holds recently appended events that are in no chunk yet.
    A read fetches the whole buffer. A full buffer is merged into the chunks."""
    chunk_events: int = 1024
    """Largest number of events in a chunk, a stored group of successive events. A read fetches whole columns of a
    chunk, but only the columns that it needs."""

    def __post_init__(self) -> None:
        for name in ("max_events", "max_recent", "chunk_events"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", allowed="allowed: 1 or more")
        if len(self.fields) > MAX_FIELDS:
            raise UsageError(f"the store declares {len(self.fields)} fields", allowed=f"allowed: at most {MAX_FIELDS}")
        for name, kind in self.fields.items():
            if not is_field_name(name) or (name in RESERVED_NAMES and name not in ("request", "position")):
                raise UsageError(
                    f"a field is named {name!r}", allowed=f"allowed: {FIELD_NAME_RULE}, but no built-in name"
                )
            if kind not in KINDS:
                raise UsageError(f"the field {name} is {kind!r}", allowed=f"allowed: {', '.join(KINDS)}")

    @property
    def columns(self) -> dict[str, str]:
        """Maps every column to its kind. On disk, a column is named by its position in this map."""
        return {**BUILT_IN, **self.fields}

    @property
    def recent_limit(self) -> int:
        """Largest number of events in the buffer: `max_recent`, but never more than `max_events`."""
        return min(self.max_recent, self.max_events)

    def require(self, names: Iterable[str]) -> list[str]:
        """Returns `names` without repeats. A name that the store does not have raises UsageError."""
        wanted = list(dict.fromkeys(names))
        known = self.columns
        for name in wanted:
            if name not in known:
                raise UsageError(
                    f"the store has no field {name!r}",
                    allowed=f"its fields: {', '.join(known)}",
                    fix=did_you_mean(name, known),
                )
        return wanted

    def to_json(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StoreConfig:
        """Does the inverse of `to_json`."""
        try:
            content: dict[str, Any] = json.loads(text)
            return cls(**content)
        except (ValueError, TypeError):
            raise CorruptFileError("the settings of the sequence store cannot be read") from None
