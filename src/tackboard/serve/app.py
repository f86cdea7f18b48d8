"""The HTTP application, written as raw ASGI: it takes one request and sends one answer.

The application ignores the content type, because some clients do not send it. Every answer that is not 200 is a JSON
object with a sentence under the key `error`. An infer call is handled in this order: token, path, room in the queue,
body, tensors (parsed here if parsing is cheap, else in the parser's process), deadline, model, answer. Cheap checks
come before expensive checks. Decided: the token guards every path, health calls and metrics included, so that no path
can be forgotten.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from tackboard import __version__
from tackboard.scoring.request import ScoreRequest
from tackboard.serve.admission import Admission, Job, describe_error
from tackboard.serve.errors import RequestError, error_body
from tackboard.serve.inputs import OUTPUT_NAME
from tackboard.serve.model import ServedModel
from tackboard.serve.parsing import Body, Parsed, RequestParser
from tackboard.serve.protocol import InferRequest, ProtocolLimits, build_response
from tackboard.serve.routes import Route, find_route
from tackboard.serve.telemetry import Telemetry, Timings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]
Answer = tuple[int, bytes, list[tuple[bytes, bytes]]]
Scores = npt.NDArray[np.float32]
Result = TypeVar("Result")

EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
JSON_TYPE = (b"content-type", b"application/json")
_MAX_LOG_LINES_PER_S = 20
_PIECE_BYTES = 256 << 10

logger = logging.getLogger("tackboard.serve")


class ErrorLog:
    """Writes one line per error, at most `_MAX_LOG_LINES_PER_S` a second. A later line says how many were omitted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._num_lines = 0

    def write(self, line: str) -> None:
        second = int(self._clock())
        if second != self._second:
            if self._num_lines > _MAX_LOG_LINES_PER_S:
                logger.warning("%d more errors were not logged in one second", self._num_lines - _MAX_LOG_LINES_PER_S)
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        if self._num_lines <= _MAX_LOG_LINES_PER_S:
            logger.warning("%s", line)


