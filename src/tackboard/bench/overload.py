"""`tackboard bench overload` measures how many requests an overloaded server still answers in time.

The bench trains the demo's model for a few steps, because the quality of the model does not matter here. A server with
default settings serves the model, and clients in another process send requests (`overload_client`). Goodput is the
number of answers per second that reach a client within the deadline of 200 ms. The result is a dictionary of figures:

    capacity   the best goodput over a ramp; the ramp is a series of request rates, near the rate of a single client
               that waits for every answer
    loads      goodput at 0.5 to 3 times the capacity; the loads take turns, and the mean over the rounds counts
    peak       the largest mean goodput of all loads

Decided: the aim (`LEAST_GOODPUT`) is a ratio of two means over the same rounds, because the speed of a shared machine
changes from second to second. The ramp only sets the request rates of the loads. Its samples are short, so the best of
them is usually higher than the rate that the server can sustain, and twice the capacity is more than twice the
sustainable rate. The CPU time of the clients is reported, because on a machine with two cores the clients take CPU time
from the server.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tackboard.bench.report import Report, Table, where_and_when
from tackboard.bench.turns import Neighbours, aim_lines, judged, take_turns
from tackboard.core.errors import TackboardError
from tackboard.core.files import write_text_atomic
from tackboard.core.processes import ask, last_json_object, signals_interrupt
from tackboard.core.progress import say
from tackboard.flow.command import Command, run_command
from tackboard.flow.demo import MODEL, DemoConfig, build_commands, wait_until_ready
from tackboard.flow.demo_client import connect, draw_requests, require_client, send, whole_request
from tackboard.report.svg import percentile

DEADLINE_MS = 200
LOADS = (0.5, 0.75, 1.0, 2.0, 3.0)
RAMP = (0.7, 0.85, 1.0, 1.15, 1.3)
"""Request rates of the ramp, as multiples of the rate of a single client that waits for every answer."""
LEAST_GOODPUT = 0.9
"""Aim: goodput at the highest load is at least this share of the peak."""
NUM_REQUESTS = 100
"""Number of different requests. The clients send them in turn. A request has as many candidates as in the demo."""
ROUNDS, SECONDS, RAMP_SECONDS = 5, 2.0, 1.5
QUICK_ROUNDS, QUICK_SECONDS = 2, 1.0


def measure(folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """Runs the measurement in `folder`. Raises TackboardError if a command of the demo or a client process fails."""
    require_client()
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS)
    config = DemoConfig(out=folder, num_users=NUM_REQUESTS)
    with signals_interrupt():
        dataset, bundle = _build(config)
        port_file = folder / "port"
        arguments = ("serve", str(bundle), "--port", "0", "--port-file", str(port_file))
        with Command(arguments, folder / "logs" / "serve.log") as server:
            clients = _Clients(server, wait_until_ready(server, port_file), folder, dataset, config.num_candidates)
            with Neighbours() as neighbours:
                ramp_seconds = min(seconds, RAMP_SECONDS)
                ramp = [clients.load(share * clients.alone_per_s, ramp_seconds) for share in RAMP]
                capacity = max(run["in_time_per_s"] for run in ramp)
                turns: dict[str, Callable[[], dict[str, Any]]] = {
                    f"{load:g}": lambda load=load: clients.load(load * capacity, seconds)  # type: ignore[misc]
                    for load in LOADS
                }
                found = take_turns(turns, rounds)
    loads = {name: mean_of(runs) for name, runs in found.items()}
    disturbance = neighbours.report()
    result: dict[str, Any] = {
        "bench": "overload",
        "quick": quick,
        "deadline_ms": DEADLINE_MS,
        "candidates_per_request": config.num_candidates,
        "rounds": rounds,
        "seconds_per_round": seconds,
        "alone_per_s": round(clients.alone_per_s, 1),
        "ramp": ramp,
        "capacity_per_s": capacity,
        "peak_per_s": max(figures["in_time_per_s"] for figures in loads.values()),
        "loads": loads,
        **disturbance,
    }
    return result | {"aims": judged(aims(result), disturbance), **where_and_when()}


def _build(config: DemoConfig) -> tuple[Path, Path]:
    """Makes the demo's dataset, trains the demo's model for a few steps, and exports the model as a bundle."""
    say("making the demo's dataset and a model of its size")
    commands, logs = build_commands(config), config.out / "logs"
    data = run_command("data", commands["data"], log=logs / "data.log")
    train = (*commands["pretrain"], "--set", "training.steps=5")
    run = str(run_command("pretrain", train, log=logs / "pretrain.log").require("run"))
    bundle = run_command("export", build_commands(config, run)["export"], log=logs / "export.log").require("bundle")
    return Path(data.require("dataset")), Path(bundle)


class _Clients:
    """Sends the same requests to one server at different rates."""

    def __init__(self, server: Command, port: int, folder: Path, dataset: Path, num_candidates: int) -> None:
        self._server = server
        self._port = port
        self._file = folder / "requests.json"
        requests = draw_requests(dataset, num_requests=NUM_REQUESTS, num_candidates=num_candidates)
        client = connect(port)
        try:
            metadata = client.get_model_metadata(MODEL)
            datatypes = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
            # The first requests warm up the server and check that it answers with scores.
            send(client, MODEL, requests[:20], binary=True)
            latencies_ms = send(client, MODEL, requests, binary=True).latencies_ms
        finally:
            client.close()
        self.alone_per_s = 1000 / percentile(latencies_ms, 50)
        """Rate of one client that waits for every answer, in requests per second."""
        bodies = [whole_request(MODEL, request, datatypes, timeout_us=DEADLINE_MS * 1000) for request in requests]
        write_text_atomic(self._file, json.dumps([base64.b64encode(body).decode() for body in bodies]))
        self._num_loads = 0

    def load(self, rate_per_s: float, seconds: float) -> dict[str, Any]:
        """Sends `rate_per_s` requests per second and returns the figures of this load."""
        self._num_loads += 1
        words = [self._port, self._file, rate_per_s, seconds, DEADLINE_MS, self._num_loads]
        started, cpu_seconds = time.perf_counter(), self._server.cpu_seconds()
        done = ask([sys.executable, "-m", "tackboard.bench.overload_client", *map(str, words)])
        if done.code != 0:
            raise TackboardError(f"the process of the overload clients failed: {done.reason}")
        server_share = (self._server.cpu_seconds() - cpu_seconds) / (time.perf_counter() - started)
        return figures_of(last_json_object(done.output), rate_per_s) | {"server_cores": round(server_share, 2)}


def figures_of(found: Mapping[str, Any], rate_per_s: float) -> dict[str, Any]:
    """Returns the figures of one load. `found` is the JSON object that the clients' process printed."""
    seconds, outcomes = found["seconds"], dict(found["outcomes"])
    in_time, late = outcomes.pop("in_time", 0), outcomes.pop("late", 0)
    return {
        "offered_per_s": round(rate_per_s, 1),
        "in_time_per_s": round(in_time / seconds, 1),
        "late_per_s": round(late / seconds, 1),
        "refused_per_s": {status: round(count / seconds, 1) for status, count in sorted(outcomes.items())},
        "p50_ms": _percentile(found["latencies_ms"], 50),
        "p99_ms": _percentile(found["latencies_ms"], 99),
        "refused_after_p50_ms": _percentile(found["refused_after_ms"], 50),
        "clients_late_p99_ms": _percentile(found["late_starts_ms"], 99),
        "clients_cores": round(found["cpu_share"], 2),
    }


