"""Measures the time of the steps of the real trainer, on any device.

The module takes a config and a source of data, and returns the figures of timed steps after some warm-up steps.
`TimedTrainer` is the trainer of `tackboard train` with a clock around each step. A timed step lasts from the end of a
step to the end of the next step, so it contains loading, lookup, backbone, loss, backward, both optimisers, logging and
the guard against bad losses and gradients. Decided: no checkpoint is written. No timed step would contain a checkpoint,
because the trainer writes checkpoints before the first step and after the last step. But with large tables, the
checkpoints would take longer than all timed steps together. On a GPU the clock waits for the device only before the
first timed step and after the last timed step.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tackboard.batch.batches import Batch
from tackboard.core.machine import peak_rss_bytes
from tackboard.core.rundir import RunDirectory
from tackboard.data.source import SequenceSource
from tackboard.report.svg import percentile
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.trainer import Trainer


class TimedTrainer(Trainer):
    """The trainer with a clock around its steps. `train` runs `warmup` steps and then `timed` steps."""

    def __init__(
        self, config: RunConfig, runs: Path, source: SequenceSource, *, warmup: int, timed: int, **options: Any
    ) -> None:
        num_steps = warmup + timed
        training = dataclasses.replace(config.training, steps=num_steps, validate_every=0, patience=0)
        config = dataclasses.replace(config, training=training)
        run = RunDirectory.create(runs, config.name, config_to_json(config))
        super().__init__(config, run, source, **options)
        self.warmup = warmup
        self.on_begin: Callable[[], object] = lambda: None
        """Called before the first timed step."""
        self.on_end: Callable[[], object] = lambda: None
        """Called after the last timed step."""
        self.begins_s: list[float] = []
        """For each timed step: the time at which the trainer had the batch and began to compute."""
        self.ends_s: list[float] = []
        """The end of the last warm-up step, and then the end of each timed step."""
        self.first_loss = float("nan")
        """Loss of the first step of training."""
        self.figures: dict[str, float] = {}
        self.tokens_read = 0
        """Tokens of all steps. `num_tokens` lags behind: the trainer counts a step once it knows that the step was
        good."""

    def save(self) -> None:
        """Writes nothing, see the module's docstring."""

    def _one_step(self, data_step: int, batch: Batch) -> bool:
        if self.ends_s:
            self.begins_s.append(time.perf_counter())
        counted = super()._one_step(data_step, batch)
        if not counted:
            return False
        self.tokens_read += batch.num_tokens
        if self.step == 1:
            self.first_loss = self.last_loss
        if self.step == self.warmup:
            self._wait()
            self.on_begin()
            self._before = self._usage()
            self.ends_s.append(time.perf_counter())
        elif self.ends_s:
            if self.step == self.config.training.steps:
                self._wait()
            self.ends_s.append(time.perf_counter())
            if self.step == self.config.training.steps:
                self._finish()
        return True

    def _finish(self) -> None:
        after = self._usage()
        num_steps = len(self.ends_s) - 1
        each_ms = [1000 * (end - begin) for begin, end in zip(self.ends_s, self.ends_s[1:], strict=False)]
        waits_s = [begin - end for begin, end in zip(self.begins_s, self.ends_s, strict=False)]
        self.on_end()
        total_s = self.ends_s[-1] - self.ends_s[0]
        used = {name: (after[name] - self._before[name]) / num_steps for name in after}
        self.figures = {
            "wall_ms": 1000 * total_s / num_steps,
            "median_ms": percentile(each_ms, 50),
            "loader_ms": 1000 * sum(waits_s) / num_steps,
            "cpu_ms": 1000 * used["cpu_s"],
            "page_faults": used["page_faults"],
            "tokens_per_step": used["tokens"],
            "tokens_per_s": used["tokens"] * num_steps / total_s,
            "recompiled": used["graphs"] * num_steps,
            "peak_bytes": peak_rss_bytes(),
            "gpu_peak_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
        }

    def _usage(self) -> dict[str, float]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return {"cpu_s": time.process_time(), "page_faults": faults, "tokens": self.tokens_read, "graphs": num_graphs()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def num_graphs() -> int:
    """Returns the number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
