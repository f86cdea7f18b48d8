"""The standard history: gaps against exact whole numbers, what a model may read, and how sets are combined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import ConfigError, DataError, TackboardError, UsageError
from tackboard.core.vocabulary import DEFAULT_READS, Vocabulary
from tackboard.features.column import Column
from tackboard.features.language import (
    Context,
    Events,
    FeatureSet,
    Float,
    Id,
    Int,
    Item,
    List,
    Request,
    String,
    User,
    Vector,
    milliseconds,
    sequence,
)
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import (
    NEVER,
    check_finite,
    check_readable,
    features_for_model,
    history_stride,
    only_carries_items,
    request_features,
    standard_features,
)
from tackboard.features.types import FLOAT, ID, STRING, TIME

VOCABULARY = Vocabulary(actions=("click", "save"), surfaces=("home",))
INT64 = np.iinfo(np.int64)
events, item, user, request, context = (
    Events(dwell_ms=Int(default=0)),
    Item(price=Float()),
    User(country=String(), age=Int()),
    Request(),
    Context(device=String()),
)


def history_of(
    features: FeatureSet,
    items: Sequence[int],
    times: Sequence[int],
    actions: Sequence[str] | None = None,
    surfaces: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """The feature `history` of one user's events."""
    columns = {
        "item": Column.of(ID, items),
        "time": Column.of(TIME, times),
        "action": Column.of(STRING, actions or ["click"] * len(items)),
        "surface": Column.of(STRING, surfaces or ["home"] * len(items)),
    }
    found: dict[str, list[Any]] = OnlineExecutor(features.plan).compute(history=columns)["history"].to_pylist()[0]
    return found


