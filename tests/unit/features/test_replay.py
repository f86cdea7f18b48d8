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
from tackboard.features.column import Column, differing_rows
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
        assert log.offer(user_id=user, request_ms=now, item_ids=items, features=change(number, values), context=said)
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


def replayed(
    folder: Path, events: list[Event] | None = None, *, known: list[Event] | None = None, **serving: Any
) -> ReplayReport:
    """What replay finds where the dataset holds `events` and the server knew of those, or of `known`."""
    events = all_events() if events is None else events
    serve(folder / "served", serving.pop("features", feature_set()), events if known is None else known, **serving)
    return replay(folder / "served", store(folder, events), KEY)


def logged(
    folder: Path, features: FeatureSet, values: dict[str, Column], user: int, now: int, items: list[int]
) -> Path:
    """A log of one request."""
    log = FeatureLog(folder / "served", features, KEY)
    assert log.offer(user_id=user, request_ms=now, item_ids=np.array(items, dtype=np.int64), features=values)
    assert log.close()
    return folder / "served"


LATE_EVENT = Event(53, 5, "click", START + HOUR, START + 4 * HOUR, 70)


def test_an_honest_server_has_no_difference(tmp_path: Path) -> None:
    report, count = replayed(tmp_path), 24
    assert report.num_mismatches == 0
    assert (report.num_requests, report.num_compared, report.num_unknown_users) == (count, count, 0)
    assert set(report.features) == set(feature_set().plan.features)
    assert report.features["clicks"].compared == count
    assert report.features["seen"].compared == 3 * count
    assert report.features["mine"].compared == count  # One digest stands for a request's candidates.
    assert report.num_late == 0
    assert report.num_values == sum(result.compared for result in report.features.values())


def test_a_wrong_window_is_skew_however_requests_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = replayed(tmp_path, computes=feature_set(window=hours(6)))
    assert set(differing(report)) == {"clicks", "ratio"}
    assert all(set(reasons) == {"skew"} for reasons in differing(report).values())
    dataset = open_dataset(tmp_path / "log")
    for name, size in (("REQUESTS_PER_GROUP", 2), ("CANDIDATES_PER_GROUP", 1)):
        monkeypatch.setattr(replay_module, name, size)
        assert replay(tmp_path / "served", dataset, KEY).to_json() == report.to_json()


def test_one_altered_bit_of_one_value_is_found_and_named(tmp_path: Path) -> None:
    def alter(number: int, values: dict[str, Column]) -> dict[str, Column]:
        if number != 9:
            return values
        price = values["log_price"]
        moved = price.values.copy()
        moved[2] = np.nextafter(moved[2], 2.0)
        return values | {"log_price": Column(price.type, moved, present=price.present)}

    report = replayed(tmp_path, change=alter)
    assert differing(report) == {"log_price": {"skew": 1}}
    (example,) = report.features["log_price"].examples
    assert (example.reason, example.item) == ("skew", 5)
    assert example.request_ms == START + 2 * HOUR
    assert example.user == user_digest(KEY, 52).hex()
    assert float(example.served) == np.nextafter(float(example.recomputed), 2.0)
    assert report.worst()[0] == "log_price"
    assert "feature log_price: 1 of 72 values differ (1 skew)" in report.text()


def test_every_kind_of_feature_is_watched(tmp_path: Path) -> None:
    """The values of another request, served by mistake: of one feature each time."""
    names = ["clicks", "ratio", "dwell", "seen", "device", "pair", "history", "hour", "mine"]
    seen: list[dict[str, Column]] = []

    def swap(number: int, values: dict[str, Column]) -> dict[str, Column]:
        seen.append(values)
        name = names[number - 15] if 15 <= number < 24 else None
        other = None if name is None else next(one for one in seen if len(differing_rows(one[name], values[name])))
        return values if other is None else values | {name: other[name]}

    found = differing(replayed(tmp_path, change=swap))
    assert set(found) == set(names)
    assert all(set(reasons) == {"skew"} for reasons in found.values())


