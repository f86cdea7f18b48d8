"""`tackboard bench loader` measures the speed and the memory of our training loader and of three other loaders.

The bench reads the user's dataset or a made-up dataset, and returns a dictionary of figures. Every contender (our
loader or a rival) must make the same kind of batches (`SequenceBatch`). Each user's events before the held-out event
are cut into segments of at most `max_length` events. The segments are shuffled at least as well as our windows shuffle
them. A step has at most `tokens_per_step` events. `check` verifies the batches. If the batches of a contender are
wrong, its time is not reported.

    speed      training segments per CPU-second; each process has one thread; the median of several runs
    ladder     speed of our own loader, from the simplest variant to the variant that training uses
    workers    wall-clock seconds of an epoch, without workers and with two workers
    memory     peak memory of all processes of a contender over an epoch; if the data is made up, also with ten times as
               much data
    mixing     how well the training order mixes users (`mixing`)
    layouts    bytes of the same examples in four layouts (`layouts`)

The rivals are in `benchmarks/rivals/`, and the module of each rival says how it was tuned. If the rivals are not
installed (`rivals`), only Tackboard is measured. Contenders take turns, so that other work on the machine affects all
of them. A disturbed run is not judged (`turns`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tackboard.bench import rivals
from tackboard.bench.loader.check import Reference
from tackboard.bench.loader.data import POSITIVE, Setting, prepare, write_made_up
from tackboard.bench.loader.layouts import measure_layouts
from tackboard.bench.loader.mixing import measure_mixing
from tackboard.bench.report import Report, Table, shown_versions, where_and_when
from tackboard.bench.turns import Neighbours, aim_lines, judged, take_turns
from tackboard.core.errors import TackboardError
from tackboard.core.machine import THREAD_VARIABLES
from tackboard.core.processes import ask, last_json_object
from tackboard.core.progress import say
from tackboard.events.dataset import open_dataset
from tackboard.report.svg import percentile

OURS = "tackboard"
PACKAGES = ("datasets", "ray", "pandas", "numpy", "pyarrow", "torch")
"""Libraries that the rivals use."""
MADE_UP = "made up"
"""Name of the dataset if the user gives no dataset."""
LEAST_SPEEDUP = 2.0
"""Aim: our loader makes at least this many times as many examples per CPU-second as the fastest rival."""
MOST_GROWTH = 1.1
"""Aim: if the dataset is ten times as large, our peak memory is at most this many times as large."""
GROWTH = 10


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender: its module (`contender.MODULES`), its variant and a description."""

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
    "encoded": "items of a window dictionary-encoded, distinct items by a scratch array",
}
WITH_WORKERS = (OURS, "arrow")
WATCHED = (OURS, "arrow", "hugging_face", "ray")
"""Contenders whose memory is measured."""
LARGE_EVENTS = 5_000_000
"""Above this number of events, the contender SLOWEST and the check are left out. The check would keep all events in
memory."""
SLOWEST = "hugging_face_torch"
SHOWN_SETTINGS = ("max_length", "tokens_per_step", "window_buckets", "num_hashes", "positive_actions")
MIB = 2**20
WORDS = {name: entry.words for name, entry in CONTENDERS.items()} | LADDER
WORDS["product"] = "stored positions of items, one table of all items: what training uses"
Rows = list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSizes:
    """The sizes of the data and the number of measurements."""

    num_events: int = 1_040_000
    """Number of events; enough for two windows of 8 buckets. The larger dataset has twenty windows."""
    num_items: int = 100_000
    mean_length: int = 80
    """Mean number of events of a user."""
    repeats: int = 3


FULL = LoaderSizes()
QUICK = LoaderSizes(num_events=60_000, num_items=2_000, repeats=1)


def measure(
    folder: Path,
    *,
    data: Path | None = None,
    repeats: int | None = None,
    quick: bool = False,
    rivals_python: Path = rivals.PYTHON,
) -> dict[str, Any]:
    """Measures every contender and writes files to `folder`. Raises TackboardError if our own loader fails."""
    sizes = QUICK if quick else FULL
    repeats = repeats or sizes.repeats
    versions = rivals.versions(rivals_python, PACKAGES)
    installed = not isinstance(versions, str)
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
        "setting": {name: getattr(Setting.read(runner.folder), name) for name in SHOWN_SETTINGS},
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
    return result | {"aims": judged(aims(result), disturbance), **disturbance, **where_and_when()}


