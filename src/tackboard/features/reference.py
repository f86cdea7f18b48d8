"""Writes the reference of the operators in Markdown (docs/features.md), and computes the result of every example.

Every part of the reference that could differ from the code is generated. The description of an operator is the
docstring of its kernel. Its types are found by calling its type rule with the types in PROBES. The batch executor
computes the results of the examples. The code of an example is read by a small interpreter and never run as Python.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator as python_operators
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tackboard.core.errors import DataError
from tackboard.core.files import write_text_atomic
from tackboard.features import kernels, language
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column
from tackboard.features.entities import BUILT_IN
from tackboard.features.entity_tables import EntityTable, EventTable
from tackboard.features.expressions import Expression
from tackboard.features.kernels.history import AT, EVENTS
from tackboard.features.operators import ABOUT_EVENTS, FAMILIES, REGISTRY, Example, Operator, TypeClash
from tackboard.features.plan import Plan, compile_features
from tackboard.features.types import NUMBERS, SCALARS, VIEW, FeatureType

BEGIN, END = "<!-- operator reference: begin -->", "<!-- operator reference: end -->"
MOMENT = AT["request_ms"]
"""The time of the request in most of the examples about events."""
_TYPE = re.compile(r"(?:(bool|int|float|string|id|time)|vector\[(\d+)\]|list\[(\w+)\])(\??)")
_PYTHON: dict[type, Callable[..., Any]] = {
    ast.Add: python_operators.add,
    ast.Sub: python_operators.sub,
    ast.Mult: python_operators.mul,
    ast.Div: python_operators.truediv,
    ast.FloorDiv: python_operators.floordiv,
    ast.Mod: python_operators.mod,
    ast.Pow: python_operators.pow,
    ast.BitAnd: python_operators.and_,
    ast.BitOr: python_operators.or_,
    ast.Eq: python_operators.eq,
    ast.NotEq: python_operators.ne,
    ast.Lt: python_operators.lt,
    ast.LtE: python_operators.le,
    ast.Gt: python_operators.gt,
    ast.GtE: python_operators.ge,
    ast.USub: python_operators.neg,
    ast.Invert: python_operators.invert,
}
PROBES = (
    *(FeatureType(kind) for kind in SCALARS),
    FeatureType("vector", width=2),
    *(FeatureType("list", element=kind) for kind in SCALARS),
)
CONSTANTS: tuple[Any, ...] = (1, 0.5, "a", True, [])
"""Constants that are tried for a parameter `value` or `values`, in addition to the constants in the examples."""


def reference() -> str:
    """Returns the reference as Markdown: a table for each family of operators."""
    kernels.load()
    parts = [
        f"There are {len(REGISTRY)} operators. `number` means bool, int or float. `?` marks a type whose values may be",
        "missing. An operator marked with ∗ also works on every element of a list.",
        "",
    ]
    for family in FAMILIES:
        parts += [f"### {family.capitalize()}", ""]
        if family in ABOUT_EVENTS:
            parts += [_about_events(), ""]
        parts += ["| operator | types | what it gives | examples |", "|---|---|---|---|"]
        parts += [_row(one) for one in REGISTRY.values() if one.family == family]
        parts.append("")
    return "\n".join(parts)


def with_reference(page: str) -> str:
    """Returns the page with a new reference between BEGIN and END. Raises DataError if the page lacks these markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError("the page has no place for the reference", fix=f"add the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def refresh(path: Path) -> bool:
    """Updates the reference in a page. Returns whether the reference was out of date."""
    page = path.read_text(encoding="utf-8")
    fresh = with_reference(page)
    if fresh != page:
        write_text_atomic(path, fresh)
    return fresh != page


def run_example(example: Example) -> list[Any]:
    """Returns the result of the example's code, row by row. Raises SpecError if the code does not compile."""
    plan, (events, items, rows) = compile_features({"result": read_example(example)}), _data(example)
    return BatchExecutor(plan, events=events, items=items).compute(rows)["result"].to_pylist()


def read_example(example: Example) -> Expression:
    """Returns the example's code as an expression. The input columns become attributes of the candidate."""
    names: dict[str, Any] = {name: getattr(language, name) for name in language.__all__ if name[0].islower()}
    names |= {"events": language.Events(), "request": language.Request(), "float": float}
    for name, (type_, _) in _columns(example).items():
        params = {"entity": "item", "column": name, "type": parse_type(type_).to_json()}
        names[name] = Expression("source", (), params)
    found: Expression = _read(ast.parse(example.code, mode="eval").body, names)
    return found


def parse_type(text: str) -> FeatureType:
    """Parses what `str(FeatureType)` returns. Raises ValueError for the text of a sequence or of a view, and for a
    text that is not a type."""
    found = _TYPE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a type of a column")
    scalar, width, element, missing = found.groups()
    kind = scalar or ("vector" if width else "list")
    return FeatureType(kind, element=element or "", width=int(width or 0), nullable=bool(missing))


def _read(code: ast.expr, names: Mapping[str, Any]) -> Any:
    match code:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.List(elts=entries):
            return [_read(entry, names) for entry in entries]
        case ast.Attribute(value=owner, attr=name) if not name.startswith("_"):
            return getattr(_read(owner, names), name)
        case ast.UnaryOp(op=sign, operand=value):
            return _PYTHON[type(sign)](_read(value, names))
        case ast.BinOp(left=left, op=between, right=right) | ast.Compare(left=left, ops=[between], comparators=[right]):
            return _PYTHON[type(between)](_read(left, names), _read(right, names))
        case ast.Call(func=called, args=args, keywords=keywords):
            given = {word.arg: _read(word.value, names) for word in keywords if word.arg}
            return _read(called, names)(*(_read(argument, names) for argument in args), **given)
    raise ValueError(f"an example may not hold {ast.unparse(code)}")


def _columns(example: Example) -> dict[str, Any]:
    return {name: given for name, given in example.inputs.items() if name not in ("events", "request_ms")}


def _data(example: Example) -> tuple[EventTable | None, EntityTable, RequestRows]:
    """Returns (events, items, rows) of one request. The example's input columns are attributes of the candidates."""
    columns = {name: Column.of(parse_type(type_), values) for name, (type_, values) in _columns(example).items()}
    item_ids = np.arange(max((len(column) for column in columns.values()), default=1), dtype=np.int64)
    moment = np.array([example.inputs.get("request_ms", 0)], dtype=np.int64)
    user = np.zeros(1, dtype=np.int64)
    rows = RequestRows(user_ids=user, request_ms=moment, item_ids=item_ids, request_of=np.zeros_like(item_ids))
    events = None
    if given := example.inputs.get("events"):
        times = np.array(given["time"], dtype=np.int64)
        seen = {name: Column.of(BUILT_IN["event"][name], values) for name, values in given.items()}
        ends = np.array([0, len(times)], dtype=np.int64)
        events = EventTable(user_ids=user, offsets=ends, times=times, received=times, columns=seen)
    return events, EntityTable(item_ids, columns), rows


def _row(operator: Operator) -> str:
    mark = " ∗" if operator.elementwise else ""
    examples = "<br>".join(_example(example) for example in operator.examples)
    cells = [f"`{operator.spelling}`{mark}", types_of(operator), operator.summary, examples]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _example(example: Example) -> str:
    given = [f"`{name} = {_show(values)}`" for name, (_, values) in _columns(example).items()]
    told = f" with {', '.join(given)}" if given else ""
    if example.inputs.get("request_ms", MOMENT) != MOMENT:
        told += " at the time of the last event"
    return f"`{example.code}`{told} → `{_show(run_example(example))}`"


def _about_events() -> str:
    shown: Mapping[str, Any] = EVENTS
    rows = [f"{name} {', '.join(map(str, values))}" for name, values in shown.items() if name != "time"]
    return f"The examples use four events, one per day ({'; '.join(rows)}), and a request 1 ms after the last of them."


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_show(entry) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_show(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, str):
        # Two encodings of the same letter must look different on the page.
        return json.dumps(value, ensure_ascii=not (value.isprintable() and unicodedata.is_normalized("NFC", value)))
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return str(value)


def types_of(operator: Operator) -> str:
    """Returns an operator's types as text, such as `number, number → int or float`. Tries the types in PROBES."""
    taken: list[dict[str, None]] = []
    given: dict[str, None] = {}
    chooses = operator.family in ABOUT_EVENTS and operator.name != "sequence"
    for num_inputs, params in _calls(operator):
        firsts = (VIEW,) if chooses and num_inputs else ()
        for types in itertools.product(PROBES[: len(SCALARS)] if chooses else PROBES, repeat=num_inputs - len(firsts)):
            try:
                result = operator.rule((*firsts, *types), params)
            except TypeClash:
                continue
            taken += [{} for _ in range(len(types) - len(taken))]
            for place, type_ in zip(taken, types, strict=False):
                place[_generic(type_)] = None
            given[_generic(result)] = None
    inputs = ", ".join(_joined(place) for place in taken)
    if chooses and operator.name != "events":
        inputs = f"events, {inputs}".removesuffix(", ")
    more = ", …" if "..." in operator.spelling or "…)" in operator.spelling.replace("=…)", ")") else ""
    return f"{inputs}{more} → {_joined(given)}".lstrip()


def _calls(operator: Operator) -> Iterable[tuple[int, dict[str, Any]]]:
    """Returns the calls that `types_of` tries, as (number of inputs, parameters).

    These are the calls in the examples. If the first of these calls has a parameter `value` or `values`, the call is
    also tried with each constant of CONSTANTS as this parameter.
    """
    seen = []
    for example in operator.examples:
        plan: Plan = compile_features({"result": read_example(example)})
        for node in plan.nodes:
            if node.op == operator.name:
                num_inputs = min(len(node.args), 2) if "..." in operator.spelling else len(node.args)
                seen.append((num_inputs, dict(node.params)))
    for num_inputs, params in seen[:1]:
        for name in {"value", "values"}.intersection(params):
            for constant in CONSTANTS:
                seen.append((num_inputs, {**params, name: constant if name == "value" else [constant]}))
    return seen


def _generic(type_: FeatureType) -> str:
    if type_.kind == "view":
        return "events"
    return {"vector": "vector", "sequence": "sequence"}.get(type_.kind, str(type_).rstrip("?")) + "?" * type_.nullable


def _joined(kinds: Iterable[str]) -> str:
    """Returns the names of kinds as a short text, for example `number or string`."""
    left = list(kinds)
    if len(absent := [kind for kind in SCALARS if kind not in left]) == 1:
        left = [f"scalar except {absent[0]}", *(kind for kind in left if kind not in SCALARS)]
    for group, name in ((SCALARS, "scalar"), (NUMBERS, "number")):
        for form in ("{}", "{}?", "list[{}]", "list[{}]?"):
            members = [form.format(kind) for kind in group]
            if all(member in left for member in members):
                short = {"list[scalar]": "list", "list[scalar]?": "list?"}.get(form.format(name), form.format(name))
                left = [short, *(kind for kind in left if kind not in members)]
    return " or ".join(sorted(left, key=_order))


def _order(kind: str) -> int:
    names = ("scalar", "number", *SCALARS, "vector", "list", "sequence")
    return next((place for place, name in enumerate(names) if kind.startswith(name)), len(names))