def test_signs_of_zero_and_bits_of_nan_count(tmp_path: Path) -> None:
    odd = Column(FLOAT, np.array([0x7FF8000000000001], np.uint64).view(np.float64))
    report = replayed(tmp_path, change=lambda number, values: values | {"ratio": odd} if number == 4 else values)
    assert differing(report) == {"ratio": {"skew": 1}}
    (example,) = report.features["ratio"].examples
    assert example.served.startswith("nan (bits 01")
    assert example.recomputed.startswith("nan (bits 00")


def test_a_late_event_that_nobody_saw_is_listed_without_a_difference(tmp_path: Path) -> None:
    report = replayed(tmp_path, [*all_events(), LATE_EVENT], known=all_events())
    # At the requests after it was received, the server lacks the event altogether; that is skew.
    moments = {example.request_ms - START for result in report.features.values() for example in result.examples}
    assert moments <= {5 * HOUR, 30 * HOUR}
    assert report.num_late == 1
    (listed,) = report.late_requests
    assert (listed.user, listed.request_ms) == (user_digest(KEY, 53).hex(), START + 2 * HOUR)
    assert (listed.num_events, listed.first_time_ms) == (1, START + HOUR)
    assert listed.first_received_ms == START + 4 * HOUR


def test_a_late_event_within_an_honest_log_changes_nothing(tmp_path: Path) -> None:
    report = replayed(tmp_path, [*all_events(), LATE_EVENT])
    assert report.num_mismatches == 0
    assert report.num_late == 1
    assert "1 requests have late events" in report.text()


def test_a_server_that_knew_more_than_the_dataset_says_is_late(tmp_path: Path) -> None:
    """It saw an event as soon as it happened; the dataset says that it arrived hours after."""

    def alter(number: int, values: dict[str, Column]) -> dict[str, Column]:
        return values | {"clicks": Column.of(INT, [99])} if number == 0 else values

    events = [*all_events(), LATE_EVENT]
    report = replayed(tmp_path, events, knows=lambda e, now: min(e.received_ms, e.time_ms + 1000) < now, change=alter)
    found = differing(report)
    assert set(found.pop("clicks")) == {"skew", "late"}
    assert report.features["clicks"].examples[0].served == "99"
    assert set(found) == {"views", "ratio", "dwell", "seen", "history"}
    assert all(set(reasons) == {"late"} for reasons in found.values())
    assert report.num_late == 1


def test_users_that_the_dataset_does_not_know_are_counted(tmp_path: Path) -> None:
    report = replayed(tmp_path, more_users=(99,))
    assert (report.num_requests, report.num_compared, report.num_unknown_users) == (28, 24, 4)
    assert report.num_mismatches == 0
    assert "4 requests not compared" in report.text()


def test_nothing_compared_is_no_success(tmp_path: Path) -> None:
    others = [dataclasses.replace(event, user=event.user + 1000) for event in all_events()]
    serve(tmp_path / "served", feature_set(), all_events())
    with pytest.raises(DataError, match="none of the 24 requests could be compared"):
        replay(tmp_path / "served", store(tmp_path / "other", others, attributes=False), KEY)
    (path,) = (tmp_path / "served").iterdir()
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(DataError, match="no complete record"):
        replay(tmp_path / "served", store(tmp_path, all_events()), KEY)


def test_attributes_that_only_the_server_had(tmp_path: Path) -> None:
    """Item 8 is sold at a price that the dataset does not know."""
    events = [event for event in all_events() if event.item != 8]
    report = replayed(tmp_path, events, prices={**PRICES, 8: (4.0, "a")})
    found = differing(report)
    assert set(found) == {"log_price", "pair"}
    assert all(set(reasons) == {"attributes"} for reasons in found.values())
    assert report.num_without_attributes > 0
    assert {example.item for example in report.features["log_price"].examples} == {8}


def test_attributes_that_both_lack_are_equal(tmp_path: Path) -> None:
    report = replayed(tmp_path, [event for event in all_events() if event.item != 8])
    assert report.num_mismatches == 0
    assert report.num_without_attributes > 0
    assert "requests for which the dataset has no attributes" in report.text()


