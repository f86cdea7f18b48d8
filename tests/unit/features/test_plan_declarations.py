"""A column is declared once: executors know it by its name, so a second type or default would win over the first."""

from __future__ import annotations

import math

import pytest

from tackboard.core.errors import DataError
from tackboard.features.entities import Declared
from tackboard.features.language import FeatureSet, Float, Int, Item, String
from tackboard.features.plan import SpecError


@pytest.mark.parametrize("other", [Item(price=Float(default=7.0)), Item(price=String())], ids=["default", "type"])
def test_two_declarations_of_one_column_are_refused(other: Item) -> None:
    with pytest.raises(SpecError, match=r"feature b \(.*\), column: item\.price is declared in two ways"):
        FeatureSet("home", a=Item(price=Float()).price.is_missing(), b=other.price)


def test_ranges_may_differ_and_the_same_declaration_may_repeat() -> None:
    prices = (Item(price=Float()), Item(price=Float(minimum=0)), Item(price=Float()))
    assert FeatureSet("home", **{f"p{number}": item.price for number, item in enumerate(prices)})


def test_a_range_of_what_is_no_number_is_refused() -> None:
    data = FeatureSet("home", price=Item(price=String()).price).to_json()
    data["nodes"][0]["params"]["minimum"] = 0
    with pytest.raises(DataError, match="item.price is string. with a minimum"):
        FeatureSet.from_json(data)


@pytest.mark.parametrize(
    ("declared", "got"),
    [
        (Float(minimum=2, maximum=1), "minimum = 2 is above maximum = 1"),
        (Float(minimum=0, default=-1.0), "default = -1.0 is outside the declared range"),
        (Int(maximum=5, default=6), "default = 6 is outside the declared range"),
        (Float(minimum="0"), "minimum = '0'"),  # type: ignore[arg-type]
        (Float(default=math.nan), "'nan' is not a value of type float"),
    ],
)
def test_a_range_that_cannot_be(declared: Declared, got: str) -> None:
    with pytest.raises(SpecError) as error:
        FeatureSet("home", price=Item(price=declared).price)
    assert error.value.got.startswith("feature price (test_plan_declarations.py:") and got in error.value.got
    assert error.value.allowed
    assert FeatureSet("home", price=Item(price=Float(minimum=0, maximum=0, default=0.0)).price)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_constants_are_finite(value: float) -> None:
    with pytest.raises(SpecError, match=r"feature price \(.*\), constant: .* is not a finite number") as error:
        FeatureSet("home", price=Item(price=Float()).price + value)
    assert ".fill_missing(" in error.value.allowed and "finite number" in error.value.allowed
