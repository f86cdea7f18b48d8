"""What a user writes: expressions over entities, events and the request.

An expression is a tree of operator names. Building one computes nothing and checks nothing: it only remembers the line
it was written on, so that the compiler (`plan.py`), which knows the feature's name, can point at it. The operators
themselves, with their types and examples, stand in the registry.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tackboard.core.config import suggest
from tackboard.core.errors import UsageError
from tackboard.features.operators import REGISTRY

PACKAGE = str(Path(__file__).parent) + os.sep


class Place(NamedTuple):
    """Where something was written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.file else "features.json"


NOWHERE = Place("", 0)


def caller_place() -> Place:
    """The innermost line that defines features: the user's, or that of a standard feature."""
    frame = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        if frame.f_back is None:
            return NOWHERE
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def _is_machinery(file: str) -> bool:
    return file.startswith(PACKAGE) and Path(file).name != "standard.py"


class NoOperator(UsageError, AttributeError):
    """An operator that does not exist. An AttributeError too, so that hasattr and getattr work as everywhere."""


class Expression:
    """An operator applied to expressions. Compare and combine with `==`, `<`, `&`, `|`, `~`, not `and`, `or`, `not`."""

    __slots__ = ("args", "op", "params", "place", "text")
    __hash__ = object.__hash__

    def __init__(self, op: str, args: Sequence[Any] = (), params: Mapping[str, Any] | None = None) -> None:
        self.op = op
        self.args = tuple(as_expression(argument) for argument in args)
        self.params = dict(params or {})
        self.place = caller_place()
        self.text = ""

    def described(self, text: str) -> Expression:
        """The same expression with a sentence for the documentation page."""
        copy = Expression(self.op, self.args, self.params)
        copy.place, copy.text = self.place, text
        return copy

    def __repr__(self) -> str:
        return f"an expression ({self.place})"

    def __getattr__(self, name: str) -> NoReturn:
        # Python and NumPy ask for names with underscores to find out what an object can do; copies are made empty.
        if name.startswith("_") or name in Expression.__slots__:
            raise AttributeError(name)
        operators = [known for known in vars(Expression) if not known.startswith("_") and known not in self.__slots__]
        close = suggest(name, operators)
        fix = f"did you mean {close}?" if close else "docs/features.md lists the operators"
        for operator in REGISTRY.values():
            if operator.spelling.startswith((f"{name}(", f"events.{name}(")):
                fix = f"it is written {operator.spelling}"
        raise NoOperator(f"{caller_place()}: there is no operator {name}", fix=fix)

    def __call__(self, *_inputs: Any, **_params: Any) -> NoReturn:
        place = caller_place()
        if self.op not in ("source", "unknown_column"):
            raise UsageError(f"{place}: a feature is called like a function", fix="put an operator before the (")
        entity, column = str(self.params["entity"]), str(self.params["column"])
        owner = "events" if entity == "event" else entity
        spellings = [operator.spelling for operator in REGISTRY.values()] if entity == "event" else []
        operators = [text[7:].partition("(")[0] for text in spellings if text.startswith("events.")]
        if self.op == "unknown_column":
            close = suggest(column, [*operators, *self.params["known"]])
            raise UsageError(
                f"{place}: {owner} has no column or operator {column}", fix=f"did you mean {close}?" if close else ""
            )
        written = f"{owner}.{column}" if column not in operators else f'{owner}["{column}"]'
        raise UsageError(
            f"{place}: {written} is a column, not an operator",
            fix=f"the operator is {owner}.{column}(…)" if column in operators else f"write {written} without ()",
        )

    def __bool__(self) -> NoReturn:
        raise UsageError(
            f"{caller_place()}: a feature has no truth value while it is being defined",
            allowed="for and, or, not write &, |, ~ with parentheses around each comparison: (a > 0) & (a < 3)",
            fix="for `a in values` write a.is_in([…]); for `if` write if_else(condition, a, b)",
        )

    def __iter__(self) -> NoReturn:
        raise UsageError(
            f"{caller_place()}: a feature cannot be looped over",
            allowed="use the operators of lists: .has(value), .sum(), .at(0)",
        )

    # Arithmetic and comparison.

    def __add__(self, other: Any) -> Expression:
        return Expression("add", (self, other))

    def __radd__(self, other: Any) -> Expression:
        return Expression("add", (other, self))

    def __sub__(self, other: Any) -> Expression:
        return Expression("subtract", (self, other))

    def __rsub__(self, other: Any) -> Expression:
        return Expression("subtract", (other, self))

    def __mul__(self, other: Any) -> Expression:
        return Expression("multiply", (self, other))

    def __rmul__(self, other: Any) -> Expression:
        return Expression("multiply", (other, self))

    def __truediv__(self, other: Any) -> Expression:
        return Expression("divide", (self, other))

    def __rtruediv__(self, other: Any) -> Expression:
        return Expression("divide", (other, self))

    def __floordiv__(self, other: Any) -> Expression:
        return Expression("floor_divide", (self, other))

    def __rfloordiv__(self, other: Any) -> Expression:
        return Expression("floor_divide", (other, self))

    def __mod__(self, other: Any) -> Expression:
        return Expression("modulo", (self, other))

    def __rmod__(self, other: Any) -> Expression:
        return Expression("modulo", (other, self))

    def __neg__(self) -> Expression:
        return Expression("negate", (self,))

    def __abs__(self) -> Expression:
        return Expression("absolute", (self,))

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return Expression("equal", (self, other))

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return Expression("not_equal", (self, other))

    def __lt__(self, other: Any) -> Expression:
        return Expression("less", (self, other))

    def __le__(self, other: Any) -> Expression:
        return Expression("less_equal", (self, other))

    def __gt__(self, other: Any) -> Expression:
        return Expression("greater", (self, other))

    def __ge__(self, other: Any) -> Expression:
        return Expression("greater_equal", (self, other))

    def __and__(self, other: Any) -> Expression:
        return Expression("and", (self, other))

    def __rand__(self, other: Any) -> Expression:
        return Expression("and", (other, self))

    def __or__(self, other: Any) -> Expression:
        return Expression("or", (self, other))

    def __ror__(self, other: Any) -> Expression:
        return Expression("or", (other, self))

    def __invert__(self) -> Expression:
        return Expression("not", (self,))

    def abs(self) -> Expression:
        """The value without its sign."""
        return Expression("absolute", (self,))

    def floor(self) -> Expression:
        """The largest whole number that is not larger."""
        return Expression("floor", (self,))

    def is_in(self, values: Sequence[Any]) -> Expression:
        """Whether the value is one of `values`."""
        return Expression("is_in", (self,), {"values": list(values)})

    # Missing values.

    def is_missing(self) -> Expression:
        """Whether there is no value."""
        return Expression("is_missing", (self,))

    def fill_missing(self, value: Any) -> Expression:
        """`value` where there is none."""
        return Expression("fill_missing", (self,), {"value": list(value) if isinstance(value, tuple) else value})

    def missing_if(self, value: Any) -> Expression:
        """Missing where the value is `value`."""
        return Expression("missing_if", (self,), {"value": value})

    def finite(self) -> Expression:
        """Missing where the value is NaN or infinite."""
        return Expression("finite", (self,))

    # Ids.

    def hash_id(self) -> Expression:
        """The id of a value, by the one hash of the project."""
        return Expression("hash_id", (self,))

    def bucket_hash(self, num_buckets: int, seed: int = 0) -> Expression:
        """An id as a whole number below `num_buckets`."""
        return Expression("bucket_hash", (self,), {"num_buckets": num_buckets, "seed": seed})

    def index_in(self, names: Sequence[str]) -> Expression:
        """The position of a string among `names`, from 1; 0 for any other."""
        return Expression("index_in", (self,), {"names": list(names)})

    # Scaling.

    def log(self) -> Expression:
        """The natural logarithm."""
        return Expression("log", (self,))

    def log1p(self) -> Expression:
        """The natural logarithm of 1 + the value."""
        return Expression("log1p", (self,))

    def exp(self) -> Expression:
        """e to the power of the value."""
        return Expression("exp", (self,))

    def sqrt(self) -> Expression:
        """The square root."""
        return Expression("sqrt", (self,))

    def clip(self, low: float | None, high: float | None) -> Expression:
        """The value, at least `low` and at most `high`."""
        return Expression("clip", (self,), {"low": low, "high": high})

    def normalise(self, *, mean: float, std: float) -> Expression:
        """(value - mean) / std."""
        return Expression("normalise", (self,), {"mean": mean, "std": std})

    def bucketize(self, boundaries: Sequence[float]) -> Expression:
        """How many of `boundaries` are not larger than the value."""
        return Expression("bucketize", (self,), {"boundaries": list(boundaries)})

    # Vectors.

    def dot(self, other: Any) -> Expression:
        """The scalar product with another vector."""
        return Expression("dot", (self, other))

    def norm(self) -> Expression:
        """The Euclidean length of a vector."""
        return Expression("norm", (self,))

    def l2_normalise(self) -> Expression:
        """The vector over its length."""
        return Expression("l2_normalise", (self,))

    def cosine(self, other: Any) -> Expression:
        """The cosine of the angle to another vector."""
        return Expression("cosine", (self, other))

    # Text.

    def lower(self) -> Expression:
        """The text in lower case."""
        return Expression("lower", (self,))

    def strip(self) -> Expression:
        """The text without white space around it."""
        return Expression("strip", (self,))

    def nfc(self) -> Expression:
        """The text with its accents composed (Unicode NFC)."""
        return Expression("nfc", (self,))

    def contains_text(self, text: str) -> Expression:
        """Whether the text holds `text`."""
        return Expression("contains_text", (self,), {"text": text})

    # Time.

    def seconds_since(self, other: Any) -> Expression:
        """Seconds from another time to this one."""
        return Expression("seconds_since", (self, other))

    def hour(self, zone: str = "UTC") -> Expression:
        """The hour of the day, 0 to 23."""
        return Expression("hour", (self,), {"zone": zone})

    def weekday(self, zone: str = "UTC") -> Expression:
        """The day of the week, Monday 0."""
        return Expression("weekday", (self,), {"zone": zone})

    def minute_of_day(self, zone: str = "UTC") -> Expression:
        """Minutes since midnight on the clock of `zone`."""
        return Expression("minute_of_day", (self,), {"zone": zone})

    # Lists.

    def length(self) -> Expression:
        """Elements of a list, or characters of a text."""
        return Expression("length", (self,))

    def at(self, index: int) -> Expression:
        """One element of a list or component of a vector."""
        return Expression("at", (self,), {"index": index})

    def take(self, count: int) -> Expression:
        """The first `count` elements."""
        return Expression("take", (self,), {"count": count})

    def distinct(self) -> Expression:
        """The elements, each once."""
        return Expression("distinct_list", (self,))

    def has(self, value: Any) -> Expression:
        """Whether the list holds `value`."""
        return Expression("has", (self, value))

    def overlap(self, other: Any) -> Expression:
        """How many distinct elements two lists have in common."""
        return Expression("overlap", (self, other))

    def sum(self) -> Expression:
        """The sum of a list."""
        return Expression("list_sum", (self,))

    def mean(self) -> Expression:
        """The mean of a list."""
        return Expression("list_mean", (self,))

    def max(self) -> Expression:
        """The largest element of a list."""
        return Expression("list_max", (self,))

    def differences(self) -> Expression:
        """Each element less the one before it; the first is 0."""
        return Expression("differences", (self,))


