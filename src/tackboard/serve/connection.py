"""One HTTP connection with limits: uvicorn's httptools protocol plus absolute receive deadlines and size caps.

uvicorn waits for ever for the rest of a request and accepts headers of any size. Here a request's headers must be
complete within one deadline and its body within another, both counted from their beginning, so that a byte now and then
does not keep a connection alive. Header bytes, header lines, tiny chunks, pipelined requests, unread answers and the
number of connections are bounded too. A limit that is passed is answered with `{"error": …}` where an answer can still
be sent, and the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tackboard.core.config import check
from tackboard.serve.errors import error_body

_MAX_PIPELINED = 16
# A chunked body may start with this many chunks of any size; after that they must carry data worth their framing.
_FREE_CHUNKS = 1024
_MIN_MEAN_CHUNK_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What one connection may do, and how many there may be."""

    header_deadline_s: float = 10.0
    """Seconds from the connection, or from the first byte of a later request, to the end of the headers."""
    body_deadline_s: float = 30.0
    """Seconds from the end of the headers to the end of the body."""
    idle_timeout_s: float = 60.0
    """Seconds that a kept-alive connection may be silent between requests, or leave an answer unread."""
    max_header_bytes: int = 64 << 10
    """Most bytes of request line and headers together."""
    max_header_lines: int = 100
    """Most header lines."""
    max_connections: int = 512
    """Most connections at a time; more are answered with 503 and closed."""
    max_body_bytes: int = 64 << 20
    """Largest body in bytes; as much again is read and thrown away, so that a client can read why it was refused."""

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            check(getattr(self, field) > 0, field, getattr(self, field), "more than 0")


class ConnectionCounts(Protocol):
    """Where the metrics are kept."""

    def closed(self, reason: str) -> None:
        """A connection was closed by a limit."""

    def shed(self, reason: str) -> None:
        """A connection was refused for lack of room."""


class _LimitError(Exception):
    """Stops the HTTP parser from inside one of its callbacks."""


class BoundedConnection(HttpToolsProtocol):
    """One connection. `limits` and `counts` are set by `connection_class`."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    counts: ClassVar[ConnectionCounts]

    _deadline: asyncio.TimerHandle | None = None
    _in_headers = True
    _in_body = False
    _started = False
    _header_bytes = 0
    _received_bytes = 0
    _body_bytes = 0
    _num_chunks = 0
    _refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.counts.shed("connections")
            self._answer(503, "too many connections")
            return
        self._arm(self.limits.header_deadline_s, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._in_headers and not self._in_body:
            self._in_headers = True
            self._arm(self.limits.header_deadline_s, self._headers_late)
        self._started = True
        was_in_headers = self._in_headers
        super().data_received(data)
        # Headers that arrive in pieces show up in no callback before their line ends; their size is counted here.
        if was_in_headers and self._in_headers and not self.transport.is_closing():
            self._received_bytes += len(data)
            if self._received_bytes > self.limits.max_header_bytes:
                self._refuse(431, "the headers are larger than the limit", "header_size")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._in_body = True, False
        self._header_bytes = self._received_bytes = self._body_bytes = self._num_chunks = 0
        if self._deadline is None:
            self._arm(self.limits.header_deadline_s, self._headers_late)
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop_parser(400, "too many requests were sent without waiting for answers", "pipeline")

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if len(self.headers) >= self.limits.max_header_lines:
            self._stop_parser(431, f"more than {self.limits.max_header_lines} header lines", "header_size")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers, self._in_body = False, True
        self._received_bytes = 0
        self._arm(self.limits.body_deadline_s, self._body_late)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Called by the parser for every chunk of a chunked body."""
        self._num_chunks += 1
        if self._num_chunks > _FREE_CHUNKS and self._body_bytes < self._num_chunks * _MIN_MEAN_CHUNK_BYTES:
            self._stop_parser(400, "the body comes in too many tiny chunks", "chunk_size")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        # The application refuses what is over the limit; up to that much again is read so that it can be answered.
        if self._body_bytes > 2 * self.limits.max_body_bytes:
            self._stop_parser(413, "the body is larger than the limit", "body_size")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size() > 0:
            self.loop.call_later(self.limits.idle_timeout_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        # A plain close waits until the peer has read everything, which may be never.
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        elif not self._in_body:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser stops: our own refusal if a limit stopped it, else a malformed request."""
        status, message, reason = self._refusal or (400, "the request is not valid HTTP", "malformed")
        self._refuse(status, message, reason)

    def _unsupported_upgrade_warning(self) -> None:
        # An upgrade that we do not offer is ignored, as HTTP allows; it is no event for the log.
        return

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self.limits.max_header_bytes:
            self._stop_parser(431, "the headers are larger than the limit", "header_size")

    def _stop_parser(self, status: int, message: str, reason: str) -> None:
        self._refusal = (status, message, reason)
        raise _LimitError(message)

    def _headers_late(self) -> None:
        self._deadline = None
        if self._started:
            self._refuse(408, "the headers did not arrive in time", "header_deadline")
        else:
            # A connection that never said anything gets no answer either.
            self.counts.closed("header_deadline")
            self.transport.abort()

    def _body_late(self) -> None:
        self._deadline = None
        self._refuse(408, "the body did not arrive in time", "body_deadline")

    def _refuse(self, status: int, message: str, reason: str) -> None:
        self.counts.closed(reason)
        # Bytes written now would be read as part of an answer that is begun or still owed to an earlier request.
        owed = self.cycle is not None and not self.cycle.response_complete and not self._in_body
        begun = self._in_body and self.cycle is not None and self.cycle.response_started
        if self.pipeline or owed or begun:
            self.transport.abort()
        else:
            self._answer(status, message)

    def _answer(self, status: int, message: str) -> None:
        body = error_body(message)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._disarm()
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self.loop.call_later(1.0, self.transport.abort)

    def _arm(self, seconds: float, callback: Callable[[], None]) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, callback)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_class(limits: ConnectionLimits, counts: ConnectionCounts) -> type[BoundedConnection]:
    """A protocol class with these limits, for uvicorn's `http` setting."""
    return type("LimitedConnection", (BoundedConnection,), {"limits": limits, "counts": counts})
