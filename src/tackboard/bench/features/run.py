"""`tackboard bench features`: the feature layer against the same 40 features written by hand.

A folder comes in; made-up tables are written there, every contender computes them in a process of its own, and one
object of numbers goes out. A rival's values are compared with ours first, and no time is reported of one whose values
differ. The rivals are in `benchmarks/rivals/`; where they are absent (`rivals`), ours alone is measured.

    batch        rows (a request with one candidate) per CPU-second of all threads, since cores are what is paid for
    online       µs for one request; the items are known beforehand, so everybody prepares what depends on an item
                 alone, as the online executor does with a table of items
    unprepared   µs for one request that brings the attributes of its candidates along

Decided: contenders take turns and aims are judged by CPU time (`turns`); nobody here starts processes, so a process's
own CPU time is all of it. Of several batch runs the best counts, since other work on a machine only ever adds; of
online requests the median, and on the clock the 99th percentile too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tackboard.bench import rivals
from tackboard.bench.features.compare import TOLERANCE, differences
from tackboard.bench.features.data import FULL, QUICK, Sizes, batch_world, online_world, read_table
from tackboard.bench.features.set import features
from tackboard.bench.report import Report, Table, shown_versions, where_and_when
from tackboard.bench.turns import Neighbours, aim_lines, judged, take_turns
from tackboard.core.errors import TackboardError
from tackboard.core.processes import ask, last_json_object
from tackboard.core.progress import say
from tackboard.report.svg import percentile

OURS = "tackboard"
PACKAGES = ("polars", "pandas", "feast", "numpy", "pyarrow")
"""What the rivals are written with."""
SEED = 20261115
ONLINE_RIVALS = ("polars", "pandas", "feast_store", "feast_pandas", "feast_python", "numpy")
RIVALS = {"batch": ("polars", "pandas", "numpy"), "online": ONLINE_RIVALS, "unprepared": ONLINE_RIVALS}
"""Who is measured in which part; the module behind each name says how it was tuned."""
FOLDERS = {"batch": "batch", "online": "online", "unprepared": "online"}
ITEMS = {"online": "items known beforehand", "unprepared": "attributes of items come with the request"}
WORDS = {
    OURS: "one definition, executed by Tackboard",
    "polars": "hand-written Polars",
    "pandas": "hand-written pandas",
    "numpy": "hand-written NumPy, without data frames",
    "feast_store": "Feast as it is called: get_online_features, items in its SQLite store, native Python mode",
    "feast_pandas": "Feast's transformation alone (transform_arrow, pandas mode), inputs already fetched",
    "feast_python": "Feast's transformation alone (transform_dict, Python mode, NumPy inside), inputs already fetched",
}
FEWER_REPEATS = {"feast_store": 20}
"""Contenders so slow that they are measured on fewer requests: by what the number is divided."""
MOST_BATCH_COST = 1.5
"""Aim: CPU time of a batch over that of hand-written Polars, at most."""
LEAST_SPEEDUP = 10.0
"""Aim: a pandas or Feast request's CPU time over ours, at least."""
AIMED_AT = {
    "pandas": "hand-written pandas",
    "feast_store": "Feast as it is called",
    "feast_pandas": "Feast's transformation alone, pandas mode",
    "feast_python": "Feast's transformation alone, Python mode with NumPy inside",
}
"""Every way in which Feast was measured is judged: which of them an aim was meant for is the reader's to say."""
AGGREGATIONS = 8


def measure(folder: Path, *, quick: bool = False, rivals_python: Path = rivals.PYTHON) -> dict[str, Any]:
    """Measures every contender, with its tables in `folder`. Raises TackboardError where our own side fails."""
    sizes = QUICK if quick else FULL
    versions = rivals.versions(rivals_python, PACKAGES)
    installed = not isinstance(versions, str)
    if not installed:
        say(f"only our own figures are measured: the rivals are {versions}")
    batch, online = batch_world(sizes, SEED), online_world(sizes, SEED)
    batch.write(folder / "batch")
    online.write(folder / "online")
    result: dict[str, Any] = {
        "bench": "features",
        "quick": quick,
        "num_features": len(features.plan.features),
        "num_aggregations": AGGREGATIONS,
        "feature_set": features.hash,
        "tolerance": TOLERANCE,
        "rivals": versions,
        "batch": {
            "num_rows": batch.rows.num_rows,
            "num_requests": batch.requests.num_rows,
            "num_events": batch.events.num_rows,
        },
    }
    for part in ("online", "unprepared"):
        result[part] = {
            "num_candidates": sizes.online_candidates,
            "num_events": sizes.online_events,
            "num_requests": sizes.online_requests,
        }
    with Neighbours() as neighbours:
        for part, others in RIVALS.items():
            names = (OURS, *(others if installed else ()))
            run = functools.partial(
                _contend, part=part, folder=folder / FOLDERS[part], sizes=sizes, python=rivals_python
            )
            found = take_turns({name: functools.partial(run, name) for name in names}, sizes.rounds)
            result[part]["contenders"] = {
                name: _figures(name, part, folder / FOLDERS[part], runs, batch.rows.num_rows)
                for name, runs in found.items()
            }
    disturbance = neighbours.report()
    return result | {
        "aims": judged(aims(result), disturbance),
        **disturbance,
        **where_and_when(),
    }


