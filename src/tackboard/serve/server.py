"""Runs the server process, which serves a scorer with the settings of a config until it is told to stop.

At the start the server takes the port, warms the model up, listens and reports its address. On SIGTERM or SIGINT the
server drains: it is no longer ready, refuses new infer calls with 503, finishes admitted requests, closes and exits
with 0. Requests that are unfinished at the drain timeout get 503. While the server drains, it stays live and answers
health calls. Decided: the port is taken before the model is warmed up, so that a port in use is reported at once.
Clients can connect only after the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import uvicorn

from tackboard.core.config import check
from tackboard.core.errors import UsageError
from tackboard.core.progress import say
from tackboard.features.serving_log import FeatureLog
from tackboard.scoring.request import ScoreRequest
from tackboard.serve.admission import Admission, AdmissionConfig
from tackboard.serve.app import Application, Scores
from tackboard.serve.connection import BoundedConnection, ConnectionLimits, connection_class
from tackboard.serve.inputs import MAX_EVENTS
from tackboard.serve.listener import Listener
from tackboard.serve.model import ServedModel
from tackboard.serve.parser_process import ParserProcess
from tackboard.serve.parsing import Body, Parsed, RequestParser
from tackboard.serve.protocol import ProtocolLimits
from tackboard.serve.telemetry import Telemetry
from tackboard.serve.tokens import TOKEN_VARIABLE, check_token

if TYPE_CHECKING:
    from tackboard.scoring.scorer import Scorer

_POLL_S = 0.02
# Number of descriptors that connections leave free for files that the process opens later.
_SPARE_DESCRIPTORS = 16


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All settings of a server except its model."""

    host: str = "127.0.0.1"
    """Address or name to listen on."""
    port: int = 8000
    """TCP port; 0 takes a free port."""
    token: str | None = None
    """Token that clients must send as `Authorization: Bearer …` on every path; None means that no token is needed."""
    insecure: bool = False
    """Whether the server may listen on an address that other machines can reach, although there is no token."""
    max_candidates: int = 10_000
    """Largest number of candidates in one request."""
    max_events: int = MAX_EVENTS
    """Largest number of history events in one request; raised to the model's max_history if that is larger."""
    max_parses: int = 16
    """Largest number of large bodies that wait for the parser's process; further large bodies get 429."""
    context_cache_mib: int = 0
    """Memory for contexts of users in MiB, so that a user's next request computes only new events; 0 keeps nothing."""
    drain_timeout_s: float = 25.0
    """Seconds within which admitted requests must finish after the server was asked to stop."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """The queue and the deadlines."""
    protocol: ProtocolLimits = field(default_factory=ProtocolLimits)
    """Limits of one body."""
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Limits of connections."""

    def __post_init__(self) -> None:
        check(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        for name in ("max_candidates", "max_events", "max_parses"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        check(self.context_cache_mib >= 0, "context_cache_mib", self.context_cache_mib, "at least 0 MiB")
        check(self.drain_timeout_s >= 0, "drain_timeout_s", self.drain_timeout_s, "at least 0 seconds")
        if self.token is not None:
            check_token(self.token)


class Server:
    """A server for one scorer. `run` blocks until the server stops; `drain` may be called from any thread."""

    def __init__(
        self,
        scorer: Scorer,
        config: ServeConfig,
        on_ready: Callable[[str], None] = lambda _url: None,
        feature_log: FeatureLog | None = None,
    ) -> None:
        self.config = config
        self.model = ServedModel(
            scorer,
            max_candidates=config.max_candidates,
            max_events=config.max_events,
            log=feature_log,
            context_cache_bytes=config.context_cache_mib << 20,
        )
        self.telemetry = Telemetry(
            self.model.name,
            self.model.version,
            lambda: self.admission.num_waiting,
            self.model.log_counts,
            self.model.context_figures,
        )
        self.admission: Admission[ScoreRequest, Scores] = Admission(
            self.model.score,
            config.admission,
            size=lambda request: len(request.candidate_items),
            on_expired=self.telemetry.expired,
            on_model_error=lambda error: self.app.note_model_error(error),
        )
        parser = RequestParser(self.model.inputs, config.protocol)
        self.parser_process = ParserProcess(parser)
        self.parsing: Admission[Body, Parsed] = Admission(
            self.parser_process.parse,
            replace(config.admission, max_queue=config.max_parses),
            name="parser",
            size=lambda body: sum(map(len, body.chunks)),
            on_expired=lambda _stage: self.telemetry.expired("parse"),
            on_model_error=lambda error: self.app.note_model_error(error),
        )
        self.app = Application(
            self.model, self.admission, parser, self.parsing, self.telemetry, config.protocol, token=config.token
        )
        self.url = ""
        self.num_abandoned = 0
        self._on_ready = on_ready
        self._uvicorn: _DrainingServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> bool:
        """Serves until stopped. Returns whether the model's thread ended. If not, end the process by `os._exit`."""
        listener = take_port(self.config)
        try:
            self.parser_process.start()
            self.model.warm_up()
            asyncio.run(self._serve(listener))
        finally:
            listener.close()
            self.parser_process.stop()
            self.parsing.stop()
        ended = self.admission.stop()
        if self.model.log is not None and not self.model.log.close():
            say("warning: the log of served features could not be written completely")
        return ended

    def drain(self) -> None:
        """Begins to stop the server, as SIGTERM does. A second call stops the server at once."""
        if self._loop is not None and self._uvicorn is not None:
            # A closed loop means that the server has stopped in the meantime.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._uvicorn.begin_drain)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.admission.start(self._loop)
        self.parsing.start(self._loop)
        # uvicorn's log lines would repeat ours, and its traceback of a cancelled request says nothing new.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        connection = connection_class(fit_to_descriptors(self.config.connection), self.telemetry)
        self._uvicorn = _DrainingServer(
            uvicorn.Config(
                self.app,
                http=connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=self.config.connection.idle_timeout_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=1,
            ),
            connection,
            self,
        )
        try:
            await self._uvicorn.serve(sockets=[listener])
        except OSError as error:
            raise _port_error(self.config, error) from None

    def announce(self, listener: socket.socket) -> None:
        """Reports the address and readiness; called when the server listens."""
        self.url = url_of(listener)
        self.telemetry.set_ready(ready=True)
        self._on_ready(self.url)


class _DrainingServer(uvicorn.Server):
    """uvicorn's server with our listener, a drain before its shutdown, and exit code 0 after a signal."""

    def __init__(self, config: uvicorn.Config, connection: type[BoundedConnection], owner: Server) -> None:
        super().__init__(config)
        self.owner = owner
        self._connection = connection
        self._listener: Listener | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # If uvicorn gets no sockets, it does everything except listen.
        await super().startup([])
        for listener in sockets or []:
            self._listener = Listener(
                listener,
                lambda: self._connection(self.config, self.server_state, self.lifespan.state),
                drop_one=self._connection.open.drop_one,
                on_error=self.owner.telemetry.accept_failed,
            )
            self._listener.start()
            self.owner.announce(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listener is not None:
            self._listener.stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal again at the end, and the signal would kill a process that must exit with 0.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.begin_drain)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def begin_drain(self) -> None:
        """Begins the drain; a second call ends the drain at once."""
        owner = self.owner
        owner.admission.draining = True
        owner.telemetry.set_ready(ready=False)
        if self._drain_task is None:
            self._drain_task = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._give_up()

    async def _drain(self) -> None:
        owner = self.owner
        ends_s = asyncio.get_running_loop().time() + owner.config.drain_timeout_s
        while not (owner.admission.is_idle and owner.app.num_in_flight == 0):
            if asyncio.get_running_loop().time() >= ends_s or self.should_exit:
                self._give_up()
                # Gives the loop a moment to write the 503 answers.
                await asyncio.sleep(_POLL_S)
                break
            await asyncio.sleep(_POLL_S)
        self.should_exit = True

    def _give_up(self) -> None:
        num_abandoned = self.owner.admission.abandon() + self.owner.parsing.abandon()
        self.owner.num_abandoned += num_abandoned
        if num_abandoned:
            say(f"{num_abandoned} requests were not finished at the end of the drain")
        self.should_exit = True


def take_port(config: ServeConfig) -> socket.socket:
    """Binds a socket that does not listen yet.

    Raises UsageError if the host is unknown, if the port cannot be taken, or if a token is needed and not set.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise UsageError(
            f"--host {config.host} is neither an address nor a known name", fix="use 127.0.0.1 or 0.0.0.0"
        ) from None
    family, kind, number, _, address = found[0]
    if not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback and not (config.token or config.insecure):
        raise UsageError(
            f"--host {config.host} can be reached from other machines, and no token is set",
            allowed=f"allowed: a token in {TOKEN_VARIABLE} or --token-file, or --insecure where the network is trusted",
            fix="or serve on 127.0.0.1",
        )
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _port_error(config, error) from None
    return listener


def fit_to_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """Lowers the limits on connections if this process has too few descriptors, and reports the lower limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest free descriptor; all descriptors below it are open.
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    taken = free + _SPARE_DESCRIPTORS + limits.num_health_connections
    if allowed == resource.RLIM_INFINITY or taken + limits.max_connections <= allowed:
        return limits
    num_connections = max(1, allowed - taken)
    limit = f"the limit of open files is {allowed}; raise it with ulimit -n"
    say(f"at most {num_connections} connections are served: {limit}")
    num_per_address = min(limits.max_connections_per_address, max(1, num_connections // 2))
    return replace(limits, max_connections=num_connections, max_connections_per_address=num_per_address)


def url_of(listener: socket.socket) -> str:
    """Returns the address of a listening socket as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _port_error(config: ServeConfig, error: OSError) -> UsageError:
    return UsageError(
        f"cannot listen on {config.host} port {config.port}: {os.strerror(error.errno or 0)}",
        fix="choose another --port (0 takes a free port) or --host, or stop the process that uses this port",
    )