class Application:
    """The ASGI callable. `admission` takes requests to the model, `parsing` takes large bodies to the parser process.

    `max_buffered_bytes` bounds the bodies of all requests together.
    """

    def __init__(
        self,
        model: ServedModel,
        admission: Admission[ScoreRequest, Scores],
        parser: RequestParser,
        parsing: Admission[Body, Parsed],
        telemetry: Telemetry,
        limits: ProtocolLimits,
        *,
        token: str | None = None,
        max_buffered_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.admission = admission
        self.parsing = parsing
        self.parser = parser
        self.telemetry = telemetry
        self.limits = limits
        self.num_in_flight = 0
        self.log = ErrorLog()
        self._authorization = f"Bearer {token}".encode() if token else None
        self._max_buffered_bytes = max_buffered_bytes or 4 * limits.max_body_bytes
        self._buffered_bytes = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_ns = time.monotonic_ns()
        headers: Headers = dict(scope["headers"])
        call = "request"
        try:
            self._check_token(headers)
            route = find_route(scope["method"], scope["raw_path"])
            call = route.call
            if call == "infer":
                status, body, more = await self._infer(route, headers, receive, started_ns)
            else:
                status, body, more = self._describe(route)
        except RequestError as error:
            status, body, more = self._refuse(error, call, started_ns)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            # This is a bug in the server. The answer says that the server failed, and the log says where. Neither of
            # them repeats the request.
            bug = RequestError(500, "the server failed on this request")
            self.log.write(f"bug: {describe_error(error)}")
            status, body, more = self._refuse(bug, call, started_ns)
        if status == 499:
            return
        more.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": more})
        await send({"type": "http.response.body", "body": body})

    def note_model_error(self, error: BaseException) -> None:
        """Logs the type and the place of a model's error. The message is left out, because it may quote the request."""
        self.log.write(f"model error: {describe_error(error)}")

    def _check_token(self, headers: Headers) -> None:
        if self._authorization is None:
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            raise RequestError(401, "this server needs a token: send Authorization: Bearer <token>")

    def _refuse(self, error: RequestError, call: str, started_ns: int) -> Answer:
        spent_ns = time.monotonic_ns() - started_ns
        if call == "infer":
            self.telemetry.failed(error.status, spent_ns)
        if error.reason:
            self.telemetry.shed(error.reason)
        self.log.write(f"{error.status} {call} {spent_ns / 1e6:.1f} ms: {error.message}")
        return error.status, error_body(error.message), [JSON_TYPE, *error.headers()]

    def _describe(self, route: Route) -> Answer:
        ready = not self.admission.draining
        if route.model:
            self._check_model(route)
        if route.call == "metrics":
            return 200, self.telemetry.prometheus_text(), [(b"content-type", b"text/plain; version=0.0.4")]
        if route.call == "live":
            alive = self.admission.is_alive
            return _health({"live": alive, "ready": ready and alive}, "the model's thread is stuck", good=alive)
        if route.call == "server_ready":
            return _health({"ready": ready, "live": True}, "the server is draining", good=ready)
        if route.call == "ready":
            return _health({"name": self.model.name, "ready": ready}, "the server is draining", good=ready)
        if route.call == "server_metadata":
            return _json({"name": "tackboard", "version": __version__, "extensions": EXTENSIONS})
        if route.call == "metadata":
            return _json(self.model.metadata())
        if route.call == "config":
            return _json(self.model.config())
        return _json({"model_stats": [self.telemetry.statistics()]})

    def _check_model(self, route: Route) -> None:
        if route.model != self.model.name:
            raise RequestError(404, "there is no model of this name; GET /v2/models/stats lists what is served")
        if route.version and route.version != self.model.version:
            raise RequestError(404, f"this model does not have that version; served: {self.model.version}")

    async def _infer(self, route: Route, headers: Headers, receive: Receive, started_ns: int) -> Answer:
        self._check_model(route)
        self.admission.check_room()
        held = [0]
        encoding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
        body = Body([], encoding, headers.get(b"inference-header-content-length"))
        self.num_in_flight += 1
        try:
            await self._read_body(body, headers, receive, held)
            arrived_ns = time.monotonic_ns()
            parsed = self.parser.parse_cheap(body, self._admit) or await self._parse_elsewhere(body, receive)
            request = parsed.request
            self.telemetry.trimmed(request.skipped_bytes)
            parsed_ns = time.monotonic_ns()
            waited_s = (parsed_ns - arrived_ns) / 1e9
            job = self.admission.submit(parsed.score_request, self.admission.deadline_s(request.timeout_us) - waited_s)
            scores = await self._result(self.admission, job, receive)
            computed_ns = time.monotonic_ns()
            answer = self._scores_answer(request, scores)
            now_ns = time.monotonic_ns()
            timings = Timings(
                total=now_ns - started_ns,
                queue=job.started_ns - job.queued_ns,
                compute_input=parsed_ns - arrived_ns,
                compute_infer=job.finished_ns - job.started_ns,
                compute_output=now_ns - computed_ns,
            )
            self.telemetry.answered(timings, len(scores))
            self.telemetry.unknown(job.request.num_unknown)
            return answer
        finally:
            self.num_in_flight -= 1
            self._buffered_bytes -= held[0]
            _let_go(body.chunks)

    async def _read_body(self, body: Body, headers: Headers, receive: Receive, held: list[int]) -> None:
        """Fills `body` with medium-sized pieces: joining 64 MiB, or keeping a million pieces, would block the loop.

        `held[0]` counts the bytes of this body, which also count towards the limit on all bodies together.
        """
        limit = self.limits.max_body_bytes
        too_large = RequestError(413, f"the body is larger than the limit of {limit:,} bytes")
        if int(headers.get(b"content-length", b"0")) > limit:
            raise too_large
        pieces = body.chunks
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise RequestError(499, "the client went away before its body was complete")
            chunk: bytes = message.get("body", b"")
            held[0] += len(chunk)
            self._buffered_bytes += len(chunk)
            if held[0] > limit:
                raise too_large
            if self._buffered_bytes > self._max_buffered_bytes:
                raise RequestError(429, "the server holds too many large bodies", reason="memory", retry_after_s=1)
            is_last = not message.get("more_body", False)
            if is_last and not pieces:
                pieces.append(chunk)
                return
            if not pieces or len(pieces[-1]) >= _PIECE_BYTES:
                pieces.append(bytearray())
            pieces[-1] += chunk
            if is_last:
                return

    def _admit(self, num_candidates: int, timeout_us: int | None) -> None:
        self.admission.check_time(num_candidates, self.admission.deadline_s(timeout_us))

    async def _parse_elsewhere(self, body: Body, receive: Receive) -> Parsed:
        deadline_s = self.admission.deadline_s(self.parser.timeout_hint_us(body))
        return await self._result(self.parsing, self.parsing.submit(body, deadline_s), receive)

    async def _result(self, line: Admission[Any, Result], job: Job[Any, Result], receive: Receive) -> Result:
        """Awaits the result of a job. Raises RequestError if the job fails or expires, or if the client goes away."""

        def gone(watcher: asyncio.Future[Message]) -> None:
            if not watcher.cancelled():
                line.cancel(job)

        # After the whole body, the next thing that can be received is the end of the connection.
        watcher = asyncio.ensure_future(receive())
        watcher.add_done_callback(gone)
        try:
            return await job.future
        finally:
            watcher.remove_done_callback(gone)
            watcher.cancel()

    def _scores_answer(self, request: InferRequest, scores: Scores) -> Answer:
        head = {"model_name": self.model.name, "model_version": self.model.version}
        body, json_length = build_response(head, {OUTPUT_NAME: ("FP32", scores)}, request)
        if json_length is None:
            return 200, body, [JSON_TYPE]
        length = (b"inference-header-content-length", str(json_length).encode())
        return 200, body, [(b"content-type", b"application/octet-stream"), length]


def _let_go(pieces: list[bytes | bytearray]) -> None:
    """Frees a large body 4 MiB at a time; freeing 64 MiB at once would block the loop for 7 ms.

    The list itself is emptied, because an error's stack frames or the parser's thread may still refer to the list.
    """
    del pieces[-16:]
    if pieces:
        asyncio.get_running_loop().call_soon(_let_go, pieces)


def _health(state: dict[str, Any], otherwise: str, *, good: bool) -> Answer:
    return _json(state) if good else (503, orjson.dumps({**state, "error": otherwise}), [JSON_TYPE])


def _json(value: dict[str, Any]) -> Answer:
    return 200, orjson.dumps(value), [JSON_TYPE]
