"""Compares a rival's values with ours before its time is reported.

Two Arrow tables with the same columns come in; a sentence for every column that differs goes out. Bools, ints, ids and
lists must be equal; floats may differ by 1e-12 of the larger of 1 and the value itself, because a rival takes another
`log` and `exp` and adds in another order. A missing value equals only a missing value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

TOLERANCE = 1e-12


def differences(ours: pa.Table, theirs: pa.Table) -> list[str]:
    """What differs, a sentence for each column; empty where nothing does."""
    if sorted(ours.column_names) != sorted(theirs.column_names):
        odd = sorted(set(ours.column_names) ^ set(theirs.column_names))
        return [f"columns only one of the two has: {', '.join(odd)}"]
    if ours.num_rows != theirs.num_rows:
        return [f"{theirs.num_rows} rows instead of {ours.num_rows}"]
    found = []
    for name in ours.column_names:
        wrong = differing(ours[name], theirs[name])
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            here, there = ours[name][row].as_py(), theirs[name][row].as_py()
            found.append(f"{name} differs in {int(wrong.sum())} of {len(wrong)} rows: row {row} is {there}, not {here}")
    return found


def differing(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which rows of two columns differ."""
    if pa.types.is_large_list(ours.type) or pa.types.is_list(ours.type):
        return _differing_lists(ours, theirs)
    if pa.types.is_floating(ours.type) != pa.types.is_floating(theirs.type):
        return np.ones(len(ours), dtype=np.bool_)
    absent, absent_there = _absent(ours), _absent(theirs)
    left, right = _values(ours), _values(theirs)
    if pa.types.is_floating(ours.type):
        allowed = TOLERANCE * np.maximum(1.0, np.maximum(np.abs(left), np.abs(right)))
        finite = np.isfinite(left) & np.isfinite(right)
        with np.errstate(invalid="ignore"):
            close = finite & (np.abs(left - right) <= allowed)
        same = close | (left == right) | (np.isnan(left) & np.isnan(right))
    else:
        same = left == right
    return np.asarray((absent != absent_there) | ~(absent | same), dtype=np.bool_)


def _differing_lists(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> NDArray[np.bool_]:
    left, right = ours.to_pylist(), theirs.to_pylist()
    return np.array([one != other for one, other in zip(left, right, strict=True)], dtype=np.bool_)


def _absent(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    return np.asarray(pc.is_null(column).to_numpy(), dtype=np.bool_)


def _values(column: pa.ChunkedArray) -> NDArray[Any]:
    column = column.cast(pa.float64() if pa.types.is_floating(column.type) else pa.int64())
    return np.asarray(pc.fill_null(column, 0).to_numpy())