def as_expression(value: Any) -> Expression:
    """A Python value as a constant; an expression as it is."""
    if isinstance(value, Expression):
        return value
    return Expression("constant", (), {"value": value})


def if_else(condition: Any, then: Any, otherwise: Any) -> Expression:
    """`then` where the condition holds, `otherwise` where it does not."""
    return Expression("if_else", (condition, then, otherwise))


def coalesce(*values: Any) -> Expression:
    """The first value that is not missing."""
    return Expression("coalesce", values)


def cross(*values: Any) -> Expression:
    """One id for a combination of values."""
    return Expression("cross", values)


def concat(*values: Any, separator: str = "") -> Expression:
    """Texts one after the other."""
    return Expression("concat", values, {"separator": separator})


def pack(*values: Any) -> Expression:
    """Numbers as one vector."""
    return Expression("pack", values)


def sequence(**columns: Expression) -> Expression:
    """Parallel lists of the same events, as one feature."""
    return Expression("sequence", tuple(columns.values()), {"names": list(columns)})


def feature(name: str) -> Expression:
    """Another feature of the same set, by name."""
    if not isinstance(name, str):
        raise UsageError(f"{caller_place()}: feature({name!r:.40})", allowed='the name of a feature: feature("clicks")')
    return Expression("feature", (), {"name": name})


