"""`tackboard bench pretrain` times a training step with more and more optimisations, and compares it with its floor.

The bench takes names of sizes (`data.PRESETS`) and returns a dictionary of figures. For each size it measures:

    floor      the least time that a step of the algorithm can take on this device (`floor`, `peaks`)
    ladder     the step without optimisations, then with one more optimisation each time (`ladder`)
    rival      the same model, loss, negatives and batches in plain PyTorch (`benchmarks/rivals/plain_pretrain.py`)
    parts      where the time of a step goes (`breakdown`)

The floor is measured in this process. Every other measurement is a process of its own: `contender`, or the rival's
module. The lines of the ladder and the rival take turns. Losses are compared before times are reported: an optimisation
that changes the loss by more than its tolerance is an error, and a rival whose first loss differs from ours gets no
figures.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tackboard.bench import rivals
from tackboard.bench.pretrain.contender import Spec
from tackboard.bench.pretrain.data import Preset, config_of, dataset_of, find_preset
from tackboard.bench.pretrain.floor import floor_items, floor_result
from tackboard.bench.pretrain.ladder import Rung, rungs_of
from tackboard.bench.pretrain.peaks import Peaks
from tackboard.bench.pretrain.prepared import Prepared, has_rival, prepare
from tackboard.bench.report import where_and_when
from tackboard.bench.turns import Neighbours, judged, take_turns
from tackboard.core.config import apply_overrides
from tackboard.core.errors import TackboardError, UsageError
from tackboard.core.machine import usable_cores
from tackboard.core.processes import ask, last_json_object
from tackboard.core.progress import say
from tackboard.models.interface import build_model
from tackboard.report.svg import percentile
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source

BASE = "base"
"""Name of the first measurement, without any optimisation."""
RIVAL = "plain PyTorch"
PROFILED_STEPS = 5
RIVAL_TOLERANCE = 1e-4
"""Largest relative difference between our first loss and the rival's."""
FIGURES = ("wall_ms", "median_ms", "cpu_ms", "tokens_per_s", "loader_ms", "page_faults", "peak_bytes", "gpu_peak_bytes")
DEFAULT_SIZES = {"cpu": ("cpu",), "cuda": ("h200", "h200-256")}
CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The threads of both sides wait without spinning, as in `tackboard train` (see core.machine)."""


def measure(
    folder: Path,
    *,
    sizes: Sequence[str] = (),
    data: Path | None = None,
    overrides: Sequence[str] = (),
    rounds: int | None = None,
    rungs: Sequence[str] = (),
    quick: bool = False,
) -> dict[str, Any]:
    """Measures each size and writes files to `folder`. Without `sizes`, measures the device's default sizes.

    `rungs` names lines of the ladder. These lines and the last line are measured; without `rungs`, all lines are
    measured. Raises UsageError for an unknown size or rung, and TackboardError if our own side fails or a rung changes
    the loss.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("tiny",) if quick else tuple(sizes) or DEFAULT_SIZES[device_type]
    presets = {name: find_preset(name) for name in names}
    known = [BASE, *(rung.name for rung in rungs_of(device_type))]
    if unknown := [name for name in rungs if name not in known]:
        raise UsageError(f"there is no rung {unknown[0]!r}", allowed=f"allowed: {', '.join(known)}")
    result: dict[str, Any] = {"bench": "pretrain", "quick": quick, "device": device_type, "overrides": list(overrides)}
    with Neighbours() as neighbours:
        result["sizes"] = {
            name: _Size(name, preset, folder / name, device_type, overrides, data).measure(
                rounds or preset.rounds, rungs
            )
            for name, preset in presets.items()
        }
    disturbance = neighbours.report()
    found = [aim for name, size in result["sizes"].items() for aim in aims(name, size, device_type)]
    return result | {"aims": judged(found, disturbance), **disturbance, **where_and_when()}


