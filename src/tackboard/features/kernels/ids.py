"""Operators on ids: the kernels take strings, whole numbers, bools, times and ids. They return ids and ints.

Decided: an id is an int64. `core.hashing` makes ids in the same way for events, features and tables: the id of an int
is the int itself, and the id of a string is its BLAKE2b hash. Trained models depend on the exact results of `cross` and
`bucket_hash`, so these results must never change. Tests compare them with golden values.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.hashing import MAX_ROWS, mix64, remembered_string_id, row_ids
from tackboard.features.column import Column
from tackboard.features.kernels.arithmetic import joined
from tackboard.features.kernels.comparison import need_constant
from tackboard.features.kernels.text import per_text
from tackboard.features.operators import Example, Params, TypeClash, any_missing, register
from tackboard.features.types import ID, INT, STRING, FeatureType

_register = functools.partial(register, family="ids", elementwise=True)
HASHABLE = ("string", "int", "bool", "time", "id")
CROSS_SEED = 0
"""The seed of `cross`. No hash function of a table has this seed, because `core.hashing.table_seed` begins at 1."""
MAX_SEED = (1 << 32) - 1


def _hashed(types: tuple[FeatureType, ...], _params: Params) -> FeatureType:
    for type_ in types:
        if type_.kind not in HASHABLE:
            fix = "make it an int first: a.bucketize([...])" if type_.kind == "float" else ""
            raise TypeClash(f"it is given {type_}", allowed=f"it takes: {', '.join(HASHABLE)}", fix=fix)
    return ID.with_nullable(any_missing(types))


def _crossed(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    if len(types) < 2:
        raise TypeClash(f"it is given {len(types)} value", allowed="it takes two or more", fix="cross(a, b)")
    return _hashed(types, params)


def _bucketed(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    if types[0].kind != "id":
        fix = "hash it first: a.hash_id().bucket_hash(...)" if types[0].kind in HASHABLE else ""
        raise TypeClash(f"it is given {types[0]}", allowed="it takes: id", fix=fix)
    for name, value, low, high in (
        ("num_buckets", params.get("num_buckets"), 1, MAX_ROWS),
        ("seed", params.get("seed", 0), 0, MAX_SEED),
    ):
        if type(value) is not int or not low <= value <= high:
            raise TypeClash(f"{name} is {str(value)[:40]!r}", allowed=f"it takes a whole number from {low} to {high}")
    return INT.with_nullable(types[0].nullable)


def _indexed(types: tuple[FeatureType, ...], params: Params) -> FeatureType:
    if types[0].kind != "string":
        raise TypeClash(f"it is given {types[0]}", allowed="it takes: string")
    names = params.get("names")
    if not isinstance(names, list | tuple) or len(names) == 0:
        raise TypeClash(f"the names are {str(names)[:40]!r}", allowed="it takes a list of at least one name")
    seen = set()
    for name in names:
        need_constant(STRING, name)
        if name in seen:
            raise TypeClash(f"the name {name[:40]!r} is in the list twice", allowed="each name has one index")
        seen.add(name)
    return INT.with_nullable(types[0].nullable)


def _ids(column: Column) -> NDArray[Any]:
    if column.type.kind == "string":
        return per_text(column, remembered_string_id, np.int64)
    return column.values.astype(np.int64, copy=False)


@_register(
    "hash_id",
    "a.hash_id()",
    _hashed,
    Example("x.hash_id()", [3405396810240292928, None], {"x": ("string?", ["a", None])}),
    Example("x.hash_id()", [-7], {"x": ("int", [-7])}),
)
def hash_id(a: Column) -> Column:
    """The id of a value. The id of a string is a hash of its code points, so composed and decomposed letters differ
    (see `.nfc()`). The id of an int, bool (0 or 1), time (ms) or id is the number itself. Missing stays missing."""
    return joined(ID, _ids(a), a)


@_register(
    "cross",
    "cross(a, b, ...)",
    _crossed,
    Example(
        "cross(x, y) == cross(y, x)",
        [False, True, None],
        {"x": ("string", ["de", "de", "de"]), "y": ("string?", ["shoes", "de", None])},
    ),
)
def cross(*columns: Column) -> Column:
    """One id for a combination of values, each of a kind that `hash_id` takes. The order and the number of values
    matter. Missing if one of the values is missing. To treat a missing value like any other, fill it first."""
    mixed = mix64(_ids(columns[0]), CROSS_SEED)
    for column in columns[1:]:
        mixed = mix64(mixed ^ _ids(column).view(np.uint64), CROSS_SEED)
    return joined(ID, mixed.view(np.int64), *columns)


@_register(
    "bucket_hash",
    "a.bucket_hash(num_buckets, seed=0)",
    _bucketed,
    Example("x.bucket_hash(1000)", [802, 35, 96, None], {"x": ("id?", [0, 1, -1, None])}),
)
def bucket_hash(a: Column, *, num_buckets: int, seed: int = 0) -> Column:
    """The bucket of an id, from 0 to num_buckets - 1. The bucket equals the row of the id in an embedding table with
    one hash function and the same seed. Ids are spread evenly, and different seeds give unrelated buckets. Missing
    stays missing."""
    return joined(INT, row_ids(a.values, 1, num_buckets, seed)[:, 0], a)


@_register(
    "index_in",
    "a.index_in(names)",
    _indexed,
    Example('x.index_in(["click", "save"])', [2, 0, None], {"x": ("string?", ["save", "hide", None])}),
)
def index_in(a: Column, *, names: list[str]) -> Column:
    """The position of a string in a list of names, counted from 1; 0 for a string that is not in the list. Strings are
    compared by code points. Missing stays missing; `.fill_missing(0)` then treats a missing string like a string that
    is not in the list."""
    index = {name: position for position, name in enumerate(names, start=1)}
    return joined(INT, per_text(a, lambda text: index.get(text, 0), np.int64), a)
