"""Converts columns to Arrow and back. Most columns without missing values are not copied.

int64, float64, time, vector and list columns share their memory with Arrow in both directions. Bools are copied,
because Arrow packs eight bools into a byte. Columns with missing values are copied, because Arrow packs the mask of
missing values in the same way. The strings of a dictionary are always copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tackboard.core.errors import DataError
from tackboard.core.hashing import string_id
from tackboard.features.column import Column, offsets_of
from tackboard.features.types import FeatureType

TIMESTAMP = pa.timestamp("ms", tz="UTC")
ARROW_TYPES = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "string": pa.dictionary(pa.int64(), pa.string()),
    "id": pa.int64(),
    "time": TIMESTAMP,
}


def arrow_type(type_: FeatureType) -> pa.DataType:
    """Returns the Arrow type that stores a column of the feature type `type_`."""
    if type_.kind == "vector":
        return pa.list_(pa.float32(), type_.width)
    if type_.kind == "list":
        return pa.large_list(ARROW_TYPES[type_.element])
    if type_.kind == "sequence":
        return pa.struct([(name, arrow_type(column)) for name, column in type_.columns])
    return ARROW_TYPES[type_.kind]


def to_arrow(column: Column) -> pa.Array:
    """Converts a column to an Arrow array of the type that `arrow_type` returns."""
    absent = None if column.present is None else ~np.ascontiguousarray(column.present)
    mask = None if absent is None else pa.array(absent)
    if column.fields is not None:
        arrays = {name: to_arrow(field) for name, field in column.fields.items()}
        return pa.StructArray.from_arrays(list(arrays.values()), list(arrays), mask=mask)
    if column.offsets is not None:
        inner = to_arrow(column.flat())
        return pa.LargeListArray.from_arrays(pa.array(np.ascontiguousarray(column.offsets)), inner, mask=mask)
    if column.type.kind == "vector":
        flat = pa.array(np.ascontiguousarray(column.values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, column.type.width, mask=mask)
    values = np.ascontiguousarray(column.values)
    if column.dictionary is not None:
        texts = [str(text) for text in column.dictionary] or [""]
        # The code of a missing row is undefined, and Arrow refuses a code outside the dictionary.
        codes = pa.array(values if absent is None else np.clip(values, 0, len(texts) - 1), mask=absent)
        try:
            return pa.DictionaryArray.from_arrays(codes, pa.array(texts, pa.string()))
        except (UnicodeEncodeError, pa.ArrowException):
            raise DataError(
                "a text holds half a surrogate pair, which no file can hold", fix="correct the text"
            ) from None
    array = pa.array(values, mask=absent)
    return array.view(TIMESTAMP) if column.type.kind == "time" else array


def from_arrow(array: pa.Array | pa.ChunkedArray, type_: FeatureType, what: str = "a column") -> Column:
    """Converts an Arrow array to a column of `type_`. Raises a DataError that names `what` if the types do not fit."""
    array = _one_array(array)
    if type_.kind == "sequence":
        fields = {name: from_arrow(array.field(name), column, what) for name, column in type_.columns}
        return Column(type_, np.zeros(0), present=_present(array), fields=fields)
    if type_.kind == "list":
        return _from_list(array, type_, what)
    if type_.kind == "vector":
        return _from_vector(array, type_, what)
    if type_.kind == "string" or (type_.kind == "id" and _is_text(array.type)):
        return _from_text(array, type_, what)
    present = _present(array)
    values = _numbers(array, type_, what)
    return Column(type_, values, present=present)


def to_table(columns: Mapping[str, Column]) -> pa.Table:
    """Converts columns of equal length to one Arrow table."""
    arrays = [to_arrow(column) for column in columns.values()]
    fields = [
        pa.field(name, array.type, nullable=True, metadata={"feature_type": str(columns[name].type)})
        for name, array in zip(columns, arrays, strict=True)
    ]
    return pa.table(arrays, schema=pa.schema(fields))


def _one_array(array: Any) -> Any:
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    if pa.types.is_dictionary(array.type):
        array = array.unify_dictionaries()
    combined = array.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return combined.chunk(0) if combined.num_chunks else pa.array([], type=array.type)
    return combined


def _present(array: Any) -> Any:
    return None if array.null_count == 0 else np.asarray(pc.is_valid(array).to_numpy(zero_copy_only=False))


def _is_text(type_: pa.DataType) -> bool:
    inner = type_.value_type if pa.types.is_dictionary(type_) else type_
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))


def _wrong(what: str, array: Any, type_: FeatureType) -> DataError:
    return DataError(f"{what} is {array.type}", allowed=f"declared: {type_.kind}", fix="declare it as it is stored")


def _numbers(array: Any, type_: FeatureType, what: str) -> Any:
    stored, kind = array.type, type_.kind
    integer = pa.types.is_integer(stored)
    fits = {
        "bool": pa.types.is_boolean(stored),
        "int": integer,
        "id": integer,
        "float": integer or pa.types.is_floating(stored),
        "time": pa.types.is_timestamp(stored) or integer,
    }[kind]
    if not fits:
        raise _wrong(what, array, type_)
    try:
        if array.null_count:
            array = pc.fill_null(array, pa.scalar(0).cast(stored) if not pa.types.is_boolean(stored) else False)
        if kind == "time" and pa.types.is_timestamp(stored):
            array = array.cast(pa.timestamp("ms", tz=stored.tz)).view(pa.int64())
        elif kind in ("int", "id", "time") and stored != pa.int64():
            array = array.cast(pa.int64())
        elif kind == "float" and stored != pa.float64():
            array = array.cast(pa.float64())
    except pa.ArrowException as error:
        raise DataError(f"{what}: {str(error)[:120]}", allowed=f"declared: {kind}") from None
    return array.to_numpy(zero_copy_only=False)


def _from_text(array: Any, type_: FeatureType, what: str) -> Column:
    if not _is_text(array.type):
        raise _wrong(what, array, type_)
    present = _present(array)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    codes = array.indices
    codes = codes.fill_null(0) if codes.null_count else codes
    values = codes.to_numpy().astype(np.int64, copy=False)
    texts = array.dictionary.to_pylist()
    if None in texts:
        known = np.array([text is not None for text in texts])[values]
        present = known if present is None else present & known
    if type_.kind == "id":
        hashed = np.fromiter((string_id(text or "") for text in texts), np.int64, len(texts))
        return Column(type_, hashed[values] if len(texts) else values, present=present)
    dictionary = np.empty(max(1, len(texts)), dtype=np.object_)
    dictionary[:] = [text or "" for text in texts] or [""]
    return Column(type_, values, present=present, dictionary=dictionary)


def _from_list(array: Any, type_: FeatureType, what: str) -> Column:
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise _wrong(what, array, type_)
    present = _present(array)
    if present is not None:
        elements = array.flatten()  # `flatten` leaves out the elements of missing lists.
        offsets = offsets_of(pc.list_value_length(array).fill_null(0).to_numpy())
    else:
        elements, offsets = array.values, array.offsets.to_numpy().astype(np.int64, copy=False)
        if len(offsets) and (offsets[0] or offsets[-1] != len(elements)):
            elements, offsets = elements[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]
    inner = from_arrow(elements, type_.of_elements(), what)
    if inner.present is not None:
        raise DataError(f"{what} has lists with missing elements", allowed="elements of a list are never missing")
    offsets = offsets if len(offsets) else np.zeros(1, dtype=np.int64)
    return Column(type_, inner.values, present=present, offsets=offsets, dictionary=inner.dictionary)


def _from_vector(array: Any, type_: FeatureType, what: str) -> Column:
    stored, width = array.type, type_.width
    is_fixed = pa.types.is_fixed_size_list(stored)
    is_list = is_fixed or pa.types.is_list(stored) or pa.types.is_large_list(stored)
    if not is_list or not (pa.types.is_floating(stored.value_type) or pa.types.is_integer(stored.value_type)):
        raise _wrong(what, array, type_)
    widths = [stored.list_size] if is_fixed else pc.unique(pc.list_value_length(array.drop_null())).to_pylist()
    if any(found != width for found in widths):
        raise DataError(f"{what} has vectors of width {max(widths)}", allowed=f"declared: {type_}")
    flat = array.flatten()  # `flatten` leaves out the numbers of missing vectors.
    if flat.null_count:
        raise DataError(f"{what} has vectors with missing numbers", allowed="numbers of a vector are never missing")
    with np.errstate(all="ignore"):
        numbers = flat.to_numpy(zero_copy_only=False).astype(np.float32, copy=False).reshape(-1, width)
    present = _present(array)
    if present is None:
        return Column(type_, numbers)
    values = np.zeros((len(array), width), dtype=np.float32)
    values[present] = numbers
    return Column(type_, values, present=present)
