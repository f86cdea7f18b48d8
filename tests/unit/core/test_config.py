"""Strict config: a typo is an error with a suggestion, a wrong type never passes, what is written reads back equal."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import pytest

from tackboard.core.config import (
    apply_overrides,
    check,
    explain,
    field_docs,
    from_dict,
    move_settings,
    suggest,
    to_dict,
)
from tackboard.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """The inner settings."""

    steps: int = 10
    """How many
    steps."""
    rate: float = 0.5
    """Per step."""
    undocumented: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """The outer settings."""

    name: str
    """A word."""
    inner: Inner = dataclasses.field(default_factory=Inner)
    """Nested."""
    cutoffs: tuple[int, ...] = (1, 5)
    """Several."""
    mode: Literal["fast", "exact"] = "fast"
    """One of two."""
    limit: int | None = None
    """Optional."""
    anything: Any = None
    """Whatever."""
    verbose: bool = False
    """A switch."""

    def __post_init__(self) -> None:
        check(self.limit is None or self.limit > 0, "limit", self.limit, "above 0")


def error_lines(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(Outer, data)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3
    return lines


def test_round_trip_through_plain_json() -> None:
    config = Outer(name="x", inner=Inner(rate=1e-9), cutoffs=(3,), limit=4, anything={"deep": [1]})
    assert to_dict(config)["cutoffs"] == [3]
    assert from_dict(Outer, to_dict(config)) == config


def test_an_unknown_key_names_its_path_and_the_closest_one() -> None:
    assert error_lines({"name": "x", "inner": {"step": 3}}) == [
        "unknown setting inner.step",
        "allowed here: steps, rate, undocumented",
        "did you mean inner.steps?",
    ]
    assert error_lines({"nam": "x"})[-1] == "did you mean name?"
    assert len(error_lines({"name": "x", "qqqqqq": 1})) == 2  # nothing is near: no suggestion


def test_missing_fields_and_wrong_shapes() -> None:
    assert "name" in error_lines({})[0]
    assert "inner is int" in error_lines({"name": "x", "inner": 3})[0]
    assert "list" in error_lines([1])[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inner.steps", 1.5),
        ("inner.steps", True),
        ("inner.steps", "3"),
        ("inner.steps", None),
        ("inner.rate", "0.1"),
        ("inner.rate", True),
        ("verbose", 1),
        ("verbose", "true"),
        ("name", 3),
        ("cutoffs", 3),
        ("cutoffs", "15"),
        ("cutoffs", [1, "a"]),
        ("mode", "slow"),
        ("limit", "3"),
        ("limit", -1),
    ],
)
def test_wrong_values_are_refused_by_name(key: str, value: Any) -> None:
    data: dict[str, Any] = {"name": "x", "inner": {}}
    table, _, leaf = key.rpartition(".")
    (data[table] if table else data)[leaf] = value
    assert key in error_lines(data)[0]


def test_whole_numbers_pass_as_fractions_and_lists_as_tuples() -> None:
    config = from_dict(Outer, {"name": "x", "inner": {"rate": 2}, "cutoffs": [7, 8]})
    assert isinstance(config.inner.rate, float)
    assert config.cutoffs == (7, 8)


def test_overrides_apply_in_order_and_leave_the_original_alone() -> None:
    config = Outer(name="x")
    changed = apply_overrides(
        config,
        [
            "inner.steps=3",
            "inner.steps=4",
            "inner.rate=1e-3",
            "cutoffs=[2,20]",
            "mode=exact",
            "limit=5",
            "verbose=true",
        ],
    )
    assert changed == Outer(
        name="x", inner=Inner(steps=4, rate=1e-3), cutoffs=(2, 20), mode="exact", limit=5, verbose=True
    )
    assert config == Outer(name="x")
    assert apply_overrides(changed, ["limit=null"]).limit is None
    assert apply_overrides(config, ["name=12"]).name == "12"  # a string stays one
    assert apply_overrides(config, ["name=a=b"]).name == "a=b"
    assert apply_overrides(Outer(name="x", anything=Inner()), ["anything.steps=9"]).anything == Inner(steps=9)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("inner.stpes=3", "did you mean inner.steps?"),
        ("iner.steps=3", "did you mean inner.steps?"),
        ("inner=3", "inner.NAME=value"),
        ("name.first=x", "name is a single value"),
        ("inner.steps", "--set name=value"),
        ("=3", "--set name=value"),
        ("inner.steps=many", "a whole number"),
        ("mode=slow", "fast, exact"),
        ("limit=0", "above 0"),
    ],
)
def test_wrong_overrides_say_what_to_do(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Outer(name="x"), [override])
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_field_docs_are_the_strings_under_the_fields() -> None:
    assert field_docs(Inner) == {"steps": "How many steps.", "rate": "Per step."}
    assert field_docs(Outer)["inner"] == "Nested."


def test_suggest_is_silent_when_nothing_is_near() -> None:
    assert suggest("stpes", ["steps", "rate"]) == "steps"
    assert suggest("zzz", ["steps", "rate"]) is None


def test_settings_that_fit_only_together_may_come_in_any_order() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Pair:
        low: int = 1
        high: int = 2

        def __post_init__(self) -> None:
            check(self.low < self.high, "low", self.low, f"below {self.high}")

    for overrides in (["low=5", "high=9"], ["high=9", "low=5"], ["low=8", "high=9", "low=5"]):
        assert apply_overrides(Pair(), overrides) == Pair(low=5, high=9)
    with pytest.raises(ConfigError):
        apply_overrides(Pair(), ["low=5"])


def test_a_leaf_given_without_its_table_is_found() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Outer(name="x"), ["steps=3"])
    assert caught.value.fix == "did you mean inner.steps?"


def test_explain_lists_every_setting_with_its_meaning() -> None:
    rows = {name: (value, meaning) for name, value, meaning in explain(Outer(name="x"))}
    assert rows["name"] == ("x", "A word.")
    assert rows["inner.steps"] == ("10", "How many steps.")
    assert rows["cutoffs"] == ("[1, 5]", "Several.")
    assert rows["inner.undocumented"][1] == ""


MOVED = {"hashing": "tables", "table_dim": "tables.dim", "backbone": "backbone.kind", "layers": "backbone.layers"}


def test_settings_of_an_older_version_are_moved_to_their_place() -> None:
    old = {"hashing": {"num_rows": 3}, "table_dim": 4, "backbone": "gpt", "layers": 2, "width": 8}
    new = {"tables": {"num_rows": 3, "dim": 4}, "backbone": {"kind": "gpt", "layers": 2}, "width": 8}
    assert move_settings(old, MOVED) == new
    assert move_settings(new, MOVED) == new, "what is of today's version stays"
    assert move_settings(5, MOVED) == 5
    assert old["hashing"] == {"num_rows": 3}, "what came in is left alone"
    for wrong in ({"tables": 5, "table_dim": 4}, {"tables": 5, "hashing": {}}, {"tables": None, "table_dim": 4}):
        assert move_settings(wrong, MOVED) == wrong, "left to whoever reads it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    dim: int = 1
    num_rows: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    moved_settings: ClassVar[dict[str, str]] = MOVED | {"tables": "tables.num_rows"}
    tables: Tables = dataclasses.field(default_factory=Tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    model: Model = dataclasses.field(default_factory=Model)


def test_who_sets_what_has_moved_is_told_where_it_is() -> None:
    wanted = {
        "model.table_dim=4": ("unknown setting model.table_dim", "did you mean model.tables.dim?"),
        "model.hashing.num_rows=4": ("unknown setting model.hashing.num_rows", "did you mean model.tables.num_rows?"),
        "model.tables=4": ("model.tables is a table of settings", "did you mean model.tables.num_rows?"),
        "model.tables.rows=4": ("unknown setting model.tables.rows", "did you mean model.tables.num_rows?"),
    }
    for override, (got, fix) in wanted.items():
        with pytest.raises(ConfigError) as caught:
            apply_overrides(Run(), [override])
        assert (caught.value.got, caught.value.fix) == (got, fix)
    assert apply_overrides(Run(), ["model.tables.dim=4"]).model.tables.dim == 4