def exact_bucket(gap_ms: int) -> int:
    """floor(log2(1 + s)) of a gap of s = gap_ms / 1000 seconds, in whole numbers; 0 where a clock went backwards."""
    return ((gap_ms + 1000) // 1000).bit_length() - 1 if gap_ms > 0 else 0


def test_the_history_by_hand() -> None:
    found = history_of(
        standard_features(VOCABULARY),
        [5, -9, 5],
        [1000, 2000, 9000],
        ["save", "click", "never seen"],
        ["home", "tv", "home"],
    )
    assert found == {
        "item": [5, -9, 5],
        "action": [2, 1, 0],
        "surface": [1, 0, 1],
        "time": [1000, 2000, 9000],
        "gap": [0, 1, 3],
    }


def test_the_newest_events_are_kept_and_the_first_of_them_has_no_gap() -> None:
    found = history_of(standard_features(VOCABULARY, 2), [1, 2, 3], [0, 10**6, 10**6 + 3000])
    assert found["item"] == [2, 3]
    assert found["gap"] == [0, 2]
    assert history_of(standard_features(VOCABULARY, 2), [], []) == {name: [] for name in found}


EDGES = [
    gap
    for power in range(54)
    for gap in (((1 << power) - 1) * 1000 - 1, ((1 << power) - 1) * 1000, ((1 << power) - 1) * 1000 + 1)
]


@pytest.mark.parametrize("gaps", [EDGES, [0, 999, 1000, 2999, 3000, 7000, 10**15, -1, -5000, INT64.max, INT64.min]])
def test_gap_buckets_at_their_edges(gaps: list[int]) -> None:
    features = standard_features(VOCABULARY)
    # From 0 on, or back to it: the gap itself, without a sum that would leave 64 bits.
    found = [history_of(features, [1, 2], [0, gap])["gap"] for gap in gaps]
    assert found == [[0, exact_bucket(gap)] for gap in gaps]


@given(st.lists(st.integers(-(2**62), 2**62), max_size=8).map(sorted))
@settings(max_examples=60)
def test_gap_buckets_of_any_times(times: list[int]) -> None:
    found = history_of(standard_features(VOCABULARY), list(range(len(times))), times)
    gaps = [0, *(later - earlier for earlier, later in itertools.pairwise(times))][: len(times)]
    assert found["gap"] == [exact_bucket(gap) for gap in gaps]


def sources(features: FeatureSet) -> set[str]:
    return {f"{node.params['entity']}.{node.params['column']}" for _, node in features.plan.sources()}


def test_a_model_gets_the_columns_it_reads_and_nothing_else_is_loaded() -> None:
    features = features_for_model(["history.item", "history.gap"], VOCABULARY, 8)
    assert features.reads() == ["history.item", "history.gap"]
    assert sources(features) == {"event.item", "event.time"}
    assert features.plan.newest_events == 8
    other_order = features_for_model(["history.gap", "history.item"], VOCABULARY, 8)
    assert other_order.hash == features.hash, "columns come in the order they were written"
    assert sources(features_for_model(["history.item"], VOCABULARY, 8)) == {"event.item"}
    assert features_for_model(DEFAULT_READS, VOCABULARY, 8).reads() == list(DEFAULT_READS)


def test_features_of_ones_own_stand_beside_the_standard_history() -> None:
    own = FeatureSet("shop", version=3, hour=request.time.hour("UTC"), events_before=events.count(), unread=item.price)
    features = features_for_model(["history.item", "events_before", "hour"], VOCABULARY, 8, own)
    assert (features.name, features.version) == ("shop", 3)
    assert features.reads() == ["history.item", "events_before", "hour"]
    assert sources(features) == {"event.item", "request.time"}
    assert features.feature_hashes()["hour"] == own.feature_hashes()["hour"]


def test_a_history_of_ones_own_replaces_the_standard_one() -> None:
    newest = events.newest(8)
    own = FeatureSet(
        "shop",
        history=sequence(
            item=newest.collect(events.item), dwell=newest.collect((events.dwell_ms / 1000.0).log1p())
        ).described("With how long it was looked at."),
    )
    features = features_for_model(["history.item", "history.dwell"], VOCABULARY, 8, own)
    assert sources(features) == {"event.item", "event.dwell_ms"}
    assert features.features()[0].description == "With how long it was looked at."
    with pytest.raises(UsageError, match="feature history has no column gap") as caught:
        features_for_model(["history.item", "history.gap"], VOCABULARY, 8, own)
    assert caught.value.allowed == "its columns: item, dwell"


@pytest.mark.parametrize(
    ("reads", "parts"),
    [
        (["history.item", "hisstory.gap"], ["there is no feature hisstory", "did you mean history?"]),
        (["history.item", "history.gapp"], ["history has no column gapp", "did you mean history.gap?"]),
        (["history.item", "price"], ["price", "may be missing", ".fill_missing(0.0)"]),
        (["history.item", "country"], ["country", "is string", "a number (bool, int or float)"]),
        (["history.item", "device"], ["device", "is id", "a number (bool, int or float)"]),
        (["history.item", "last_items"], ["last_items", "is list[id]", "a number (bool, int or float)"]),
        (["history.item", "log_price"], ["log_price", "one value per candidate", "one value per request"]),
        (["history.item", "age"], ["age", "may be missing", ".fill_missing(0)"]),
        (["history.action"], ["history", "sequence{action: int}", "a sequence with a column item"]),
        (["num_events"], ["does not read history.item"]),
        ([], ["does not read history.item"]),
    ],
)
def test_what_no_model_can_read_is_named_with_its_line(reads: list[str], parts: list[str]) -> None:
    own = FeatureSet(
        "shop",
        price=item.price,
        country=user.country.fill_missing(""),
        device=context.device.fill_missing("").hash_id(),
        last_items=events.newest(3).collect(events.item),
        log_price=item.price.fill_missing(0.0).log1p(),
        age=user.age,
        num_events=events.count(),
    )
    with pytest.raises(TackboardError) as caught:
        features_for_model(reads, VOCABULARY, 8, own)
    assert isinstance(caught.value, ConfigError | UsageError)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert len(text.splitlines()) <= 3
    if caught.value.got.startswith("feature ") and "has no column" not in text:
        place = "standard.py" if reads == ["history.action"] else "test_standard.py"
        assert f"{place}:" in caught.value.got


def test_a_model_of_requests_reads_everything_but_text() -> None:
    """Of the request and of its candidates; a model of histories is refused each of them."""
    things = Item(price=Float(), maker=Id(), look=Vector(3), tags=List(Id), marks=List(Float), words=List(String))
    own = FeatureSet(
        "ads",
        device=context.device.fill_missing("").hash_id(),
        last_items=events.newest(3).collect(events.item),
        last_times=events.newest(3).collect(events.time),
        now=request.time,
        log_price=things.price.fill_missing(0.0).log1p(),
        maker=things.maker.fill_missing(0),
        look=things.look.fill_missing(0),
        tags=things.tags.fill_missing([]),
        marks=things.marks.fill_missing([]),
        words=things.words.fill_missing([]),
        country=user.country.fill_missing(""),
        bare_tags=things.tags,
        again=sequence(item=events.newest(3).collect(events.item)),
    )
    readable = ["device", "last_items", "last_times", "now", "log_price", "maker", "look", "tags", "marks"]
    features = features_for_model(["history.item", *readable], VOCABULARY, 8, own, of_requests=True)
    assert features.reads() == ["history.item", *readable]
    check_readable(features, 8, of_requests=True)
    for name in readable:
        with pytest.raises(ConfigError, match=name):
            features_for_model(["history.item", name], VOCABULARY, 8, own)
    wrong = {
        "words": ("is list[string]", "a list of numbers, ids or times"),
        "country": ("is string", "a number, id, time or vector"),
        "bare_tags": ("may be missing", ".fill_missing([])"),
        "again": ("is sequence{item: id}", "a number, id, time or vector"),
    }
    for name, (got, help_) in wrong.items():
        with pytest.raises(ConfigError) as caught:
            features_for_model(["history.item", name], VOCABULARY, 8, own, of_requests=True)
        assert got in caught.value.got
        assert help_ in f"{caught.value.allowed} {caught.value.fix}"
    with pytest.raises(ConfigError, match=r"does not read history\.item"):
        features_for_model(["now"], VOCABULARY, 8, own, of_requests=True)


def since_last_of(times: Sequence[int], request_ms: int | None) -> float:
    features = features_for_model(["history.item", "since_last"], VOCABULARY, 2)
    columns = {"item": Column.of(ID, range(len(times))), "time": Column.of(TIME, times)}
    found = OnlineExecutor(features.plan).compute(history=columns, request_ms=request_ms)
    return float(found["since_last"].values[0])


def test_the_time_since_the_newest_event_by_hand() -> None:
    assert since_last_of([1000, 2000, 9500], 10_000) == 0.5
    assert since_last_of([], 10_000) == NEVER
    assert since_last_of([10_000], 10_000) == 0.0
    assert since_last_of([12_000], 10_000) == -2.0  # a clock that went backwards is not hidden here
    assert since_last_of([0], 10**15) == 10.0**12


def test_since_last_is_read_only_where_it_is_asked_for() -> None:
    features = features_for_model(["history.item", "since_last"], VOCABULARY, 8)
    assert features.reads() == ["history.item", "since_last"]
    assert sources(features) == {"event.item", "event.time", "request.time"}
    check_readable(features, 8)
    without = features_for_model(["history.item"], VOCABULARY, 8)
    assert sources(without) == {"event.item"}
    assert without.feature_hashes()["history"] == features.feature_hashes()["history"]
    again = FeatureSet.from_json(features.to_json())
    assert again.feature_hashes()["since_last"] == request_features().feature_hashes()["since_last"]


def test_a_history_may_begin_at_an_anchor() -> None:
    anchored = features_for_model(["history.item", "history.gap"], VOCABULARY, 8, of_requests=True, anchor_stride=3)
    assert history_stride(anchored) == 3
    newest = features_for_model(["history.item", "history.gap"], VOCABULARY, 8, of_requests=True)
    assert history_stride(newest) == 1
    assert anchored.read_hashes(8) == newest.read_hashes(8), "a pretrained model may be fine-tuned with anchors"
    for features, stride in ((anchored, 1), (anchored, 4), (newest, 3)):
        with pytest.raises(ConfigError, match="is not the user's newest 8 events") as caught:
            check_readable(features, 8, anchor_stride=stride)
        call = "newest(model.max_history)"
        call = call if stride == 1 else "anchored(model.max_history, model.fusion.anchor_stride)"
        assert f"events.{call}" in caught.value.allowed
    own = FeatureSet("own", history=sequence(item=events.anchored(8, 3).collect(events.item)))
    assert history_stride(features_for_model(["history.item"], VOCABULARY, 8, own, anchor_stride=3)) == 3


newest_8 = events.newest(8)
NOT_NEWEST = "is not the user's newest 8 events"
ALLOWED = "allowed: newest = events.newest(model.max_history), with item=newest.collect(events.item)"
WRONG_HISTORIES = {
    "a list": (newest_8.collect(events.item), "is list[id]", "a sequence with a column item"),
    "text": (
        sequence(item=newest_8.collect(events.item), action=newest_8.collect(events.action)),
        "has text in action",
        "index_in",
    ),
} | {
    name: (sequence(item=items), NOT_NEWEST, ALLOWED)
    for name, items in {
        "some events": events.where(events.action == "click").newest(8).collect(events.item),
        "young events": events.within(milliseconds(1000)).newest(8).collect(events.item),
        "all events": events.collect(events.item),
        "too few": events.newest(7).collect(events.item),
        "too many": events.newest(9).collect(events.item),
        "other ids": newest_8.collect(events.surface.hash_id()),
        "changed ids": newest_8.collect(events.item).take(3),
    }.items()
}


newest_item = newest_8.collect(events.item)
CARRIED = {
    "the standard history": (standard_features(VOCABULARY, 8), True),
    "other features of events": (FeatureSet("shop", history=sequence(item=newest_item), count=events.count()), True),
    "a candidate's id": (FeatureSet("shop", history=sequence(item=newest_item), own=item.id), True),
    "twice": (FeatureSet("shop", history=sequence(item=newest_item, same=newest_item)), False),
    "compared": (
        FeatureSet(
            "shop", history=sequence(item=newest_item, five=newest_8.collect(events.item.hash_id() == events.item))
        ),
        False,
    ),
    "matched": (
        FeatureSet("shop", history=sequence(item=newest_item), seen=events.matching(events.item, item.id).count()),
        False,
    ),
    "collected": (FeatureSet("shop", history=sequence(item=newest_item), list=newest_item), False),
    "of other events": (FeatureSet("shop", history=sequence(item=newest_8.collect(events.surface.hash_id()))), False),
}


@pytest.mark.parametrize("name", CARRIED)
def test_whether_items_are_only_carried(name: str) -> None:
    features, expected = CARRIED[name]
    assert only_carries_items(features.plan) is expected


@pytest.mark.parametrize("name", WRONG_HISTORIES)
def test_a_history_that_training_could_not_predict_is_refused(name: str) -> None:
    history, got, help_ = WRONG_HISTORIES[name]
    features = FeatureSet("shop", history=history)
    with pytest.raises(ConfigError, match=r"feature history \(test_standard\.py:") as caught:
        check_readable(features, 8)
    assert got in caught.value.got and help_ in f"{caught.value.allowed} {caught.value.fix}"
    with pytest.raises(ConfigError):
        features_for_model(features.reads(), VOCABULARY, 8, features)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf, 1e39])
def test_a_number_that_is_not_finite_names_its_feature_and_line(wrong: float) -> None:
    """A loss of NaN says nothing about where it came from."""
    features = FeatureSet("own", rate=Events().count() / Events().count())
    check_finite(features, {"rate": Column.of(FLOAT, [0.0, -3e38])})
    with pytest.raises(DataError, match=r"feature rate \(test_standard\.py:\d+\) is .*; 1 of 2 values"):
        check_finite(features, {"rate": Column.of(FLOAT, [0.5, wrong])})
