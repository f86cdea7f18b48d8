"""Converts configurations (frozen dataclasses) to JSON and back with strict checks, and applies overrides `a.b=c`.

A config class is a frozen, keyword-only dataclass with a docstring (a string literal) under every field. Decided: an
unknown key is always an error that shows the closest known key, because a typo that silently keeps a default costs a
training run.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tackboard.core.errors import ConfigError

C = TypeVar("C")
NAMES_SHOWN = 16
"""An error about an unknown setting lists at most this number of known settings."""


def suggest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice closest to `word`, or None if no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return close[0] if close else None


def did_you_mean(word: str, choices: Iterable[str], before: str = "") -> str:
    """Returns `did you mean X?`, where X is `before` plus the choice closest to `word`; "" if no choice is close."""
    close = suggest(word, choices)
    return f"did you mean {before}{close}?" if close else ""


def check(condition: bool, field: str, got: object, allowed: str) -> None:  # noqa: FBT001
    """Raises ConfigError for `field` if `condition` is false. Config classes call `check` in `__post_init__`."""
    if not condition:
        raise _wrong_value(field, got, allowed)


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a config as plain JSON types. Tuples become lists."""
    return typing.cast("dict[str, Any]", json.loads(json.dumps(dataclasses.asdict(config))))


def from_dict(cls: type[C], data: Any, path: str = "") -> C:
    """Builds `cls` from plain JSON types. Unknown keys, wrong types and missing fields raise ConfigError."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path or cls.__name__} is {type(data).__name__}", allowed="allowed: a table of settings")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise _unknown_key(path, str(key), "", fields)
    values = {key: convert(value, hints[key], _path(path, key)) for key, value in data.items()}
    missing = [name for name, field in fields.items() if name not in values and _is_required(field)]
    if missing:
        raise ConfigError(f"{path or cls.__name__} lacks {', '.join(missing)}", fix="give a value for each")
    return cls(**values)


def move_settings(data: Any, moved: Mapping[str, str]) -> Any:
    """Returns `data`, a config of this or an older version, with the settings in `moved` at their present places.

    `moved` maps an old key to its new place `a.b`. If the old value is a table, it is merged into the table at the new
    place. An old key may also be the name of a table of this version. A table under such a key stays where it is. If a
    setting cannot move to its new place, `data` is returned unchanged, and `from_dict` reports the mistake.
    """
    if not isinstance(data, dict):
        return data
    tables = {place.partition(".")[0] for place in moved.values()}
    old = {key for key in data if key in moved and not (key in tables and isinstance(data[key], dict))}
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items() if key not in old}
    for key in old:
        *path, name = moved[key].split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
        if not isinstance(table, dict) or not isinstance(there := table.get(name, {}), dict):
            return data
        table[name] = {**there, **data[key]} if isinstance(data[key], dict) else data[key]
    return result


def apply_overrides(config: C, overrides: Sequence[str]) -> C:
    """Returns a copy of `config` with every `a.b=c` applied. Values are JSON or bare words.

    If a setting is repeated, its last value counts. All overrides are applied before the result is checked, so settings
    that depend on each other may be given in any order.
    """
    wanted: dict[str, str] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--set {override} lacks a name or a value",
                allowed="allowed: --set name=value",
                fix="e.g. --set training.steps=200",
            )
        wanted[key] = text
    return _with_values(config, wanted, "")


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring of each field of a config class, by field name. Fields without a docstring are left out."""
    docs: dict[str, str] = {}
    for parent in cls.__bases__:
        docs |= field_docs(parent) if dataclasses.is_dataclass(parent) else {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    for statement, following in itertools.pairwise(body):
        is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_doc:
            docs[statement.target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
    return docs


def explain(config: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Returns (name, value in the form that `--set` takes, meaning) of every setting, in the order of declaration."""
    rows = []
    meanings = field_docs(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), _path(prefix, field.name)
        if dataclasses.is_dataclass(value):
            rows += explain(value, name)
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value), meanings.get(field.name, "")))
    return rows


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Returns the settings of a config in JSON as a dict: name `a.b` → value. A list is one value."""
    if not isinstance(value, dict):
        return {path: value}
    return {key: leaf for name, entry in value.items() for key, leaf in leaves(entry, _path(path, name)).items()}


def convert(value: Any, hint: Any, path: str) -> Any:
    """Returns `value` as the type `hint`, or raises ConfigError. An int is allowed for a float, but not the reverse."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        return from_dict(typing.cast("type[Any]", hint), value, path)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        raise _wrong_value(path, value, ", ".join(map(str, choices)))
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return convert(value, next(option for option in options if option is not type(None)), path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong_value(path, value, "a list, e.g. [1,5,10]")
        return tuple(convert(entry, typing.get_args(hint)[0], f"{path}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_value(path, value, 'a table in JSON, e.g. {"name": 1}')
        return {key: convert(entry, typing.get_args(hint)[1], _path(path, key)) for key, entry in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Any or (isinstance(value, hint) and not (hint is int and isinstance(value, bool))):
        return value
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    raise _wrong_value(path, value, kinds.get(hint, hint.__name__))


def _with_values(config: C, wanted: dict[str, str], path: str) -> C:
    """Returns a copy of `config`, the settings at `path`, with the values in `wanted` (keys relative to `path`)."""
    if not wanted:
        return config
    hints = typing.get_type_hints(type(config))
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    moved = getattr(config, "moved_settings", {})
    below: dict[str, dict[str, str]] = {}
    values: dict[str, Any] = {}
    for key, text in wanted.items():
        head, _, rest = key.partition(".")
        if head not in fields:
            if head in moved:
                raise ConfigError(
                    f"unknown setting {_path(path, key)}", fix=f"did you mean {_path(path, moved[head], rest)}?"
                )
            elsewhere = [name for name, *_ in explain(config) if name.rpartition(".")[2] == key.rpartition(".")[2]]
            if path == "" and len(elsewhere) == 1:
                raise ConfigError(f"unknown setting {key}", fix=f"did you mean {elsewhere[0]}?")
            raise _unknown_key(path, head, rest, fields)
        is_table = dataclasses.is_dataclass(getattr(config, head))
        here = _path(path, head)
        if rest and not is_table:
            if isinstance(getattr(config, head), dict):
                fix = f"set it as a whole, in JSON: --set '{here}={{\"{rest}\": {text}}}'"
                raise ConfigError(f"{here} is one setting, and its value is a table", fix=fix)
            raise ConfigError(f"{here}.{rest} does not exist: {head} is a single value, not a table of settings")
        if is_table and not rest:
            inside = ", ".join(field.name for field in dataclasses.fields(getattr(config, head)))
            fix = f"did you mean {_path(path, moved[head])}?" if head in moved else f"set {here}.NAME=value"
            raise ConfigError(f"{here} is a table of settings", allowed=f"it holds: {inside}", fix=fix)
        if rest:
            below.setdefault(head, {})[rest] = text
        else:
            values[head] = convert(_parse(text, hints[head]), hints[head], here)
    values |= {head: _with_values(getattr(config, head), inner, _path(path, head)) for head, inner in below.items()}
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _parse(text: str, hint: Any) -> Any:
    if hint is str:
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _unknown_key(before: str, key: str, after: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for the unknown setting `key` in a path. `before` and `after` are the parts around `key`."""
    names = list(known)
    close = suggest(key, names)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ConfigError(
        f"unknown setting {_path(before, key, after)}",
        allowed=f"allowed here: {', '.join(names[:NAMES_SHOWN])}{more}",
        fix=f"did you mean {_path(before, close, after)}?" if close else "",
    )


def _path(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _wrong_value(path: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{path} = {value!r} is not allowed", allowed=f"allowed: {allowed}", fix=f"change {path}")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
