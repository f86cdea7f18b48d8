"""A run that is killed, at whatever instant, and taken up again ends in the same bits as one that was not.

Twenty-one instants for each number of loader workers: thirteen between the named points of the checkpoint writer, eight
at random. `make test` takes five of them, `make test-slow` all, and every named point besides.
"""

from __future__ import annotations

import fcntl
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core import keyed_random

if TYPE_CHECKING:
    from conftest import Nursery, Outcome, Reference, Runs
else:
    Nursery = Outcome = Reference = Runs = Any

KILLED = -9
STOPPED_BY_SIGTERM = -15
RESUME_ME = 75
NAMED = [
    ("dense.safetensors:before-write", 1),
    ("dense.safetensors:after-write", 3),
    ("tables.safetensors:before-write", 2),
    ("tables.safetensors:after-write", 4),
    ("optimizer.safetensors:after-fsync", 3),
    ("state.json:after-write", 2),
    ("MANIFEST.json:before-write", 5),
    ("MANIFEST.json:after-write", 3),
    ("MANIFEST.json:after-rename", 2),
    ("step-00000006:before-rename", 1),
    ("step-00000009:after-rename", 1),
    ("latest:before-rename", 4),
    ("best:before-rename", 2),
]
"""(point, which time the writer stands there). `latest` counts one more than checkpoints: runs/latest is the first."""
NUM_RANDOM = 8
WORKERS = (0, 1, 3)


def instants() -> list[Any]:
    """All 63; without the slow mark: four named points and one random instant, over all numbers of workers."""
    quick = {(1, 0), (7, 1), (9, 0), (12, 3), (13, 3)}
    return [
        pytest.param(
            number,
            workers,
            id=f"{'-'.join(map(str, NAMED[number])) if number < len(NAMED) else f'random-{number}'}-{workers}-workers",
            marks=[] if (number, workers) in quick else [pytest.mark.slow],
        )
        for workers in WORKERS
        for number in range(len(NAMED) + NUM_RANDOM)
    ]


def interrupt(nursery: Nursery, workers: int, delay_s: float, name: str, since: str = "") -> tuple[Runs, Outcome]:
    """A run that a signal interrupts so long after its start, or after the path `since` in it; sooner, if it had ended.

    Its end is `done` in STATUS. The process lives on for a while, in which a signal may end it but interrupts nothing:
    see test_a_kill_after_the_end_leaves_a_finished_run.
    """
    while True:
        runs = nursery.runs()
        order = {"from": f"{runs.name}/[0-9]*_small_*/{since}"} if since else {}
        outcome = runs.train(workers, after_s=delay_s, signal=name, **order)
        if not runs.done:
            return runs, outcome
        assert outcome.code in (0, -signal.Signals[name]), outcome.log
        delay_s *= 0.7


def finish(runs: Runs, reference: Reference, workers: int = 0) -> None:
    """Takes the run up again and compares what it ends in."""
    resumed = runs.train(workers)
    assert resumed.code == 0, resumed.log
    assert runs.digest() == reference.digest
    assert runs.metrics() == reference.metrics, "each step stands in metrics.jsonl once, with the same figures"
    assert runs.leftovers() == []
    runs.check_readable()


@pytest.mark.parametrize(("number", "workers"), instants())
def test_a_killed_run_resumes_to_the_same_bits(
    nursery: Nursery, runs: Runs, reference: Reference, number: int, workers: int
) -> None:
    if number < len(NAMED):
        outcome = runs.train(workers, at=NAMED[number], action="kill")
    else:
        delay_s = keyed_random.uniform(20, workers, number).item() * reference.seconds
        runs, outcome = interrupt(nursery, workers, delay_s, "SIGKILL")
    assert outcome.code == KILLED, outcome.log
    runs.check_readable()
    finish(runs, reference, workers)


def test_the_named_points_surround_every_move_of_the_writer(reference: Reference) -> None:
    passed = Counter(reference.points)
    assert all(passed[point] >= occurrence for point, occurrence in NAMED)
    for group in ("dense", "tables", "optimizer"):
        assert {f"{group}.safetensors:{move}" for move in ("before-write", "after-write", "after-fsync")} <= set(passed)
    for name in ("state.json", "MANIFEST.json"):
        moves = ("before-write", "after-write", "after-fsync", "after-rename")
        assert {f"{name}:{move}" for move in moves} <= set(passed)
    for name in ("step-00000003", "latest", "best"):
        assert {f"{name}:before-rename", f"{name}:after-rename"} <= set(passed)
    assert {"step-00000000:before-removal", "step-00000000:during-removal"} <= set(passed)


