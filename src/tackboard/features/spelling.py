"""Writes a node of a plan as text in the feature language. `features docs` shows this text for every feature.

If the text is read as Python, it compiles to a node with the same hash. A reference to another feature of the set is
written as `feature("name")`. A node that is used more than once gets a name and a separate line, so the text never
grows faster than the plan. The notation of operators comes from `spelling` in the registry, so it is not repeated here.
"""

from __future__ import annotations

import inspect
import json
import keyword
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.features.entities import Events
from tackboard.features.operators import REGISTRY, Operator
from tackboard.features.plan import Plan

WIDTH = 100
"""If a call has several inputs and one of its lines would be longer than this, each input gets a separate line."""
DURATIONS = (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000), ("seconds", 1000), ("milliseconds", 1))
COMPARISON, OR, AND, SUM, PRODUCT, SIGN, CALL = range(7)
MAX_DEPTH = 40
"""Largest depth of nested operators. If an expression is deeper, its inner part gets a name and a separate line."""
BINDING = {"|": OR, "&": AND, "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "//": PRODUCT, "%": PRODUCT}
_INFIX = re.compile(r"a (\S+) b")
_PREFIX = re.compile(r"([-~])a")
_CALL = re.compile(r"(?:(\w+)\.)?(\w+)\((.*)\)")


def spell(plan: Plan, name: str) -> str:
    """Returns one feature as text: a line for each part that has a name, then the feature's expression."""
    others: dict[int, str] = {}
    for other, index in plan.features.items():
        if other != name and index != plan.features[name] and plan.nodes[index].op not in ("source", "constant"):
            others.setdefault(index, other)
    return _Speller(plan, others).lines(plan.features[name])


def source_name(params: Mapping[str, Any]) -> str:
    """Returns a column as users write it: `item.price`, or `item["the price"]` if the name cannot be an attribute."""
    entity, column = str(params["entity"]), str(params["column"])
    owner = "events" if entity == "event" else entity
    taken = owner == "events" and hasattr(Events, column)
    if column.isidentifier() and not keyword.iskeyword(column) and not column.startswith("_") and not taken:
        return f"{owner}.{column}"
    return f"{owner}[{literal(column)}]"


def literal(value: Any) -> str:
    """Returns a constant or parameter as Python code. Strings get double quotes; unprintable characters are escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(literal(entry) for entry in value)}]"
    return repr(value)


def duration(milliseconds: Any) -> str:
    """Returns a duration as a user would write it, for example `days(7)`."""
    for name, unit in DURATIONS:
        if isinstance(milliseconds, int) and milliseconds % unit == 0:
            return f"{name}({milliseconds // unit})"
    return literal(milliseconds)


class _Speller:
    def __init__(self, plan: Plan, others: Mapping[int, str]) -> None:
        self._nodes = plan.nodes
        self._others = others
        self._named: dict[int, str] = {}

    def lines(self, root: int) -> str:
        needed, uses = {root}, dict.fromkeys(range(root + 1), 0)
        for index in range(root, -1, -1):  # The inputs of a node have lower positions than the node.
            if index in needed and (index == root or index not in self._others):
                needed.update(self._nodes[index].args)
                for argument in self._nodes[index].args:
                    uses[argument] += 1
        lines, depths = [], dict.fromkeys(range(root + 1), 0)
        for index in sorted(needed):
            plain = self._nodes[index].op in ("source", "constant", "events") or index in self._others
            depths[index] = 0 if plain else 1 + max((depths[arg] for arg in self._nodes[index].args), default=0)
            if index != root and not plain and (uses[index] > 1 or depths[index] > MAX_DEPTH):
                depths[index] = 0
                text = self._write(index)[0]
                self._named[index] = f"v{len(self._named) + 1}"
                lines.append(f"{self._named[index]} = {text}")
        return "\n".join([*lines, self._write(root)[0]])

    def _text(self, index: int, binding: int = COMPARISON) -> str:
        """Returns the node's text as part of an expression, in parentheses if it binds less tightly than `binding`."""
        if index in self._named:
            return self._named[index]
        if index in self._others:
            return f"feature({literal(self._others[index])})"
        text, own = self._write(index)
        return f"({text})" if own < binding else text

    def _write(self, index: int) -> tuple[str, int]:
        """Returns the node's text, and how tightly its outermost operator binds."""
        node = self._nodes[index]
        if node.op == "source":
            return source_name(node.params), CALL
        if node.op == "constant":
            value = node.params["value"]
            negative = isinstance(value, int | float) and str(value).startswith("-")
            return literal(value), SIGN if negative else CALL
        if node.op == "events":
            return "events", CALL
        if node.op == "sequence":
            return self._sequence([str(name) for name in node.params["names"]], node.args), CALL
        spelling = REGISTRY[node.op].spelling
        if found := _INFIX.fullmatch(spelling):
            binding = BINDING.get(found[1], COMPARISON)
            # Comparisons cannot be chained, and operators of equal precedence are left-associative.
            left = self._text(node.args[0], max(binding, OR))
            return f"{left} {found[1]} {self._text(node.args[1], binding + 1)}", binding
        if found := _PREFIX.fullmatch(spelling):
            return f"{found[1]}{self._text(node.args[0], CALL)}", SIGN
        found = _CALL.fullmatch(spelling)
        if found is None:
            raise ValueError(f"operator {node.op} is spelt {spelling!r}, which cannot be read")
        inputs, head = list(node.args), found[2]
        if found[1]:
            head = f"{self._text(inputs.pop(0), CALL)}.{head}"
        params = _params(found[3], node.operator, node.params)
        return _call(head, [*(self._text(argument) for argument in inputs), *params]), CALL

    def _sequence(self, names: Sequence[str], args: Sequence[int]) -> str:
        columns = [(name, self._text(argument)) for name, argument in zip(names, args, strict=True)]
        if all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
            return _call("sequence", [f"{name}={text}" for name, text in columns])
        return _call("sequence", ["**{" + ", ".join(f"{literal(name)}: {text}" for name, text in columns) + "}"])


def _params(spelt: str, operator: Operator, params: Mapping[str, Any]) -> list[str]:
    """Returns the parameters in the kernel's order. A parameter with `=` in `spelt` is written as name=value."""
    keywords = [name.split("=")[0].strip() for name in spelt.split(",") if "=" in name]
    texts = []
    for name in inspect.signature(operator.kernel).parameters:
        if name not in params:
            continue
        value, written = params[name], name.removesuffix("_ms")
        text = duration(value) if name.endswith("_ms") else literal(value)
        texts.append(f"{written}={text}" if written in keywords else text)
    return texts


def _call(head: str, inputs: Sequence[str]) -> str:
    text = f"{head}({', '.join(inputs)})"
    longest = max((len(line) for line in text.splitlines()), default=0)
    if len(inputs) < 2 or (longest <= WIDTH and "\n" not in "".join(inputs)):
        return text
    inner = "".join(f"    {line}\n" for entry in inputs for line in f"{entry},".splitlines())
    return f"{head}(\n{inner})"