class Duration(int):
    """A length of time in ms, so that `within(7)` is not taken for seven of anything.

    Durations add up and can be multiplied; anything else gives a plain number, and JSON holds a plain number.
    """

    __slots__ = ()

    def __add__(self, other: int) -> int:
        return Duration(int(self) + int(other)) if isinstance(other, Duration) else int(self) + other

    def __sub__(self, other: int) -> int:
        return Duration(int(self) - int(other)) if isinstance(other, Duration) else int(self) - other

    def __mul__(self, other: int) -> int:
        return Duration(int(self) * other) if type(other) is int else int(self) * other

    def __rmul__(self, other: int) -> int:
        return self * other


def duration_ms(call: str, *values: Any) -> list[int]:
    """Durations as plain ms; UsageError with the user's line where one of `values` is no duration."""
    if all(isinstance(value, Duration) for value in values):
        return [int(value) for value in values]
    given = call.format(*(f"{value!r:.40}" for value in values))
    raise UsageError(f"{caller_place()}: {given}", allowed="a duration: days(7), hours(1), minutes(5)")


def _duration(unit: str, count: Any, unit_ms: int) -> Duration:
    number = isinstance(count, int | float) and not isinstance(count, bool)
    if not number or (isinstance(count, float) and not math.isfinite(count * unit_ms)):
        raise UsageError(f"{caller_place()}: {unit}({count!r:.40})", allowed=f"a number: {unit}(7)")
    return Duration(round(count * unit_ms))


def days(count: float) -> Duration:
    """A duration of days of 24 hours."""
    return _duration("days", count, 86_400_000)


def hours(count: float) -> Duration:
    """A duration of hours."""
    return _duration("hours", count, 3_600_000)


def minutes(count: float) -> Duration:
    """A duration of minutes."""
    return _duration("minutes", count, 60_000)


def seconds(count: float) -> Duration:
    """A duration of seconds."""
    return _duration("seconds", count, 1000)


def milliseconds(count: float) -> Duration:
    """A duration of milliseconds, rounded to whole ones."""
    return _duration("milliseconds", count, 1)
