"""`tackboard bench features` compares Tackboard with hand-written code and with Feast on the same 40 features.

The bench writes made-up tables into a folder, lets every contender (Tackboard or a rival) compute the features in a
separate process, and returns a dictionary of figures. The values of a rival are compared with ours. If they differ, the
rival's time is not reported. The rivals are in `benchmarks/rivals/`. If they are not installed (`rivals`), only
Tackboard is measured.

    batch        rows per CPU-second of all threads, because cores cost money; a row is a candidate of a request
    online       µs for one request; the items are known beforehand, so every contender prepares the features that
                 depend on an item alone, as the online executor does with a table of items
    unprepared   µs for one request that carries the attributes of its candidates

Decided: contenders take turns, and aims are judged by CPU time (`turns`). No contender starts other processes, so the
CPU time of its own process is enough. For a batch, the best of several runs counts, because other work on the machine
only adds time. For online requests, the median counts, and the report also has the 99th percentile of wall-clock time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tackboard.bench import rivals
from tackboard.bench.features.data import FULL, QUICK, FeatureSizes, batch_world, online_world, read_table
from tackboard.bench.features.set import features
from tackboard.bench.report import Report, Table, shown_versions, where_and_when
from tackboard.bench.turns import Neighbours, aim_lines, judged, take_turns
from tackboard.core.errors import TackboardError
from tackboard.core.processes import ask, last_json_object
from tackboard.core.progress import say
from tackboard.report.svg import percentile

OURS = "tackboard"
PACKAGES = ("polars", "pandas", "feast", "numpy", "pyarrow")
"""Libraries that the rivals use."""
SEED = 20261115
ONLINE_RIVALS = ("polars", "pandas", "feast_store", "feast_pandas", "feast_python", "numpy")
RIVALS = {"batch": ("polars", "pandas", "numpy"), "online": ONLINE_RIVALS, "unprepared": ONLINE_RIVALS}
"""Part → rivals that are measured in this part. The module of each rival says how it was tuned."""
FOLDERS = {"batch": "batch", "online": "online", "unprepared": "online"}
ITEMS = {"online": "items known beforehand", "unprepared": "attributes of items come with the request"}
WORDS = {
    OURS: "one definition, executed by Tackboard",
    "polars": "hand-written Polars",
    "pandas": "hand-written pandas",
    "numpy": "hand-written NumPy, without data frames",
    "feast_store": "Feast as users call it: get_online_features, items in its SQLite store, native Python mode",
    "feast_pandas": "Feast's transformation alone (transform_arrow, pandas mode), inputs already fetched",
    "feast_python": "Feast's transformation alone (transform_dict, Python mode, NumPy inside), inputs already fetched",
}
FEWER_REPEATS = {"feast_store": 20}
"""Slow contender → the factor by which its number of repeats is reduced."""
MOST_BATCH_COST = 1.5
"""Aim: our CPU time of a batch is at most this many times the CPU time of hand-written Polars."""
LEAST_SPEEDUP = 10.0
"""Aim: pandas or Feast needs at least this many times our CPU time for a request."""
AIMED_AT = {
    "pandas": "hand-written pandas",
    "feast_store": "Feast as users call it",
    "feast_pandas": "Feast's transformation alone, pandas mode",
    "feast_python": "Feast's transformation alone, Python mode with NumPy inside",
}
"""Rival to which the aim LEAST_SPEEDUP applies → description. Feast is measured and judged in three ways, so that
readers can choose the way that matters to them."""
AGGREGATIONS = 8
TOLERANCE = 1e-12
"""Floats a and b count as equal if their difference is at most this number times the largest of 1, |a| and |b|."""


def measure(folder: Path, *, quick: bool = False, rivals_python: Path = rivals.PYTHON) -> dict[str, Any]:
    """Writes tables into `folder` and measures every contender on them. Raises TackboardError if Tackboard fails."""
    sizes = QUICK if quick else FULL
    versions = rivals.versions(rivals_python, PACKAGES)
    installed = not isinstance(versions, str)
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
    return result | {"aims": judged(aims(result), disturbance), **disturbance, **where_and_when()}


def _contend(name: str, *, part: str, folder: Path, sizes: FeatureSizes, python: Path) -> dict[str, Any]:
    """Runs one turn of a contender. Returns its times, or the reason why it failed. `python` runs the rivals."""
    say(f"{part}: {WORDS[name]}")
    repeats = sizes.batch_repeats if part == "batch" else sizes.online_repeats
    repeats = max(2, repeats // FEWER_REPEATS.get(name, 1) // sizes.rounds)
    command = [sys.executable if name == OURS else str(python), "-m", "tackboard.bench.features.contender"]
    done = ask([*command, name, part, str(folder), str(repeats)], environment=rivals.environment())
    if done.code == 0:
        return last_json_object(done.output)
    if name == OURS:
        raise TackboardError(f"Tackboard's own side of the {part} bench failed: {done.reason}")
    return {"failed": done.reason}


def _figures(name: str, part: str, folder: Path, runs: Sequence[Mapping[str, Any]], num_rows: int) -> dict[str, Any]:
    """Returns the figures of a contender over all its turns, or the reason why there are no figures."""
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
    """Returns rows per CPU-second of the best run and of the median run."""
    best, middle = min(times["cpu_seconds"]), percentile(times["cpu_seconds"], 50)
    return {
        "rows_per_cpu_s": round(num_rows / best),
        "rows_per_cpu_s_median": round(num_rows / middle),
        "cpu_seconds": round(best, 4),
        "wall_seconds": round(min(times["wall_seconds"]), 4),
        "repeats": len(times["cpu_seconds"]),
    }


def online_figures(times: Mapping[str, Any]) -> dict[str, Any]:
    """Returns µs per request."""
    return {
        "us_median": round(percentile(times["wall_us"], 50), 1),
        "us_p99": round(percentile(times["wall_us"], 99), 1),
        "us_cpu_median": round(percentile(times["cpu_us"], 50), 1),
        "repeats": len(times["wall_us"]),
    }


def aims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the aims that could be measured, with their values."""
    batch, online = result["batch"]["contenders"], result["online"]["contenders"]
    found: list[dict[str, Any]] = []
    if "cpu_seconds" in batch.get("polars", {}):
        cost = batch[OURS]["cpu_seconds"] / batch["polars"]["cpu_seconds"]
        text = f"CPU time of a batch, divided by that of hand-written Polars: at most {MOST_BATCH_COST}"
        found.append({"aim": text, "value": round(cost, 2), "met": cost <= MOST_BATCH_COST})
    for name, words in AIMED_AT.items():
        if "us_cpu_median" in online.get(name, {}):
            speedup = online[name]["us_cpu_median"] / online[OURS]["us_cpu_median"]
            text = f"CPU time of a request with {words}, divided by ours: at least {LEAST_SPEEDUP:g}"
            found.append({"aim": text, "value": round(speedup, 2), "met": speedup >= LEAST_SPEEDUP})
    return found


