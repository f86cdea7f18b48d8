"""This module converts attributes that are lists of floats to float32 vectors of fixed width, and stores the vectors.

Decided: in Parquet files, vectors are stored as lists, and the column's metadata holds their width. Parquet has no
lists of fixed width, and pyarrow cannot read back a fixed-width column with nulls. Nulls are common, because the vector
of an item without attributes is null.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tackboard.core.errors import DataError

WIDTH = b"vector_width"
"""The key under which the metadata of a stored column holds the width of its vectors."""


def with_vectors(table: pa.Table) -> pa.Table:
    """Converts each column of lists of floats to fixed_size_list<float32> if all its lists have the same length.

    Other columns are not converted. Lists of integers are never converted, because they are usually ids, and float32
    would make different large ids equal. A row may hold null instead of a list, and this null stays null. A null inside
    a list of a converted column raises DataError.
    """
    for place, name in enumerate(table.column_names):
        width = _width_of(table[name])
        if width:
            table = table.set_column(place, name, _vectors_of(table[name], name, width))
    return table


def to_stored(table: pa.Table) -> pa.Table:
    """Prepares `table` for Parquet: converts fixed-size lists to lists, and stores the width of vectors as metadata."""
    for place, field in enumerate(table.schema):
        if pa.types.is_fixed_size_list(field.type):
            stored = table[field.name].cast(pa.list_(field.type.value_type))
            metadata = {WIDTH: str(field.type.list_size)} if field.type.value_type == pa.float32() else None
            table = table.set_column(place, pa.field(field.name, stored.type, metadata=metadata), stored)
    return table


def from_stored(table: pa.Table) -> pa.Table:
    """Reverses `to_stored`: lists that were vectors become vectors again."""
    for place, field in enumerate(table.schema):
        if field.metadata and WIDTH in field.metadata:
            vectors = _vectors_of(table[field.name], field.name, int(field.metadata[WIDTH]))
            table = table.set_column(place, field.name, vectors)
    return table


def _width_of(column: pa.ChunkedArray) -> int:
    """Returns the width of the vectors in a column, or 0 if the column holds no vectors."""
    kind = column.type
    is_fixed = pa.types.is_fixed_size_list(kind)
    is_list = is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_floating(kind.value_type):
        return 0
    if is_fixed:
        return int(kind.list_size)
    lengths = pc.unique(pc.list_value_length(column.drop_null())).to_pylist()
    return int(lengths[0]) if len(lengths) == 1 else 0


def _vectors_of(column: pa.ChunkedArray, name: str, width: int) -> pa.Array:
    valid = column.is_valid().to_numpy()
    flat = pc.list_flatten(column).cast(pa.float32())
    if flat.null_count:
        raise DataError(
            f"a vector of the attribute {name!r} lacks a number",
            allowed="allowed: vectors without a missing number, or null instead of a vector",
        )
    values = np.zeros((len(valid), width), dtype=np.float32)
    values[valid] = flat.to_numpy().reshape(-1, width)
    mask = None if valid.all() else pa.array(~valid)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width, mask=mask)