def mean_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of every figure over the rounds, and the goodput of each round."""
    names = [name for name in runs[0] if name != "refused_per_s"]
    refused: Counter[str] = Counter()
    for run in runs:
        refused.update(run["refused_per_s"])

    def mean(values: list[Any]) -> float | None:
        known = [value for value in values if value is not None]
        return round(sum(known) / len(known), 2) if known else None

    return {
        **{name: mean([run[name] for run in runs]) for name in names},
        "refused_per_s": {status: round(total / len(runs), 1) for status, total in sorted(refused.items())},
        "in_time_per_s_rounds": [run["in_time_per_s"] for run in runs],
    }


def aims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the aim, its measured value and whether the aim was met."""
    highest = f"{LOADS[-1]:g}"
    value = result["loads"][highest]["in_time_per_s"] / result["peak_per_s"] if result["peak_per_s"] else 0.0
    text = f"goodput at {highest} times the capacity, divided by the peak goodput: at least {LEAST_GOODPUT:g}"
    return [{"aim": text, "value": round(value, 3), "met": value >= LEAST_GOODPUT}]


def _percentile(values: list[float], percent: int) -> float | None:
    return round(percentile(values, percent), 1) if values else None


# ---- the report ----

COLUMNS = (
    "load", "offered", "in time", "of peak", "late", "refused", "p50 ms", "p99 ms", "refused in", "server", "clients",
)  # fmt: skip


def table_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a row of COLUMNS for each load. Rates are per second; CPU use of server and clients is in cores."""
    rows: list[tuple[str, ...]] = []
    for name, figures in result["loads"].items():
        refused = ", ".join(f"{status}: {rate:g}" for status, rate in figures["refused_per_s"].items())
        share = figures["in_time_per_s"] / max(result["peak_per_s"], 1e-9)
        times = ("p50_ms", "p99_ms", "refused_after_p50_ms")
        rates = f"{figures['in_time_per_s']:.1f}", f"{share:.0%}", f"{figures['late_per_s']:g}", refused or "none"
        p50, p99, told = ("" if figures[key] is None else f"{figures[key]:.0f}" for key in times)
        cores = (f"{figures[key]:.2f}" for key in ("server_cores", "clients_cores"))
        offered = f"{figures['offered_per_s']:.0f}"
        rows.append((f"{name}×", offered, *rates, p50, p99, told and f"{told} ms", *cores))
    return rows


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    return Report(
        result=result,
        theme="overload",
        title="Overload: answers in time against offered load",
        command=f"bench overload{' --quick' if result['quick'] else ''}",
        words=[
            "The server runs the demo's model with default settings. A request has "
            f"{result['candidates_per_request']:,} candidates as binary tensors, and its deadline is "
            f"{result['deadline_ms']} ms.",
            "Arrivals are a Poisson process that does not wait for answers. A latency is measured from the time at "
            "which the request was due to be sent.",
            f"Rates are per second, as means over {result['rounds']} rounds of {result['seconds_per_round']:g} s. "
            "The loads took turns. The CPU use of server and clients is in cores.",
            f"The peak is {result['peak_per_s']:g} answers in time per second. A single client that waits for every "
            f"answer gets {result['alone_per_s']:g} per second.",
        ],
        tables=[Table("", COLUMNS, table_rows(result))],
        notes=aim_lines(result),
    )
