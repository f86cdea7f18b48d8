"""The queue with a scripted model that waits for an event: who is answered what, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tackboard.serve.admission import Admission, AdmissionConfig, CostEstimate
from tackboard.serve.errors import RequestError


class Script:
    """A model that doubles numbers and waits at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.seen: list[int] = []

    def score(self, number: int) -> int:
        self.seen.append(number)
        self.begun.set()
        assert self.gate.wait(10)
        if number < 0:
            raise ValueError(f"negative: {number}")
        return 2 * number


def run(
    scenario: Callable[[Admission[int, int], Script], Awaitable[None]], events: list[Any] | None = None, **config: Any
) -> Script:
    script = Script()
    noted = events if events is not None else []

    async def main() -> None:
        admission: Admission[int, int] = Admission(
            script.score, AdmissionConfig(**config), on_expired=noted.append, on_model_error=noted.append
        )
        admission.start(asyncio.get_running_loop())
        try:
            await scenario(admission, script)
        finally:
            script.gate.set()
            await asyncio.to_thread(admission.stop)
            assert not admission.is_alive

    asyncio.run(main())
    return script


async def begin(script: Script) -> None:
    assert await asyncio.to_thread(script.begun.wait, 5)


def test_a_deadline_fires_while_another_request_is_computed() -> None:
    events: list[Any] = []

    async def scenario(admission: Admission[int, int], script: Script) -> None:
        first = admission.submit(1, admission.deadline_s(5_000_000))
        await begin(script)
        started = time.monotonic()
        second = admission.submit(2, admission.deadline_s(100_000))
        with pytest.raises(RequestError, match="waiting in the queue") as caught:
            await second.future
        assert caught.value.status == 504
        assert 0.08 <= time.monotonic() - started < 1.0
        assert admission.num_waiting == 0
        script.gate.set()
        assert await first.future == 2

    assert run(scenario, events).seen == [1], "expired work must not reach the model"
    assert events == ["queue"]


def test_a_deadline_in_the_computation_is_answered_at_once() -> None:
    events: list[Any] = []

    async def scenario(admission: Admission[int, int], script: Script) -> None:
        job = admission.submit(1, admission.deadline_s(50_000))
        with pytest.raises(RequestError, match="in the model") as caught:
            await job.future
        assert caught.value.status == 504
        script.gate.set()
        assert await admission.submit(2, admission.deadline_s(None)).future == 4

    run(scenario, events)
    assert events == ["compute"]


def test_a_request_that_would_end_too_late_is_passed_over_while_others_wait() -> None:
    events: list[Any] = []

    async def scenario(admission: Admission[int, int], script: Script) -> None:
        first = admission.submit(1, admission.deadline_s(None))
        await begin(script)
        await asyncio.sleep(0.5)
        # After this answer a computation is expected to take 0.5 s; the second request has less than that left.
        second = admission.submit(2, admission.deadline_s(400_000))
        third = admission.submit(3, admission.deadline_s(None))
        started = time.monotonic()
        script.gate.set()
        assert await first.future == 2
        with pytest.raises(RequestError, match="waiting in the queue"):
            await second.future
        assert time.monotonic() - started < 0.3, "it is told at once, not at its deadline"
        assert await third.future == 6
        # Alone in line it is tried all the same, or a wrong estimate would never be corrected.
        assert await admission.submit(4, admission.deadline_s(400_000)).future == 8

    assert run(scenario, events, timeout_ms=5000).seen == [1, 3, 4]
    assert events == ["queue"]


def test_the_bound_of_the_queue_is_exact() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        admission.submit(0, admission.deadline_s(None))
        await begin(script)
        waiting = [admission.submit(number, admission.deadline_s(None)) for number in (1, 2, 3)]
        for refuse in (admission.check_room, lambda: admission.submit(9, admission.deadline_s(None))):
            with pytest.raises(RequestError) as caught:
                refuse()
            assert (caught.value.status, caught.value.reason, caught.value.retry_after_s) == (429, "queue_full", 1)
        script.gate.set()
        assert [await job.future for job in waiting] == [2, 4, 6]

    assert run(scenario, max_queue=3, timeout_ms=5000).seen == [0, 1, 2, 3]


def test_a_cancelled_request_never_reaches_the_model() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        first = admission.submit(1, admission.deadline_s(None))
        await begin(script)
        second = admission.submit(2, admission.deadline_s(None))
        admission.cancel(second)
        with pytest.raises(RequestError) as caught:
            await second.future
        assert caught.value.status == 499
        script.gate.set()
        assert await first.future == 2

    assert run(scenario, timeout_ms=5000).seen == [1]


def test_abandoning_answers_everyone() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        jobs = [admission.submit(number, admission.deadline_s(None)) for number in (1, 2, 3)]
        await begin(script)
        assert admission.abandon() == 3
        for job in jobs:
            with pytest.raises(RequestError) as caught:
                await job.future
            assert caught.value.status == 503
        assert admission.abandon() == 0

    assert run(scenario, timeout_ms=5000).seen == [1]


