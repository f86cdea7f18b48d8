"""This module holds the registry of the operators of the feature language, with their types, kernels and examples.

An operator says which types it takes, which type it gives, and how values are computed. Its kernel is the only code
that computes these values: both executors and the examples of the reference (docs/features.md) call the kernel. A
kernel takes columns and keyword parameters and returns a column. It does not change its inputs, and it computes each
row from that row alone, so a row has the same value in a batch of millions of rows and in a request of one row.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tackboard.features.types import FeatureType

CHOOSING, AGGREGATING = "choosing events", "aggregating events"
ABOUT_EVENTS = (CHOOSING, AGGREGATING)
FAMILIES = (
    "arithmetic",
    "comparison",
    "missing values",
    "ids",
    "scaling",
    "vectors",
    "text",
    "time",
    "lists",
    *ABOUT_EVENTS,
)
Params = Mapping[str, Any]
TypeRule = Callable[[tuple[FeatureType, ...], Params], FeatureType]


class TypeClash(Exception):
    """Raised by a type rule. Tells what was given and what the operator takes.

    The compiler adds the name of the feature and its line in the code.
    """

    def __init__(self, got: str, allowed: str = "", fix: str = "") -> None:
        super().__init__(got)
        self.got = got
        self.allowed = allowed
        self.fix = fix


@dataclasses.dataclass(frozen=True)
class Example:
    """An example of an operator in the reference. The tests run every example.

    `inputs` maps each name to (type, values by row). `code` is an expression over these names, as a user would write
    it. `result` holds the values that the expression must have. Two names are special: `events` holds the event columns
    of one user by name, and `request_ms` is the time of the request.
    """

    code: str
    result: Any
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator; see the module's docstring.

    `spelling` shows how a user writes the operator. An `elementwise` operator works value by value: on a list, it is
    applied to every element. Its kernel must stay correct if NumPy broadcasts a column of one row. If an operator has
    `broadcasts`, its kernel must also accept a column of one row, but the operator is not applied to list elements.
    """

    name: str
    family: str
    spelling: str
    summary: str
    rule: TypeRule
    kernel: Callable[..., Any]
    elementwise: bool = False
    examples: tuple[Example, ...] = ()
    broadcasts: bool = False

    def check_call(self, num_inputs: int, params: Params) -> None:
        """Raises TypeClash unless the kernel takes `num_inputs` inputs and exactly the parameters named in `params`."""
        inputs, takes_more, wanted = _call_shape(self.kernel)
        inputs -= self.family in ABOUT_EVENTS  # The first argument of a kernel about events is the frame.
        if num_inputs != inputs and not (takes_more and num_inputs >= max(1, inputs)):
            raise TypeClash(f"it is given {num_inputs} inputs", allowed=f"{inputs}{' or more' if takes_more else ''}")
        if set(params) != wanted:
            raise TypeClash(
                f"its parameters are {', '.join(sorted(params)) or 'none'}",
                allowed=f"{', '.join(sorted(wanted)) or 'none'}",
            )


REGISTRY: dict[str, Operator] = {}


def register(
    name: str,
    spelling: str,
    rule: TypeRule,
    *examples: Example,
    family: str,
    elementwise: bool = False,
    broadcasts: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that registers a kernel as an operator. The kernel's docstring becomes the summary."""
    if family not in FAMILIES:
        raise ValueError(f"there is no family of operators {family}")

    def add(kernel: Callable[..., Any]) -> Callable[..., Any]:
        if name in REGISTRY:
            raise ValueError(f"operator {name} is registered twice")
        summary = " ".join((kernel.__doc__ or "").split())
        REGISTRY[name] = Operator(name, family, spelling, summary, rule, kernel, elementwise, examples, broadcasts)
        return kernel

    return add


@functools.cache
def _call_shape(kernel: Callable[..., Any]) -> tuple[int, bool, frozenset[str]]:
    """Returns (number of positional inputs, whether more may follow, names of the parameters) of a kernel."""
    found = inspect.signature(kernel).parameters.values()
    positional = sum(1 for parameter in found if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD)
    more = any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in found)
    named = frozenset(parameter.name for parameter in found if parameter.kind == inspect.Parameter.KEYWORD_ONLY)
    return positional, more, named


def any_missing(types: tuple[FeatureType, ...]) -> bool:
    """Returns whether at least one input may be missing."""
    return any(type_.nullable for type_ in types)


def need(types: tuple[FeatureType, ...], position: int, kinds: tuple[str, ...]) -> FeatureType:
    """Returns the type at `position`. Raises TypeClash if its kind is not among `kinds`."""
    given = types[position]
    if given.kind not in kinds:
        raise TypeClash(f"it is given {given}", allowed=f"it takes: {', '.join(kinds)}")
    return given


def gives(result: FeatureType, *kinds: tuple[str, ...], check: Callable[[Params], None] | None = None) -> TypeRule:
    """Returns a type rule: the kind of input i must be in `kinds[i]`, and the type of the result is `result`. The
    result may be missing if an input may be missing. `check` checks the parameters."""

    def rule(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
        for position, allowed in enumerate(kinds):
            need(types, position, allowed)
        if check is not None:
            check(params)
        return result.with_nullable(any_missing(types))

    return rule