# ---- comparing the values of a rival with ours ----


def differences(ours: pa.Table, theirs: pa.Table) -> list[str]:
    """Returns a sentence for each column that differs.

    Bools, ints, ids and lists must be equal. Floats may differ by TOLERANCE, because a rival may use a different `log`
    or `exp` and may add numbers in a different order. A missing value equals only a missing value.
    """
    if sorted(ours.column_names) != sorted(theirs.column_names):
        odd = sorted(set(ours.column_names) ^ set(theirs.column_names))
        return [f"columns that only one side has: {', '.join(odd)}"]
    if ours.num_rows != theirs.num_rows:
        return [f"{theirs.num_rows} rows instead of {ours.num_rows}"]
    found = []
    for name in ours.column_names:
        wrong = differing(ours[name], theirs[name])
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            here, there = ours[name][row].as_py(), theirs[name][row].as_py()
            found.append(f"{name} differs in {int(wrong.sum())} of {len(wrong)} rows: row {row} is {there}, not {here}")
    return found


def differing(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Returns for each row whether two columns differ."""
    if pa.types.is_large_list(ours.type) or pa.types.is_list(ours.type):
        pairs = zip(ours.to_pylist(), theirs.to_pylist(), strict=True)
        return np.array([one != other for one, other in pairs], dtype=np.bool_)
    if pa.types.is_floating(ours.type) != pa.types.is_floating(theirs.type):
        return np.ones(len(ours), dtype=np.bool_)
    absent, absent_there = (pc.is_null(column).to_numpy() for column in (ours, theirs))
    left, right = _values(ours), _values(theirs)
    if pa.types.is_floating(ours.type):
        allowed = TOLERANCE * np.maximum(1.0, np.maximum(np.abs(left), np.abs(right)))
        finite = np.isfinite(left) & np.isfinite(right)
        with np.errstate(invalid="ignore"):
            close = finite & (np.abs(left - right) <= allowed)
        same = close | (left == right) | (np.isnan(left) & np.isnan(right))
    else:
        same = left == right
    return np.asarray((absent != absent_there) | ~(absent | same), dtype=np.bool_)


def _values(column: pa.ChunkedArray) -> NDArray[Any]:
    column = column.cast(pa.float64() if pa.types.is_floating(column.type) else pa.int64())
    return np.asarray(pc.fill_null(column, 0).to_numpy())


# ---- the report ----


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
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
            "A rival's time is shown only if its values equal ours: floats to within "
            f"{result['tolerance']:g}, all other values exactly.",
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
        ("wall-clock µs per request", "p99", "CPU µs", "requests"),
        lambda f: (*(f"{f[name]:,.0f}" for name in ("us_median", "us_p99", "us_cpu_median")), str(f["repeats"])),
    )


def _table(
    title: str, part: Mapping[str, Any], header: tuple[str, ...], cells: Callable[[Mapping[str, Any]], tuple[str, ...]]
) -> Table:
    """Makes a table with a row for each contender. If a contender was not timed, its row says why."""
    rows = []
    for name, f in part["contenders"].items():
        failed = "values differ" if "differs" in f else "failed" if "failed" in f else ""
        rows.append((name, *((failed, "", "", "") if failed else cells(f)), WORDS[name]))
    return Table(title, ("contender", *header, ""), rows)
