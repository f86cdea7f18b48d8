"""Implements the infer call of the Open Inference Protocol: reads the tensors of a body, and writes an answer's body.

A body is JSON, or JSON followed by the raw bytes of its tensors. In the second case the header
Inference-Header-Content-Length gives the length of the JSON. Content-Type is ignored, because the most used client
sends none. A hostile body is refused before it costs much. The checks cover the compression ratio, the number and
depth of JSON values, the number, ranks and shapes of tensors, sizes that do not add up, and names given twice. Decided:
`open_infer` reads the declarations of a body and no tensor values; `OpenBody.read` reads the values after the caller
has compared the declarations with the model. A request for a part of Triton that this server lacks (shared memory,
sequences, classification) gets 501.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tackboard.core.config import check
from tackboard.serve.errors import RequestError, bad_request, shown
from tackboard.serve.tensors import Tensor, check_datatype, check_shape, check_size, from_binary, from_json, to_binary

# Up to this decompressed size any compression ratio is allowed: a short body of equal ids compresses very well.
_RATIO_FREE_BYTES = 1 << 20
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, kw_only=True)
class ProtocolLimits:
    """Limits on the content of one infer body."""

    max_body_bytes: int = 64 << 20
    """Largest body in bytes, as sent."""
    max_compression_ratio: int = 100
    """Largest ratio of decompressed to compressed size, for bodies of more than 1 MiB after decompression."""
    max_decompressed_bytes: int = 16 << 20
    """Largest body in bytes after decompression; a larger body can be sent uncompressed."""
    max_tensor_bytes: int = 32 << 20
    """Largest tensor, in bytes of binary data."""
    max_tensor_values: int = 8_000_000
    """Largest number of values in one tensor; enough for 10,000 candidates with vectors of 800."""
    max_json_depth: int = 32
    """Deepest nesting of lists and objects."""
    max_json_values: int = 1_000_000
    """Largest number of values in the JSON part."""
    max_tensors: int = 64
    """Largest number of inputs, and of requested outputs."""

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            check(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Holds the id, timeout and wanted outputs of one infer call. If `outputs` is empty, all outputs are wanted.

    `outputs` maps each wanted output to whether it is sent as binary. `skipped_bytes` is the size of tensors that the
    model does not read.
    """

    id: str | None
    timeout_us: int | None
    outputs: dict[str, bool]
    binary_by_default: bool
    skipped_bytes: int = 0


