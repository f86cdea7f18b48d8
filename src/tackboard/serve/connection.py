"""Adds absolute receive deadlines and size limits to uvicorn's httptools protocol, which handles one HTTP connection.

uvicorn waits for ever for the rest of a request and accepts headers of any size. Here a request's headers must be
complete within one deadline and its body within another. New bytes extend neither deadline, so a client cannot keep a
connection alive with a byte now and then. Header bytes, header lines, tiny chunks, pipelined requests, unread answers
and the number of connections are also bounded. If a request exceeds a limit, its client gets the answers to its earlier
requests and then `{"error": …}`, and the connection is closed.

Decided: when there are too many connections, from one address or in total, the new connection is served and another
connection is dropped. If one address has too many connections, the server drops a connection of this address. If there
are too many in total, it drops a connection of the address with the most connections. In both cases it drops the
connection that has waited longest for its client, and never a connection whose request is being computed. So a client
with many waiting connections cannot displace clients with fewer connections. If nothing can be dropped, the new
connection may ask for the server's health and gets 429 for anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tackboard.core.config import check
from tackboard.serve.errors import RequestError, error_body
from tackboard.serve.routes import find_route
from tackboard.serve.telemetry import Telemetry

Wait = Literal["idle", "slow", "busy"]

# Largest number of requests on one connection that wait for their answers.
_MAX_PIPELINED = 16
# A chunked body may start with this many chunks of any size; after that the mean size of its chunks is checked.
_FREE_CHUNKS = 1024
_MIN_MEAN_CHUNK_BYTES = 64
# Seconds within which a client must ask for the server's health if there are too many connections.
_HEALTH_DEADLINE_S = 1.0
# Seconds within which a refused client must read its answer and close the connection.
_LINGER_S = 1.0
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")
_CROWDED = "there are too many connections; try again later"


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection, and of the number of connections."""

    header_deadline_s: float = 10.0
    """Seconds from the start of a connection, or from the first byte of a later request, to the end of the headers."""
    body_deadline_s: float = 30.0
    """Seconds from the end of the headers to the end of the body."""
    idle_timeout_s: float = 60.0
    """Seconds that a kept-alive connection may be silent between requests, or leave an answer unread."""
    max_header_bytes: int = 64 << 10
    """Largest number of bytes of request line and headers together."""
    max_header_lines: int = 100
    """Largest number of header lines."""
    max_connections: int = 512
    """Largest number of connections at a time. A further connection displaces a waiting connection, or gets 429."""
    max_connections_per_address: int = 256
    """Largest number of connections of one client at a time. A client is an IPv4 address or an IPv6 /64 network."""
    num_health_connections: int = 16
    """Number of further connections, beyond these limits, that may only ask for the server's health."""
    max_body_bytes: int = 64 << 20
    """Largest body in bytes. A larger body is read up to twice this size, so that the client can read the refusal."""

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            check(getattr(self, field) > 0, field, getattr(self, field), "more than 0")


class _LimitError(Exception):
    """Stops the HTTP parser from inside one of its callbacks."""


class _Room:
    """Connections that share one limit. `waiting` holds those that wait for their client, longest wait first."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.waiting: dict[BoundedConnection, None] = {}

    def drop_one(self) -> bool:
        """Drops the connection that has waited longest; returns False if no connection waits."""
        for connection in self.waiting:
            connection.drop()
            return True
        return False


class OpenConnections:
    """The open connections of one server: a room for each address, and a reserve of connections for health calls."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.reserve = _Room()
        self._by_address: dict[str, _Room] = {}
        self._num_inside = 0

    def enter(self, connection: BoundedConnection) -> None:
        """Puts a new connection into the room of its address, or else into the reserve. May drop another connection.

        If both are full and nothing can be dropped, `connection.room` stays None.
        """
        limits, own = self.limits, self._by_address.get(connection.address) or _Room()
        if (own.num_inside < limits.max_connections_per_address or own.drop_one()) and (
            self._num_inside < limits.max_connections or self._drop_one_of_most()
        ):
            connection.room = self._by_address[connection.address] = own
            self._num_inside += 1
        elif self.reserve.num_inside < limits.num_health_connections or self.reserve.drop_one():
            connection.room = self.reserve
        if connection.room is not None:
            connection.room.num_inside += 1

    def leave(self, connection: BoundedConnection) -> None:
        """Takes a connection out of its room; a second call does nothing."""
        room, connection.room = connection.room, None
        if room is None:
            return
        room.num_inside -= 1
        room.waiting.pop(connection, None)
        if room is not self.reserve:
            self._num_inside -= 1
            if not room.num_inside:
                del self._by_address[connection.address]

    def drop_one(self) -> bool:
        """Drops the least useful connection to free its descriptor; returns False if none can be dropped."""
        return self.reserve.drop_one() or self._drop_one_of_most()

    def _drop_one_of_most(self) -> bool:
        rooms = [room for room in self._by_address.values() if room.waiting]
        return bool(rooms) and max(rooms, key=lambda room: room.num_inside).drop_one()


