"""Converts tensors between the wire (JSON values or raw bytes) and memory (NumPy arrays or lists of text).

The datatypes are those of the Open Inference Protocol. Numbers are little-endian and row-major; a BYTES element is a
4-byte little-endian length followed by that many bytes. Decided: BYTES is text here (UTF-8), because everything this
server reads as BYTES is an id, a word or a list in JSON. Bytes that are not UTF-8 are refused. The sizes in a shape are
multiplied as Python integers, so that the product cannot overflow. `check_datatype`, `check_shape` and `check_size`
check the declaration of a tensor. They run first, so that no values are read if the declaration is wrong. Errors name
the tensor and, for binary texts, the position, but never the value.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tackboard.serve.errors import RequestError, bad_request, shown

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
DATATYPES = (*NUMPY_TYPES, "BYTES")
MAX_RANK = 8
_JSON_KINDS: dict[str, set[type]] = {"b": {bool}, "f": {int, float}}
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `values` is a flat array, or a list of text for BYTES; its length is the product of `shape`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: npt.NDArray[Any] | list[str]


def check_datatype(name: str, datatype: object) -> str:
    """Returns the datatype as text. Raises 501 for BF16, which is not supported, and 400 for an unknown datatype."""
    if isinstance(datatype, str) and datatype in DATATYPES:
        return datatype
    if datatype == "BF16":
        raise RequestError(501, f"tensor {shown(name)}: BF16 is not supported")
    raise bad_request(f"tensor {shown(name)} has datatype {shown(datatype)}; allowed: {', '.join(DATATYPES)}")


def check_shape(name: str, shape: object, max_elements: int) -> tuple[int, ...]:
    """Returns the shape. Raises 400 unless it is a list of up to MAX_RANK sizes with a product up to `max_elements`."""
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise bad_request(f"tensor {shown(name)} needs a shape that is a list of integers")
    if len(shape) > MAX_RANK:
        raise bad_request(f"tensor {shown(name)} has {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    if any(size < 0 for size in shape):
        raise bad_request(f"tensor {shown(name)} has a negative size in its shape")
    if math.prod(shape) > max_elements:
        raise bad_request(f"tensor {shown(name)} has more elements than the {max_elements:,} allowed")
    return tuple(shape)


def check_size(name: str, datatype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    """Refuses raw bytes that cannot fill the shape: numbers need an exact size, texts at least four bytes each."""
    count = math.prod(shape)
    if datatype == "BYTES":
        if num_bytes < count * _LENGTH.size:
            raise bad_request(
                f"tensor {shown(name)} has {num_bytes} bytes; its shape needs {count * _LENGTH.size} or more"
            )
    elif num_bytes != (expected := count * NUMPY_TYPES[datatype].itemsize):
        raise bad_request(f"tensor {shown(name)} has {num_bytes} bytes where its shape and datatype need {expected}")


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Tensor:
    """Reads a tensor from JSON: a flat list, or nested lists in row-major order. Raises 400 if values do not fit."""
    flat = _flatten(name, data, len(shape))
    _check_count(name, len(flat), shape)
    kinds = set(map(type, flat))
    if datatype == "BYTES":
        if kinds - {str}:
            raise bad_request(f"tensor {shown(name)} is BYTES: every value must be a string")
        return Tensor(name, datatype, shape, list(flat))
    allowed = _JSON_KINDS.get(NUMPY_TYPES[datatype].kind, {int})
    # orjson reads an integer beyond 64 bits as a float, so this check catches such an integer as well.
    if kinds - allowed:
        wanted = " or ".join(sorted(kind.__name__ for kind in allowed))
        raise bad_request(f"tensor {shown(name)} is {datatype}: every value must be {wanted}")
    try:
        with np.errstate(over="ignore"):
            values = np.array(flat, dtype=NUMPY_TYPES[datatype])
    except OverflowError:
        raise bad_request(f"tensor {shown(name)} holds a value that does not fit {datatype}") from None
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise bad_request(f"tensor {shown(name)} holds a value that does not fit {datatype}")
    return Tensor(name, datatype, shape, values)


def from_binary(name: str, datatype: str, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    """Reads a tensor from raw bytes. Raises 400 unless they fill the shape exactly and are finite numbers or UTF-8."""
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, _split_bytes(name, raw, math.prod(shape)))
    check_size(name, datatype, shape, len(raw))
    dtype = NUMPY_TYPES[datatype]
    values = np.frombuffer(raw, dtype=dtype)
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise bad_request(f"tensor {shown(name)} holds NaN or infinity")
    return Tensor(name, datatype, shape, values)


def to_binary(datatype: str, values: npt.NDArray[Any] | Sequence[str]) -> bytes:
    """Returns the raw bytes of `values`, as `from_binary` reads them."""
    if datatype == "BYTES":
        encoded = [str(value).encode("utf-8") for value in values]
        return b"".join(part for text in encoded for part in (_LENGTH.pack(len(text)), text))
    return np.ascontiguousarray(values, dtype=NUMPY_TYPES[datatype]).tobytes()


def _flatten(name: str, data: object, rank: int) -> list[Any]:
    if not isinstance(data, list):
        raise bad_request(f"tensor {shown(name)} needs a list under data, or binary_data_size")
    flat = data
    for _ in range(rank - 1):
        if not flat or not all(type(part) is list for part in flat):
            break
        flat = list(itertools.chain.from_iterable(flat))
    return flat


def _check_count(name: str, count: int, shape: tuple[int, ...]) -> None:
    expected = math.prod(shape)
    if count != expected:
        raise bad_request(f"tensor {shown(name)} has {count} values where its shape needs {expected}")


def _split_bytes(name: str, raw: memoryview, count: int) -> list[str]:
    """Reads `count` texts that fill `raw` exactly; stops at the first surplus text, because millions may follow."""
    buffer = bytes(raw)
    texts: list[str] = []
    start, end = 0, len(buffer)
    try:
        while start < end:
            if len(texts) == count:
                raise bad_request(f"tensor {shown(name)} has more values than the {count} of its shape")
            stop = start + 4 + _LENGTH.unpack_from(buffer, start)[0]
            if stop > end:
                raise bad_request(f"tensor {shown(name)}: BYTES element {len(texts)} runs past the end of the data")
            texts.append(buffer[start + 4 : stop].decode("utf-8"))
            start = stop
    except struct.error:
        raise bad_request(f"tensor {shown(name)}: BYTES element {len(texts)} has no complete length") from None
    except UnicodeDecodeError:
        raise bad_request(f"tensor {shown(name)}: BYTES element {len(texts)} is not UTF-8") from None
    _check_count(name, len(texts), (count,))
    return texts
