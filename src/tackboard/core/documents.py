"""Reads the JSON files of sealed folders (folders with a manifest) and checks their fields.

A manifest proves that a file is unchanged, not that its content makes sense. Anybody can seal a folder with any
content, so every document is checked before it is used, and an error names the file. Unknown fields are allowed,
because a newer version may have added them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tackboard.core.config import convert
from tackboard.core.errors import CorruptFileError, DataError, TackboardError, UsageError, line_of_user_code
from tackboard.core.files import read_json

_INT64 = 1 << 63


def read_document(path: Path, fields: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads the JSON object at `path`. `fields` and `optional` give the types of its required and optional fields.

    The name of a field in a nested object is `table.field`. A missing required field, a wrong type, or a whole number
    of more than 64 bits raises CorruptFileError.
    """
    content = read_json(path)
    with blaming(path):
        for name, hint in {**fields, **(optional or {})}.items():
            *tables, last = name.split(".")
            place = content
            for table in tables:
                place = place.get(table) if isinstance(place, dict) else None
            if place is None and name not in fields:
                continue
            if not isinstance(place, dict):
                raise DataError(f"it has no object {'.'.join(tables)}" if tables else "it is not a JSON object")
            if last in place:
                _check_range(convert(place[last], hint, name), name)
            elif name in fields:
                raise DataError(f"it lacks {name}")
    return dict(content)


@contextlib.contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Wraps the use of a sealed file. An error caused by the file's content becomes a CorruptFileError with the path.

    A plain UsageError is not changed, because it is about the command. Subclasses of UsageError are changed, because
    they are about settings and features in the file. Errors that name `path`, or come from user code, do not change.
    """
    try:
        yield
    except (UsageError, DataError) as error:
        if type(error) is UsageError or str(path) in error.got:
            raise
        raise CorruptFileError(f"{path} is malformed: {error.got}", allowed=error.allowed) from None
    except TackboardError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        if line_of_user_code(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFileError(f"{path} is malformed: {reason[:200]}") from error


def _check_range(value: Any, name: str) -> None:
    """Raises DataError if a whole number has more than 64 bits, because no array or file offset can hold it."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and not -_INT64 <= number < _INT64:
            raise DataError(f"{name} has more than 64 bits")