@pytest.mark.parametrize(("status", "is_told"), [(400, False), (500, True)])
def test_a_refusal_of_the_models_is_passed_on(status: int, is_told: bool) -> None:
    """A request that features cannot be computed from is no error of the model; scores that are no numbers are."""
    errors: list[BaseException] = []

    async def go() -> None:
        def refuse(_request: int) -> int:
            raise RequestError(status, "as it is")

        admission: Admission[int, int] = Admission(refuse, AdmissionConfig(), on_model_error=errors.append)
        admission.start(asyncio.get_running_loop())
        with pytest.raises(RequestError, match="as it is") as caught:
            await admission.submit(1, admission.deadline_s(None)).future
        assert caught.value.status == status
        assert admission.stop()

    asyncio.run(go())
    assert bool(errors) == is_told


def test_a_stuck_model_is_not_alive() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        assert admission.is_alive
        job = admission.submit(1, admission.deadline_s(None))
        await begin(script)
        await asyncio.sleep(0.06)
        assert not admission.is_alive
        script.gate.set()
        await job.future
        assert admission.is_alive

    run(scenario, stall_timeout_s=0.05)


def test_deadlines_are_capped() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        now = time.monotonic()
        assert admission.deadline_s(None) - now == pytest.approx(0.5, abs=0.05)
        assert admission.deadline_s(20_000) - now == pytest.approx(0.02, abs=0.05)
        assert admission.deadline_s(10**15) - now == pytest.approx(2.0, abs=0.05)

    run(scenario, timeout_ms=500, max_timeout_ms=2000)


def test_the_cost_of_a_request_follows_its_size() -> None:
    cost = CostEstimate()
    assert cost.seconds(1000) == 0
    for number in range(40):
        size = (10, 1000)[number % 2]
        cost.learn(size, 0.003 + size * 4e-6)
    assert cost.seconds(10) == pytest.approx(0.003, rel=0.05)
    assert cost.seconds(5000) == pytest.approx(0.023, rel=0.05)


def test_a_cost_neither_falls_with_the_size_nor_outgrows_it() -> None:
    falling, noisy = CostEstimate(), CostEstimate()
    for number in range(20):
        falling.learn(100 + number % 2, 0.002 - 0.001 * (number % 2))
        noisy.learn(100 + number % 2, 0.002 + 0.001 * (number % 2))
    assert falling.seconds(10_000) == pytest.approx(0.0015, rel=0.1)
    assert noisy.seconds(10_000) == pytest.approx(0.25, rel=0.1), "a hundred times the size costs a hundred times more"


def test_one_stall_moves_the_cost_little_and_a_lasting_change_is_learnt() -> None:
    cost = CostEstimate()
    for _ in range(20):
        cost.learn(1, 0.005)
    cost.learn(1, 4.0)
    assert cost.seconds(1) < 0.008
    for _ in range(60):
        cost.learn(1, 0.1)
    assert cost.seconds(1) == pytest.approx(0.1, rel=0.05)


def test_who_would_come_too_late_or_make_another_late_is_refused_at_once() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        admission._cost.learn(1, 0.5)
        admission.submit(0, admission.deadline_s(30_000_000))
        await begin(script)
        waiting = []
        for deadline_us in (5_000_000, 2_000_000):
            # The next ones would come too late themselves; the more urgent ones would make one of the others late.
            with pytest.raises(RequestError, match="would pass in the queue") as caught:
                for number in range(10):
                    waiting.append(admission.submit(number, admission.deadline_s(deadline_us)))
            assert (caught.value.status, caught.value.reason) == (429, "too_late")
            assert caught.value.retry_after_s == pytest.approx(0.5 * len(waiting), abs=0.5)
            assert 5 <= len(waiting) <= 7, "six of half a second and the one that runs fit into three quarters of 5 s"
        with pytest.raises(RequestError, match="needs about 500 ms") as caught:
            admission.submit(9, admission.deadline_s(400_000))
        assert (caught.value.status, caught.value.reason) == (504, "too_late")
        patient = admission.submit(8, admission.deadline_s(30_000_000))
        script.gate.set()
        await asyncio.gather(patient.future, *(job.future for job in waiting))

    assert run(scenario, timeout_ms=5000).seen[-1] == 8


def test_the_line_is_in_the_order_of_deadlines() -> None:
    async def scenario(admission: Admission[int, int], script: Script) -> None:
        jobs = [admission.submit(1, admission.deadline_s(9_000_000))]
        await begin(script)
        for number, deadline_us in ((2, 9_000_000), (3, 5_000_000), (4, 7_000_000), (5, 5_000_000)):
            jobs.append(admission.submit(number, admission.deadline_s(deadline_us)))
        script.gate.set()
        await asyncio.gather(*(job.future for job in jobs))

    assert run(scenario, timeout_ms=10_000).seen == [1, 3, 5, 4, 2]
