"""Measures the time of each line of the ladder (rungs.py) in scoring and in training, end to end and for PinFM alone.

    serving    end to end: distinct items, their table rows, layouts, the copy to the device, lookup, PinFM, cross
               layers, heads, the copy of the scores; PinFM alone: from looked-up rows to PinFM's outputs
    training   end to end: a step of the real trainer (`bench/pretrain/ours.py`): loading, lookup, ranker, loss,
               backward, both optimisers, logging, guard; PinFM alone: forward and backward of PinFM's outputs

The lines of the ladder take turns. An exact line must give the same results as the first line: its scores are compared
before scoring is timed, and its loss is compared after the timed training steps. On a GPU the host waits for the device
before and after the timed work, so wall time is what a caller waits for. Decided: on a CPU, ratios are computed from
CPU time. On a busy machine, short work fits between the turns of other processes and long work does not, so ratios of
wall time favour short work. On a GPU, ratios are computed from wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tackboard.batch import RequestBatch
from tackboard.bench.dcat.data import VOCABULARY, Asked, DcatPreset, made_up_requests
from tackboard.bench.dcat.equality import ranker_of
from tackboard.bench.dcat.rungs import RUNGS, WHOLE, DcatRung
from tackboard.bench.pretrain.ours import TimedTrainer
from tackboard.bench.turns import take_turns
from tackboard.core.config import apply_overrides
from tackboard.core.errors import TackboardError
from tackboard.report.svg import percentile
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source

Times = dict[str, float]
"""`wall_ms` and `cpu_ms` of one call."""
SERVED_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest difference of timed scores from those of the first line, as a share of the largest absolute score."""
TRAINED_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of the loss after the timed steps from that of the first line."""


def timed(work: Callable[[], object], device: torch.device, least_s: float) -> Times:
    """Repeats `work` until `least_s` seconds have passed, at least once, and returns the mean times of a call."""
    _wait(device)
    calls, started_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while not calls or time.perf_counter() - started_s < least_s:
        work()
        calls += 1
        _wait(device)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return {"wall_ms": 1000 * wall_s / calls, "cpu_ms": 1000 * cpu_s / calls}


def medians(runs: Mapping[str, Sequence[Times]]) -> list[dict[str, Any]]:
    """Returns a line for each contender: its median times, and its speed as a multiple of the first contender's speed.

    `times` (wall time) and `cpu_times` compare two contenders within a round, because work of other processes changes
    from round to round. Each is the median of this ratio over the rounds.
    """
    first, found = next(iter(runs)), []
    for name, turns in runs.items():
        line: dict[str, Any] = {"name": name}
        for key in ("wall_ms", "cpu_ms"):
            line[key] = round(percentile([turn[key] for turn in turns], 50), 3)
            ratios = [whole[key] / max(turn[key], 1e-9) for whole, turn in zip(runs[first], turns, strict=True)]
            line["times" if key == "wall_ms" else "cpu_times"] = round(percentile(ratios, 50), 2)
        found.append(line)
    return found


def ratio_of(device_type: str) -> tuple[str, str]:
    """Returns the key of the ratios to report for a type of device (see `medians`), and the name of their clock."""
    return ("times", "wall time") if device_type == "cuda" else ("cpu_times", "CPU time")


# ---- serving ----


class Served:
    """Scores requests with one line of the ladder."""

    def __init__(self, rung: DcatRung, config: RunConfig, asked: Asked, device: torch.device, at_once: int) -> None:
        self.rung, self.device = rung, device
        self.config = rung.config(config)
        self.is_half = config.training.precision == "bf16"
        self.model = ranker_of(self.config, VOCABULARY, device).eval()
        self.parts = asked.parts(at_once) if rung.name == WHOLE else [asked]
        self.looked_up = [self._looked_up(self._batch(part)) for part in self.parts]

    @torch.inference_mode()
    def answer(self) -> torch.Tensor:
        """Returns the scores of all candidates, end to end."""
        with self.rung.active(), self._precision():
            scores = [self.model.scores(self._batch(part)).float().cpu() for part in self.parts]
        return torch.cat(scores)

    @torch.inference_mode()
    def outputs(self) -> None:
        """Computes PinFM's outputs for all candidates from rows that were looked up before."""
        with self.rung.active(), self._precision():
            for batch, items_ME, candidates_CE in self.looked_up:
                _fused(self.model, batch, items_ME, candidates_CE)

    def _batch(self, part: Asked) -> RequestBatch:
        return self.model.prepare(part.batch(self.config.model)).to(self.device)

    @torch.inference_mode()
    def _looked_up(self, batch: RequestBatch) -> tuple[RequestBatch, torch.Tensor, torch.Tensor]:
        items_ME = self.model.tables(batch.histories.item_rows)
        return batch, items_ME, functional.embedding(batch.candidates, items_ME)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half)


