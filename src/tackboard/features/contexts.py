"""Turns the contexts of requests, stored as JSON texts, into the context columns that a plan declares.

Each distinct text is parsed once. A value is missing if its key is absent, if the JSON value is null, or if there is
no text. If a value does not have the declared type, an error names the feature and its line in the code.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.events.schema import encode
from tackboard.features.column import Column
from tackboard.features.plan import Node, Plan
from tackboard.features.types import FeatureType

INT64 = range(-(1 << 63), 1 << 63)


def context_sources(plan: Plan) -> list[tuple[int, Node]]:
    """Returns the sources of a plan that read the context."""
    return [(index, node) for index, node in plan.sources() if node.params["entity"] == "context"]


def context_columns(plan: Plan, texts: pa.ChunkedArray | pa.Array) -> dict[str, Column]:
    """Returns the context columns that `plan` reads, with one value per text.

    Raises a DataError that names the feature and its line in the code if a value does not have the declared type.
    """
    sources = context_sources(plan)
    if not sources:
        return {}
    array = encode(texts)
    # The last object is for rows without a context.
    objects = [_parse(text) for text in array.dictionary.to_pylist()] + [{}]
    codes = array.indices.fill_null(len(objects) - 1).to_numpy().astype(np.int64)
    columns = {}
    for index, node in sources:
        name = str(node.params["column"])
        column = Column.of(node.type, [_read(row.get(name), node.type, plan, index) for row in objects]).take(codes)
        if column.present is not None and column.present.all():
            column.present = None
        columns[name] = column
    return columns


def _parse(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError("the context of an event is not a JSON object", fix="import the events again")
    return content


def _read(value: Any, type_: FeatureType, plan: Plan, index: int) -> Any:
    try:
        return None if value is None else _converted(value, type_)
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"{plan.describe_source(index)} is {json.dumps(value)[:60]} in an event's context",
            allowed=f"declared: {type_.with_nullable(False)}",
            fix="correct the data, or declare it as it is stored",
        ) from None


def _converted(value: Any, type_: FeatureType) -> Any:
    """Converts a JSON value for `Column.of`. Raises ValueError or TypeError if the value does not have the type."""
    kind, given = type_.kind, type(value)
    if kind in ("vector", "list") and given is list:
        if kind == "list":
            return [_converted(element, type_.of_elements()) for element in value]
        if len(value) == type_.width:
            return [_converted(element, FeatureType("float")) for element in value]
    elif kind in ("int", "time", "id") and given is int and value in INT64:
        return value
    elif (kind == "bool" and given is bool) or (kind == "float" and given in (int, float)):
        return float(value) if kind == "float" else value
    elif kind in ("string", "id") and given is str:
        value.encode()  # Raises ValueError for half a surrogate pair, which JSON can hold.
        return value if kind == "string" else string_id(value)
    raise TypeError(f"{given.__name__} is not {type_}")