def test_columns_that_the_dataset_does_not_have_are_told(tmp_path: Path) -> None:
    dataset = store(tmp_path, all_events(), attributes=False, fields=False)
    serve(tmp_path / "served", feature_set(), all_events())
    report = replay(tmp_path / "served", dataset, KEY)
    assert set(report.not_compared) == {"dwell", "log_price", "pair"}
    assert "events.dwell_ms" in report.not_compared["dwell"]
    assert "item.price" in report.not_compared["log_price"]
    assert set(report.features).isdisjoint(report.not_compared)
    assert report.num_mismatches == 0
    features = FeatureSet("prices", price=Item(price=Float()).price)
    log = logged(tmp_path / "prices", features, {"price": Column.of(FLOAT, [1.0])}, 50, START, [1])
    with pytest.raises(DataError, match=r"does not have item\.price"):
        replay(log, dataset, KEY)


def test_several_feature_sets_in_one_folder(tmp_path: Path) -> None:
    serve(tmp_path / "served", feature_set(), all_events())
    report = replayed(tmp_path, features=feature_set(all_events=Events().count()))
    assert report.num_mismatches == 0
    assert len(report.feature_sets) == 2
    assert report.features["all_events"].compared == 24
    assert report.features["clicks"].compared == 48


def test_a_torn_file_is_reported_and_the_rest_compared(tmp_path: Path) -> None:
    serve(tmp_path / "served", feature_set(), all_events())
    (path,) = (tmp_path / "served").iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    report = replay(tmp_path / "served", store(tmp_path, all_events()), KEY)
    assert report.num_compared == 23
    assert report.torn_files == [str(path)]
    assert "cut short" in report.text()


def test_features_that_read_no_events(tmp_path: Path) -> None:
    features = FeatureSet("hours", hour=Request().time.hour())
    log = logged(tmp_path, features, {"hour": Column.of(INT, [22])}, 50, START, [])
    report = replay(log, store(tmp_path, all_events()), KEY)
    assert (report.num_mismatches, report.num_values, report.num_late) == (0, 1, 0)


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    features = FeatureSet("long", text=Events().collect(Events().item))
    mine = [event for event in all_events() if event.user == 55] * 9
    many = [dataclasses.replace(event, time_ms=START + n, received_ms=START + n) for n, event in enumerate(mine)]
    items = Column.of(ID, [event.item for event in many[:-1]] + [999])
    served = OnlineExecutor(features.plan).compute(history={"item": items})
    log = logged(tmp_path, features, served, 55, START + HOUR, [])
    (example,) = replay(log, store(tmp_path, many), KEY).features["text"].examples
    assert example.served.startswith("…")
    assert example.served != example.recomputed
    assert len(example.served) < 140


def test_the_report_is_plain_json_within_limits(tmp_path: Path) -> None:
    report = replayed(tmp_path, change=lambda n, v: v | {"ratio": Column.of(FLOAT, [np.inf])})
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["num_mismatches"] == data["features"]["ratio"]["mismatches"]["skew"] == 24
    assert data["features"]["ratio"]["examples"][0]["served"] == "inf"
    assert "50" not in {example["user"] for example in data["features"]["ratio"]["examples"]}
    dataset = open_dataset(tmp_path / "log")
    assert replay(tmp_path / "served", dataset, KEY, max_requests=5).num_requests == 5
    few = replay(tmp_path / "served", dataset, KEY, num_examples=2).features["ratio"]
    assert (len(few.examples), few.mismatches["skew"]) == (2, 24)


def test_an_id_is_never_shown(tmp_path: Path) -> None:
    seen: list[Column] = []

    def swap(number: int, values: dict[str, Column]) -> dict[str, Column]:
        seen.append(values["mine"])
        return values | {"mine": seen[0]}

    report = replayed(tmp_path, change=swap)
    assert report.features["mine"].mismatches["skew"] == 23
    assert {example.served for example in report.features["mine"].examples} == {replay_module.HIDDEN}
