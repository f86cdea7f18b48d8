"""Every label, weight and count is what a plain loop over the rules gives."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import UsageError
from tackboard.core.hashing import string_id
from tackboard.core.keyed_random import bits
from tackboard.data.labels import Label, LabelConfig, LabelCounts, LabelJobCounts, label_bucket, parse_label

DAY_MS = 86_400_000
Row = dict[str, Any]


def by_loops(config: LabelConfig, impressions: list[Row], events: list[Row], end_ms: int) -> tuple[list[Row], Row]:
    """The reference: the rules, one impression and one action at a time."""
    shown: dict[tuple[int, Any], dict[int, Row]] = defaultdict(dict)
    counts = LabelJobCounts(labels={label.action: LabelCounts() for label in config.labels})
    for row in impressions:
        candidates = shown[row["user_id"], row["request"]]
        if row["item_id"] not in candidates:
            candidates[row["item_id"]] = dict(row)
            continue
        counts.impressions_repeated += 1
        kept = candidates[row["item_id"]]
        kept["time_ms"] = min(kept["time_ms"], row["time_ms"])
        positions = [one["position"] for one in (kept, row) if one["position"] is not None]
        kept["position"] = min(positions, default=None)
    for label in config.labels:
        label_by_loops(label, shown, events, end_ms, counts.labels[label.action])
    rows = []
    for (user, request), candidates in shown.items():
        ordered = sorted(candidates.values(), key=lambda row: (place(row), row["time_ms"], row["item_id"]))
        kept_rows = draw_by_loops(config, ordered)
        counts.negatives_left_out += len(ordered) - len(kept_rows)
        counts.candidates += len(kept_rows)
        surfaces = [event["surface"] for event in events if (event["user_id"], event["request"]) == (user, request)]
        row = {"request": request, "user_id": user, "time_ms": min(one["time_ms"] for one in ordered)}
        row |= {"surface": surfaces[0] if surfaces else None}
        names = ["item_id", "position", "weight", *(label.column for label in config.labels)]
        rows.append(row | {name: [one[name] for one in kept_rows] for name in names})
    counts.requests = len(rows)
    rows.sort(key=lambda row: (row["user_id"], row["time_ms"], in_order(row["request"])))
    return rows, dataclasses.asdict(counts)


def place(row: Row) -> float:
    return float("inf") if row["position"] is None else row["position"]


def in_order(request: Any) -> Any:
    return request.encode() if isinstance(request, str) else request


def label_by_loops(
    label: Label, shown: dict[tuple[int, Any], dict[int, Row]], events: list[Row], end_ms: int, count: LabelCounts
) -> None:
    for event in events:
        if event["action"] != label.action:
            continue
        if event["request"] is None:
            count.actions_without_request += 1
            continue
        impression = shown.get((event["user_id"], event["request"]), {}).get(event["item_id"])
        if impression is None:
            count.actions_not_shown += 1
        elif event["time_ms"] < impression["time_ms"]:
            count.actions_early += 1
        elif event["time_ms"] > impression["time_ms"] + label.window_ms:
            count.actions_late += 1
        elif label.column in impression:
            count.actions_repeated += 1
        else:
            impression[label.column] = 1
            count.positives += 1
    for candidates in shown.values():
        for impression in candidates.values():
            if label.column in impression:
                continue
            if impression["time_ms"] + label.window_ms < end_ms:
                impression[label.column] = 0
                count.negatives += 1
            else:
                impression[label.column] = None
                count.not_known_yet += 1


def draw_by_loops(config: LabelConfig, candidates: list[Row]) -> list[Row]:
    negatives = []
    for row in candidates:
        row["weight"] = 1.0
        values = [row[label.column] for label in config.labels]
        if 1 not in values and 0 in values:
            negatives.append(row)
    if config.negatives is None:
        return candidates

    def draw(row: Row) -> tuple[int, int]:
        request = row["request"] if isinstance(row["request"], int) else string_id(row["request"])
        return int(bits(config.seed, row["user_id"], request, row["item_id"])[0]), row["item_id"]

    kept = sorted(negatives, key=draw)[: config.negatives]
    for row in kept:
        row["weight"] = float(np.float32(len(negatives) / len(kept)))
    return [row for row in candidates if row in kept or not any(row is one for one in negatives)]


def tables(impressions: list[Row], events: list[Row], request_type: pa.DataType) -> tuple[pa.Table, pa.Table]:
    id_, names = pa.int64(), pa.dictionary(pa.int32(), pa.string())
    shown = {"user_id": id_, "time_ms": id_, "request": request_type, "position": pa.int32(), "item_id": id_}
    done = {"user_id": id_, "item_id": id_, "time_ms": id_, "request": request_type, "action": names, "surface": names}
    return tuple(  # type: ignore[return-value]
        pa.table({name: pa.array([row[name] for row in rows], type=type_) for name, type_ in types.items()})
        for rows, types in ((impressions, shown), (events, done))
    )


REQUESTS: dict[str, list[Any]] = {"int": [-3, 0, 7, 1 << 40], "string": ["", "a", "é", "zz"]}
TIMES = st.integers(0, 20)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[LabelConfig, list[Row], list[Row], int, pa.DataType]:
    kind = draw(st.sampled_from(["int", "string"]))
    requests = st.sampled_from(REQUESTS[kind][: draw(st.integers(1, 4))])
    users, items = st.integers(-1, 1), st.integers(0, 4)
    impression = st.fixed_dictionaries(
        {
            "user_id": users,
            "time_ms": TIMES,
            "request": requests,
            "position": st.none() | st.integers(0, 3),
            "item_id": items,
        }
    )
    event = st.fixed_dictionaries(
        {
            "user_id": users,
            "item_id": items,
            "time_ms": TIMES,
            "request": st.none() | requests,
            "action": st.sampled_from(["click", "save", "hide"]),
            "surface": st.sampled_from(["home", "search"]),
        }
    )
    config = LabelConfig(
        labels=tuple(
            Label(action, draw(st.integers(1, 12))) for action in draw(st.sampled_from(["save", "click save"])).split()
        ),
        negatives=draw(st.none() | st.integers(1, 3)),
        seed=draw(st.integers(0, 3)),
    )
    events = sorted(draw(st.lists(event, max_size=25)), key=lambda row: (row["user_id"], row["time_ms"]))
    type_ = pa.int64() if kind == "int" else pa.string()
    return config, draw(st.lists(impression, max_size=25)), events, draw(st.integers(10, 35)), type_


@settings(max_examples=150)
@given(worlds())
def test_random_worlds_equal_the_loops(world: tuple[LabelConfig, list[Row], list[Row], int, pa.DataType]) -> None:
    config, impressions, events, end_ms, type_ = world
    counts = LabelJobCounts(labels={label.action: LabelCounts() for label in config.labels})
    found = label_bucket(config, *tables(impressions, events, type_), end_ms, counts)
    expected, expected_counts = by_loops(config, impressions, events, end_ms)
    assert found.to_pylist() == expected
    assert dataclasses.asdict(counts) == expected_counts


def shown(**changes: Any) -> Row:
    return {"user_id": 1, "time_ms": 1000, "request": 5, "position": 0, "item_id": 9} | changes


def done(**changes: Any) -> Row:
    return {"user_id": 1, "item_id": 9, "time_ms": 1000, "request": 5, "action": "save", "surface": "home"} | changes


SAVE = LabelConfig(labels=(Label("save", 100),))
LONG_AFTER = 10_000


def label_of(impression: Row, *events: Row, end_ms: int = LONG_AFTER) -> tuple[int | None, LabelJobCounts]:
    counts = LabelJobCounts()
    table = label_bucket(SAVE, *tables([impression], list(events), pa.int64()), end_ms, counts)
    return table["label_save"].to_pylist()[0][0], counts


@pytest.mark.parametrize(
    ("event", "label", "reason"),
    [
        (done(time_ms=1000), 1, "positives"),
        (done(time_ms=1100), 1, "positives"),
        (done(time_ms=1101), 0, "actions_late"),
        (done(time_ms=999), 0, "actions_early"),
        (done(item_id=8), 0, "actions_not_shown"),
        (done(request=6), 0, "actions_not_shown"),
        (done(user_id=2), 0, "actions_not_shown"),
        (done(request=None), 0, "actions_without_request"),
    ],
)
def test_an_action_counts_once_and_where_it_belongs(event: Row, label: int, reason: str) -> None:
    found, counts = label_of(shown(), event)
    count = dataclasses.asdict(counts.labels["save"])
    assert found == label
    assert count[reason] == 1
    assert sum(number for name, number in count.items() if name == "positives" or name.startswith("actions")) == 1


@pytest.mark.parametrize(("end_ms", "label"), [(1099, None), (1100, None), (1101, 0)])
def test_a_window_that_is_open_at_the_end_is_not_known_yet(end_ms: int, label: int | None) -> None:
    assert label_of(shown(), end_ms=end_ms)[0] == label
    assert label_of(shown(), done(time_ms=1050), end_ms=end_ms)[0] == 1, "a positive is known at once"


@pytest.mark.parametrize(
    ("text", "window_ms"),
    [("save=7d", 7 * DAY_MS), ("save=30m", 1_800_000), ("save=500ms", 500), ("save=2h", 7_200_000), ("save=9s", 9000)],
)
def test_windows(text: str, window_ms: int) -> None:
    assert parse_label(text) == Label("save", window_ms)


def test_an_action_may_hold_an_equals_sign() -> None:
    assert parse_label("a=b=1d") == Label("a=b", DAY_MS)


@pytest.mark.parametrize("text", ["save=7x", "save=0d", "save=-1d", "save=1.5h", "save=", "save=d", "save=99999999d"])
def test_windows_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="the window"):
        parse_label(text)


@pytest.mark.parametrize("text", ["save", "=7d", ""])
def test_labels_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="allowed: ACTION=WINDOW"):
        parse_label(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": ()}, "no label"),
        ({"labels": (Label("save", 1), Label("save", 2))}, "action save has two labels"),
        ({"shown": "save"}, "give every shown item the label 1"),
        ({"negatives": 0}, "--negatives 0"),
    ],
)
def test_rules_that_cannot_be(changes: Row, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dataclasses.replace(SAVE, **changes)


def test_the_order_of_labels_does_not_matter() -> None:
    click, save = Label("click", 5), Label("save", 7)
    assert LabelConfig(labels=(save, click)) == LabelConfig(labels=(click, save))
