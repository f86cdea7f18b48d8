"""`tackboard bench loader`: how fast and in how much memory training batches come, against three other ways.

A folder comes in, and a dataset or none; one object of numbers goes out. Without a dataset one is made up. Every
contender gives the same batches: the segments of `data.max_length` events before each user's held-out one, shuffled at
least as our windows are, at most `tokens_per_step` events in a step, as the tensors of `SequenceBatch`. That is checked
too (`check`); of one that differs no time is reported.

    speed      training segments per CPU-second of all processes, one thread each, the median of several processes
    ladder     our own loader, from the simplest way to the one that is used
    workers    seconds on the clock for an epoch, without workers and with two
    memory     peak of the process tree over an epoch, of this dataset and of one ten times as large
    mixing     how well the order mixes users (`mixing`)
    layouts    bytes of the same examples in four layouts (`layouts`)

The rivals are in `benchmarks/rivals/`, where each module says how it was tuned; where they are absent (`rivals`), ours
alone is measured. Contenders take turns, so that what else the machine does falls on all, and a run that was disturbed
is not judged (`turns`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tackboard.bench import rivals
from tackboard.bench.loader.check import Reference
from tackboard.bench.loader.data import POSITIVE, Setting, prepare, write_made_up
from tackboard.bench.loader.layouts import measure_layouts
from tackboard.bench.loader.mixing import measure_mixing
from tackboard.bench.report import where_and_when
from tackboard.bench.turns import Neighbours, judged, take_turns
from tackboard.core.errors import TackboardError
from tackboard.core.machine import THREAD_VARIABLES
from tackboard.core.processes import ask, last_json_object
from tackboard.core.progress import say
from tackboard.events.dataset import open_dataset
from tackboard.report.svg import percentile

OURS = "tackboard"
PACKAGES = ("datasets", "ray", "pandas", "numpy", "pyarrow", "torch")
"""What the rivals are written with."""
MADE_UP = "made up"
"""Name of the dataset where the user gives none."""
LEAST_SPEEDUP = 2.0
"""Aim: our examples per CPU-second over those of the fastest other."""
MOST_GROWTH = 1.1
"""Aim: our peak memory on a dataset ten times as large over that on the smaller one, at most."""
GROWTH = 10


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender: which module of the bench it is in (`contender.MODULES`), and what it is."""

    module: str
    variant: str
    words: str


CONTENDERS = {
    OURS: Entry("tackboard", "product", "the loader of training"),
    "arrow": Entry("arrow", "events", "IterableDataset over our Parquet file, windows and collate in NumPy by hand"),
    "hugging_face": Entry("hugging_face", "arrow", "datasets, Arrow format, blocks of finished segments, same collate"),
    "hugging_face_torch": Entry("hugging_face", "torch", "datasets, torch format, finished segments, torch.cat"),
    "ray": Entry("ray", "window", "Ray Data, finished segments, iter_batches in Arrow, same collate"),
}
LADDER = {
    "memory": "the whole dataset in memory, each batch by make_batch",
    "streamed": "windows from disk, each batch by make_batch",
    "columns": "columns of the history once per window, distinct items by sorting",
}
PRODUCT = "distinct items by a scratch table: what training uses"
WITH_WORKERS = (OURS, "arrow")
WATCHED = (OURS, "arrow", "hugging_face", "ray")
"""Of whom memory is measured."""
LARGE_EVENTS = 5_000_000
"""Events above which batches are not checked, since that needs all of them, and the slowest contender is left out."""
SLOWEST = "hugging_face_torch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much data, and how often each thing is measured."""

    num_events: int = 1_040_000
    """Two windows of 8 buckets; of the larger dataset twenty."""
    num_items: int = 100_000
    mean_length: int = 80
    """Events of a user, in the mean."""
    repeats: int = 3


FULL = Sizes()
QUICK = Sizes(num_events=60_000, num_items=2_000, repeats=1)


