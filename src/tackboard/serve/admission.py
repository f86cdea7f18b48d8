"""Decides which requests reach the model, and by when each request gets its scores or a refusal.

One thread runs the model; everything else happens on the event loop, which stays responsive because the model's kernels
release the interpreter lock. A request waits in a bounded line. Its deadline is a timer on the loop, so the timer fires
on time even while the model is busy with another request. If the request is still in line when the timer fires, it
leaves the line and never reaches the model. If the deadline passes during the computation, the client gets an answer at
once, and the result is thrown away.

Decided: the line is sorted by the instant at which a request is due, some time before its deadline. A request enters
the line only if this request and all requests behind it are likely to be answered in time, judged by the cost of recent
computations. A refused client is told at once and can ask another server while there is time. Requests that are due at
the same instant are served in the order of their arrival. The limit on the length of the line is exact, because the
check and the entry happen under one lock. An estimate may be wrong, so a request that finds the model idle and the line
empty is always admitted. If other requests wait, the model skips a request that it can no longer finish in time.
docs/log.md compares this order of the line with other orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tackboard.core.config import check
from tackboard.serve.errors import RequestError

Request = TypeVar("Request")
Result = TypeVar("Result")
_SMOOTHING = 0.1
_MOST_SURPRISE = 4.0
"""An observed cost counts as at most this multiple of the expected cost, so that one stall does not cause refusals."""
_FILL = 0.75
"""The estimated costs of a request and of the requests ahead of it may take at most this share of the time until its
deadline. The rest is for sending the answer, which the server cannot time, and for estimates that are too
low."""


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Limits on how many requests may wait, and on how long a request may take."""

    max_queue: int = 64
    """Largest number of requests that wait for the model, not counting the request being computed."""
    timeout_ms: int = 1000
    """Deadline in milliseconds of a request that asks for no timeout, counted from the arrival of its complete body."""
    max_timeout_ms: int = 60_000
    """Longest deadline in milliseconds that a request may ask for; a longer deadline is shortened to this value."""
    stall_timeout_s: float = 120.0
    """If one computation takes more than this many seconds, the server reports that it is not live."""

    def __post_init__(self) -> None:
        check(self.max_queue >= 1, "max_queue", self.max_queue, "at least 1")
        check(self.timeout_ms >= 1, "timeout_ms", self.timeout_ms, "at least 1 millisecond")
        check(self.max_timeout_ms >= self.timeout_ms, "max_timeout_ms", self.max_timeout_ms, "at least timeout_ms")
        check(self.stall_timeout_s > 0, "stall_timeout_s", self.stall_timeout_s, "more than 0 seconds")


class CostEstimate:
    """Estimates the seconds of the next computation from the sizes and seconds of past computations.

    The estimate is a straight line fitted to past computations. Each computation weighs a tenth less than the next one.
    The estimate never falls as the size grows, and at most doubles if the size doubles. If all computations had the
    same size, the estimate is their mean cost. Before the first computation every cost is 0.
    """

    __slots__ = ("_covariance", "_mean_s", "_mean_size", "_variance")

    def __init__(self) -> None:
        self._mean_s = self._mean_size = self._variance = self._covariance = 0.0

    def seconds(self, size: int) -> float:
        """Returns the likely cost of a request of this size."""
        if self._variance <= 0:
            return self._mean_s
        slope = min(max(self._covariance / self._variance, 0.0), self._mean_s / self._mean_size)
        return self._mean_s + slope * (size - self._mean_size)

    def learn(self, size: int, seconds: float) -> None:
        """Adds one computation to the estimate."""
        if self._mean_s == 0:
            self._mean_s, self._mean_size = seconds, float(size)
            return
        more_s = min(seconds, _MOST_SURPRISE * max(self._mean_s, self.seconds(size))) - self._mean_s
        more_size = size - self._mean_size
        self._mean_s += _SMOOTHING * more_s
        self._mean_size += _SMOOTHING * more_size
        self._covariance = (1 - _SMOOTHING) * (self._covariance + _SMOOTHING * more_size * more_s)
        self._variance = (1 - _SMOOTHING) * (self._variance + _SMOOTHING * more_size * more_size)


