"""Bodies in, score requests out: the way from bytes to columns, and which bodies are cheap enough for the event loop.

Whatever runs on the event loop holds up every other request, health calls included, so no callback may take more than
5 ms of CPU time. `RequestParser.parse_cheap` reads what certainly stays far below that: it looks at sizes first (bytes
of JSON, brackets), then at what the tensors are declared to be (texts, events, lists), and answers None for the rest.
Those bodies, which few clients send, go to `parser_process`, where the same `parse` reads them. Decided: a thread would
not do, because decoding JSON and converting to arrays hold the interpreter's lock for their whole call. Both ways end
in the same functions, so what a request means does not depend on its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tackboard.scoring.request import ScoreRequest
from tackboard.serve.inputs import HISTORY_PREFIX, OUTPUT_NAME, ModelInputs
from tackboard.serve.protocol import (
    Declared,
    InferRequest,
    OpenBody,
    ProtocolLimits,
    check_outputs,
    decompress,
    decompressed_start,
    open_infer,
)

# What one callback reads at most. Each bound alone is below 2 ms of CPU time; 1,000 candidates are well within them.
_CHEAP_BODY_BYTES = 256 << 10
_CHEAP_JSON_BYTES = 32 << 10
_CHEAP_BRACKETS = 2_000
_CHEAP_TEXTS = 1_500
_CHEAP_EVENTS = 4_000
_CHEAP_LIST_BYTES = 4 << 10
_TIMEOUT = re.compile(rb'"timeout"\s*:\s*(\d{1,15})')


@dataclass(slots=True)
class Body:
    """A body as it arrived, in pieces, with the headers that say how to read it."""

    chunks: Sequence[bytes | bytearray]
    encoding: str = ""
    header_length: bytes | None = None

    def joined(self) -> bytes:
        """The pieces as one."""
        return b"".join(self.chunks)


@dataclass(slots=True)
class Parsed:
    """What a client asks for, and the history and candidates to score."""

    request: InferRequest
    score_request: ScoreRequest


class RequestParser:
    """Reads the bodies for one model."""

    def __init__(self, inputs: ModelInputs, limits: ProtocolLimits) -> None:
        self.inputs = inputs
        self.limits = limits

    def parse(self, body: Body) -> Parsed:
        """The request in a body of any size; RequestError where it is not one."""
        return self._read(self._open(decompress(body.joined(), body.encoding, self.limits), body.header_length))

    def parse_cheap(self, body: Body) -> Parsed | None:
        """As `parse`, in a few ms of CPU time at most; None where that might take longer."""
        plain = self._small(body)
        if plain is None:
            return None
        opened = self._open(plain, body.header_length)
        return self._read(opened) if self._is_cheap(opened) else None

    def timeout_hint_us(self, body: Body) -> int | None:
        """The timeout that a body seems to ask for, from its first and last bytes; the true one is known once it is
        parsed."""
        head, tail = bytes(body.chunks[0][:_CHEAP_JSON_BYTES]), b""
        if body.encoding:
            head = decompressed_start(head, body.encoding, _CHEAP_JSON_BYTES)
        elif body.header_length is None:
            tail = bytes(body.chunks[-1][-_CHEAP_JSON_BYTES:])
        found = [int(digits) for part in (head, tail) for digits in _TIMEOUT.findall(part)]
        return max(found, default=0) or None

    def _small(self, body: Body) -> bytes | None:
        """The body without compression, or None where it, its JSON or its number of brackets is large."""
        if sum(map(len, body.chunks)) > _CHEAP_BODY_BYTES:
            return None
        plain = body.joined()
        if body.encoding:
            if len(decompressed_start(plain, body.encoding, _CHEAP_BODY_BYTES + 1)) > _CHEAP_BODY_BYTES:
                return None
            plain = decompress(plain, body.encoding, self.limits)
        length = body.header_length
        json_bytes = len(plain) if length is None else int(length) if length.isdigit() and len(length) <= 12 else 0
        if json_bytes > _CHEAP_JSON_BYTES:
            return None
        if plain.count(b"[", 0, json_bytes) + plain.count(b"{", 0, json_bytes) > _CHEAP_BRACKETS:
            return None
        return plain

    def _open(self, plain: bytes, header_length: bytes | None) -> OpenBody:
        opened = open_infer(plain, header_length, self.limits, self.inputs.skipped)
        check_outputs(opened.request, (OUTPUT_NAME,))
        self.inputs.check(opened.declared)
        return opened

    def _read(self, opened: OpenBody) -> Parsed:
        return Parsed(opened.request, self.inputs.read(opened.read()))

    def _is_cheap(self, opened: OpenBody) -> bool:
        num_texts = list_bytes = 0
        for name, tensor in opened.declared.items():
            if tensor.datatype == "BYTES":
                num_texts += math.prod(tensor.shape)
                if (type_ := self.inputs.inputs[name].type) is not None and type_.kind == "list":
                    list_bytes += _text_bytes(tensor)
        num_events = opened.declared[f"{HISTORY_PREFIX}item"].shape[0]
        return num_texts <= _CHEAP_TEXTS and num_events <= _CHEAP_EVENTS and list_bytes <= _CHEAP_LIST_BYTES


def _text_bytes(tensor: Declared) -> int:
    if tensor.raw is not None:
        return len(tensor.raw)
    return sum(len(text) for text in tensor.data if isinstance(text, str)) if isinstance(tensor.data, list) else 0
