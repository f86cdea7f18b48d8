"""This module defines the expressions that users write over entities, events and the request.

An expression is a tree of operator names. Building an expression computes nothing and checks no types. The expression
only remembers its line in the code. The compiler (plan.py) checks the types, and its errors name the feature and that
line. The types and examples of the operators are in the registry (operators.py).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tackboard.core.config import did_you_mean
from tackboard.core.errors import UsageError
from tackboard.features.operators import REGISTRY

PACKAGE = str(Path(__file__).parent) + os.sep


class CodePlace(NamedTuple):
    """A file and the number of a line in this file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.file else "features.json"


NOWHERE = CodePlace("", 0)


def caller_place() -> CodePlace:
    """Returns the innermost line of the call stack that is in the user's code or in standard.py."""
    frame = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        if frame.f_back is None:
            return NOWHERE
        frame = frame.f_back
    return CodePlace(frame.f_code.co_filename, frame.f_lineno)


def _is_machinery(file: str) -> bool:
    return file.startswith(PACKAGE) and Path(file).name != "standard.py"


class NoOperator(UsageError, AttributeError):
    """Raised for an operator that does not exist. Derives from AttributeError, so that hasattr and getattr work."""


def _unary(op: str, about: str = "") -> Callable[[Expression], Expression]:
    """Returns a method that applies an operator to the expression."""

    def method(self: Expression) -> Expression:
        return Expression(op, (self,))

    method.__doc__ = about
    return method


def _binary(op: str, about: str = "", *, mirrored: bool = False) -> Callable[[Expression, Any], Expression]:
    """Returns a method that applies an operator to the expression and another value (in reverse order if mirrored)."""

    def method(self: Expression, other: Any) -> Expression:
        return Expression(op, (other, self) if mirrored else (self, other))

    method.__doc__ = about
    return method