class _Size:
    """Measures one size."""

    def __init__(
        self,
        name: str,
        preset: Preset,
        folder: Path,
        device_type: str,
        overrides: Sequence[str],
        data: Path | None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.preset, self.folder, self.device_type = name, preset, folder, device_type
        say(f"{name}: {preset.words}")
        dataset = dataset_of(preset, folder / "datasets", data)
        self.config: RunConfig = apply_overrides(config_of(preset, dataset), overrides)
        precision = self.config.training.precision
        self.is_half = precision == "bf16" or (precision == "auto" and device_type == "cuda")
        self.spec = Spec(
            preset=name,
            dataset=str(dataset),
            device=device_type,
            overrides=tuple(overrides),
            warmup=preset.warmup,
            timed=preset.steps,
            batches=str(folder / "batches.safetensors"),
        )

    def measure(self, rounds: int, chosen: Sequence[str] = ()) -> dict[str, Any]:
        source = open_source(self.config)
        num_batches = self.preset.warmup + self.preset.steps
        prepared = prepare(self.config, source, Path(self.spec.batches), num_batches=num_batches, is_half=self.is_half)
        say(f"{self.name}: the floor")
        floor = self._floor(prepared, source.vocabulary)
        rungs = rungs_of(self.device_type)
        specs = {BASE: self._without(rungs)} | {
            rung.name: self._without(rungs[number + 1 :]) for number, rung in enumerate(rungs)
        }
        specs = {name: spec for name, spec in specs.items() if not chosen or name in (*chosen, rungs[-1].name)}
        turns: dict[str, Callable[[], dict[str, Any]]] = {
            name: functools.partial(self._ours, name, spec) for name, spec in specs.items()
        }
        if has_rival(self.config) and rivals.CODE.is_dir():
            turns[RIVAL] = self._rival
        runs = take_turns(turns, rounds)
        result: dict[str, Any] = {
            "words": self.preset.words,
            "counts": prepared.counts.__dict__ | {"num_tokens": prepared.counts.num_tokens},
            "floor": floor,
            "ladder": ladder_figures({name: runs[name] for name in specs}, rungs),
        }
        product = result["ladder"][-1]
        result["product"] = {
            "floor_share": round(floor["total_ms"] / product["wall_ms"], 4),
            "mfu": round(floor["model_gflop"] / product["wall_ms"] * 1000 / floor["peak_gflop_per_s"], 4),
        }
        result["rival"] = rival_figures(runs.get(RIVAL), prepared.first_loss, product)
        say(f"{self.name}: where the time goes")
        profiled = Spec(**self.spec.__dict__ | {"is_profiled": True, "timed": min(PROFILED_STEPS, self.spec.timed)})
        result["parts"] = self._ask("parts", profiled, "tackboard.bench.pretrain.contender")
        if (gpu_ms := result["parts"]["gpu_ms"]) is not None:
            result["product"]["wall_per_gpu"] = round(product["wall_ms"] / gpu_ms, 4)
        return result

    def _floor(self, prepared: Prepared, vocabulary: Any) -> dict[str, Any]:
        with torch.device("meta"):
            model = build_model(self.config.model, vocabulary)
        torch.set_num_threads(self.config.training.num_threads or usable_cores())
        peaks = Peaks(torch.device(self.device_type), torch.bfloat16 if self.is_half else torch.float32)
        items = floor_items(model, prepared.counts, number_bytes=2 if self.is_half else 4, device_type=self.device_type)
        found = floor_result(items, peaks)
        if self.device_type == "cuda":
            torch.cuda.empty_cache()  # The measured processes need the memory.
        return found

    def _without(self, rungs: Sequence[Rung]) -> Spec:
        return Spec(**self.spec.__dict__ | {"off": tuple(rung.name for rung in rungs)})

    def _ours(self, name: str, spec: Spec) -> dict[str, Any]:
        say(f"{self.name}: {name}")
        return self._ask(name, spec, "tackboard.bench.pretrain.contender")

    def _rival(self) -> dict[str, Any]:
        say(f"{self.name}: {RIVAL}")
        return self._ask("rival", self.spec, "rivals.plain_pretrain")

    def _ask(self, name: str, spec: Spec, module: str) -> dict[str, Any]:
        path = spec.write(self.folder / f"{name}.json")
        environment = {**rivals.environment(), **CHILD_ENVIRONMENT}
        done = ask([sys.executable, "-m", module, str(path)], environment=environment)
        if done.code == 0:
            return last_json_object(done.output)
        if module.startswith("rivals."):
            return {"failed": done.reason}
        raise TackboardError(f"the measurement {name} of {self.name} failed: {done.reason}")


def ladder_figures(runs: Mapping[str, Sequence[Mapping[str, float]]], rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    """Returns a line for each measurement of the ladder: medians over the rounds, and the gain over the line before.

    Every loss is compared with the loss of the first measurement. Raises TackboardError if a rung changes the loss by
    more than its tolerance.
    """
    found: list[dict[str, Any]] = []
    words = {BASE: "without the optimisations below"} | {rung.name: rung.words for rung in rungs}
    order = list(words)
    first = next(iter(runs))
    expected = runs[first][0]["last_loss"]
    for name, turns in runs.items():
        # The allowed difference is the largest tolerance of the rungs between the first measurement and this one.
        allowed = max([rung.tolerance for rung in rungs[order.index(first) : order.index(name)]], default=0.0)
        for turn in turns:
            if not abs(turn["last_loss"] - expected) <= allowed * abs(expected) + 1e-6:
                raise TackboardError(
                    f"the loss with {name} is {turn['last_loss']}, but with {first} it is {expected}",
                    allowed=f"allowed: a relative difference of {allowed:g}",
                )
        line: dict[str, Any] = {"name": name, "words": words[name], "last_loss": turns[0]["last_loss"]}
        line |= {key: round(percentile([turn[key] for turn in turns], 50), 3) for key in FIGURES}
        line["recompiled"] = max(turn["recompiled"] for turn in turns)
        before = found[-1] if found else line
        line["gain"] = round(before["wall_ms"] / line["wall_ms"], 3)
        line["cpu_gain"] = round(before["cpu_ms"] / line["cpu_ms"], 3)
        found.append(line)
    return found


def rival_figures(
    runs: Sequence[Mapping[str, Any]] | None, first_loss: float | None, product: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the rival's medians, and how many times as fast we are.

    If the rival failed or its loss differs, returns only the reason. Returns None if there was no rival. `first_loss`
    is None if the rival started from parameters of its own.
    """
    if runs is None:
        return None
    for run in runs:
        if "failed" in run:
            return {"failed": run["failed"]}
        # A loss that is NaN also counts as different from our first loss.
        if first_loss is not None and not abs(run["first_loss"] - first_loss) <= RIVAL_TOLERANCE * abs(first_loss):
            return {"failed": f"its first loss is {run['first_loss']}, ours is {first_loss}"}
    keys = ("wall_ms", "cpu_ms", "tokens_per_s", "peak_bytes")
    line = {key: round(percentile([run[key] for run in runs], 50), 3) for key in keys}
    tokens = {"ours": product["tokens_per_s"] * product["wall_ms"], "rival": line["tokens_per_s"] * line["wall_ms"]}
    per_cpu = tokens["ours"] / product["cpu_ms"] / (tokens["rival"] / line["cpu_ms"])
    return line | {
        "is_checked": first_loss is not None,
        "times_as_fast": round(product["tokens_per_s"] / line["tokens_per_s"], 3),
        "times_as_fast_per_cpu_s": round(per_cpu, 3),
    }


def aims(name: str, size: Mapping[str, Any], device_type: str) -> list[dict[str, Any]]:
    """Returns the aims of a size with their values."""
    product, wall_ms = size["product"], size["ladder"][-1]["wall_ms"]
    found: list[tuple[str, float, bool]] = []
    if device_type == "cpu" and size["rival"] is not None and "failed" not in size["rival"]:
        value = size["rival"]["times_as_fast_per_cpu_s"]
        found.append(("tokens per CPU-second as a multiple of plain PyTorch's, at least 2", value, value >= 2))
    if device_type == "cuda":
        if name == "h200":
            found.append(("ms per step, at most 45", wall_ms, wall_ms <= 45))
        if name in ("h200-256", "h200-1024"):
            share = product["floor_share"]
            found.append(("share of the floor's speed, at least 0.8", share, share >= 0.8))
        most = 1.2 if name == "ml-1m" else 1.05
        ratio = product["wall_per_gpu"]
        found.append((f"wall time of a step as a multiple of its GPU time, at most {most}", ratio, ratio <= most))
    return [{"aim": f"{name}: {words}", "value": value, "met": met} for words, value, met in found]
