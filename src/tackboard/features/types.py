"""This module defines the types of expressions and features. Types are checked before any data is read.

A scalar is a bool, a 64-bit int, a 64-bit float, a string, an id or a time. An id is an int64 that names something; no
operator calculates with it. A time is in ms since 1970, UTC. The other types are vectors of fixed width (32-bit
floats), lists of scalars, and sequences (parallel lists with one entry per event). `nullable` means that a value may be
missing; elements of lists and vectors are never missing. A view is a selection of events, and no feature is a view.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tackboard.core.errors import DataError

SCALARS = ("bool", "int", "float", "string", "id", "time")
NUMBERS = ("bool", "int", "float")
KINDS = (*SCALARS, "vector", "list", "sequence", "view")


@dataclasses.dataclass(frozen=True)
class FeatureType:
    """The type of a value. `element` is the scalar kind in a list; `width` is for vectors, `columns` for sequences."""

    kind: str
    element: str = ""
    width: int = 0
    nullable: bool = False
    columns: tuple[tuple[str, FeatureType], ...] = ()

    def __str__(self) -> str:
        if self.kind == "vector":
            text = f"vector[{self.width}]"
        elif self.kind == "list":
            text = f"list[{self.element}]"
        elif self.kind == "sequence":
            text = "sequence{" + ", ".join(f"{name}: {column.element}" for name, column in self.columns) + "}"
        else:
            text = self.kind
        return text + "?" if self.nullable else text

    @property
    def is_number(self) -> bool:
        """Whether values of this type are numbers: bool, int or float."""
        return self.kind in NUMBERS

    def with_nullable(self, nullable: bool) -> FeatureType:  # noqa: FBT001
        """Returns the same type, with or without missing values."""
        return self if nullable == self.nullable else _with_nullable(self, nullable)

    def of_elements(self) -> FeatureType:
        """Returns the scalar type of a list's elements. Returns any other type as it is."""
        return FeatureType(self.element) if self.kind == "list" else self

    def in_list(self) -> FeatureType:
        """Returns the type of a list of this scalar."""
        return FeatureType("list", element=self.kind)

    def to_json(self) -> dict[str, Any]:
        """Returns the type as plain JSON. Fields with their default value are left out."""
        data: dict[str, Any] = {"kind": self.kind}
        if self.element:
            data["element"] = self.element
        if self.width:
            data["width"] = self.width
        if self.nullable:
            data["nullable"] = True
        if self.columns:
            data["columns"] = {name: column.to_json() for name, column in self.columns}
        return data


@functools.cache
def _with_nullable(type_: FeatureType, nullable: bool) -> FeatureType:  # noqa: FBT001 - kernels call it in each request
    return dataclasses.replace(type_, nullable=nullable)


BOOL, INT, FLOAT = FeatureType("bool"), FeatureType("int"), FeatureType("float")
STRING, ID, TIME = FeatureType("string"), FeatureType("id"), FeatureType("time")
VIEW = FeatureType("view")


def type_from_json(data: Any) -> FeatureType:
    """Returns the type that `to_json` wrote. Raises DataError for anything else."""
    if not isinstance(data, dict) or data.get("kind") not in KINDS or not set(data) <= _FIELDS:
        raise DataError(f"{str(data)[:80]!r} is not a feature type", allowed=f"kinds: {', '.join(KINDS)}")
    width, columns, element = data.get("width", 0), data.get("columns", {}), data.get("element", "")
    if type(width) is not int or width < 0 or not isinstance(columns, dict) or element not in ("", *SCALARS):
        raise DataError(f"{str(data)[:80]!r} is not a feature type")
    kind, nullable = data["kind"], data.get("nullable", False)
    parts = tuple((str(name), type_from_json(column)) for name, column in columns.items())
    whole = (kind == "list") == bool(element) and (kind == "vector") == bool(width) and isinstance(nullable, bool)
    if not whole or (kind == "sequence") != bool(parts) or any(part.kind != "list" for _, part in parts):
        raise DataError(f"{str(data)[:80]!r} is not a feature type")
    return FeatureType(kind=kind, element=element, width=width, nullable=nullable, columns=parts)


_FIELDS = {field.name for field in dataclasses.fields(FeatureType)}
