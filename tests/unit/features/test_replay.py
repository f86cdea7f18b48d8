"""Replay: what was served honestly has no difference; planted skew is found and named, late events are told apart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset, open_dataset, write_dataset
from tackboard.features import replay as replay_module
from tackboard.features.column import Column
from tackboard.features.expressions import Expression
from tackboard.features.language import (
    Context,
    Events,
    FeatureSet,
    Float,
    Int,
    Item,
    Request,
    String,
    User,
    cross,
    feature,
    hours,
    sequence,
)
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.replay import ReplayReport, replay
from tackboard.features.serving_log import FeatureLog, FeatureLogConfig, user_digest
from tackboard.features.types import FLOAT, ID, INT, STRING, TIME

KEY = bytes(range(32))
HOUR = 3_600_000
START = 1_700_000_000_000
NUM_USERS = 6


@dataclasses.dataclass(frozen=True)
class Event:
    """One event, as it is stored."""

    user: int
    item: int
    action: str
    time_ms: int
    received_ms: int
    dwell_ms: int | None


def feature_set(window: int = hours(5), **more: Expression) -> FeatureSet:
    item, user = Item(price=Float(), category=String()), User(country=String())
    events, context, request = Events(dwell_ms=Int()), Context(device=String()), Request()
    clicks = events.where(events.action == "click")
    return FeatureSet(
        "home",
        hour=request.time.hour("Europe/Berlin"),
        clicks=clicks.within(window).count(),
        views=events.within(hours(9)).count(),
        ratio=feature("clicks") / feature("views"),
        dwell=clicks.decayed_sum(events.dwell_ms.fill_missing(0), half_life=hours(2)),
        seen=events.matching(events.item, item.id).count(),
        log_price=item.price.log1p(),
        device=context.device.fill_missing("none"),
        pair=cross(user.country.fill_missing(""), item.category.fill_missing("")),
        history=sequence(item=events.newest(3).collect(events.item), word=events.newest(3).collect(events.action)),
        mine=cross(user.id, item.id),
        **more,
    )


def all_events() -> list[Event]:
    events = []
    for user in range(NUM_USERS):
        for number in range(4 + user):
            time_ms = START + number * HOUR + user
            action = ("click", "view", "save")[(user + number) % 3]
            dwell = None if number % 4 == 3 else 100 * number + user
            events.append(Event(user + 50, (user * 7 + number) % 9, action, time_ms, time_ms + 1000, dwell))
    return events


def store(root: Path, events: list[Event], *, attributes: bool = True, fields: bool = True) -> Dataset:
    rows = [dataclasses.asdict(event) for event in events]
    table = pa.table(
        {
            "user": pa.array([row["user"] for row in rows], pa.int64()),
            "item": pa.array([row["item"] for row in rows], pa.int64()),
            "action": pa.array([row["action"] for row in rows]).dictionary_encode(),
            "surface": pa.array(["home"] * len(rows)).dictionary_encode(),
            "time_ms": pa.array([row["time_ms"] for row in rows], pa.int64()),
            "received_ms": pa.array([row["received_ms"] for row in rows], pa.int64()),
            "order": pa.array(range(len(rows)), pa.int64()),
        }
        | ({"dwell_ms": pa.array([row["dwell_ms"] for row in rows], pa.int64())} if fields else {})
    )
    items = pa.table({"item": pa.array(range(8)), "price": [0.5 * n for n in range(8)], "category": list("ababcabc")})
    users = pa.table({"user": pa.array(range(50, 54)), "country": ["de", "fr", None, "de"]})
    given = {"item_attributes": items, "user_attributes": users} if attributes else {}
    write_dataset(root, "log", table, **given)
    return open_dataset(root / "log")


PRICES: dict[int, tuple[float, str]] = {n: (0.5 * n, "ababcabc"[n]) for n in range(8)}
COUNTRIES: dict[int, str | None] = {50: "de", 51: "fr", 52: None, 53: "de"}
Change = Callable[[int, dict[str, Column]], dict[str, Column]]


def serve(
    folder: Path,
    features: FeatureSet,
    events: list[Event],
    *,
    knows: Callable[[Event, int], bool] = lambda event, now: event.received_ms < now,
    change: Change = lambda number, values: values,
    prices: Mapping[int, tuple[float, str]] = PRICES,
    computes: FeatureSet | None = None,
    more_users: tuple[int, ...] = (),
) -> int:
    """Plays a server that knows `events` and logs what it serves; `computes` is what it really computes."""
    executor = OnlineExecutor((computes or features).plan)
    log = FeatureLog(folder, features, KEY, FeatureLogConfig(max_waiting=10_000))
    requests = [(user, START + moment * HOUR) for user in (*range(50, 56), *more_users) for moment in (0, 2, 5, 30)]
    for number, (user, now) in enumerate(requests):
        mine = sorted((e for e in events if e.user == user and knows(e, now)), key=lambda e: e.time_ms)
        items = np.array([number % 9, (number + 3) % 9, 5])
        known = [prices.get(int(item), (None, None)) for item in items]
        said = {"device": Column.of(STRING, ["phone" if number % 2 else None])}
        values = executor.compute(
            history={
                "time": Column.of(TIME, [e.time_ms for e in mine]),
                "item": Column.of(ID, [e.item for e in mine]),
                "action": Column.of(STRING, [e.action for e in mine]),
                "dwell_ms": Column.of(INT, [e.dwell_ms for e in mine]),
            },
            request_ms=now,
            user_id=user,
            item_ids=items,
            user={"country": Column.of(STRING, [COUNTRIES.get(user)])},
            item={
                "price": Column.of(FLOAT, [price for price, _ in known]),
                "category": Column.of(STRING, [category for _, category in known]),
            },
            context=said,
        )
        assert log.offer(
            user_id=user, request_ms=now, item_ids=items, features=change(number, values), context=said
        )  # fmt: skip
    assert log.close()
    assert log.num_logged == len(requests)
    return len(requests)


def differing(report: ReplayReport) -> dict[str, dict[str, int]]:
    """Reasons by feature, of those that differ."""
    return {
        name: {reason: count for reason, count in result.mismatches.items() if count}
        for name, result in report.features.items()
        if result.num_mismatches
    }


def test_an_honest_server_has_no_difference(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    count = serve(tmp_path / "served", feature_set(), events)
    report = replay(tmp_path / "served", dataset, KEY)
    assert report.num_mismatches == 0
    assert (report.num_requests, report.num_compared, report.num_unknown_users) == (count, count, 0)
    assert set(report.features) == set(feature_set().plan.features)
    assert report.features["clicks"].compared == count
    assert report.features["seen"].compared == 3 * count
    assert report.features["mine"].compared == count  # One digest stands for a request's candidates.
    assert report.num_late == 0
    assert report.num_values == sum(result.compared for result in report.features.values())


def test_results_do_not_depend_on_how_requests_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events, computes=feature_set(window=hours(1)))
    whole = replay(tmp_path / "served", dataset, KEY).to_json()
    monkeypatch.setattr(replay_module, "REQUESTS_PER_GROUP", 2)
    assert replay(tmp_path / "served", dataset, KEY).to_json() == whole
    monkeypatch.setattr(replay_module, "CANDIDATES_PER_GROUP", 1)
    assert replay(tmp_path / "served", dataset, KEY).to_json() == whole


def test_one_altered_bit_of_one_value_is_found_and_named(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)

    def alter(number: int, values: dict[str, Column]) -> dict[str, Column]:
        if number != 9:
            return values
        price = values["log_price"]
        moved = price.values.copy()
        moved[2] = np.nextafter(moved[2], 2.0)
        return values | {"log_price": Column(price.type, moved, present=price.present)}

    serve(tmp_path / "served", feature_set(), events, change=alter)
    report = replay(tmp_path / "served", dataset, KEY)
    assert differing(report) == {"log_price": {"skew": 1}}
    (example,) = report.features["log_price"].examples
    assert (example.reason, example.item) == ("skew", 5)
    assert example.request_ms == START + 2 * HOUR
    assert example.user == user_digest(KEY, 52).hex()
    assert float(example.served) == np.nextafter(float(example.recomputed), 2.0)
    assert report.worst()[0] == "log_price"
    assert "feature log_price: 1 of 72 values differ (1 skew)" in report.text()


@pytest.mark.parametrize("name", ["clicks", "ratio", "dwell", "seen", "device", "pair", "history", "hour", "mine"])
def test_every_kind_of_feature_is_watched(tmp_path: Path, name: str) -> None:
    """The values of another request, served by mistake."""
    events = all_events()
    dataset = store(tmp_path, events)
    seen: list[dict[str, Column]] = []

    def swap(number: int, values: dict[str, Column]) -> dict[str, Column]:
        seen.append(values)
        return values if number != 15 else values | {name: seen[2][name]}

    serve(tmp_path / "served", feature_set(), events, change=swap)
    found = differing(replay(tmp_path / "served", dataset, KEY))
    assert list(found) == [name]
    assert set(found[name]) == {"skew"}


def test_signs_of_zero_and_bits_of_nan_count(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    serve(
        tmp_path / "served",
        feature_set(),
        events,
        change=lambda number, values: (
            values
            if number != 4
            else values | {"ratio": Column(FLOAT, np.array([0x7FF8000000000001], np.uint64).view(np.float64))}
        ),
    )
    report = replay(tmp_path / "served", dataset, KEY)
    assert differing(report) == {"ratio": {"skew": 1}}
    (example,) = report.features["ratio"].examples
    assert example.served.startswith("nan (bits 01")
    assert example.recomputed.startswith("nan (bits 00")


def test_a_wrong_window_is_skew_in_all_that_depends_on_it(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events, computes=feature_set(window=hours(6)))
    found = differing(replay(tmp_path / "served", dataset, KEY))
    assert set(found) == {"clicks", "ratio"}
    assert all(set(reasons) == {"skew"} for reasons in found.values())


def test_a_late_event_that_nobody_saw_is_listed_without_a_difference(tmp_path: Path) -> None:
    events = all_events()
    late = Event(53, 8, "click", START + HOUR, START + 4 * HOUR, 70)
    dataset = store(tmp_path, [*events, late])
    serve(tmp_path / "served", feature_set(), events, knows=lambda e, now: e.received_ms < now)
    report = replay(tmp_path / "served", dataset, KEY)
    # At the requests after it was received, the server lacks the event altogether; that is skew.
    assert {example.request_ms - START for r in report.features.values() for example in r.examples} <= {
        5 * HOUR,
        30 * HOUR,
    }
    assert report.num_late == 1
    (listed,) = report.late_requests
    assert (listed.user, listed.request_ms) == (user_digest(KEY, 53).hex(), START + 2 * HOUR)
    assert (listed.num_events, listed.first_time_ms) == (1, START + HOUR)
    assert listed.first_received_ms == START + 4 * HOUR


def test_a_late_event_within_an_honest_log_changes_nothing(tmp_path: Path) -> None:
    events = [*all_events(), Event(53, 8, "click", START + HOUR, START + 4 * HOUR, 70)]
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events)
    report = replay(tmp_path / "served", dataset, KEY)
    assert report.num_mismatches == 0
    assert report.num_late == 1
    assert "1 requests before which events had happened" in report.text()


def test_a_server_that_knew_more_than_the_dataset_says_is_late(tmp_path: Path) -> None:
    """It saw an event as soon as it happened; the dataset says that it arrived hours after."""
    events = [*all_events(), Event(53, 5, "click", START + HOUR, START + 4 * HOUR, 70)]
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events, knows=lambda e, now: min(e.received_ms, e.time_ms + 1000) < now)
    report = replay(tmp_path / "served", dataset, KEY)
    found = differing(report)
    assert set(found) == {"clicks", "views", "ratio", "dwell", "seen", "history"}
    assert all(set(reasons) == {"late"} for reasons in found.values())
    assert report.num_late == 1


def test_late_and_skew_are_told_apart_in_one_feature(tmp_path: Path) -> None:
    events = [*all_events(), Event(53, 5, "click", START + HOUR, START + 4 * HOUR, 70)]
    dataset = store(tmp_path, events)

    def alter(number: int, values: dict[str, Column]) -> dict[str, Column]:
        return values if number != 0 else values | {"clicks": Column.of(INT, [99])}

    serve(tmp_path / "served", feature_set(), events, knows=lambda e, now: e.time_ms < now, change=alter)
    report = replay(tmp_path / "served", dataset, KEY)
    clicks = report.features["clicks"]
    assert clicks.mismatches["skew"] == 1
    assert clicks.mismatches["late"] >= 1
    assert clicks.examples[0].served == "99"


def test_users_that_the_dataset_does_not_know_are_counted(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    count = serve(tmp_path / "served", feature_set(), events, more_users=(99,))
    report = replay(tmp_path / "served", dataset, KEY)
    assert (report.num_requests, report.num_compared, report.num_unknown_users) == (count, count - 4, 4)
    assert report.num_mismatches == 0
    assert "4 requests not compared" in report.text()


def test_nothing_compared_is_no_success(tmp_path: Path) -> None:
    events = all_events()
    serve(tmp_path / "served", feature_set(), events)
    other = store(tmp_path / "other", [dataclasses.replace(event, user=event.user + 1000) for event in events],
                  attributes=False)  # fmt: skip
    with pytest.raises(DataError, match="not one of 24 requests could be compared"):
        replay(tmp_path / "served", other, KEY)


def test_an_empty_log_is_no_success(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events)
    (path,) = (tmp_path / "served").iterdir()
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(DataError, match="no complete record"):
        replay(tmp_path / "served", dataset, KEY)


def test_attributes_that_only_the_server_had(tmp_path: Path) -> None:
    """Item 8 is sold at a price that the dataset does not know."""
    events = all_events()
    dataset = store(tmp_path, [event for event in events if event.item != 8])
    events = [event for event in events if event.item != 8]
    serve(tmp_path / "served", feature_set(), events, prices={**PRICES, 8: (4.0, "a")})
    report = replay(tmp_path / "served", dataset, KEY)
    found = differing(report)
    assert set(found) == {"log_price", "pair"}
    assert all(set(reasons) == {"attributes"} for reasons in found.values())
    assert report.num_without_attributes > 0
    assert {example.item for example in report.features["log_price"].examples} == {8}


def test_attributes_that_both_lack_are_equal(tmp_path: Path) -> None:
    events = [event for event in all_events() if event.item != 8]
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events)
    report = replay(tmp_path / "served", dataset, KEY)
    assert report.num_mismatches == 0
    assert report.num_without_attributes > 0
    assert "requests for which the dataset has no attributes" in report.text()


def test_columns_that_the_dataset_does_not_have_are_told(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events, attributes=False, fields=False)
    serve(tmp_path / "served", feature_set(), events)
    report = replay(tmp_path / "served", dataset, KEY)
    assert set(report.not_compared) == {"dwell", "log_price", "pair"}
    assert "events.dwell_ms" in report.not_compared["dwell"]
    assert "item.price" in report.not_compared["log_price"]
    assert set(report.features).isdisjoint(report.not_compared)
    assert report.num_mismatches == 0


def test_a_dataset_without_any_of_the_columns(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events, attributes=False)
    features = FeatureSet("prices", price=Item(price=Float()).price)
    log = FeatureLog(tmp_path / "served", features, KEY)
    log.offer(
        user_id=50, request_ms=START, item_ids=np.array([1]), features={"price": Column.of(FLOAT, [1.0])}
    )  # fmt: skip
    assert log.close()
    with pytest.raises(DataError, match=r"does not have item\.price"):
        replay(tmp_path / "served", dataset, KEY)


def test_several_feature_sets_in_one_folder(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    count = serve(tmp_path / "served", feature_set(), events)
    serve(tmp_path / "served", feature_set(all_events=Events().count()), events)
    report = replay(tmp_path / "served", dataset, KEY)
    assert report.num_mismatches == 0
    assert len(report.feature_sets) == 2
    assert report.features["all_events"].compared == count
    assert report.features["clicks"].compared == 2 * count


def test_a_torn_file_is_reported_and_the_rest_compared(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    count = serve(tmp_path / "served", feature_set(), events)
    (path,) = (tmp_path / "served").iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    report = replay(tmp_path / "served", dataset, KEY)
    assert report.num_compared == count - 1
    assert report.torn_files == [str(path)]
    assert "cut short" in report.text()


def test_limits(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events, change=lambda n, v: v | {"clicks": Column.of(INT, [99])})
    assert replay(tmp_path / "served", dataset, KEY, max_requests=5).num_requests == 5
    report = replay(tmp_path / "served", dataset, KEY, num_examples=2)
    assert len(report.features["clicks"].examples) == 2
    assert report.features["clicks"].mismatches["skew"] == 24


def test_features_that_read_no_events(tmp_path: Path) -> None:
    dataset = store(tmp_path, all_events())
    features = FeatureSet("hours", hour=Request().time.hour())
    log = FeatureLog(tmp_path / "served", features, KEY)
    log.offer(
        user_id=50, request_ms=START, item_ids=np.zeros(0, dtype=np.int64), features={"hour": Column.of(INT, [22])}
    )  # fmt: skip
    assert log.close()
    report = replay(tmp_path / "served", dataset, KEY)
    assert (report.num_mismatches, report.num_values, report.num_late) == (0, 1, 0)


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    everything = Events().collect(Events().item)
    features = FeatureSet("long", text=everything)
    executor = OnlineExecutor(features.plan)
    mine = [event for event in all_events() if event.user == 55] * 9
    many = [dataclasses.replace(event, time_ms=START + n, received_ms=START + n) for n, event in enumerate(mine)]
    dataset = store(tmp_path, many)
    served = executor.compute(history={"item": Column.of(ID, [event.item for event in many[:-1]] + [999])})
    log = FeatureLog(tmp_path / "served", features, KEY)
    log.offer(user_id=55, request_ms=START + HOUR, item_ids=np.zeros(0, dtype=np.int64), features=served)
    assert log.close()
    (example,) = replay(tmp_path / "served", dataset, KEY).features["text"].examples
    assert example.served.startswith("…")
    assert example.served != example.recomputed
    assert len(example.served) < 140


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    serve(tmp_path / "served", feature_set(), events, change=lambda n, v: v | {"ratio": Column.of(FLOAT, [np.inf])})
    data = json.loads(json.dumps(replay(tmp_path / "served", dataset, KEY).to_json(), allow_nan=False))
    assert data["num_mismatches"] == data["features"]["ratio"]["mismatches"]["skew"] > 0
    assert data["features"]["ratio"]["examples"][0]["served"] == "inf"
    assert "50" not in {example["user"] for example in data["features"]["ratio"]["examples"]}


def test_an_id_is_never_shown(tmp_path: Path) -> None:
    events = all_events()
    dataset = store(tmp_path, events)
    seen: list[Any] = []

    def swap(number: int, values: dict[str, Column]) -> dict[str, Column]:
        seen.append(values["mine"])
        return values | {"mine": seen[0]}

    serve(tmp_path / "served", feature_set(), events, change=swap)
    report = replay(tmp_path / "served", dataset, KEY)
    assert report.features["mine"].mismatches["skew"] == 23
    assert {e.served for e in report.features["mine"].examples} == {replay_module.HIDDEN}