def setting_of(folder: Path, sizes: LoaderSizes, data: Path | None, growth: int) -> Setting:
    """Returns the setting for all contenders. If `data` is None, makes up a dataset that is `growth` times as large."""
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
        """Returns the answer of a contender's process, or the reason why it failed. `watch` adds `peak_bytes`."""
        python = sys.executable if entry.module == OURS else str(self._rivals_python)
        command = [python, "-m", "tackboard.bench.loader.contender", entry.module, entry.variant]
        quiet = {"HF_DATASETS_OFFLINE": "1", "RAY_DEDUP_LOGS": "0"}
        environment = {**dict.fromkeys(THREAD_VARIABLES, "1"), **quiet, **rivals.environment()}
        done = ask([*command, str(self.folder), tasks], environment=environment, sample_memory=watch)
        if done.code == 0:
            return last_json_object(done.output) | ({"peak_bytes": done.peak_bytes} if watch else {})
        if entry.module == OURS:
            raise TackboardError(f"Tackboard's own side of the loader bench failed: {done.reason}")
        return {"failed": done.reason}

    def speed(self, entries: Mapping[str, Entry], repeats: int, *, checked: bool = True) -> dict[str, Any]:
        """Lets contenders take turns and returns their figures. For wrong batches, returns the differences instead."""
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
        """Returns sentences about wrong batches of a contender. Raises TackboardError if our own batches are wrong."""
        if "failed" in found:
            return []
        differences = reference.differences(self.folder / f"{entry.module}_{entry.variant}_check.npz")
        if found["most_tokens"] > reference.setting.tokens_per_step:
            differences.append(f"a step has {found['most_tokens']} events, more than tokens_per_step")
        if differences and entry.module == OURS:
            raise TackboardError(f"our own batches differ from those of make_batch: {differences[0]}")
        return differences

    def workers(self, names: list[str]) -> dict[str, Any]:
        """Measures the wall-clock seconds of an epoch, without workers and with two workers."""
        figures: dict[str, Any] = {}
        for name in names:
            say(f"with workers: {CONTENDERS[name].words}")
            found = {str(number): self.run(CONTENDERS[name], f"workers{number}") for number in (0, 2)}
            figures[name] = {
                number: round(run["wall_seconds"], 2) for number, run in found.items() if "failed" not in run
            }
        return figures

    def memory(self, names: list[str]) -> dict[str, Any]:
        """Measures the peak memory over an epoch."""
        figures: dict[str, Any] = {}
        for name in names:
            say(f"memory: {CONTENDERS[name].words}")
            found = self.run(CONTENDERS[name], "memory", watch=True)
            figures[name] = found if "failed" in found else memory_figures(found)
        return figures


def speed_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians over several runs of a contender."""
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
    """Returns the peak memory, and its excess over the memory of a process that has only loaded its libraries."""
    return {
        "peak_bytes": found["peak_bytes"],
        "above_idle_bytes": found["peak_bytes"] - found["idle_bytes"],
        "idle_bytes": found["idle_bytes"],
        "cpu_seconds": round(found["cpu_seconds"], 2),
        "wall_seconds": round(found["wall_seconds"], 2),
        "examples_per_cpu_s": round(found["num_examples"] / found["cpu_seconds"]),
    }


def aims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the aims that could be measured, with their values."""
    contenders, found = result["contenders"], []
    rates = {name: f["examples_per_cpu_s"] for name, f in contenders.items() if "examples_per_cpu_s" in f}
    others = {name: rate for name, rate in rates.items() if name != OURS}
    if others:
        fastest = max(others, key=lambda name: others[name])
        value = rates[OURS] / others[fastest]
        text = f"examples per CPU-second, divided by those of the fastest rival ({fastest}): at least {LEAST_SPEEDUP:g}"
        found.append({"aim": text, "value": round(value, 2), "met": value >= LEAST_SPEEDUP})
    peaks = [result["memory"].get(growth, {}).get(OURS, {}).get("peak_bytes") for growth in ("1", str(GROWTH))]
    # If the dataset is smaller than a window, all of it is in memory, so memory grows with the dataset.
    if all(peaks) and result["dataset"]["num_buckets"] >= result["setting"]["window_buckets"]:
        value = peaks[1] / peaks[0]
        text = f"peak memory on {GROWTH} times the data, divided by peak memory on the data: at most {MOST_GROWTH:g}"
        found.append({"aim": text, "value": round(value, 2), "met": value <= MOST_GROWTH})
    return found