def measure(
    folder: Path,
    *,
    data: Path | None = None,
    repeats: int | None = None,
    quick: bool = False,
    rivals_python: Path = rivals.PYTHON,
) -> dict[str, Any]:
    """Measures every contender, with its files in `folder`. Raises TackboardError where our own side fails."""
    sizes = QUICK if quick else FULL
    repeats = repeats or sizes.repeats
    versions = rivals.versions(rivals_python, PACKAGES)
    installed = not isinstance(versions, str)
    if not installed:
        say(f"only our own figures are measured: the rivals are {versions}")
    runner = Runner(folder / "small", rivals_python)
    dataset = prepare(setting_of(folder, sizes, data, 1), runner.folder)
    large = dataset["num_events"] > LARGE_EVENTS
    left_out = [SLOWEST] if quick or large else []
    names = [name for name in CONTENDERS if name == OURS or (installed and name not in left_out)]
    result: dict[str, Any] = {
        "bench": "loader",
        "quick": quick,
        "repeats": repeats,
        "rivals": versions,
        "left_out": left_out if installed else [],
        "checked": not large,
        "dataset": dataset | {"name": MADE_UP if data is None else open_dataset(data, verify=False).name},
        "setting": _asked(Setting.read(runner.folder)),
    }
    entries = {name: CONTENDERS[name] for name in names}
    ladder = {} if quick else {variant: Entry(OURS, variant, words) for variant, words in LADDER.items()}
    with Neighbours() as neighbours:
        found = runner.speed(entries | ladder, repeats, checked=not large)
        result["workers"] = {} if quick else runner.workers([name for name in WITH_WORKERS if name in names])
    result["contenders"] = {name: found[name] for name in names}
    result["ladder"] = {name: found[name] for name in ladder} | ({"product": found[OURS]} if ladder else {})
    watched = [OURS] if quick else [name for name in WATCHED if name in names]
    result["memory"] = {"1": runner.memory(watched)}
    if data is None:
        larger = Runner(folder / "large", rivals_python)
        result["larger_dataset"] = prepare(setting_of(folder, sizes, None, GROWTH), larger.folder)
        result["memory"][str(GROWTH)] = larger.memory(watched)
        say("layouts: bytes of the same examples")
        result["layouts"] = measure_layouts(folder / "layouts", quick=quick)
    result["mixing"] = measure_mixing(num_orders=1) if quick else measure_mixing()
    disturbance = neighbours.report()
    return result | {
        "aims": judged(aims(result), disturbance),
        **disturbance,
        **where_and_when(),
    }


def setting_of(folder: Path, sizes: Sizes, data: Path | None, growth: int) -> Setting:
    """What is asked of every contender, of the user's dataset or of a made-up one, `growth` times as large."""
    if data is not None:
        return Setting(dataset=str(data), positive_actions=())
    say(f"making up {growth * sizes.num_events:,} events")
    snapshot = write_made_up(
        folder / "datasets",
        f"made-up-{growth}",
        num_events=growth * sizes.num_events,
        num_items=sizes.num_items,
        mean_length=sizes.mean_length,
        seed=20261115,
    )
    return Setting(dataset=str(snapshot), positive_actions=POSITIVE)


class Runner:
    """Starts contenders on the files of one folder."""

    def __init__(self, folder: Path, rivals_python: Path) -> None:
        self.folder = folder
        self._rivals_python = rivals_python

    def run(self, entry: Entry, tasks: str, *, watch: bool = False) -> dict[str, Any]:
        """What a contender's process says, or why it failed; `peak_bytes` of its process tree with `watch`."""
        python = sys.executable if entry.module == OURS else str(self._rivals_python)
        command = [python, "-m", "tackboard.bench.loader.contender", entry.module, entry.variant]
        quiet = {"HF_DATASETS_OFFLINE": "1", "RAY_DEDUP_LOGS": "0"}
        environment = {**dict.fromkeys(THREAD_VARIABLES, "1"), **quiet, **rivals.environment()}
        done = ask([*command, str(self.folder), tasks], environment=environment, sample_memory=watch)
        if done.code == 0:
            return last_json_object(done.output) | ({"peak_bytes": done.peak_bytes} if watch else {})
        if entry.module == OURS:
            raise TackboardError(f"our own side of the loader bench failed: {done.reason}")
        return {"failed": done.reason}

    def speed(self, entries: Mapping[str, Entry], repeats: int, *, checked: bool = True) -> dict[str, Any]:
        """The figures of contenders, which take turns; of one whose batches are not ours, how they differ."""
        reference = Reference(Setting.read(self.folder)) if checked else None
        wrong: dict[str, dict[str, Any]] = {}
        begun: set[str] = set()

        def turn(name: str) -> dict[str, Any]:
            if name in wrong:
                return wrong[name]
            say(f"speed: {entries[name].words}")
            if reference is None or name in begun:
                return self.run(entries[name], "speed")
            begun.add(name)
            found = self.run(entries[name], "speed,check")
            if differences := self._differences(reference, entries[name], found):
                wrong[name] = {"differs": differences}
            return found

        runs = take_turns({name: functools.partial(turn, name) for name in entries}, repeats)
        return {name: wrong.get(name) or speed_figures(found) for name, found in runs.items()}

    def _differences(self, reference: Reference, entry: Entry, found: Mapping[str, Any]) -> list[str]:
        """What is not as in our batches. Raises TackboardError where it is our own side."""
        if "failed" in found:
            return []
        differences = reference.differences(self.folder / f"{entry.module}_{entry.variant}_check.npz")
        if found["most_tokens"] > reference.setting.tokens_per_step:
            differences.append(f"a step of {found['most_tokens']} events")
        if differences and entry.module == OURS:
            raise TackboardError(f"our own batches are not those of make_batch: {differences[0]}")
        return differences

    def workers(self, names: list[str]) -> dict[str, Any]:
        """Seconds on the clock for an epoch."""
        figures: dict[str, Any] = {}
        for name in names:
            say(f"with workers: {CONTENDERS[name].words}")
            found = {str(number): self.run(CONTENDERS[name], f"workers{number}") for number in (0, 2)}
            figures[name] = {
                number: round(run["wall_seconds"], 2) for number, run in found.items() if "failed" not in run
            }
        return figures

    def memory(self, names: list[str]) -> dict[str, Any]:
        """Peak memory over an epoch."""
        figures: dict[str, Any] = {}
        for name in names:
            say(f"memory: {CONTENDERS[name].words}")
            found = self.run(CONTENDERS[name], "memory", watch=True)
            figures[name] = found if "failed" in found else memory_figures(found)
        return figures


