"""Who gets to the model, and until when: requests in, scores or a refusal out.

One thread runs the model; everything else happens on the event loop, which stays free because the model's kernels
release the interpreter lock. A request waits in a bounded line. Its deadline is a timer on the loop, so it fires on
time even while the model is busy with another request; whoever is still in line then leaves it and never reaches the
model. Decided: the line is first come, first served, and its bound is exact, because it is checked and entered under
one lock. A deadline that passes during the computation is answered at once as well; the result is thrown away. Under
overload the first in line is always the one with the least time left, so a request that would most likely end too late
is passed over while others wait: begun regardless, nearly all of them would miss their deadlines in the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tackboard.core.config import check
from tackboard.serve.errors import RequestError

Request = TypeVar("Request")
Result = TypeVar("Result")
_SMOOTHING = 0.1


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """How many wait, and how long."""

    max_queue: int = 64
    """Most requests that wait for the model; one more is being computed."""
    timeout_ms: int = 1000
    """Deadline in milliseconds of a request that names none, counted from the arrival of its whole body."""
    max_timeout_ms: int = 60_000
    """Longest deadline in milliseconds that a request may ask for; a longer one is shortened to this."""
    stall_timeout_s: float = 120.0
    """Seconds in one computation after which the server no longer calls itself live."""

    def __post_init__(self) -> None:
        check(self.max_queue >= 1, "max_queue", self.max_queue, "at least 1")
        check(self.timeout_ms >= 1, "timeout_ms", self.timeout_ms, "at least 1 millisecond")
        check(self.max_timeout_ms >= self.timeout_ms, "max_timeout_ms", self.max_timeout_ms, "at least timeout_ms")
        check(self.stall_timeout_s > 0, "stall_timeout_s", self.stall_timeout_s, "more than 0 seconds")


class Job(Generic[Request, Result]):
    """One admitted request. `future` resolves to the scores or to a RequestError; times are nanoseconds."""

    __slots__ = ("deadline_s", "finished_ns", "future", "queued_ns", "request", "started_ns", "timer")

    def __init__(self, request: Request, deadline_s: float, future: asyncio.Future[Result]) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.queued_ns = time.monotonic_ns()
        self.started_ns = 0
        self.finished_ns = 0


class Admission(Generic[Request, Result]):
    """A bounded line in front of `score`, which one thread of its own calls.

    `on_expired(stage)` and `on_model_error(error)` are called on the loop, for metrics and the log. `name` says in
    messages what `score` is.
    """

    def __init__(
        self,
        score: Callable[[Request], Result],
        config: AdmissionConfig,
        *,
        name: str = "model",
        on_expired: Callable[[str], None] = lambda _stage: None,
        on_model_error: Callable[[BaseException], None] = lambda _error: None,
    ) -> None:
        self.config = config
        self.draining = False
        self._score = score
        self._name = name
        self._on_expired = on_expired
        self._on_model_error = on_model_error
        self._line: OrderedDict[int, Job[Request, Result]] = OrderedDict()
        self._running: Job[Request, Result] | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._mean_compute_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name=f"tackboard-{name}", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the model's thread; answers are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ends the thread after what it is computing. Returns whether it ended within `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is computed."""
        with self._changed:
            return not self._line and self._running is None

    @property
    def is_alive(self) -> bool:
        """Whether the model's thread runs and is not stuck in one computation."""
        running = self._running
        stuck = running is not None and time.monotonic_ns() - running.started_ns > self.config.stall_timeout_s * 1e9
        return self._thread.is_alive() and not stuck

    def check_room(self) -> None:
        """Refuses a request that could not be admitted now, before its body is read or parsed."""
        if self.draining:
            raise RequestError(503, "the server is draining and takes no new requests", reason="draining", close=True)
        if len(self._line) >= self.config.max_queue:
            raise self._full()

    def deadline_s(self, timeout_us: int | None) -> float:
        """The instant (loop time, seconds) at which a request that arrived now must be answered."""
        timeout_ms = self.config.timeout_ms if timeout_us is None else timeout_us / 1000
        return time.monotonic() + min(timeout_ms, self.config.max_timeout_ms) / 1000

    def submit(self, request: Request, deadline_s: float) -> Job[Request, Result]:
        """Puts `request` in line; its future is settled by `deadline_s` at the latest. 429 or 503 where it cannot."""
        assert self._loop is not None
        job: Job[Request, Result] = Job(request, deadline_s, self._loop.create_future())
        with self._changed:
            self.check_room()
            self._line[id(job)] = job
            self._changed.notify()
        job.timer = self._loop.call_at(deadline_s, self._expire, job)
        return job

    def cancel(self, job: Job[Request, Result]) -> None:
        """Takes a job whose client is gone out of the line; one that is being computed loses its listener only."""
        with self._changed:
            self._line.pop(id(job), None)
        self._settle(job, error=RequestError(499, "the client went away"))

    def abandon(self) -> int:
        """Answers everything admitted with 503, computed or not; returns how many there were."""
        with self._changed:
            jobs = [*self._line.values(), *([self._running] if self._running else [])]
            self._line.clear()
        left = [job for job in jobs if not job.future.done()]
        for job in left:
            self._settle(job, error=RequestError(503, "the server stopped before it came to this request", close=True))
        return len(left)

    def _full(self) -> RequestError:
        wait_s = max(1, math.ceil(self._mean_compute_s * len(self._line)))
        return RequestError(
            429,
            f"the queue is full ({self.config.max_queue} requests wait); try again in {wait_s} s",
            reason="queue_full",
            retry_after_s=wait_s,
        )

    def _expire(self, job: Job[Request, Result]) -> None:
        with self._changed:
            waited = self._line.pop(id(job), None) is not None or job.started_ns == 0
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
            spent_s = (job.finished_ns - job.started_ns) / 1e9
            self._mean_compute_s += (spent_s - self._mean_compute_s) * (_SMOOTHING if self._mean_compute_s else 1.0)
            with self._changed:
                self._running = None
            self._on_loop(self._finish, job, result, error)

    def _next_job(self) -> Job[Request, Result] | None:
        with self._changed:
            while True:
                while not self._line and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return None
                _, job = self._line.popitem(last=False)
                time_left_s = job.deadline_s - time.monotonic()
                # The last in line is begun even if it seems hopeless: an estimate that is too high would otherwise
                # never be corrected. Work whose time is over is not begun at all; the loop's timer may just be late.
                if time_left_s <= 0 or (time_left_s <= self._mean_compute_s and self._line):
                    self._on_loop(self._expire, job)
                    continue
                job.started_ns = time.monotonic_ns()
                self._running = job
                return job

    def _on_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # The loop is closed when the server was stopped hard during this computation: nobody waits any more.
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
    """The type and the place of an error, without its message, which may quote what a client sent."""
    frame: Any = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = ""
    if frame is not None:
        code = frame.tb_frame.f_code
        place = f" at {code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno}"
    return type(error).__name__ + place
