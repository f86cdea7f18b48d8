"""What may change in a feature set without a new version, and what may not: one sentence each."""

from __future__ import annotations

from typing import Any

import pytest

from tackboard.core.errors import UsageError
from tackboard.features.evolution import FeatureChange, check_evolution, compare
from tackboard.features.evolution import sentences as told
from tackboard.features.expressions import Expression
from tackboard.features.language import (
    Events,
    FeatureSet,
    Float,
    Item,
    List,
    String,
    Vector,
    feature,
    milliseconds,
    sequence,
)

events = Events()


def item(**price: Any) -> Item:
    return Item(price=Float(**price), look=Vector(3), wide=Vector(4), tags=List(String), name=String())


def base(**changes: Expression) -> dict[str, Expression]:
    return {"log_price": item(minimum=0).price.fill_missing(0.0).log1p(), "count": events.count()} | changes


OLD = FeatureSet("home", version=3, **base())


def sentences(new: FeatureSet, old: FeatureSet = OLD) -> list[str]:
    return [change.sentence for change in compare(old, new) if " moved from " not in change.sentence]


def test_nothing_changed() -> None:
    assert compare(OLD, OLD) == []
    assert check_evolution(OLD, FeatureSet.from_json(OLD.to_json())) == []


@pytest.mark.parametrize(
    ("features", "says"),
    [
        (base(more=events.count() + 1), "feature more (test_evolution.py:"),
        (base(count=events.count().described("All events.")), "is described in other words"),
        (base(log_price=item(minimum=-1).price.fill_missing(0.0).log1p()), "is widened from 0 to ∞ to -1 to ∞"),
        (base(log_price=item().price.fill_missing(0.0).log1p()), "is widened from 0 to ∞ to -∞ to ∞"),
        (base(count=events.count()), ""),
    ],
    ids=["added", "described", "widened", "no range any more", "another line"],
)
def test_what_needs_no_version(features: dict[str, Expression], says: str) -> None:
    new = FeatureSet("home", version=3, **features)
    changes = check_evolution(OLD, new)
    assert not any(change.needs_version for change in changes)
    assert len(sentences(new)) == bool(says)
    assert says in " ".join(sentences(new))


@pytest.mark.parametrize(
    ("features", "feature_name", "says"),
    [
        ({"count": base()["count"]}, "log_price", "is removed"),
        (base(count=events.count() * 1.0), "count", "has another type: int became float"),
        (base(count=events.last(events.time).seconds_since(events.last(events.time))), "count", "int became float?"),
        (base(count=events.within(milliseconds(5)).count()), "count", "is computed in another way"),
        (
            base(log_price=item(minimum=0, maximum=5).price.fill_missing(0.0).log1p()),
            "log_price",
            "the range of item.price is narrowed from 0 to ∞ to 0 to 5",
        ),
        (
            base(log_price=item(minimum=1).price.fill_missing(0.0).log1p()),
            "log_price",
            "the range of item.price is narrowed from 0 to ∞ to 1 to ∞",
        ),
        (base(log_price=item(minimum=0, default=0.0).price.log1p()), "log_price", "is computed in another way"),
    ],
    ids=["removed", "kind", "nullable", "computed", "maximum", "minimum", "default"],
)
def test_what_needs_a_version(features: dict[str, Expression], feature_name: str, says: str) -> None:
    new = FeatureSet("home", version=3, **features)
    breaking = [change for change in compare(OLD, new) if change.needs_version]
    assert [change.feature for change in breaking] == [feature_name]
    assert says in breaking[0].sentence
    with pytest.raises(UsageError) as refused:
        check_evolution(OLD, new)
    assert f"feature {feature_name} (test_evolution.py:" in refused.value.got
    assert "a new version of feature set home" in refused.value.allowed
    assert "version=4" in refused.value.fix
    raised = FeatureSet("home", version=4, **features)
    assert compare(OLD, raised) == compare(OLD, new)
    assert check_evolution(OLD, raised) == compare(OLD, raised)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (item().look, item().wide, "another width: vector[3]? became vector[4]?"),
        (item().look, item().look.fill_missing(0.0), "another nullability: vector[3]? became vector[3]"),
        (item().tags.fill_missing([]), events.collect(events.item), "another type: list[string] became list[id]"),
        (
            sequence(item=events.collect(events.item)),
            sequence(time=events.collect(events.time)),
            "another type: sequence{item: id} became sequence{time: time}",
        ),
    ],
)
def test_types_are_told_apart(old: Expression, new: Expression, says: str) -> None:
    (sentence,) = sentences(FeatureSet("home", x=new), FeatureSet("home", x=old))
    assert says in sentence


def test_several_changes_are_counted_and_the_first_is_told() -> None:
    new = FeatureSet("home", version=3, count=events.within(milliseconds(5)).count(), more=events.count())
    with pytest.raises(UsageError, match=r"log_price \(test_evolution\.py:\d+\) is removed, and 1 more such changes"):
        check_evolution(OLD, new)


def test_a_range_changes_every_feature_that_reads_the_column() -> None:
    def make(minimum: float) -> FeatureSet:
        prices = item(minimum=minimum)
        return FeatureSet(
            "home", price=prices.price.fill_missing(0.0), twice=feature("price") * 2, other=prices.name.hash_id()
        )

    assert [change.feature for change in compare(make(0), make(1)) if change.needs_version] == ["price", "twice"]


def test_a_column_declared_twice_must_lie_in_both_ranges() -> None:
    def make(low: float, high: float) -> FeatureSet:
        return FeatureSet("home", x=coalesced(item(minimum=low), item(maximum=high)))

    def coalesced(one: Item, other: Item) -> Expression:
        return one.price.fill_missing(0.0) + other.price.fill_missing(0.0)

    assert sentences(make(0, 9), make(0, 9)) == []
    (sentence,) = sentences(make(1, 10), make(0, 9))
    assert "narrowed from 0 to 9 to 1 to 10" in sentence


def test_another_name_and_an_older_version() -> None:
    renamed = FeatureSet("start", version=3, **base())
    with pytest.raises(UsageError, match="the set home is now called start"):
        check_evolution(OLD, renamed)
    assert check_evolution(OLD, FeatureSet("start", version=4, **base()))
    with pytest.raises(UsageError, match="has version 2, which is below the old version 3"):
        check_evolution(OLD, FeatureSet("home", version=2, **base()))


def test_a_moved_line_is_told() -> None:
    data = OLD.to_json()
    for node in data["nodes"]:
        node |= {"file": "other.py", "line": 7}
    changes = compare(OLD, FeatureSet.from_json(data))
    assert len(changes) == 2
    assert all(" moved from test_evolution.py:" in change.sentence and change.moved for change in changes)
    assert all(change.sentence.endswith("to other.py:7") and not change.needs_version for change in changes)


def test_moves_are_counted_and_changes_told_in_full() -> None:
    real = FeatureChange("a", "x.py:1", "feature a (x.py:1) is added", needs_version=False)
    move = FeatureChange("b", "x.py:2", "feature b moved from x.py:1 to x.py:2", needs_version=False, moved=True)
    assert told([move, real]) == [real.sentence, "1 feature moved to another line"]
    assert told([move, move]) == ["2 features moved to another line"] and told([]) == []