@pytest.mark.slow
def test_every_point_of_the_writer(nursery: Nursery, reference: Reference) -> None:
    passed = Counter(reference.points)
    for point, times in sorted(passed.items()):
        runs = nursery.runs()
        outcome = runs.train(at=[point, (times + 1) // 2], action="kill")
        assert outcome.code == KILLED, f"{point}: {outcome.log}"
        runs.check_readable()
        finish(runs, reference)


def test_many_kills_of_one_run_and_another_number_of_workers_each_time(runs: Runs, reference: Reference) -> None:
    chain = [
        (0, ["tables.safetensors:after-write", 2]),
        (3, ["latest:before-rename", 2]),
        (1, ["step-00000009:before-rename", 1]),
    ]
    for workers, at in chain:
        outcome = runs.train(workers, at=at, action="kill")
        assert outcome.code == KILLED, outcome.log
        runs.check_readable()
    finish(runs, reference, workers=3)
    assert len(runs.all) == 1


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_sigterm_saves_and_asks_to_be_resumed(nursery: Nursery, reference: Reference, number: int) -> None:
    workers = WORKERS[number % len(WORKERS)]
    delay_s = keyed_random.uniform(21, number).item() * reference.seconds / 2
    runs, outcome = interrupt(nursery, workers, delay_s, "SIGTERM", since="checkpoints/step-00000000")
    assert outcome.code == RESUME_ME, outcome.log
    (run,) = runs.all
    assert (run / "STATUS").read_text() == "preempted\n"
    assert len(outcome.error_lines) <= 3 and f"--resume {run.relative_to(nursery.folder)}" in outcome.error_lines[-1]
    runs.check_readable()
    finish(runs, reference, workers)


def test_a_kill_after_the_end_leaves_a_finished_run(runs: Runs, reference: Reference) -> None:
    # STATUS is written as the run starts and as it ends; the second time it says `done`.
    assert runs.train(at=["STATUS:after-rename", 2], action="kill").code == KILLED
    runs.check_readable()
    assert runs.digest() == reference.digest
    assert runs.metrics() == reference.metrics
    again = runs.train()
    assert again.code == 0, again.log
    assert len(runs.done) == 2, "a finished run is not taken up again: the same command starts another"


def test_a_signal_before_the_first_step_loses_nothing(runs: Runs, reference: Reference) -> None:
    outcome = runs.train(after_s=0.0, signal="SIGTERM")
    assert outcome.code == STOPPED_BY_SIGTERM
    finish(runs, reference)


def test_another_number_of_threads_is_told(runs: Runs) -> None:
    assert runs.train(at=["state.json:before-write", 3], action="kill").code == KILLED
    resumed = runs.train(settings=["training.num_threads=2"])
    assert resumed.code == 0, resumed.log
    assert "warning: the run had 1 threads and has 2 now: results differ in rounding" in resumed.log
    assert runs.metrics()[-1]["step"] == 12


def test_one_run_is_trained_by_one_process_at_a_time(runs: Runs, reference: Reference) -> None:
    assert runs.train(at=["state.json:before-write", 2], action="kill").code == KILLED
    (run,) = runs.all
    with (run / "lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        refused = runs.train()
    assert refused.code == 2
    assert "is being trained by another process" in refused.log
    finish(runs, reference)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metrics.jsonl", lambda data: data[:5] + bytes([data[5] ^ 0x80]) + data[6:]),
        pytest.param("metrics.jsonl", lambda data: data.replace(b"{", b"[", 1), marks=pytest.mark.slow),
        ("STATUS", lambda _data: b"\xff\xfe\x00garbage"),
        pytest.param("STATUS", lambda _data: b"", marks=pytest.mark.slow),
        pytest.param("events.jsonl", lambda data: b"\xff" + data[1:], marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_damaged_log_is_resumed(runs: Runs, reference: Reference, name: str, damage: Any) -> None:
    assert runs.train(at=["step-00000006:after-rename", 1], action="kill").code == KILLED
    path = runs.all[0] / name
    path.write_bytes(damage(path.read_bytes()))
    resumed = runs.train()
    assert resumed.code == 0, resumed.log
    assert len(runs.all) == 1
    assert runs.digest() == reference.digest
    assert len(reference.metrics) - len(runs.metrics()) == (1 if name == "metrics.jsonl" else 0)


def test_a_damaged_checkpoint_is_passed_over_and_written_again(runs: Runs, reference: Reference) -> None:
    assert runs.train().code == 0
    (run,) = runs.all
    newest = run / "checkpoints" / "step-00000012" / "tables.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    (run / "STATUS").write_text("running\n")
    resumed = runs.train()
    assert resumed.code == 0, resumed.log
    assert "skipping step-00000012" in resumed.log and "tables.safetensors" in resumed.log
    assert runs.digest() == reference.digest
    assert runs.metrics() == reference.metrics
