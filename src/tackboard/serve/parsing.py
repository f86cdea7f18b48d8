"""Turns HTTP bodies into score requests, and decides which bodies are cheap enough to parse on the event loop.

Work on the event loop delays every other request, health calls included, so no callback may take more than 5 ms of CPU
time. `RequestParser.parse_cheap` reads a body only if its estimated cost is far below this limit. To estimate the cost,
it counts bytes, commas and brackets of the JSON, and then adds the declared sizes of the tensors. For an expensive body
it returns None. Expensive bodies are rare; `parser_process` reads them with `parse`. Decided: expensive bodies need a
process, not a thread, because decoding JSON and converting to arrays hold the interpreter's lock until they are done.
`parse` and `parse_cheap` use the same functions, so the meaning of a request does not depend on its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from tackboard.scoring.request import ScoreRequest
from tackboard.serve.inputs import CANDIDATE, HISTORY_PREFIX, OUTPUT_NAME, ModelInputs
from tackboard.serve.protocol import (
    DeclaredTensor,
    InferRequest,
    OpenBody,
    ProtocolLimits,
    check_outputs,
    decompress,
    decompressed_start,
    open_infer,
)

# Limits on one callback: bytes of the body, bytes of its JSON, and estimated CPU time. The costs of a value, a bracket,
# a text, an event and a byte of a list were measured on the slowest machine seen; most machines need half the time.
_CHEAP_BODY_BYTES = 256 << 10
_CHEAP_JSON_BYTES = 64 << 10
_CHEAP_US = 2000.0
_VALUE_US, _BRACKET_US, _TEXT_US, _EVENT_US, _LIST_BYTE_US = 0.2, 0.5, 1.2, 0.9, 1.0
_TIMEOUT = re.compile(rb'"timeout"\s*:\s*(\d{1,15})')


@dataclass(slots=True)
class Body:
    """A body as it arrived, in pieces, with the headers that say how to read it."""

    chunks: list[bytes | bytearray]
    encoding: str = ""
    header_length: bytes | None = None

    def joined(self) -> bytes:
        return b"".join(self.chunks)


@dataclass(slots=True)
class Parsed:
    """Holds what a client asks for, and the history and candidates to score."""

    request: InferRequest
    score_request: ScoreRequest


class RequestParser:
    """Reads the bodies for one model."""

    def __init__(self, inputs: ModelInputs, limits: ProtocolLimits) -> None:
        self.inputs = inputs
        self.limits = limits

    def parse(self, body: Body) -> Parsed:
        """Reads the request in a body of any size. Raises RequestError if the body is not a request."""
        return self._read(self._open(decompress(body.joined(), body.encoding, self.limits), body.header_length))

    def parse_cheap(self, body: Body, admit: Callable[[int, int | None], None]) -> Parsed | None:
        """Does the same as `parse` in a few ms of CPU time at most; returns None if parsing might take longer.

        `admit` gets the number of candidates and the timeout before any value is read, and may raise a refusal. Under
        overload most requests are refused, and reading their values would take time from the other requests.
        """
        plain = self._small(body)
        if plain is None:
            return None
        length = body.header_length
        end = len(plain) if length is None else int(length) if length.isdigit() and len(length) <= 12 else 0
        num_brackets = plain.count(b"[", 0, end) + plain.count(b"{", 0, end)
        cost_us = _VALUE_US * plain.count(b",", 0, end) + _BRACKET_US * num_brackets
        if end > _CHEAP_JSON_BYTES or cost_us > _CHEAP_US:
            return None
        opened = self._open(plain, length)
        if cost_us + self._cost_us(opened) > _CHEAP_US:
            return None
        admit(opened.declared[CANDIDATE].shape[0], opened.request.timeout_us)
        return self._read(opened)

    def timeout_hint_us(self, body: Body) -> int | None:
        """Guesses a body's timeout from the body's first and last bytes. Parsing gives the exact timeout."""
        head, tail = bytes(body.chunks[0][:_CHEAP_JSON_BYTES]), b""
        if body.encoding:
            head = decompressed_start(head, body.encoding, _CHEAP_JSON_BYTES)
        elif body.header_length is None:
            tail = bytes(body.chunks[-1][-_CHEAP_JSON_BYTES:])
        found = [int(digits) for part in (head, tail) for digits in _TIMEOUT.findall(part)]
        return max(found, default=0) or None

    def _small(self, body: Body) -> bytes | None:
        """Returns the decompressed body, or None if the body is large."""
        if sum(map(len, body.chunks)) > _CHEAP_BODY_BYTES:
            return None
        plain = body.joined()
        if not body.encoding:
            return plain
        if len(decompressed_start(plain, body.encoding, _CHEAP_BODY_BYTES + 1)) > _CHEAP_BODY_BYTES:
            return None
        return decompress(plain, body.encoding, self.limits)

    def _open(self, plain: bytes, header_length: bytes | None) -> OpenBody:
        opened = open_infer(plain, header_length, self.limits, self.inputs.skipped)
        check_outputs(opened.request, (OUTPUT_NAME,))
        self.inputs.check(opened.declared)
        return opened

    def _read(self, opened: OpenBody) -> Parsed:
        return Parsed(opened.request, self.inputs.read(opened.read()))

    def _cost_us(self, opened: OpenBody) -> float:
        """Estimates the cost of reading the declared tensors; numbers cost next to nothing."""
        cost_us = _EVENT_US * opened.declared[f"{HISTORY_PREFIX}item"].shape[0]
        for name, tensor in opened.declared.items():
            if tensor.datatype == "BYTES":
                cost_us += _TEXT_US * math.prod(tensor.shape)
                if (type_ := self.inputs.inputs[name].type) is not None and type_.kind == "list":
                    cost_us += _LIST_BYTE_US * _text_bytes(tensor)
        return cost_us


def _text_bytes(tensor: DeclaredTensor) -> int:
    if tensor.raw is not None:
        return len(tensor.raw)
    return sum(len(text) for text in tensor.data if isinstance(text, str)) if isinstance(tensor.data, list) else 0
