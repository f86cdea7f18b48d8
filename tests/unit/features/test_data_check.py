"""`check_data`: every column that features read is there, of its type and in its range, or feature and line told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import open_dataset
from tackboard.features.data_check import check_data
from tackboard.features.expressions import Expression
from tackboard.features.language import (
    Bool,
    Context,
    Events,
    FeatureSet,
    Float,
    Int,
    Item,
    List,
    Request,
    String,
    User,
    Vector,
)

GOOD = FeatureSet(
    "good",
    price=Item(price=Float(minimum=0, maximum=9.25)).price,
    look=Item(look=Vector(2)).look,
    tags=Item(tags=List(Int)).tags,
    country=User(country=String()).country,
    dwell=Events(dwell_ms=Int(minimum=0, maximum=9000)).count(),
    longest=Events(dwell_ms=Int(minimum=0, maximum=9000)).max(Events(dwell_ms=Int(minimum=0, maximum=9000)).dwell_ms),
    device=Context(device=String()).device,
    slot=Context(slot=Int(minimum=0, maximum=3)).slot,
    ids=Item().id,
    hour=Request().time.hour(),
)


def last(name: str, declared: Any) -> Expression:
    events = Events(**{name: declared})
    return events.last(events[name])


def test_data_that_fits(rich_dataset: Path) -> None:
    check_data(GOOD, open_dataset(rich_dataset))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Item(cost=Float()).cost, "item.cost is not in the data"),
        (User(age=Int()).age, "user.age is not in the data"),
        (last("scroll", Int()), "events.scroll is not in the data"),
        (Context(devcie=String()).devcie, "context.devcie is not in the data"),
        (Item(price=String()).price, "item.price is double"),
        (Item(look=Vector(3)).look, "item.look has vectors of width 2"),
        (Item(tags=String()).tags, "item.tags is list"),
        (User(country=Float()).country, "user.country is"),
        (last("dwell_ms", Bool()), "events.dwell_ms is int64"),
        (Context(slot=String()).slot, "context.slot is"),
        (Item(price=Float(minimum=0.5)).price, "item.price is 0.0; 1 of 5 values"),
        (last("dwell_ms", Int(maximum=4000)), "events.dwell_ms is "),
        (Context(slot=Int(maximum=1)).slot, "context.slot is "),
    ],
)
def test_data_that_does_not(rich_dataset: Path, bad: Expression, says: str) -> None:
    features = FeatureSet("bad", fine=Events().count(), wrong=bad)
    with pytest.raises(DataError) as refused:
        check_data(features, open_dataset(rich_dataset))
    assert refused.value.got.startswith("feature wrong (test_data_check.py:")
    assert says in refused.value.got


def test_a_range_is_checked_in_rows_that_no_event_leads_to(rich_dataset: Path) -> None:
    # Nobody has ever touched items beyond the log's; they can be asked for tomorrow.
    dataset = open_dataset(rich_dataset)
    check_data(FeatureSet("x", price=Item(price=Float(maximum=9.25)).price), dataset)
    with pytest.raises(DataError, match=r"declared range: -∞ to 9"):
        check_data(FeatureSet("x", price=Item(price=Float(maximum=9)).price), dataset)


def test_events_without_any_context(make_rich_dataset: Callable[..., Path], tmp_path: Path) -> None:
    dataset = open_dataset(make_rich_dataset(tmp_path, context=None))
    with pytest.raises(DataError, match=r"feature device \(test_data_check\.py:\d+\): context\.device is not in"):
        check_data(GOOD, dataset)
    check_data(GOOD.trimmed(["price", "dwell"]), dataset)


def test_every_row_group_is_looked_at(
    make_rich_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 4)
    dwell = [0] * 63
    dwell[-1] = -5
    path = make_rich_dataset(tmp_path, dwell_ms=pa.array(dwell, pa.int64()))
    with pytest.raises(DataError, match=r"events\.dwell_ms is -5; 1 of"):
        check_data(GOOD, open_dataset(path))
