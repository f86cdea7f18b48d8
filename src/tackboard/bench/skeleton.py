"""`tackboard bench skeleton` measures what the whole path costs, from events to a served score.

The bench runs the demo in a folder, with the same code as `tackboard demo`, and returns a dictionary of figures. The
demo checks that server and offline scoring give the same scores, and that binary and JSON requests do too. Decided: a
rate per CPU-second counts the CPU time of the whole process, including start-up and imports, so no cost is hidden in a
warm-up. Tokens per second are measured from the first training step to the last, including data loading and
checkpoints. Users per second are measured while the model ranks the catalogue for all users.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tackboard.bench.report import Report, Table
from tackboard.bench.turns import Neighbours, aim_lines
from tackboard.flow.demo import DemoConfig, run_demo
from tackboard.flow.outcome import Outcome

NUM_USERS = 500
"""Number of users to score items for. With 500 users, a CPU clock with ticks of 10 ms resolves 0.02 ms per request."""

UNITS = {
    "events_per_cpu_s": "events per CPU-second, generated and written",
    "train_tokens_per_s": "tokens per second, training",
    "evaluate_users_per_s": "users per second, full-catalogue evaluation",
    "serve_cpu_ms_per_request_binary": "CPU ms of the server per request, binary tensors",
    "serve_cpu_ms_per_request_json": "CPU ms of the server per request, JSON",
    "latency_p50_ms": "ms, median latency at the client",
    "latency_p99_ms": "ms, 99th percentile of latency at the client",
    "demo_seconds": "seconds, the whole demo",
    "demo_peak_rss_bytes": "bytes, largest resident memory of the demo",
}


def measure(out: Path, *, quick: bool = False) -> dict[str, Any]:
    """Runs the demo in `out` and returns the measurement. Raises the errors of `run_demo`."""
    with Neighbours() as neighbours:
        outcome = run_demo(DemoConfig(out=out, quick=quick, num_users=20 if quick else NUM_USERS))
    return measurement(outcome) | neighbours.report()


def measurement(outcome: Outcome) -> dict[str, Any]:
    """Returns the numbers of one demo, with the machine, the versions and the date."""
    data, train, evaluate = (outcome.stages[name] for name in ("data", "pretrain", "evaluate"))
    cpu_ms = {exchange.wire: exchange.server_cpu_ms_per_request for exchange in outcome.exchanges}
    summary = outcome.summary()
    return {
        "bench": "skeleton",
        "quick": outcome.quick,
        "events_per_cpu_s": round(data.require("num_events") / data.cpu_seconds, 1),
        "train_tokens_per_s": train.require("tokens_per_s"),
        "evaluate_users_per_s": round(float(evaluate.require("users_per_s")), 1),
        "serve_cpu_ms_per_request_binary": round(cpu_ms["binary"], 3),
        "serve_cpu_ms_per_request_json": round(cpu_ms["JSON"], 3),
        "latency_p50_ms": summary["latency_ms"]["p50"],
        "latency_p99_ms": summary["latency_ms"]["p99"],
        "demo_seconds": summary["seconds"],
        "demo_peak_rss_bytes": outcome.peak_rss_bytes,
        "candidates_per_request": outcome.num_candidates,
        "requests": summary["requests"],
        "num_events": data.require("num_events"),
        "gap_closed": summary["gap_closed"],
        "stages": {
            name: {key: round(getattr(stage, key), 2) for key in ("seconds", "cpu_seconds", "peak_rss_bytes")}
            for name, stage in outcome.stages.items()
        },
        **{name: outcome.environment[name] for name in ("hardware", "python", "packages", "commit")},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    stages = [
        (name, f"{stage['seconds']:.1f}", f"{stage['cpu_seconds']:.1f}", f"{stage['peak_rss_bytes'] / 1e6:.0f}")
        for name, stage in result["stages"].items()
    ]
    return Report(
        result=result,
        theme="skeleton",
        title="Walking skeleton: what the whole path costs",
        command=f"bench skeleton{' --quick' if result['quick'] else ''}",
        words=[
            f"{result['num_events']:,} events; {result['requests']:,} requests of "
            f"{result['candidates_per_request']:,} candidates, one after another, half as binary tensors and half as "
            "JSON."
        ],
        tables=[
            Table(
                "", ("measured", "value", "unit"), [(name, f"{result[name]:,}", unit) for name, unit in UNITS.items()]
            ),
            Table("", ("stage", "seconds", "CPU seconds", "peak memory, MB"), stages),
        ],
        notes=aim_lines(result),
    )
