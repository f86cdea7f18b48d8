"""`tackboard bench skeleton`: what the whole path costs, from events to a served score.

A folder comes in; the demo runs there, by the same code as `tackboard demo`, and one object of numbers goes out. All
values were checked by the demo before they are reported: server and offline scores agree, and so do binary and JSON.
Decided: a rate counts the whole process, start-up and imports included, wherever it is per CPU-second, so that nothing
can be hidden in a warm-up. Tokens per second are those of the whole run from its first step to its last, with data
loading and checkpoints; users per second are those that the model's ranking takes, of all users.
"""

import time
from pathlib import Path
from typing import Any

from tackboard.bench.turns import Neighbours, disturbance_lines
from tackboard.core.files import write_text_atomic
from tackboard.flow.demo import DemoConfig, run_demo
from tackboard.flow.outcome import Outcome, hardware_words

NUM_USERS = 500
"""Users to score for: a CPU clock that ticks every 10 ms then resolves 0.02 ms per request."""

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
    """Runs the demo in `out` and returns the measurement. Errors are those of `run_demo`."""
    with Neighbours() as neighbours:
        outcome = run_demo(DemoConfig(out=out, quick=quick, num_users=20 if quick else NUM_USERS))
    return measurement(outcome) | neighbours.report()


def measurement(outcome: Outcome) -> dict[str, Any]:
    """The numbers of one demo, with where, when and on what they were taken."""
    data, train, evaluate = (outcome.stages[name] for name in ("data", "train", "evaluate"))
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
            name: {
                "seconds": round(stage.seconds, 2),
                "cpu_seconds": round(stage.cpu_seconds, 2),
                "peak_rss_bytes": stage.peak_rss_bytes,
            }
            for name, stage in outcome.stages.items()
        },
        "hardware": outcome.environment["hardware"],
        "python": outcome.environment["python"],
        "packages": outcome.environment["packages"],
        "commit": outcome.environment["commit"],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def table_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and unit of every number, for people."""
    return [(name, f"{result[name]:,}", unit) for name, unit in UNITS.items()]


def result_path(results: Path, hardware: str, date: str) -> Path:
    """Where a result belongs: `skeleton_<hardware>_<yyyymm>.md`. `date` is yyyy-mm-dd."""
    return results / f"skeleton_{hardware}_{date[:4]}{date[5:7]}.md"


def write_result(result: dict[str, Any], results: Path, hardware: str) -> Path:
    """Writes the measurement as Markdown under `results`, named by a short word for the hardware; returns the file."""
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items() if version)
    lines = [
        "# Walking skeleton: what the whole path costs",
        "",
        f"`tackboard bench skeleton{' --quick' if result['quick'] else ''}`, {result['date']}, "
        f"commit {result['commit'] or 'unknown'}.",
        f"Machine: {hardware_words(result['hardware'])}. Python {result['python']}, {packages}.",
        "",
        f"{result['num_events']:,} events; {result['requests']:,} requests of {result['candidates_per_request']:,} "
        "candidates, one after another, half as binary tensors and half as JSON.",
        "",
        "| measured | value | unit |",
        "|---|--:|---|",
        *(f"| `{name}` | {value} | {unit} |" for name, value, unit in table_rows(result)),
        "",
        "| stage | seconds | CPU seconds | peak memory, MB |",
        "|---|--:|--:|--:|",
        *(
            f"| {name} | {stage['seconds']:.1f} | {stage['cpu_seconds']:.1f} | {stage['peak_rss_bytes'] / 1e6:.0f} |"
            for name, stage in result["stages"].items()
        ),
        *(f"\n{line[0].upper()}{line[1:]}." for line in disturbance_lines(result)),
    ]
    path = result_path(results, hardware, result["date"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "\n".join(lines) + "\n")
    return path
