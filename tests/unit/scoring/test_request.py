"""Requests: every way to be wrong has a sentence that names the field and never the id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tackboard.bundle.signature import Signature
from tackboard.core.errors import UsageError
from tackboard.core.hashing import string_id
from tackboard.scoring.request import parse_request


def signature_of(id_type: Any = "int64", max_history: int = 3) -> Signature:
    return Signature(
        format_version=1,
        name="m",
        version="1",
        id_type=id_type,
        actions=("click", "save"),
        surfaces=("home",),
        max_history=max_history,
        model={},
        tables={},
        lineage={},
    )


def test_a_full_request_by_hand() -> None:
    request = parse_request(
        signature_of(),
        {"item": [5, 6], "action": ["save", "click"], "surface": ["home", "tv"], "time_ms": [100, 200]},
        [7, -8],
    )
    assert request.history_items.tolist() == [5, 6]
    assert request.history_actions.tolist() == [2, 1]
    assert request.history_surfaces.tolist() == [1, 0]  # `tv` was never seen in training
    assert request.history_times_ms.tolist() == [100, 200]
    assert request.candidate_items.tolist() == [7, -8]


def test_events_are_sorted_by_time_with_ties_as_given_and_all_columns_together() -> None:
    history: dict[str, list[Any]] = {
        "item": [1, 2, 3],
        "action": ["click", "save", "new"],
        "surface": ["home", "", "home"],
        "time_ms": [50, 10, 10],
    }
    request = parse_request(signature_of(), history, [1])
    assert request.history_items.tolist() == [2, 3, 1]
    assert request.history_actions.tolist() == [2, 0, 1]
    assert request.history_surfaces.tolist() == [0, 1, 1]
    assert request.history_times_ms.tolist() == [10, 10, 50]


def test_the_newest_events_are_kept_after_sorting() -> None:
    request = parse_request(signature_of(), {"item": [1, 2, 3, 4, 5], "time_ms": [9, 1, 8, 2, 7]}, [1])
    assert request.history_items.tolist() == [5, 3, 1]
    untimed = parse_request(signature_of(), {"item": [1, 2, 3, 4, 5]}, [1])
    assert untimed.history_items.tolist() == [3, 4, 5]
    assert untimed.history_times_ms.tolist() == [0, 0, 0]
    assert untimed.history_actions.tolist() == [0, 0, 0]


@pytest.mark.parametrize("history", [{}, {"item": []}, {"item": [], "action": [], "time_ms": []}])
def test_an_empty_history_is_allowed(history: dict[str, list[Any]]) -> None:
    request = parse_request(signature_of(), history, [1, 2])
    assert len(request.history_items) == len(request.history_times_ms) == 0
    assert request.candidate_items.tolist() == [1, 2]


def test_strings_are_hashed_where_training_had_strings() -> None:
    request = parse_request(signature_of("string"), {"item": ["a"]}, ["b", "\u00e9"])
    assert request.history_items.tolist() == [string_id("a")]
    assert request.candidate_items.tolist() == [string_id("b"), string_id("\u00e9")]


def test_arrays_of_the_wire_are_taken_as_they_are() -> None:
    wide: Any = {"item": np.array([4, 9]), "time_ms": np.array([2, 1])}
    assert parse_request(signature_of(), wide, [7]).history_items.tolist() == [9, 4]
    other: dict[str, Any] = {"item": np.array([4], dtype=np.int32)}
    candidates: Any = np.array([7], dtype=np.uint64)
    narrow = parse_request(signature_of(), other, candidates)
    assert narrow.candidate_items.dtype == narrow.history_items.dtype == np.int64
    assert narrow.candidate_items.tolist() == [7]


@pytest.mark.parametrize(
    ("history", "candidates", "expected"),
    [
        ({"items": [1]}, [1], "history has a field 'items'"),
        ({"item": [1, 2], "action": ["click"]}, [1], "2 items and 1 of action"),
        ({"item": [], "surface": ["home"]}, [1], "0 items and 1 of surface"),
        ({"item": [1], "time_ms": []}, [1], "1 items and 0 of time_ms"),
        ({"item": [1], "action": [3]}, [1], "history action 0 is a number"),
        ({"item": [1], "surface": [None]}, [1], "history surface 0 is missing"),
        ({"item": [1], "time_ms": ["now"]}, [1], "history time_ms 0 is a string"),
        ({"item": [1], "time_ms": [1.5]}, [1], "history time_ms 0 is a fraction"),
        ({"item": [1], "time_ms": [2**63]}, [1], "history time_ms 0 is out of range"),
        ({"item": ["secret"]}, [1], "history item 0 is a string"),
        ({"item": [1, True]}, [1], "history item 1 is true or false"),
        ({"item": [2**63]}, [1], "history item 0 is out of range"),
        ({}, [1.0], "candidate 0 is a fraction"),
        ({}, [1, None], "candidate 1 is missing"),
        ({}, [], "candidates is empty"),
    ],
)
def test_every_error_names_its_field(history: dict[str, Any], candidates: list[Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as caught:
        parse_request(signature_of(), history, candidates)
    assert len(str(caught.value).splitlines()) <= 3
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("history", "candidates", "expected"),
    [
        ({"item": [5]}, ["a"], "history item 0 is a number"),
        ({"item": [""]}, ["a"], "history item 0 is an empty string"),
        ({}, [None], "candidate 0 is missing"),
    ],
)
def test_string_models_take_strings_only(history: dict[str, Any], candidates: list[Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse_request(signature_of("string"), history, candidates)
