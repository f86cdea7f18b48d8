"""From what a caller sends to what a model reads; the one parser of server and command line.

A history event has an item, and may have an action, a surface and a time. Names that training never saw become the
unknown index. Events may come in any order: they are sorted by time, ties kept as given, and the newest
`max_history` are read. Errors name the field and never repeat an id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bundle.signature import Signature
from tackboard.core.errors import UsageError
from tackboard.core.hashing import string_id

INT64 = np.iinfo(np.int64)
HISTORY_FIELDS = ("item", "action", "surface", "time_ms")


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """One user's history [S], oldest first, and candidates [C]; ids hashed, names as indices."""

    history_items: NDArray[np.int64]
    history_actions: NDArray[np.int64]
    history_surfaces: NDArray[np.int64]
    history_times_ms: NDArray[np.int64]
    candidate_items: NDArray[np.int64]


def parse_request(
    signature: Signature, history: Mapping[str, Sequence[Any]], candidates: Sequence[Any]
) -> ScoreRequest:
    """Checks and converts a request. `history` holds parallel lists `item`, `action`, `surface`, `time_ms`.

    `action` and `surface` may be absent (unknown), `time_ms` too (all 0, order as given). Raises UsageError.
    """
    for field in history:
        if field not in HISTORY_FIELDS:
            raise UsageError(f"history has a field {field!r}", allowed=f"allowed: {', '.join(HISTORY_FIELDS)}")
    items = item_ids(signature, history.get("item", ()), "history item")
    count = len(items)
    actions = signature.vocabulary.action_indices(_names(history.get("action"), count, "action"))
    surfaces = signature.vocabulary.surface_indices(_names(history.get("surface"), count, "surface"))
    times = _times(history.get("time_ms"), count)
    newest = np.argsort(times, kind="stable")[-signature.max_history :] if count else np.zeros(0, dtype=np.int64)
    chosen = item_ids(signature, candidates, "candidate")
    if len(chosen) == 0:
        raise UsageError("candidates is empty", allowed="allowed: one or more item ids")
    return ScoreRequest(items[newest], actions[newest], surfaces[newest], times[newest], chosen)


def item_ids(signature: Signature, values: Sequence[Any] | NDArray[Any], field: str) -> NDArray[np.int64]:
    """int64 ids of item values in the bundle's id type."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and signature.id_type == "int64":
        return values
    if signature.id_type == "int64":
        for position, value in enumerate(values):
            if problem := _not_int64(value):
                raise _wrong_id(field, position, problem, "a whole number of 64 bits, as in training")
        return np.array([int(value) for value in values], dtype=np.int64)
    for position, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise _wrong_id(field, position, _type_name(value), "a non-empty string, as in training")
    return np.array([string_id(value) for value in values], dtype=np.int64)


def _names(values: Sequence[Any] | None, count: int, field: str) -> Sequence[str]:
    if values is None:
        return [""] * count
    _check_length(values, count, field)
    for position, value in enumerate(values):
        if not isinstance(value, str):
            raise UsageError(f"history {field} {position} is {_type_name(value)}", allowed="allowed: a string")
    return values


def _times(values: Sequence[Any] | None, count: int) -> NDArray[np.int64]:
    if values is None:
        return np.zeros(count, dtype=np.int64)
    _check_length(values, count, "time_ms")
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        return values
    for position, value in enumerate(values):
        if problem := _not_int64(value):
            raise UsageError(f"history time_ms {position} is {problem}", allowed="allowed: whole ms since 1970")
    return np.array([int(value) for value in values], dtype=np.int64)


def _check_length(values: Sequence[Any], count: int, field: str) -> None:
    if len(values) != count:
        raise UsageError(
            f"history has {count} items and {len(values)} of {field}", allowed="allowed: one for each item"
        )


def _not_int64(value: Any) -> str | None:
    """Why a value is no whole number of 64 bits, or None."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        return _type_name(value)
    return None if INT64.min <= int(value) <= INT64.max else "out of range"


def _wrong_id(field: str, position: int, problem: str, wanted: str) -> UsageError:
    return UsageError(f"{field} {position} is {problem}", allowed=f"allowed: {wanted}")


def _type_name(value: Any) -> str:
    if isinstance(value, str) and not value:
        return "an empty string"
    name = type(value).__name__
    return {"str": "a string", "int": "a number", "float": "a fraction", "bool": "true or false"}.get(
        name, "missing" if value is None else name
    )
