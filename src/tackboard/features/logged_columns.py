"""Converts columns to JSON and back, bit for bit. The log of served features stores columns in this form:

    {"dtype": "<f8", "values": base64, "present": base64, "offsets": base64, "dictionary": [texts], "fields": {…}}

An array is written as its little-endian bytes in base64. `present` is packed, eight rows to a byte, and written only if
a value is missing. Decided: the JSON is canonical. Details that do not matter (values of missing rows, strings that no
row uses, the order of a dictionary) are always written in the same way. So two columns have the same JSON if and only
if `column.differing_rows` finds no difference. If a column must not be shown, a hash of its JSON can replace it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError
from tackboard.features.column import DTYPES, Column, offsets_of, ranges
from tackboard.features.types import FeatureType

OFFSETS = np.dtype("<i8")


def encode_array(array: NDArray[Any]) -> dict[str, str]:
    """Returns an array as a dict with the keys "dtype" and "values". The shape is not stored."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "values": _base64(little)}


def decode_array(data: Mapping[str, Any], dtype: Any) -> NDArray[Any]:
    """Returns the flat array that `encode_array` wrote. Raises CorruptFileError if the array has another dtype."""
    wanted = np.dtype(dtype).newbyteorder("<")
    if data.get("dtype") != wanted.str:
        raise CorruptFileError(f"an array has dtype {str(data.get('dtype'))[:16]!r}, not {wanted.str}")
    return _from_base64(data.get("values"), wanted).astype(dtype, copy=False)


def encode_column(column: Column) -> dict[str, Any]:
    """Returns a column of any type as plain JSON; see the module's docstring."""
    present = _mask_of(column)
    data: dict[str, Any] = {}
    if present is not None:
        data["present"] = _base64(np.packbits(present))
    if column.fields is not None:
        fields = {name: _encode_values(field, present) for name, field in column.fields.items()}
        offsets = [field.pop("offsets") for field in fields.values()]
        return data | {"offsets": offsets[0], "fields": fields}
    return data | _encode_values(column, present)


def decode_column(type_: FeatureType, data: Any, num_rows: int) -> Column:
    """Returns the column of `num_rows` rows that `encode_column` wrote. Raises CorruptFileError for anything else."""
    if not isinstance(data, dict):
        raise CorruptFileError("a column is not a JSON object")
    present = None
    if "present" in data:
        packed = _from_base64(data["present"], np.dtype("u1"))
        if len(packed) != (num_rows + 7) // 8:
            raise CorruptFileError("a column's mask does not have a bit per row")
        present = np.unpackbits(packed, count=num_rows).astype(np.bool_)
    if type_.kind == "sequence":
        fields, names = data.get("fields"), [name for name, _ in type_.columns]
        if not isinstance(fields, dict) or list(fields) != names:
            raise CorruptFileError(f"a sequence does not have the columns {', '.join(names)}")
        offsets = _decode_offsets(data, num_rows)
        columns = {name: _decode_list(list_, fields[name], offsets) for name, list_ in type_.columns}
        return Column(type_, np.zeros(0), present=present, fields=columns)
    if type_.kind == "list":
        return dataclasses.replace(_decode_list(type_, data, _decode_offsets(data, num_rows)), present=present)
    values, dictionary = _decode_values(type_, data, num_rows)
    return Column(type_, values, present=present, dictionary=dictionary)


def _mask_of(column: Column) -> NDArray[np.bool_] | None:
    if column.present is None:
        return None
    present = np.broadcast_to(column.present, (len(column),))
    return None if present.all() else present


def _encode_values(column: Column, present: NDArray[np.bool_] | None) -> dict[str, Any]:
    """Returns the JSON of values, offsets and dictionary. A missing row is written as an empty list or as zeros."""
    if column.offsets is None:
        values = column.values
        if column.dictionary is not None:
            return _encode_strings(values, column.dictionary, present)
        if present is not None:
            values = values.copy()
            values[~present] = 0
        return encode_array(values)
    lengths = np.diff(column.offsets)
    if present is not None:
        lengths = np.where(present, lengths, 0)
    starts = column.offsets[:-1]
    whole = len(lengths) == 0 or (int(starts[0]) == 0 and int(lengths.sum()) == len(column.values))
    values = column.values if whole else column.values[ranges(starts, lengths)]
    encoded = encode_array(values) if column.dictionary is None else _encode_strings(values, column.dictionary, None)
    return encoded | {"offsets": _base64(offsets_of(lengths).astype(OFFSETS, copy=False))}


def _encode_strings(
    codes: NDArray[np.int64], dictionary: NDArray[np.object_], present: NDArray[np.bool_] | None
) -> dict[str, Any]:
    seen = codes if present is None else codes[present]
    used, inverse = np.unique(seen, return_inverse=True)
    texts = [str(dictionary[code]) for code in used]
    distinct = sorted(set(texts))
    place = {text: number for number, text in enumerate(distinct)}
    renamed = np.array([place[text] for text in texts], dtype=np.int64)[inverse] if len(seen) else seen
    if present is not None:
        spread = np.zeros(len(codes), dtype=np.int64)
        spread[present] = renamed
        renamed = spread
    return encode_array(renamed) | {"dictionary": distinct}


def _decode_values(
    type_: FeatureType, data: Mapping[str, Any], num_values: int
) -> tuple[NDArray[Any], NDArray[np.object_] | None]:
    values = decode_array(data, DTYPES[type_.kind])
    if type_.kind == "vector":
        if len(values) != num_values * type_.width:
            raise CorruptFileError("a vector column does not have the size that its rows need")
        return values.reshape(num_values, type_.width), None
    if len(values) != num_values:
        raise CorruptFileError(f"a column has {len(values)} values, not {num_values}")
    if type_.kind != "string":
        return values, None
    texts = data.get("dictionary")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CorruptFileError("a column of text has no dictionary")
    # If all rows are missing, the column uses no string, but its codes (zeros) must still point to a string.
    texts = texts or [""]
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < len(texts)):
        raise CorruptFileError("a column of text names strings that its dictionary does not hold")
    dictionary = np.empty(len(texts), dtype=np.object_)
    dictionary[:] = texts
    return values, dictionary


def _decode_list(type_: FeatureType, data: Any, offsets: NDArray[np.int64]) -> Column:
    if not isinstance(data, dict):
        raise CorruptFileError("a list column is not a JSON object")
    values, dictionary = _decode_values(type_.of_elements(), data, int(offsets[-1]))
    return Column(type_, values, offsets=offsets, dictionary=dictionary)


def _decode_offsets(data: Mapping[str, Any], num_rows: int) -> NDArray[np.int64]:
    offsets = _from_base64(data.get("offsets"), OFFSETS).astype(np.int64, copy=False)
    if len(offsets) != num_rows + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise CorruptFileError("a list column's offsets do not fit its rows")
    return offsets


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _from_base64(text: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        raw = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise CorruptFileError("an array is not base64") from None
    if len(raw) % dtype.itemsize:
        raise CorruptFileError("an array ends in the middle of a value")
    # The array is copied, because an array over `bytes` is read-only, and kernels may expect writable arrays.
    return np.frombuffer(raw, dtype=dtype).copy()
