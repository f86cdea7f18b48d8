"""A column is declared once: executors know it by its name, so a second type or default would win over the first."""

from __future__ import annotations

import pytest

from tackboard.core.errors import DataError
from tackboard.features.language import FeatureSet, Float, Item, String
from tackboard.features.plan import SpecError


@pytest.mark.parametrize("other", [Item(price=Float(default=7.0)), Item(price=String())], ids=["default", "type"])
def test_two_declarations_of_one_column_are_refused(other: Item) -> None:
    with pytest.raises(SpecError, match=r"feature b \(.*\), source: item\.price is declared in two ways"):
        FeatureSet("home", a=Item(price=Float()).price.is_missing(), b=other.price)


def test_ranges_may_differ_and_the_same_declaration_may_repeat() -> None:
    prices = (Item(price=Float()), Item(price=Float(minimum=0)), Item(price=Float()))
    assert FeatureSet("home", **{f"p{number}": item.price for number, item in enumerate(prices)})


def test_a_range_of_what_is_no_number_is_refused() -> None:
    data = FeatureSet("home", price=Item(price=String()).price).to_json()
    data["nodes"][0]["params"]["minimum"] = 0
    with pytest.raises(DataError, match="item.price is string. with a minimum"):
        FeatureSet.from_json(data)