def speed_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several processes the one in the middle."""
    failed = [run for run in runs if "failed" in run]
    if failed:
        return failed[0]
    rates = [run["num_examples"] / run["cpu_seconds"] for run in runs]
    return {
        "examples_per_cpu_s": round(percentile(rates, 50)),
        "examples_per_cpu_s_runs": [round(rate) for rate in rates],
        "tokens_per_cpu_s": round(percentile([run["num_tokens"] / run["cpu_seconds"] for run in runs], 50)),
        "cpu_seconds_per_epoch": round(percentile([run["cpu_seconds"] / run["num_epochs"] for run in runs], 50), 4),
        "wall_seconds_per_epoch": round(percentile([run["wall_seconds"] / run["num_epochs"] for run in runs], 50), 4),
        "setup_cpu_seconds": round(percentile([run["setup_cpu_seconds"] for run in runs], 50), 3),
    }


def memory_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Peak bytes, and those above the process that has loaded its libraries and nothing else."""
    return {
        "peak_bytes": found["peak_bytes"],
        "above_idle_bytes": found["peak_bytes"] - found["idle_bytes"],
        "idle_bytes": found["idle_bytes"],
        "cpu_seconds": round(found["cpu_seconds"], 2),
        "wall_seconds": round(found["wall_seconds"], 2),
        "examples_per_cpu_s": round(found["num_examples"] / found["cpu_seconds"]),
    }


def aims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at and what came out, as far as it was measured."""
    contenders, found = result["contenders"], []
    rates = {name: f["examples_per_cpu_s"] for name, f in contenders.items() if "examples_per_cpu_s" in f}
    others = {name: rate for name, rate in rates.items() if name != OURS}
    if others:
        fastest = max(others, key=lambda name: others[name])
        value = rates[OURS] / others[fastest]
        text = f"examples per CPU-second over those of the fastest other ({fastest}), at least {LEAST_SPEEDUP:g}"
        found.append({"aim": text, "value": round(value, 2), "met": value >= LEAST_SPEEDUP})
    peaks = [result["memory"].get(growth, {}).get(OURS, {}).get("peak_bytes") for growth in ("1", str(GROWTH))]
    # A dataset smaller than a window is in memory as a whole, so it grows until there is one.
    if all(peaks) and result["dataset"]["num_buckets"] >= result["setting"]["window_buckets"]:
        value = peaks[1] / peaks[0]
        text = f"peak memory on {GROWTH} times the dataset over that on the smaller one, at most {MOST_GROWTH:g}"
        found.append({"aim": text, "value": round(value, 2), "met": value <= MOST_GROWTH})
    return found


def _asked(setting: Setting) -> dict[str, Any]:
    names = ("max_length", "tokens_per_step", "window_buckets", "num_hashes", "positive_actions")
    return {name: getattr(setting, name) for name in names}
