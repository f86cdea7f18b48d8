"""`tackboard bench feeding` measures how fast the host makes batches, and how long a GPU step takes with these batches.

Instead of training, the GPU computes a series of matrix products in each step. This takes about as long as a step of
pretraining with 8 layers of width 512 and 65,536 tokens. The bench compares three ways of moving a batch to the device.
Each way is measured twice: with and without reading the loss in every step. A trainer that reads the loss makes the
host wait for the GPU. These measurements take turns, and the result says if other processes disturbed the run (see
`turns`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.bench.loader.data import write_made_up
from tackboard.bench.turns import Neighbours, take_turns
from tackboard.core.vocabulary import DEFAULT_READS
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.prefetch import on_device
from tackboard.data.source import open_sequences
from tackboard.features.standard import features_for_model

STEP_MS = 31.6
WORKERS = (0, 1, 2, 4, 8)
WAYS = ("copied", "pinned", "ahead")
"""`copied` copies from pageable memory and `pinned` from pinned memory. `ahead` copies from pinned memory on a separate
stream, one batch before the batch is needed (`prefetch.on_device`)."""
ROUNDS = 2


def measure(folder: Path, *, data: Path | None, num_events: int, tokens_per_step: int) -> dict[str, Any]:
    """Measures host and device with batches of the dataset `data`, or of a made-up dataset in `folder`."""
    if data is None:
        data = write_made_up(
            folder, "made-up", num_events=num_events, num_items=500_000, mean_length=200, seed=20261115
        )
    max_length = min(256, tokens_per_step // 2)
    source = open_sequences(data, features=lambda names: features_for_model(DEFAULT_READS, names, max_length))
    config = DataConfig(dataset=str(data), max_length=max_length, tokens_per_step=tokens_per_step)
    steps = TrainingSteps(source, config, HashConfig(num_hashes=8, num_rows=20_000_000), seed=0)
    num_steps = min(steps.plan.steps_per_epoch, 256)
    with Neighbours() as neighbours:
        host, device = measure_host(steps, num_steps), measure_device(steps, num_steps)
    return {
        "bench": "feeding",
        "num_events": source.dataset.num_events,
        "tokens_per_step": tokens_per_step,
        "num_steps": num_steps,
        "host": host,
        "device": device,
        **neighbours.report(),
    }


def measure_host(steps: TrainingSteps, num_steps: int) -> dict[str, dict[str, float]]:
    """Returns millions of tokens per second of wall time and per second of CPU time, for each number of workers."""

    def turn(workers: int) -> tuple[float, float, float]:
        batches = steps.iterate(range(num_steps), workers)
        next(batches)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = sum(batch.num_events for _, batch in batches)
        # The workers are threads, so the CPU time of this process includes the CPU time of the workers.
        return tokens / 1e6, time.perf_counter() - wall, time.process_time() - cpu

    turns = take_turns({str(workers): functools.partial(turn, workers) for workers in WORKERS}, ROUNDS)
    found = {}
    for workers, runs in turns.items():
        tokens, wall, cpu = (sum(values) for values in zip(*runs, strict=True))
        found[workers] = {"per_s": round(tokens / wall, 2), "per_cpu_s": round(tokens / cpu, 2)}
    return found


def measure_device(steps: TrainingSteps, num_steps: int) -> dict[str, Any] | None:
    """Returns ms per step for each way with 0, 1, 2 and 4 workers, with and without reading the loss.

    Also returns the time of the GPU's work alone. Returns None if there is no GPU.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")
    work = _busy(device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(50):
        work()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"compute_alone_ms": round((time.perf_counter() - started) * 20, 2)}

    def turn(workers: int, way: str, *, reads_loss: bool) -> float:
        batches = _brought(steps.iterate(range(num_steps), workers), way, device)
        return _ms_per_step(batches, work, reads_loss=reads_loss)

    turns = {
        f"{workers} workers, {way}{', loss read' if reads_loss else ''}": functools.partial(
            turn, workers, way, reads_loss=reads_loss
        )
        for workers in WORKERS[:-1]
        for way in WAYS
        for reads_loss in (False, True)
    }
    return found | {key: round(sum(runs) / len(runs), 2) for key, runs in take_turns(turns, ROUNDS).items()}


def _brought(
    batches: Iterator[tuple[int, SequenceBatch]], way: str, device: torch.device
) -> Iterator[tuple[int, SequenceBatch]]:
    if way == "ahead":
        return on_device(batches, device)
    return ((number, (batch.pin_memory() if way == "pinned" else batch).to(device)) for number, batch in batches)


def _ms_per_step(batches: Iterator[tuple[int, SequenceBatch]], work: Callable[[], None], *, reads_loss: bool) -> float:
    next(batches)
    torch.cuda.synchronize()
    started, count = time.perf_counter(), 0
    for _, batch in batches:
        work()
        loss = batch.item_rows.sum()
        if reads_loss:
            loss.item()
        count += 1
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / count


def _busy(device: torch.device) -> Callable[[], None]:
    """Returns a function that keeps the device busy for about STEP_MS."""
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    result = torch.empty_like(matrix)
    for repeat in (10, 100):  # The first pass is a warm-up.
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeat):
            torch.mm(matrix, matrix, out=result)
        torch.cuda.synchronize()
        each_ms = 1000 * (time.perf_counter() - started) / repeat
    count = max(1, round(STEP_MS / each_ms))

    def work() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=result)

    return work