# ---- the report ----


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    rivals, setting, name = result["rivals"], result["setting"], result["dataset"]["name"]
    versions = rivals if isinstance(rivals, str) else shown_versions(rivals)
    data = "" if name == MADE_UP else f" --data datasets/{name}"
    return Report(
        result=result,
        theme="loader" if name == MADE_UP else f"loader-{name}",
        title="Loader: training batches against three other ways to read them",
        command=f"bench loader{' --quick' if result['quick'] else ''}{data}",
        versions=f"Rivals: {versions}.",
        words=[
            f"Segments of at most {setting['max_length']} events, at most {setting['tokens_per_step']:,} events in a "
            f"step, {setting['num_hashes']} table rows per item, windows of {setting['window_buckets']} buckets.",
            f"Speeds are medians over {result['repeats']} processes of each contender.",
        ],
        tables=[Table(title, rows[0], rows[1:]) for title, rows in tables(result)],
        notes=[*remarks(result), *aim_lines(result)],
    )


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Returns remarks about missing rivals, skipped checks, failures and wrong batches."""
    found = [f"rivals: {result['rivals']}"] if isinstance(result["rivals"], str) else []
    if result["left_out"]:
        found.append(f"left out in this run: {', '.join(result['left_out'])}")
    if not result["checked"]:
        found.append("the batches of a dataset of this size are not compared; a run on made-up data compares them")
    for name, figures in result["contenders"].items():
        for sentence in [figures["failed"]] if "failed" in figures else figures.get("differs", []):
            found.append(f"{name}: {sentence}")
    return found


def tables(result: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """Returns (title, rows) of each table. The first row names the columns."""
    data = result["dataset"]
    found = [
        (
            f"speed: {data['num_examples']:,} training segments of {data['num_events']:,} events, {data['name']}",
            _speed_rows(result["contenders"].items()),
        )
    ]
    if result["ladder"]:
        found.append(("ours, step by step", _speed_rows(result["ladder"].items())))
    if result["workers"]:
        found.append(("wall-clock time of one epoch, without a warm-up", _worker_rows(result["workers"])))
    for growth, memory in result["memory"].items():
        size = result["larger_dataset" if growth != "1" else "dataset"]["num_events"]
        found.append((f"peak memory over one epoch of {size:,} events", _memory_rows(memory)))
    found.append((f"mixing, over {result['mixing']['num_buckets']} buckets", _mixing_rows(result["mixing"])))
    for name, world in result.get("layouts", {}).get("worlds", {}).items():
        sizes = f"{world['candidates_per_request']:g} per request, histories of {world['mean_history']:g} events"
        found.append((f"layouts: {name}, {sizes}", _layout_rows(world)))
    return found


def _speed_rows(figures: Iterable[tuple[str, Mapping[str, Any]]]) -> Rows:
    rows: Rows = [("", "examples per CPU-second", "of each run", "events per CPU-second", "CPU s before", "")]
    for name, f in figures:
        if "examples_per_cpu_s" not in f:
            rows.append((name, "batches differ" if "differs" in f else "failed", "", "", "", WORDS[name]))
            continue
        runs = " ".join(f"{rate:,}" for rate in f["examples_per_cpu_s_runs"])
        rate, tokens = f"{f['examples_per_cpu_s']:,}", f"{f['tokens_per_cpu_s']:,}"
        rows.append((name, rate, runs, tokens, f"{f['setup_cpu_seconds']:.2f}", WORDS[name]))
    return rows


def _worker_rows(workers: Mapping[str, Mapping[str, float]]) -> Rows:
    rows: Rows = [("", "s without workers", "s with two", "")]
    for name, f in workers.items():
        rows.append((name, *(f"{f[number]:.2f}" if number in f else "failed" for number in ("0", "2")), WORDS[name]))
    return rows


def _memory_rows(memory: Mapping[str, Mapping[str, Any]]) -> Rows:
    rows: Rows = [("", "MiB", "above idle", "CPU s", "")]
    for name, f in memory.items():
        if "failed" in f:
            rows.append((name, "failed", "", "", WORDS[name]))
            continue
        peak, above = (f"{f[key] / MIB:,.0f}" for key in ("peak_bytes", "above_idle_bytes"))
        rows.append((name, peak, above, f"{f['cpu_seconds']:.2f}", WORDS[name]))
    return rows


def _mixing_rows(mixing: Mapping[str, Any]) -> Rows:
    rows: Rows = [("buckets in a window", "spread", "neighbours", "")]
    for window, f in mixing["windows"].items():
        words = "a full permutation" if window == str(mixing["num_buckets"]) else ""
        rows.append((window, f"{f['spread']:.2f}", f"{f['neighbours']:.2f}", words))
    return rows


def _layout_rows(world: Mapping[str, Any]) -> Rows:
    rows: Rows = [("", "bytes per candidate", "times smaller", "")]
    return rows + [
        (layout, f"{f['bytes_per_candidate']:.2f}", f"{f['times_smaller']:.2f}", codec)
        for codec, layouts in world["codecs"].items()
        for layout, f in layouts.items()
    ]