@dataclass(slots=True, eq=False)
class Job(Generic[Request, Result]):
    """One admitted request. `future` resolves to the scores or to a RequestError.

    `due_s` is the instant by which the request should be done, some time before its deadline.
    """

    request: Request
    size: int
    deadline_s: float
    due_s: float
    future: asyncio.Future[Result]
    timer: asyncio.TimerHandle | None = None
    queued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    finished_ns: int = 0


def _due_by(deadline_s: float) -> float:
    """Returns the instant by which a request that arrives now should be done."""
    now_s = time.monotonic()
    return now_s + _FILL * (deadline_s - now_s)


class Admission(Generic[Request, Result]):
    """Keeps a bounded line of requests for `score`, which runs on a separate thread.

    The cost of a request grows with `size(request)`, for example the number of its candidates. `on_expired(stage)` and
    `on_model_error(error)` are called on the loop, for metrics and the log. Error messages use `name` for what runs
    `score`: the model or the parser.
    """

    def __init__(
        self,
        score: Callable[[Request], Result],
        config: AdmissionConfig,
        *,
        name: str = "model",
        size: Callable[[Request], int] = lambda _request: 1,
        on_expired: Callable[[str], None] = lambda _stage: None,
        on_model_error: Callable[[BaseException], None] = lambda _error: None,
    ) -> None:
        self.config = config
        self.draining = False
        self._score = score
        self._name = name
        self._size = size
        self._on_expired = on_expired
        self._on_model_error = on_model_error
        self._line: list[Job[Request, Result]] = []
        self._running: Job[Request, Result] | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._cost = CostEstimate()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name=f"tackboard-{name}", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the model's thread; answers are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ends the thread after its current computation. Returns whether the thread ended within `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._line and self._running is None

    @property
    def is_alive(self) -> bool:
        """Whether the model's thread runs and is not stuck in one computation."""
        running = self._running
        stuck = running is not None and time.monotonic_ns() - running.started_ns > self.config.stall_timeout_s * 1e9
        return self._thread.is_alive() and not stuck

    def check_room(self) -> None:
        """Refuses a request if the server drains or the line is full. Runs before the body is read, and in `submit`."""
        if self.draining:
            raise RequestError(503, "the server is draining and takes no new requests", reason="draining", close=True)
        if len(self._line) >= self.config.max_queue:
            raise self._refusal(f"the queue is full ({self.config.max_queue} requests wait)", "queue_full")

    def deadline_s(self, timeout_us: int | None) -> float:
        """Returns the instant (loop time, seconds) by which a request that arrives now must be answered."""
        timeout_ms = self.config.timeout_ms if timeout_us is None else timeout_us / 1000
        return time.monotonic() + min(timeout_ms, self.config.max_timeout_ms) / 1000

    def submit(self, request: Request, deadline_s: float) -> Job[Request, Result]:
        """Puts `request` in line and returns its job. The future of the job is settled by `deadline_s` at the latest.

        Raises RequestError: 429 if there is no room, or if this request or another request would be late; 504 if the
        deadline is too short for the request's own computation; 503 while the server drains.
        """
        assert self._loop is not None
        job: Job[Request, Result] = Job(
            request, self._size(request), deadline_s, _due_by(deadline_s), self._loop.create_future()
        )
        with self._changed:
            self.check_room()
            self._check_time(job.size, deadline_s, job.due_s)
            self._line.insert(self._place(job.due_s), job)
            self._changed.notify()
        job.timer = self._loop.call_at(deadline_s, self._expire, job)
        return job

    def cancel(self, job: Job[Request, Result]) -> None:
        """Removes the job of a client that went away. If the job is being computed, its result is dropped."""
        with self._changed, contextlib.suppress(ValueError):
            self._line.remove(job)
        self._settle(job, error=RequestError(499, "the client went away"))

    def abandon(self) -> int:
        """Answers all admitted requests with 503; returns their number."""
        with self._changed:
            jobs = [*self._line, *([self._running] if self._running else [])]
            self._line.clear()
        left = [job for job in jobs if not job.future.done()]
        for job in left:
            self._settle(job, error=RequestError(503, "the server stopped before it computed this request", close=True))
        return len(left)

    def check_time(self, size: int, deadline_s: float) -> None:
        """Refuses a request that `submit` would refuse as too late, before the values of the request are read."""
        with self._changed:
            self._check_time(size, deadline_s, _due_by(deadline_s))

    def _check_time(self, size: int, deadline_s: float, due_s: float) -> None:
        """Refuses a request that would most likely be late in line, or make another request late."""
        if not self._line and self._running is None:
            return
        now_s = time.monotonic()
        own_s = self._cost.seconds(size)
        if now_s + own_s > deadline_s:
            needs = f"the {self._name} needs about {1000 * own_s:.0f} ms for a request of this size"
            raise RequestError(504, f"the deadline is too short: {needs}", reason="too_late")
        place = self._place(due_s)
        done_s = now_s + self._running_s(now_s) + sum(self._cost.seconds(other.size) for other in self._line[:place])
        later = [(other.size, other.due_s) for other in self._line[place:]]
        for waiting_size, waiting_due_s in ((size, due_s), *later):
            done_s += self._cost.seconds(waiting_size)
            if done_s > waiting_due_s:
                raise self._refusal(
                    f"the deadline would pass in the queue ({len(self._line)} requests wait)", "too_late"
                )

    def _place(self, due_s: float) -> int:
        """Returns the place in line of a request that is due at `due_s`: behind requests with the same due time."""
        return bisect_right(self._line, due_s, key=lambda other: other.due_s)

    def _running_s(self, now_s: float) -> float:
        """Returns the likely remaining seconds of the current computation."""
        running = self._running
        if running is None:
            return 0.0
        return max(0.0, self._cost.seconds(running.size) - (now_s - running.started_ns / 1e9))

    def _refusal(self, what: str, reason: str) -> RequestError:
        wait_s = max(1, math.ceil(sum(self._cost.seconds(job.size) for job in self._line)))
        return RequestError(429, f"{what}; try again in {wait_s} s", reason=reason, retry_after_s=wait_s)

    def _expire(self, job: Job[Request, Result]) -> None:
        with self._changed, contextlib.suppress(ValueError):
            self._line.remove(job)
        waited = job.started_ns == 0
        if not job.future.done():
            stage = "queue" if waited else "compute"
            self._on_expired(stage)
            where = "waiting in the queue" if waited else f"in the {self._name}"
            self._settle(job, error=RequestError(504, f"the deadline passed while the request was {where}"))

    def _settle(
        self, job: Job[Request, Result], result: Result | None = None, error: RequestError | None = None
    ) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if job.future.done():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)  # type: ignore[arg-type]

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            result: Result | None = None
            error: BaseException | None = None
            try:
                result = self._score(job.request)
            except Exception as raised:  # noqa: BLE001 - a model may raise anything; the thread lives on
                error = raised
            job.finished_ns = time.monotonic_ns()
            with self._changed:
                self._running = None
                # A request that the model refused says little about the cost of other requests.
                if error is None:
                    self._cost.learn(job.size, (job.finished_ns - job.started_ns) / 1e9)
            self._on_loop(self._finish, job, result, error)

    def _next_job(self) -> Job[Request, Result] | None:
        with self._changed:
            while True:
                while not self._line and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return None
                job = self._line.pop(0)
                time_left_s = job.deadline_s - time.monotonic()
                # The last request in line is started even if it seems too late: otherwise an estimate that is too high
                # would never be corrected. A request past its deadline is not started; its timer is about to fire.
                if time_left_s <= 0 or (time_left_s <= self._cost.seconds(job.size) and self._line):
                    self._on_loop(self._expire, job)
                    continue
                job.started_ns = time.monotonic_ns()
                self._running = job
                return job

    def _on_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # The loop is closed if the server was stopped hard during this computation. Then nobody waits for the result.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _finish(self, job: Job[Request, Result], result: Result | None, error: BaseException | None) -> None:
        if error is None:
            self._settle(job, result=result)
            return
        if not isinstance(error, RequestError):
            self._on_model_error(error)
            error = RequestError(500, f"the {self._name} failed on this request")
        elif error.status >= 500:
            self._on_model_error(error)
        self._settle(job, error=error)


def describe_error(error: BaseException) -> str:
    """Returns the type and the place of an error. The message is left out, because it may quote the request."""
    frame: Any = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = ""
    if frame is not None:
        code = frame.tb_frame.f_code
        place = f" at {code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno}"
    return type(error).__name__ + place