class Expression:
    """An operator applied to expressions. Users must write `&`, `|` and `~` instead of `and`, `or` and `not`."""

    __slots__ = ("args", "op", "params", "place", "text")
    __hash__ = object.__hash__

    def __init__(self, op: str, args: Sequence[Any] = (), params: Mapping[str, Any] | None = None) -> None:
        self.op = op
        self.args = tuple(as_expression(argument) for argument in args)
        self.params = dict(params or {})
        self.place = caller_place()
        self.text = ""

    def described(self, text: str) -> Expression:
        """Returns the same expression with a description, which the feature catalogue shows."""
        copy = Expression(self.op, self.args, self.params)
        copy.place, copy.text = self.place, text
        return copy

    def __repr__(self) -> str:
        return f"an expression ({self.place})"

    def __getattr__(self, name: str) -> NoReturn:
        # Python and NumPy look up names with underscores to find out what an object can do. For an attribute in
        # `__slots__`, Python calls this method only while the attribute has no value yet. This happens while `copy` or
        # `pickle` makes the object.
        if name.startswith("_") or name in Expression.__slots__:
            raise AttributeError(name)
        operators = [known for known in vars(Expression) if not known.startswith("_") and known not in self.__slots__]
        fix = did_you_mean(name, operators) or "docs/features.md lists the operators"
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
            fix = did_you_mean(column, [*operators, *self.params["known"]])
            raise UsageError(f"{place}: {owner} has no column or operator {column}", fix=fix)
        written = f"{owner}.{column}" if column not in operators else f'{owner}["{column}"]'
        raise UsageError(
            f"{place}: {written} is a column, not an operator",
            fix=f"the operator is {owner}.{column}(…)" if column in operators else f"write {written} without ()",
        )

    def __bool__(self) -> NoReturn:
        raise UsageError(
            f"{caller_place()}: a feature has no truth value while it is being defined",
            allowed="instead of `and`, `or`, `not` write &, |, ~, "
            "with parentheses around each comparison: (a > 0) & (a < 3)",
            fix="instead of `a in values` write a.is_in([…]); instead of `if` write if_else(condition, a, b)",
        )

    def __iter__(self) -> NoReturn:
        raise UsageError(
            f"{caller_place()}: a feature cannot be looped over",
            allowed="use the operators of lists: .has(value), .sum(), .at(0)",
        )

    # Arithmetic and comparison.

    __add__, __radd__ = _binary("add"), _binary("add", mirrored=True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", mirrored=True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", mirrored=True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", mirrored=True)
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _binary("floor_divide", mirrored=True)
    __mod__, __rmod__ = _binary("modulo"), _binary("modulo", mirrored=True)
    __and__, __rand__ = _binary("and"), _binary("and", mirrored=True)
    __or__, __ror__ = _binary("or"), _binary("or", mirrored=True)
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")
    __neg__, __abs__, __invert__ = _unary("negate"), _unary("absolute"), _unary("not")

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return Expression("equal", (self, other))

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return Expression("not_equal", (self, other))

    abs = _unary("absolute", "The absolute value.")
    floor = _unary("floor", "The number rounded down to a whole number.")

    def is_in(self, values: Sequence[Any]) -> Expression:
        """Whether the value is one of `values`."""
        return Expression("is_in", (self,), {"values": list(values)})

    # Missing values.

    is_missing = _unary("is_missing", "Whether the value is missing.")
    finite = _unary("finite", "The value, or missing if the value is NaN or infinite.")

    def fill_missing(self, value: Any) -> Expression:
        """This value or, if this value is missing, the constant `value`."""
        return Expression("fill_missing", (self,), {"value": list(value) if isinstance(value, tuple) else value})

    def missing_if(self, value: Any) -> Expression:
        """This value, but missing if it equals the constant `value`."""
        return Expression("missing_if", (self,), {"value": value})

    # Ids.

    hash_id = _unary("hash_id", "The id of a value: the hash of a string; any other value is its own id.")

    def bucket_hash(self, num_buckets: int, seed: int = 0) -> Expression:
        """The bucket of an id: a whole number from 0 to `num_buckets` - 1, computed with a hash."""
        return Expression("bucket_hash", (self,), {"num_buckets": num_buckets, "seed": seed})

    def index_in(self, names: Sequence[str]) -> Expression:
        """The position of a string among `names`, counted from 1, or 0 if the string is not among them."""
        return Expression("index_in", (self,), {"names": list(names)})

    # Scaling.

    log = _unary("log", "The natural logarithm.")
    log1p = _unary("log1p", "The natural logarithm of 1 + the value.")
    exp = _unary("exp", "e to the power of the value.")
    sqrt = _unary("sqrt", "The square root.")

    def clip(self, low: float | None, high: float | None) -> Expression:
        """The value, limited to the range from `low` to `high`."""
        return Expression("clip", (self,), {"low": low, "high": high})

    def normalise(self, *, mean: float, std: float) -> Expression:
        """(value - mean) / std."""
        return Expression("normalise", (self,), {"mean": mean, "std": std})

    def bucketize(self, boundaries: Sequence[float]) -> Expression:
        """The number of `boundaries` that are less than or equal to the value."""
        return Expression("bucketize", (self,), {"boundaries": list(boundaries)})

    # Vectors.

    dot = _binary("dot", "The dot product with another vector.")
    norm = _unary("norm", "The Euclidean length of a vector.")
    l2_normalise = _unary("l2_normalise", "The vector divided by its length.")
    cosine = _binary("cosine", "The cosine of the angle to another vector.")

    # Text.

    lower = _unary("lower", "The text in lower case.")
    strip = _unary("strip", "The text without white space around it.")
    nfc = _unary("nfc", "The text with its accents composed (Unicode NFC).")

    def contains_text(self, text: str) -> Expression:
        """Whether this text contains the constant `text`."""
        return Expression("contains_text", (self,), {"text": text})

    # Time.

    seconds_since = _binary("seconds_since", "The seconds from another time to this time.")

    def hour(self, zone: str = "UTC") -> Expression:
        """The hour of the day in the time zone `zone`, 0 to 23."""
        return Expression("hour", (self,), {"zone": zone})

    def weekday(self, zone: str = "UTC") -> Expression:
        """The day of the week in the time zone `zone`; Monday is 0."""
        return Expression("weekday", (self,), {"zone": zone})

    def minute_of_day(self, zone: str = "UTC") -> Expression:
        """The minutes from 00:00 to the local time in the time zone `zone`, 0 to 1439."""
        return Expression("minute_of_day", (self,), {"zone": zone})

    # Lists.

    length = _unary("length", "The number of elements of a list, or of characters of a text.")
    distinct = _unary("distinct_list", "The list without repetitions, in the order of first appearance.")
    has = _binary("has", "Whether the list contains the given value.")
    overlap = _binary("overlap", "The number of distinct elements that two lists have in common.")
    sum = _unary("list_sum", "The sum of a list.")
    mean = _unary("list_mean", "The mean of a list.")
    max = _unary("list_max", "The largest element of a list.")
    differences = _unary("differences", "Each element minus the element before it; 0 for the first element.")

    def at(self, index: int) -> Expression:
        """The element of a list, or the component of a vector, at position `index`."""
        return Expression("at", (self,), {"index": index})

    def take(self, count: int) -> Expression:
        """The first `count` elements."""
        return Expression("take", (self,), {"count": count})


def as_expression(value: Any) -> Expression:
    """Returns an expression unchanged, and turns any other Python value into a constant expression."""
    if isinstance(value, Expression):
        return value
    return Expression("constant", (), {"value": value})


def if_else(condition: Any, then: Any, otherwise: Any) -> Expression:
    """`then` if the condition is true, else `otherwise`."""
    return Expression("if_else", (condition, then, otherwise))


def coalesce(*values: Any) -> Expression:
    """The first value that is not missing."""
    return Expression("coalesce", values)


def cross(*values: Any) -> Expression:
    """An id for the combination of the values."""
    return Expression("cross", values)


def concat(*values: Any, separator: str = "") -> Expression:
    """The texts joined into one text, with `separator` between them."""
    return Expression("concat", values, {"separator": separator})


def pack(*values: Any) -> Expression:
    """A vector of the given numbers."""
    return Expression("pack", values)


def sequence(**columns: Expression) -> Expression:
    """One feature that consists of parallel lists of the same events."""
    return Expression("sequence", tuple(columns.values()), {"names": list(columns)})


def feature(name: str) -> Expression:
    """The feature of the same set that has the given name."""
    if not isinstance(name, str):
        raise UsageError(
            f"{caller_place()}: feature({name!r:.40}) does not name a feature", allowed='give a name: feature("clicks")'
        )
    return Expression("feature", (), {"name": name})


class Duration(int):
    """A length of time in ms. Durations have their own type, so that `within(7)` without a unit is refused.

    The sum or difference of two durations is a duration, and so is a duration times a whole number. Every other
    operation gives a plain number. In JSON, a duration is written as a plain number.
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
    """Returns durations in ms. If a value is not a duration, raises a UsageError that names the line in user code."""
    if all(isinstance(value, Duration) for value in values):
        return [int(value) for value in values]
    given = call.format(*(f"{value!r:.40}" for value in values))
    raise UsageError(
        f"{caller_place()}: {given} has no duration", allowed="give a duration: days(7), hours(1), minutes(5)"
    )


def _unit(unit: str, unit_ms: int) -> Callable[[float], Duration]:
    """Returns a function that turns a number of units into a duration, rounded to whole ms."""

    def duration(count: float) -> Duration:
        number = isinstance(count, int | float) and not isinstance(count, bool)
        if not number or (isinstance(count, float) and not math.isfinite(count * unit_ms)):
            raise UsageError(
                f"{caller_place()}: {unit}({count!r:.40}) is not a duration", allowed=f"a number: {unit}(7)"
            )
        return Duration(round(count * unit_ms))

    duration.__doc__ = f"A duration of {unit}."
    return duration


days, hours, minutes = _unit("days", 86_400_000), _unit("hours", 3_600_000), _unit("minutes", 60_000)
seconds, milliseconds = _unit("seconds", 1000), _unit("milliseconds", 1)