class BoundedConnection(HttpToolsProtocol):
    """One connection. `limits`, `counts` and `open` are set by `connection_class`."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    counts: ClassVar[Telemetry]
    open: ClassVar[OpenConnections]

    address = ""
    room: _Room | None = None

    _wait: Wait = "busy"
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _in_headers = True
    _in_body = False
    _started = False
    _header_bytes = 0
    _received_bytes = 0
    _body_bytes = 0
    _num_chunks = 0
    _num_owed = 0
    _refusal: tuple[int, str, str] | None = None
    _last_words: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client)
        self.open.enter(self)
        if self.room is None:
            self.counts.shed("connections")
            self.counts.closed("connections")
            self._end(429, _CROWDED, at_once=True)
            return
        self._update_wait()
        seconds = self.limits.header_deadline_s
        self._arm(min(seconds, _HEALTH_DEADLINE_S) if self._health_only else seconds, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.leave(self)
        self._disarm()
        self._stop_unread()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Ends this connection to make room for another connection."""
        self.counts.closed("made_room")
        self.open.leave(self)
        if (self._in_headers or self._in_body) and self.transport.get_write_buffer_size() == 0:
            self._end(429, _CROWDED, at_once=True)
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        # Without this timer, an answer that the client does not read would keep the connection waiting for ever.
        super().pause_writing()
        self._stop_unread()
        self._unread = self.loop.call_later(self.limits.idle_timeout_s, self.transport.abort)
        self._update_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()
        self._update_wait()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._last_words is not None:
            return
        if not self._in_headers and not self._in_body:
            self._in_headers = True
            self._arm(self.limits.header_deadline_s, self._headers_late)
        self._started = True
        was_in_headers = self._in_headers
        super().data_received(data)
        # The parser calls back only at the end of a header line, so unfinished headers are counted here.
        if was_in_headers and self._in_headers and self._last_words is None:
            self._received_bytes += len(data)
            if self._received_bytes > self.limits.max_header_bytes:
                self._refuse(431, "the headers are larger than the limit", "header_size")
        self._update_wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:
            self._arm(self.limits.header_deadline_s, self._headers_late)
        self._in_headers, self._in_body = True, False
        self._header_bytes = self._received_bytes = self._body_bytes = self._num_chunks = 0
        if self._num_owed >= _MAX_PIPELINED:
            self._stop_parser(429, f"more than {_MAX_PIPELINED} requests of one connection are unanswered", "pipeline")

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if len(self.headers) >= self.limits.max_header_lines:
            self._stop_parser(431, f"the request has more than {self.limits.max_header_lines} headers", "header_size")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_headers()
        super().on_headers_complete()
        self._num_owed += 1
        if self._health_only:
            self.cycle.keep_alive = False
        self._in_headers, self._in_body = False, True
        self._received_bytes = 0
        self._arm(self.limits.body_deadline_s, self._body_late)

    def on_chunk_header(self) -> None:
        """Counts one chunk of a chunked body; the parser calls this method for every chunk."""
        self._num_chunks += 1
        if self._num_chunks > _FREE_CHUNKS and self._body_bytes < self._num_chunks * _MIN_MEAN_CHUNK_BYTES:
            self._stop_parser(400, "the body comes in too many tiny chunks", "chunk_size")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        # The application refuses a body over the limit; up to twice the limit is read so that the client gets an
        # answer.
        if self._body_bytes > 2 * self.limits.max_body_bytes:
            self._stop_parser(413, "the body is larger than the limit", "body_size")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._disarm()
        super().on_message_complete()
        if self.cycle.response_complete:
            # The answer was sent before the end of the body, and the bytes that followed stopped uvicorn's idle timer.
            self._arm(self.limits.idle_timeout_s, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_owed -= 1
        if self.transport.is_closing():
            if self.transport.get_write_buffer_size() > 0:
                self._arm(self.limits.idle_timeout_s, self.transport.abort)
        elif self._last_words is not None and not self._num_owed:
            self._say_last_words()
        self._update_wait()

    def timeout_keep_alive_handler(self) -> None:
        # A plain close waits until the peer has read everything, which may be never.
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        elif not self._in_body:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Refuses the request; uvicorn calls this when the parser stops, at one of our limits or at malformed HTTP."""
        status, message, reason = self._refusal or (400, "the request is not valid HTTP", "malformed")
        self._refuse(status, message, reason)

    def _unsupported_upgrade_warning(self) -> None:
        # An upgrade that we do not offer is ignored, as HTTP allows; it is not worth a log line.
        return

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self.limits.max_header_bytes:
            self._stop_parser(431, "the headers are larger than the limit", "header_size")

    def _stop_parser(self, status: int, message: str, reason: str) -> None:
        self._refusal = (status, message, reason)
        raise _LimitError(message)

    def _check_headers(self) -> None:
        """Stops the parser at ambiguous headers, and at requests that a full server does not serve.

        llhttp has already refused several Content-Length headers, and Content-Length together with Transfer-Encoding.
        """
        version = self.parser.get_http_version()
        hosts = [value.strip() for name, value in self.headers if name == b"host"]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            self._stop_parser(400, "this server speaks HTTP/1.0 and HTTP/1.1 only", "malformed")
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            self._stop_parser(400, "a request needs one Host header, or at most one in HTTP/1.0", "malformed")
        if hosts and not _HOST.fullmatch(hosts[0]):
            self._stop_parser(400, "the Host header is not a host with an optional port", "malformed")
        if codings and (version == "1.0" or codings != [b"chunked"]):
            self._stop_parser(400, "Transfer-Encoding must be chunked, and is allowed in HTTP/1.1 only", "malformed")
        if self._health_only and not self._asks_for_health():
            self.counts.shed("connections")
            self._stop_parser(429, _CROWDED, "connections")

    @property
    def _health_only(self) -> bool:
        return self.room is self.open.reserve

    def _asks_for_health(self) -> bool:
        try:
            call = find_route(self.parser.get_method().decode(), self.url.partition(b"?")[0]).call
        except RequestError:
            return False
        return call in ("live", "server_ready")

    def _update_wait(self) -> None:
        """Updates `room.waiting`. After an answer, and when a request begins, this connection is put last."""
        before, self._wait = self._wait, self._current_wait()
        if self.room is None or self._wait == before or (before, self._wait) == ("slow", "idle"):
            return
        self.room.waiting.pop(self, None)
        if self._wait != "busy":
            self.room.waiting[self] = None

    def _current_wait(self) -> Wait:
        if self.flow.write_paused or self.transport.is_closing():
            return "slow"
        unfinished = self._in_body and not self.cycle.response_complete
        if self._num_owed > unfinished:
            return "busy"
        return "slow" if self._in_headers or self._in_body else "idle"

    def _headers_late(self) -> None:
        self._deadline = None
        if self._started:
            self._refuse(408, "the headers did not arrive in time", "header_deadline")
        else:
            # A connection that never sent anything gets no answer.
            self.counts.closed("header_deadline")
            self.transport.abort()

    def _body_late(self) -> None:
        self._deadline = None
        self._refuse(408, "the body did not arrive in time", "body_deadline")

    def _refuse(self, status: int, message: str, reason: str) -> None:
        self.counts.closed(reason)
        self._end(status, message)

    def _end(self, status: int, message: str, *, at_once: bool = False) -> None:
        """Ends this connection with an error, after the answers to all requests that have arrived completely."""
        self._disarm()
        cycle, body = self.cycle, error_body(message)
        retry = b"retry-after: 1\r\n" if status == 429 else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._last_words = STATUS_LINE[status] + retry + head + body
        if self._in_body and cycle.response_complete:
            # This request has its answer. The client would mistake a second answer for the answer to its next request.
            self._last_words = b""
        elif self._in_body:
            if cycle.response_started:
                self.transport.abort()
                return
            # The request that is still arriving is answered here, so the application must not answer it.
            if self.pipeline:
                self.pipeline.popleft()
            cycle.disconnected = True
            cycle.message_event.set()
            self._num_owed -= 1
        self._in_headers = self._in_body = False
        if not self._num_owed:
            self._say_last_words(at_once=at_once)

    def _say_last_words(self, *, at_once: bool = False) -> None:
        self._unset_keepalive_if_required()
        self.transport.write(self._last_words or b"")
        if at_once:
            # If the kernel does not take the answer at once, the client has not read earlier answers either.
            if self.transport.get_write_buffer_size() > 0:
                self.transport.abort()
            self.transport.close()
            return
        # Closing while the client still sends would reset the connection, and the client might never see the answer.
        with contextlib.suppress(OSError):  # The client may have reset the connection a moment ago.
            self.transport.write_eof()
        self.flow.resume_reading()
        self._arm(_LINGER_S, self.transport.abort)
        self._update_wait()

    def _arm(self, seconds: float, callback: Callable[[], None]) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, callback)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def address_of(client: tuple[str, int] | None) -> str:
    """Returns the key of one client: its IPv4 address, or its IPv6 /64 network, which may belong to one host."""
    if client is None or ":" not in client[0]:
        return client[0] if client else ""
    address = ipaddress.IPv6Address(client[0].partition("%")[0])
    return str(address.ipv4_mapped or address.exploded[:19])


def connection_class(limits: ConnectionLimits, counts: Telemetry) -> type[BoundedConnection]:
    """Returns a protocol class with these limits, for uvicorn's `http` setting."""
    shared = {"limits": limits, "counts": counts, "open": OpenConnections(limits)}
    return type("LimitedConnection", (BoundedConnection,), shared)
