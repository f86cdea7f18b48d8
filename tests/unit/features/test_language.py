"""The language as a user imports it: one module has all of it."""

from __future__ import annotations

from tackboard.features import entities, expressions, language


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
        "CodePlace",
        "NOWHERE",
        "NoOperator",
        "Duration",
        "as_expression",
        "caller_place",
        "did_you_mean",
        "duration_ms",
    }
    assert {name for name in public if not name.startswith("_")} - inner <= set(language.__all__)