def serving_speed(preset: DcatPreset, config: RunConfig, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measures the time of scoring for each ratio of users to candidates. Raises TackboardError if scores differ."""
    found = []
    for num_candidates, num_requests in preset.serving.items():
        asked = made_up_requests(preset, num_candidates, num_requests)
        contenders = {rung.name: Served(rung, config, asked, device, preset.at_once) for rung in RUNGS}
        scores = {name: served.answer() for name, served in contenders.items()}  # This also warms up.
        for rung in RUNGS:
            check_served(rung, scores[rung.name], scores[WHOLE], config.training.precision)
        line: dict[str, Any] = {"candidates": num_candidates, "requests": num_requests}
        for key, method in (("end_to_end", Served.answer), ("module", Served.outputs)):
            turns = {name: _timer(method, served, device, preset.least_s) for name, served in contenders.items()}
            line[key] = medians(take_turns(turns, rounds))
        found.append(line)
    return found


def check_served(rung: DcatRung, scores_C: torch.Tensor, expected_C: torch.Tensor, precision: str) -> None:
    """Raises TackboardError if the scores of an exact line differ from those of the first line."""
    apart = float((scores_C - expected_C).abs().max() / expected_C.abs().max())
    if rung.is_exact and not apart <= SERVED_TOLERANCE[precision]:
        raise TackboardError(
            f"the scores of the line {rung.name} differ by {apart:.1e} of the largest score from the first line",
            allowed=f"allowed: {SERVED_TOLERANCE[precision]:g}",
        )


def _timer(
    method: Callable[[Served], object], served: Served, device: torch.device, least_s: float
) -> Callable[[], Times]:
    return lambda: timed(lambda: method(served), device, least_s)


# ---- training ----


def training_speed(
    preset: DcatPreset, datasets: Mapping[int, Path], device: torch.device, rounds: int, folder: Path, num_threads: int
) -> list[dict[str, Any]]:
    """Measures the time of training steps for each number of candidates. Raises TackboardError if losses differ."""
    found = []
    for num_candidates, dataset in datasets.items():
        config = preset.config(str(dataset), num_candidates)
        runs = take_turns(
            {rung.name: _trainer_of(rung, preset, config, device, folder, num_threads) for rung in RUNGS}, rounds
        )
        first = runs[WHOLE][0]["last_loss"]
        for rung in RUNGS:
            check_trained(rung, [turn["last_loss"] for turn in runs[rung.name]], first, config.training.precision)
        lines = medians(runs)
        for line in lines:
            line["loss"] = runs[line["name"]][0]["last_loss"]
            line["loader_ms"] = round(percentile([turn["loader_ms"] for turn in runs[line["name"]]], 50), 3)
            line["gpu_peak_bytes"] = max(turn["gpu_peak_bytes"] for turn in runs[line["name"]])
        turns = {rung.name: _module_step(rung, preset, config, device) for rung in RUNGS}
        found.append(
            {
                "candidates": num_candidates,
                "requests": preset.requests_per_step,
                "end_to_end": lines,
                "module": medians(take_turns(turns, rounds)),
            }
        )
    return found


def check_trained(rung: DcatRung, losses: Sequence[float], expected: float, precision: str) -> None:
    """Raises TackboardError if a loss of an exact line differs from that of the first line."""
    allowed = TRAINED_TOLERANCE[precision]
    for loss in losses if rung.is_exact else ():
        if not abs(loss - expected) <= allowed * abs(expected):
            raise TackboardError(
                f"the loss with the line {rung.name} is {loss}, but with the line {WHOLE} it is {expected}",
                allowed=f"allowed: a relative difference of {allowed:g}",
            )


def _trainer_of(
    rung: DcatRung, preset: DcatPreset, config: RunConfig, device: torch.device, folder: Path, num_threads: int
) -> Callable[[], Times]:
    settings = [f"training.device={device.type}", f"training.num_threads={num_threads}"]
    config = apply_overrides(rung.config(config), settings)

    def run() -> Times:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with rung.active():
            trainer = TimedTrainer(config, folder, open_source(config), warmup=preset.warmup, timed=preset.timed)
            trainer.train(quiet=True)
        return trainer.figures

    return run


def _module_step(rung: DcatRung, preset: DcatPreset, config: RunConfig, device: torch.device) -> Callable[[], Times]:
    """Returns a function that times forward and backward of PinFM's outputs on the first batch of training."""
    config = rung.config(config)
    source = open_source(config)
    model = ranker_of(config, source.vocabulary, device).train()
    batch = model.prepare(config.data.steps(source, config.model.tables, config.seed)[0]).to(device)
    items_ME = model.tables(batch.histories.item_rows).detach().requires_grad_()
    is_half = config.training.precision == "bf16"

    def step() -> None:
        model.zero_grad(set_to_none=True)
        items_ME.grad = None
        with rung.active(), torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            outputs_CF = _fused(model, batch, items_ME, functional.embedding(batch.candidates, items_ME))
        outputs_CF.float().square().mean().backward()

    def run() -> Times:
        step()
        return timed(step, device, preset.least_s)

    return run


def _fused(model: Any, batch: RequestBatch, items_ME: torch.Tensor, candidates_CE: torch.Tensor) -> torch.Tensor:
    layouts = batch.targets.layouts
    fused = model.fusion(model.pinfm, batch, items_ME, candidates_CE, layouts, needs_hidden=False)
    return fused.outputs_CF


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
