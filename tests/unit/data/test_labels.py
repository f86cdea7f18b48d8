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
from tackboard.data.labels import Counts, Label, LabelConfig, LabelCounts, label_bucket, parse_label

DAY_MS = 86_400_000
Row = dict[str, Any]


def by_loops(config: LabelConfig, impressions: list[Row], events: list[Row], end_ms: int) -> tuple[list[Row], Row]:
    """The reference: the rules, one impression and one action at a time."""
    shown: dict[tuple[int, Any], dict[int, Row]] = defaultdict(dict)
    counts = Counts(labels={label.action: LabelCounts() for label in config.labels})
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


@settings(max_examples=400)
@given(worlds())
def test_random_worlds_equal_the_loops(world: tuple[LabelConfig, list[Row], list[Row], int, pa.DataType]) -> None:
    config, impressions, events, end_ms, type_ = world
    counts = Counts(labels={label.action: LabelCounts() for label in config.labels})
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


def label_of(impression: Row, *events: Row, end_ms: int = LONG_AFTER) -> tuple[int | None, Counts]:
    counts = Counts()
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


def test_another_action_makes_no_label() -> None:
    assert label_of(shown(), done(action="hide"))[0] == 0


@pytest.mark.parametrize(("end_ms", "label"), [(1099, None), (1100, None), (1101, 0)])
def test_a_window_that_is_open_at_the_end_is_not_known_yet(end_ms: int, label: int | None) -> None:
    assert label_of(shown(), end_ms=end_ms)[0] == label
    assert label_of(shown(), done(time_ms=1050), end_ms=end_ms)[0] == 1, "a positive is known at once"


def test_an_item_shown_twice_is_one_candidate() -> None:
    rows = [shown(position=4, time_ms=1000), shown(position=2, time_ms=1300), shown(position=3, item_id=8)]
    counts = Counts()
    table = label_bucket(SAVE, *tables(rows, [done(time_ms=1050)], pa.int64()), LONG_AFTER, counts)
    row = table.to_pylist()[0]
    assert (row["item_id"], row["position"], row["label_save"]) == ([9, 8], [2, 3], [1, 0])
    assert (row["time_ms"], row["surface"]) == (1000, "home")
    assert counts.impressions_repeated == 1


def test_drawn_negatives_stand_for_all_of_them() -> None:
    rows = [shown(request=request, item_id=item) for request in range(300) for item in range(10)]
    events = [done(request=request, item_id=0) for request in range(300)]
    given = tables(rows, events, pa.int64())
    few = dataclasses.replace(SAVE, negatives=2)
    counts = Counts()
    table = label_bucket(few, *given, LONG_AFTER, counts)
    assert [len(items) for items in table["item_id"].to_pylist()] == [3] * 300
    assert all(items[0] == 0 for items in table["item_id"].to_pylist()), "positives stay"
    assert {tuple(weights) for weights in table["weight"].to_pylist()} == {(1.0, 4.5, 4.5)}
    assert counts.negatives_left_out == 300 * 7
    drawn = [item for items in table["item_id"].to_pylist() for item in items[1:]]
    # 600 draws among 9 items: 67 each, with a standard deviation of about 7.
    assert all(40 < drawn.count(item) < 95 for item in range(1, 10))
    again = label_bucket(few, *given, LONG_AFTER, Counts())
    assert again.equals(table)
    assert not label_bucket(dataclasses.replace(few, seed=1), *given, LONG_AFTER, Counts()).equals(table)


def test_a_candidate_with_one_label_known_is_a_negative_and_one_with_none_is_not() -> None:
    config = LabelConfig(labels=(Label("click", 10), Label("save", 500)), negatives=1)
    half, open_ = ([shown(request=request, item_id=item, time_ms=time_ms) for item in range(4)]
                   for request, time_ms in ((5, 1000), (6, 1095)))  # fmt: skip
    counts = Counts()
    table = label_bucket(config, *tables([*half, *open_], [], pa.int64()), 1100, counts).to_pylist()
    assert [(row["weight"], row["label_click"], row["label_save"]) for row in table] == [
        ([4.0], [0], [None]),
        ([1.0] * 4, [None] * 4, [None] * 4),
    ]
    assert counts.negatives_left_out == 3


def test_a_draw_does_not_depend_on_what_lies_around_it() -> None:
    rows = [shown(request=request, item_id=item) for request in range(20) for item in range(10)]
    few = dataclasses.replace(SAVE, negatives=3)
    whole = label_bucket(few, *tables(rows, [], pa.int64()), LONG_AFTER, Counts())
    one = label_bucket(few, *tables([row for row in rows if row["request"] == 7], [], pa.int64()), LONG_AFTER, Counts())
    assert one.to_pylist() == [whole.to_pylist()[7]]


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
        ({"labels": (Label("save", 1), Label("save", 2))}, "two labels of the action save"),
        ({"shown": "save"}, "everything shown would be positive"),
        ({"negatives": 0}, "--negatives 0"),
    ],
)
def test_rules_that_cannot_be(changes: Row, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dataclasses.replace(SAVE, **changes)


def test_the_order_of_labels_does_not_matter() -> None:
    click, save = Label("click", 5), Label("save", 7)
    assert LabelConfig(labels=(save, click)) == LabelConfig(labels=(click, save))