def _contend(name: str, *, part: str, folder: Path, sizes: Sizes, python: Path) -> dict[str, Any]:
    """The times of one turn of a contender, or why it failed; `python` is that of the rivals."""
    say(f"{part}: {WORDS[name]}")
    repeats = sizes.batch_repeats if part == "batch" else sizes.online_repeats
    repeats = max(2, repeats // FEWER_REPEATS.get(name, 1) // sizes.rounds)
    command = [sys.executable if name == OURS else str(python), "-m", "tackboard.bench.features.contender"]
    done = ask([*command, name, part, str(folder), str(repeats)], environment=rivals.environment())
    if done.code == 0:
        return last_json_object(done.output)
    if name == OURS:
        raise TackboardError(f"our own side of the {part} bench failed: {done.reason}")
    return {"failed": done.reason}


def _figures(name: str, part: str, folder: Path, runs: Sequence[Mapping[str, Any]], num_rows: int) -> dict[str, Any]:
    """The figures of a contender over all its turns, or why there are none."""
    failed = [run for run in runs if "failed" in run]
    if failed:
        return dict(failed[0])
    if name != OURS:
        wrong = [
            sentence
            for table in ("requests", "rows")
            for sentence in differences(
                read_table(folder / f"{OURS}_{part}_{table}.arrow"), read_table(folder / f"{name}_{part}_{table}.arrow")
            )
        ]
        if wrong:
            return {"differs": wrong}
    times = {key: [value for run in runs for value in run[key]] for key in runs[0]}
    return batch_figures(times, num_rows) if part == "batch" else online_figures(times)


def batch_figures(times: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Rows per CPU-second: of the best run and of the one in the middle."""
    best, middle = min(times["cpu_seconds"]), percentile(times["cpu_seconds"], 50)
    return {
        "rows_per_cpu_s": round(num_rows / best),
        "rows_per_cpu_s_median": round(num_rows / middle),
        "cpu_seconds": round(best, 4),
        "wall_seconds": round(min(times["wall_seconds"]), 4),
        "repeats": len(times["cpu_seconds"]),
    }


def online_figures(times: Mapping[str, Any]) -> dict[str, Any]:
    """µs per request."""
    return {
        "us_median": round(percentile(times["wall_us"], 50), 1),
        "us_p99": round(percentile(times["wall_us"], 99), 1),
        "us_cpu_median": round(percentile(times["cpu_us"], 50), 1),
        "repeats": len(times["wall_us"]),
    }


def aims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at and what came out, as far as it was measured."""
    batch, online = result["batch"]["contenders"], result["online"]["contenders"]
    found: list[dict[str, Any]] = []
    if "cpu_seconds" in batch.get("polars", {}):
        cost = batch[OURS]["cpu_seconds"] / batch["polars"]["cpu_seconds"]
        text = f"CPU time of a batch over hand-written Polars, at most {MOST_BATCH_COST}"
        found.append({"aim": text, "value": round(cost, 2), "met": cost <= MOST_BATCH_COST})
    for name, words in AIMED_AT.items():
        if "us_cpu_median" in online.get(name, {}):
            speedup = online[name]["us_cpu_median"] / online[OURS]["us_cpu_median"]
            text = f"{words}: its CPU time for a request over ours, at least {LEAST_SPEEDUP:g}"
            found.append({"aim": text, "value": round(speedup, 2), "met": speedup >= LEAST_SPEEDUP})
    return found


# ---- for people ----


def report(result: Mapping[str, Any]) -> Report:
    """The measurement for people."""
    found, batch = result["rivals"], result["batch"]
    versions = found if isinstance(found, str) else shown_versions(found)
    counts = (batch["num_rows"], batch["num_requests"], batch["num_events"])
    rows, requests, events = (f"{count:,}" for count in counts)
    return Report(
        result=result,
        theme="features",
        title="Features: one definition against hand-written code",
        command=f"bench features{' --quick' if result['quick'] else ''}",
        versions=f"Rivals: {versions}.",
        words=[
            f"{result['num_features']} features, {result['num_aggregations']} of them aggregations of events.",
            "A rival's time is shown only where its values were ours: whole numbers, ids and lists exactly, floats to "
            f"{result['tolerance']:g}.",
        ],
        tables=[
            _table(
                f"batch: {rows} rows of {requests} requests, {events} events",
                batch,
                ("rows per CPU-second", "of the median run", "CPU s", "wall s"),
                lambda f: (
                    f"{f['rows_per_cpu_s']:,}",
                    f"{f['rows_per_cpu_s_median']:,}",
                    f"{f['cpu_seconds']:.3f}",
                    f"{f['wall_seconds']:.3f}",
                ),
            ),
            *(_online_table(result[part], words) for part, words in ITEMS.items()),
        ],
        notes=[*([f"rivals: {found}"] if isinstance(found, str) else []), *aim_lines(result)],
    )


def _online_table(part: Mapping[str, Any], words: str) -> Table:
    return _table(
        f"one user with {part['num_events']:,} events, {part['num_candidates']:,} candidates; {words}",
        part,
        ("µs per request, on the clock", "p99", "CPU µs", "requests"),
        lambda f: (*(f"{f[name]:,.0f}" for name in ("us_median", "us_p99", "us_cpu_median")), str(f["repeats"])),
    )


def _table(
    title: str, part: Mapping[str, Any], header: tuple[str, ...], cells: Callable[[Mapping[str, Any]], tuple[str, ...]]
) -> Table:
    """A row for each contender; of one that was not timed, why."""
    rows = []
    for name, f in part["contenders"].items():
        failed = "values differ" if "differs" in f else "failed" if "failed" in f else ""
        rows.append((name, *((failed, "", "", "") if failed else cells(f)), WORDS[name]))
    return Table(title, ("contender", *header, ""), rows)
