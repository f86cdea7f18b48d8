"""The language as a user imports it: one module has all of it, and the set of the documentation compiles."""

from __future__ import annotations

from tackboard.features import entities, expressions, language
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import (
    Context,
    Events,
    Float,
    Int,
    Item,
    Request,
    String,
    Time,
    User,
    Vector,
    cross,
    days,
    feature,
    sequence,
)


def test_everything_a_user_writes_is_in_one_module() -> None:
    assert language.__all__ == sorted(language.__all__)
    assert all(hasattr(language, name) for name in language.__all__)
    declarations = {"Bool", "Int", "Float", "String", "Id", "Time", "Vector", "List"}
    assert declarations | {"User", "Item", "Context", "Request", "Events", "FeatureSet"} <= set(language.__all__)
    assert language.Events is entities.Events and language.if_else is expressions.if_else
    public = {
        name for name, value in vars(expressions).items() if getattr(value, "__module__", "") == expressions.__name__
    }
    inner = {
        "Expression",
        "Place",
        "NOWHERE",
        "NoOperator",
        "Duration",
        "as_expression",
        "caller_place",
        "did_you_mean",
        "duration_ms",
    }
    assert {name for name in public if not name.startswith("_")} - inner <= set(language.__all__)


def test_a_whole_set_compiles_with_its_levels_and_types() -> None:
    item = Item(price=Float(minimum=0), category=String(), embedding=Vector(16), born=Time())
    user = User(country=String(), born=Time())
    events = Events(dwell_ms=Int(minimum=0), category=String())
    context = Context(device=String())
    request = Request()
    clicks = events.where(events.action == "click")
    recent = events.newest(64)
    features = FeatureSet(
        "home",
        version=1,
        hour=request.time.hour("Europe/Berlin"),
        log_price=item.price.fill_missing(0.0).log1p(),
        clicks_7d=clicks.within(days(7)).count(),
        views_7d=events.within(days(7)).count(),
        same_category=events.matching(events["category"], item.category).count(),
        decayed_dwell=clicks.decayed_sum(events.dwell_ms.fill_missing(0), half_life=days(1)),
        top_items=clicks.top(events.item, 5),
        history=sequence(
            item=recent.collect(events.item), action=recent.collect(events.action.index_in(["click", "save"]))
        ),
        ctr=feature("clicks_7d") / feature("views_7d"),
        user_x_cat=cross(user.country.fill_missing(""), item.category.fill_missing("")),
        age=request.time.seconds_since(item.born),
        phone=context.device == "phone",
    )
    assert isinstance(features, FeatureSet)
    found = {feature.name: (feature.level, str(feature.type)) for feature in features.features()}
    assert found == {
        "hour": ("request", "int"),
        "log_price": ("candidate", "float"),
        "clicks_7d": ("request", "int"),
        "views_7d": ("request", "int"),
        "same_category": ("candidate", "int"),
        "decayed_dwell": ("request", "float"),
        "top_items": ("request", "list[id]"),
        "history": ("request", "sequence{item: id, action: int}"),
        "ctr": ("request", "float"),
        "user_x_cat": ("candidate", "id"),
        "age": ("candidate", "float?"),
        "phone": ("request", "bool?"),
    }