@dataclass(slots=True)
class DeclaredTensor:
    """One tensor as the body declares it. Its values are not read yet: they are in `raw`, or else in `data` as JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: object
    raw: memoryview | None

    def read(self) -> Tensor:
        """Reads the values. Raises 400 if the values do not fit the declaration."""
        if self.raw is None:
            return from_json(self.name, self.datatype, self.shape, self.data)
        return from_binary(self.name, self.datatype, self.shape, self.raw)


@dataclass(slots=True)
class OpenBody:
    """An infer body whose declarations are read, but not yet the values of its tensors."""

    request: InferRequest
    declared: dict[str, DeclaredTensor]

    def read(self) -> dict[str, Tensor]:
        """Reads the tensors. Raises 400 if their values do not fit the declarations."""
        return {name: tensor.read() for name, tensor in self.declared.items()}


def decompress(body: bytes, encoding: str, limits: ProtocolLimits) -> bytes:
    """Decompresses a body. Raises 400 if it is damaged, 413 if it is too large, 415 if the encoding is unknown."""
    if encoding in ("", "identity"):
        return body
    by_ratio = max(_RATIO_FREE_BYTES, len(body) * limits.max_compression_ratio)
    cap = min(limits.max_body_bytes, limits.max_decompressed_bytes, by_ratio)
    stream = _decompressor(body, encoding)
    try:
        plain = stream.decompress(body, cap + 1)
    except zlib.error:
        raise bad_request(f"the body is not valid {encoding}") from None
    if len(plain) > cap:
        raise RequestError(413, f"the decompressed body is larger than the {cap:,} bytes allowed for it")
    if not stream.eof or stream.unused_data:
        raise bad_request(f"the {encoding} body ends too early or has bytes after its end")
    return plain


def decompressed_start(body: bytes, encoding: str, num_bytes: int) -> bytes:
    """Decompresses at most the first `num_bytes` of a body; returns no bytes if the body is not valid."""
    if encoding == "identity":
        return body[:num_bytes]
    try:
        return _decompressor(body, encoding).decompress(body, num_bytes)
    except zlib.error:
        return b""


def open_infer(
    body: bytes, header_length: bytes | None, limits: ProtocolLimits, skipped: Collection[str] = ()
) -> OpenBody:
    """Reads the declarations of an infer body; `header_length` is the value of Inference-Header-Content-Length.

    Inputs named in `skipped` are neither decoded nor checked; their bytes are counted.
    """
    json_bytes, raw = _split_body(body, header_length)
    envelope = _load_json(json_bytes, limits)
    if not isinstance(envelope, dict):
        raise bad_request("the request must be a JSON object")
    request_id = envelope.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise bad_request("id must be a string")
    parameters = _parameters(envelope, "the request")
    if any(key in parameters for key in _SEQUENCE):
        raise RequestError(501, "sequences are not supported")
    outputs = _parse_outputs(envelope.get("outputs"), limits)
    binary_by_default = _flag(parameters, "binary_data_output", "the request")
    declared, skipped_bytes = _declared_inputs(envelope.get("inputs"), raw, limits, skipped)
    request = InferRequest(
        id=request_id,
        timeout_us=_timeout_us(parameters),
        outputs={name: binary_by_default if wish is None else wish for name, wish in outputs.items()},
        binary_by_default=binary_by_default,
        skipped_bytes=skipped_bytes,
    )
    return OpenBody(request, declared)


def build_response(
    head: Mapping[str, str],
    tensors: Mapping[str, tuple[str, npt.NDArray[Any]]],
    request: InferRequest,
) -> tuple[bytes, int | None]:
    """Returns the body of a successful answer and, if it holds binary tensors, the length of its JSON part.

    `head` holds model_name and model_version; `tensors` maps output names to (datatype, array). If the request names
    outputs, only these are in the answer; `check_outputs` must have accepted them.
    """
    wanted = request.outputs or dict.fromkeys(tensors, request.binary_by_default)
    chunks: list[bytes] = []
    outputs = []
    for name, as_binary in wanted.items():
        datatype, values = tensors[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        if as_binary:
            chunks.append(to_binary(datatype, values))
            entry["parameters"] = {"binary_data_size": len(chunks[-1])}
        else:
            entry["data"] = np.ascontiguousarray(values).reshape(-1)
        outputs.append(entry)
    answer: dict[str, Any] = {**head, "outputs": outputs}
    if request.id is not None:
        answer["id"] = request.id
    json_bytes = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if not chunks:
        return json_bytes, None
    return b"".join((json_bytes, *chunks)), len(json_bytes)


def check_outputs(request: InferRequest, known: tuple[str, ...]) -> None:
    """Refuses an output that does not exist, before any work is done for the request."""
    for name in request.outputs:
        if name not in known:
            raise bad_request(f"there is no output {shown(name)}; allowed: {', '.join(known)}")


def _decompressor(body: bytes, encoding: str) -> zlib._Decompress:
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise RequestError(415, f"content encoding {shown(encoding)} is not supported; allowed: gzip, deflate")
    # With the value 47, zlib detects zlib or gzip by the first bytes. With -15, zlib reads deflate without a header.
    return zlib.decompressobj(-15 if encoding == "deflate" and not _has_zlib_header(body) else 47)


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] * 256 + body[1]) % 31 == 0


def _split_body(body: bytes, header_length: bytes | None) -> tuple[bytes, memoryview]:
    if header_length is None:
        return body, memoryview(b"")
    if not header_length.isdigit() or len(header_length) > 12 or int(header_length) > len(body):
        raise bad_request("Inference-Header-Content-Length must be a number of bytes, at most the length of the body")
    length = int(header_length)
    if length == 0:
        raise bad_request("a body of raw bytes alone needs a model with one input; this model has several")
    return body[:length], memoryview(body)[length:]


def _load_json(json_bytes: bytes, limits: ProtocolLimits) -> Any:
    # Separators are counted before parsing, because a parsed empty list takes twenty times the memory of its text.
    num_containers = json_bytes.count(b"[") + json_bytes.count(b"{")
    most = limits.max_json_values
    # A text with fewer bytes than the limit cannot hold too many values, so its separators are not counted.
    if len(json_bytes) > most and json_bytes.count(b",") + num_containers > most:
        raise bad_request(f"the JSON holds more than {most:,} values")
    try:
        value = orjson.loads(json_bytes)
    except orjson.JSONDecodeError as error:
        # The answer repeats orjson's own words and the position, never the text of the request.
        raise bad_request(f"the request is not valid JSON: {error.msg} at character {error.pos}") from None
    # With few brackets the depth cannot exceed the limit, and the values need not be visited.
    if num_containers > limits.max_json_depth and _is_deeper(value, limits.max_json_depth):
        raise bad_request(f"the JSON is nested deeper than {limits.max_json_depth}")
    return value


def _is_deeper(value: Any, max_depth: int) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth + 1):
        parts = itertools.chain.from_iterable(held.values() if type(held) is dict else held for held in level)
        level = [part for part in parts if type(part) is list or type(part) is dict]
        if not level:
            return False
    return True


def _declared_inputs(
    entries: object, raw: memoryview, limits: ProtocolLimits, skipped: Collection[str]
) -> tuple[dict[str, DeclaredTensor], int]:
    """Returns the declared tensors, and the number of bytes of the skipped tensors."""
    declared: dict[str, DeclaredTensor] = {}
    offset = skipped_bytes = 0
    for name, entry, parameters in _named_entries(entries, "inputs", limits):
        size = parameters.get("binary_data_size")
        is_read = name not in skipped
        datatype = check_datatype(name, entry.get("datatype")) if is_read else ""
        shape = check_shape(name, entry.get("shape"), limits.max_tensor_values) if is_read else ()
        if size is None:
            if is_read:
                declared[name] = DeclaredTensor(name, datatype, shape, entry.get("data"), None)
            else:
                skipped_bytes += len(orjson.dumps(entry.get("data")))
            continue
        if "data" in entry:
            raise bad_request(f"tensor {shown(name)} has both data and binary_data_size")
        if type(size) is not int or not 0 <= size <= len(raw) - offset:
            raise bad_request(f"tensor {shown(name)} has a binary_data_size that does not fit the body")
        if is_read:
            if size > limits.max_tensor_bytes:
                most = limits.max_tensor_bytes
                raise bad_request(f"tensor {shown(name)} has {size} bytes; at most {most:,} are allowed")
            check_size(name, datatype, shape, size)
            declared[name] = DeclaredTensor(name, datatype, shape, None, raw[offset : offset + size])
        else:
            skipped_bytes += size
        offset += size
    if offset != len(raw):
        raise bad_request(f"the body has {len(raw) - offset} bytes that belong to no tensor")
    return declared, skipped_bytes


def _parse_outputs(entries: object, limits: ProtocolLimits) -> dict[str, bool | None]:
    if entries is None:
        return {}
    outputs: dict[str, bool | None] = {}
    for name, _, parameters in _named_entries(entries, "outputs", limits):
        if parameters.get("classification"):
            raise RequestError(501, "classification outputs are not supported")
        wish = "binary_data" in parameters
        outputs[name] = _flag(parameters, "binary_data", f"output {shown(name)}") if wish else None
    return outputs


def _named_entries(
    entries: object, kind: str, limits: ProtocolLimits
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad_request(f"{kind} must be a list of objects")
    if len(entries) > limits.max_tensors:
        raise bad_request(f"{kind} has {len(entries)} entries; at most {limits.max_tensors} are allowed")
    named: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            raise bad_request(f"every entry of {kind} needs a name that is a string")
        if name in named:
            raise bad_request(f"{shown(name)} appears twice in {kind}")
        parameters = _parameters(entry, f"{kind} entry {shown(name)}")
        if any(key in parameters for key in _SHARED_MEMORY):
            raise RequestError(501, "shared memory is not supported")
        named[name] = (name, entry, parameters)
    return list(named.values())


def _parameters(holder: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = holder.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise bad_request(f"parameters of {where} must be an object")
    return parameters


def _flag(parameters: dict[str, Any], key: str, where: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise bad_request(f"{key} of {where} must be true or false")
    return value


def _timeout_us(parameters: dict[str, Any]) -> int | None:
    timeout = parameters.get("timeout")
    # Zero means "the server's default", as it does in Triton.
    if timeout is None or (type(timeout) is int and timeout == 0):
        return None
    if type(timeout) is not int or timeout < 0:
        raise bad_request("timeout must be a whole number of microseconds, 0 or more")
    return timeout
