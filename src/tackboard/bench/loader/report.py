"""What `tackboard bench loader` measured, as a report: the object that `measure` gives comes in, tables go out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tackboard.bench.loader.run import CONTENDERS, LADDER, MADE_UP, PRODUCT
from tackboard.bench.report import Report, Table, shown_versions
from tackboard.bench.turns import aim_lines

MIB = 2**20
WORDS = {name: entry.words for name, entry in CONTENDERS.items()} | LADDER | {"product": PRODUCT}
Rows = list[tuple[str, ...]]


def report(result: Mapping[str, Any]) -> Report:
    """The measurement for people."""
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
            f"{result['repeats']} processes each, the median.",
        ],
        tables=[Table(title, rows[0], rows[1:]) for title, rows in tables(result)],
        notes=[*remarks(result), *aim_lines(result)],
    )


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What has to be known beside the numbers."""
    found = []
    if isinstance(result["rivals"], str):
        found.append(f"rivals: {result['rivals']}")
    if result["left_out"]:
        found.append(f"left out in this run: {', '.join(result['left_out'])}")
    if not result["checked"]:
        found.append("batches were not compared on a dataset of this size; they are on the made-up one")
    for name, figures in result["contenders"].items():
        for sentence in [figures["failed"]] if "failed" in figures else figures.get("differs", []):
            found.append(f"{name}: {sentence}")
    return found


def tables(result: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """(title, rows) of each table; the first row names the columns."""
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
        found.append(("one epoch on the clock, from a cold start", _worker_rows(result["workers"])))
    for growth, memory in result["memory"].items():
        size = result["larger_dataset" if growth != "1" else "dataset"]["num_events"]
        found.append((f"peak memory over one epoch of {size:,} events", _memory_rows(memory)))
    found.append((f"mixing, over {result['mixing']['num_buckets']} buckets", _mixing_rows(result["mixing"])))
    for name, world in result.get("layouts", {}).get("worlds", {}).items():
        words = (
            f"{name}, {world['candidates_per_request']:g} per request, histories of {world['mean_history']:g} events"
        )
        found.append((f"layouts: {words}", _layout_rows(world)))
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
    return rows + [(name, f"{f['0']:.2f}", f"{f['2']:.2f}", WORDS[name]) for name, f in workers.items()]


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
    for codec, layouts in world["codecs"].items():
        for layout, f in layouts.items():
            rows.append((layout, f"{f['bytes_per_candidate']:.2f}", f"{f['times_smaller']:.2f}", codec))
    return rows
