"""Runs the demo, which goes from an empty folder to served scores with the same commands that a user types.

The demo makes a dataset, three runs (a PinFM, a ranker without PinFM, a ranker with this PinFM), a bundle of the second
ranker, logs and `report.html`, all in one folder. Every step is a `tackboard` command in a process of its own. This
module only starts the commands, reads their JSON and sends requests to the server as any client would. Decided: the
demo replaces only the files that a demo writes, and only in a folder that an earlier demo made. The demo fails if
server and offline scores differ by more than 1e-5 of the largest absolute score. Pretraining and both rankers leave out
the same fifth of the users, and the rankers are judged only on the requests of these users. So no figure of a ranker
comes from an event that any training has seen.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError, UsageError
from tackboard.core.files import read_json, write_json_atomic, write_text_atomic
from tackboard.core.locks import try_lock
from tackboard.core.machine import peak_rss_bytes
from tackboard.core.processes import POLL_S, signals_interrupt
from tackboard.core.rundir import describe_environment
from tackboard.features.serving_log import KEY_BYTES
from tackboard.flow.command import Command, Finished, StageError, run_command
from tackboard.flow.demo_client import (
    TOLERANCE,
    UnansweredError,
    UserRequest,
    attributes_of_items,
    connect,
    draw_requests,
    is_ready,
    largest_difference,
    require_client,
    scores_in_order,
    send,
)
from tackboard.flow.demo_report import write_report
from tackboard.flow.display import Display
from tackboard.flow.outcome import STAGE_NAMES, Exchange, Outcome, describe_hardware

MARKER = "demo.json"
KIND = "tackboard demo"
# Names of all files and folders that a demo writes. A demo that replaces an earlier demo removes only these.
OWN_NAMES = ("datasets", "runs", "bundle", "logs", "requests", "served", "log.key", "port", "report.html", MARKER)
MODEL = "demo"
WIRES = ("binary", "JSON")
NUM_WARM_UP = 5
READY_WITHIN_S = 60.0
HELD_OUT_USERS = 0.2
"""Share of the users on whose requests the rankers are judged. Neither pretraining nor a ranker learns from these
users."""
REQUESTS_PER_USER, OTHER_CANDIDATES = 4, 50
"""Number of newest events per user that become requests, and number of other candidates of a request."""
NUM_RECENT_EVENTS, RANKER_STEPS = 16, 70
"""Number of events that the rankers' own sequence module reads, and number of the rankers' training steps. Both are
smaller than in the recipes, because the demo must be short. The module reads its events once per candidate."""
TIMEOUT_MS = 10_000
"""The server's default is 1 s. With this longer limit, a demo on a busy machine is slow, but does not fail."""
FINETUNE = "finetune-late-last"
"""The recipe of the ranker with PinFM. The recipe was chosen on worlds of other seeds (docs/log.md)."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of a demo."""

    out: Path
    """The folder for everything that the demo makes."""
    quick: bool = False
    """Use a tiny world and a few steps. This shows that every stage works, but says nothing about quality."""
    num_users: int = 100
    """Number of users who send a request. The request of each user is sent once as binary tensors and once as JSON."""
    num_candidates: int = 1000
    """Number of items to score in one request."""
    num_compared: int = 3
    """Number of requests whose scores are computed again without the server."""

    def __post_init__(self) -> None:
        for name in ("num_users", "num_candidates", "num_compared"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", allowed="allowed: 1 or more")
        if self.num_compared > self.num_users:
            raise UsageError(
                f"num_compared is {self.num_compared}", allowed=f"allowed: up to num_users, {self.num_users}"
            )


def run_demo(config: DemoConfig, *, live: bool | None = None) -> Outcome:
    """Runs all stages and writes the report. Raises StageError with the exit code of the command that failed."""
    started = time.monotonic()
    require_client()
    with signals_interrupt(), claim_folder(config.out), Display(len(STAGE_NAMES), live=live) as display:
        stages = _build(config, display)
        dataset = Path(stages["data"].require("dataset"))
        bundle = Path(stages["export"].require("bundle"))
        requests = draw_requests(
            dataset,
            num_requests=config.num_users,
            num_candidates=config.num_candidates,
            attributes=attributes_of_items(bundle),
        )
        display.begin("serve")
        stages["serve"], exchanges, served = _serve(config, requests, display)
        every = [value for exchange in exchanges for value in exchange.latencies_ms]
        display.end(f"{len(every)} requests of {config.num_candidates:,} candidates, median {np.median(every):.1f} ms")
        display.begin("compare")
        stages["compare"], difference = _compare(config, bundle, requests, served, display)
        display.end(f"server and offline scores differ by at most {difference:.1e} of the largest score")
        display.begin("replay")
        stages["replay"] = replayed = _replay(config, dataset)
        display.end(
            f"{replayed.require('num_values'):,} served features computed again in batch, "
            f"{replayed.require('num_mismatches'):,} differ"
        )
        display.begin("report")
        outcome = Outcome(
            out=config.out,
            quick=config.quick,
            stages=stages,
            exchanges=exchanges,
            num_candidates=config.num_candidates,
            num_compared=config.num_compared,
            largest_difference=difference,
            total_seconds=time.monotonic() - started,
            peak_rss_bytes=max(stage.peak_rss_bytes for stage in stages.values()) + peak_rss_bytes(),
            environment={**describe_environment(), "hardware": describe_hardware()},
        )
        write_report(outcome)
        write_json_atomic(config.out / MARKER, {"kind": KIND, "status": "done", **outcome.summary()})
        display.end(str(config.out / "report.html"))
    return outcome


@contextlib.contextmanager
def claim_folder(out: Path) -> Iterator[None]:
    """Makes `out` an empty demo folder and locks it for this process. Raises UsageError if the folder has other content
    or if another demo runs in it."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", allowed="allowed: a new or empty folder, or one that a demo made")
    content = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if content and content != [".lock"] and not _is_demo(out):
        raise UsageError(
            f"{out} holds {content[0]}, and no demo made this folder",
            allowed="allowed: a new or empty folder, or one that a demo made",
            fix="tackboard demo --out ANOTHER_FOLDER",
        )
    out.mkdir(parents=True, exist_ok=True)
    with try_lock(out / ".lock") as held:
        if not held:
            raise UsageError(
                f"another demo is running in {out}",
                fix="wait until it ends, or use tackboard demo --out ANOTHER_FOLDER",
            )
        for name in OWN_NAMES:
            path = out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        write_json_atomic(out / MARKER, {"kind": KIND, "status": "running"})
        yield


def build_commands(config: DemoConfig, run: str = "RUN") -> dict[str, tuple[str, ...]]:
    """Returns the commands up to `serve`. `run` is the trained run that a command reads: the PinFM for `evaluate` and
    `finetune`, a ranker for `ranker-eval`, `finetune-eval` and `export`."""
    out = config.out
    dataset = out / "datasets" / MODEL
    small_world = ("--set", "num_users=300", "--set", "num_items=400") if config.quick else ()
    short_run = ("--set", "training.steps=20", "--set", "training.log_every=1") if config.quick else ()
    train_options = ("--set", f"data.dataset={dataset}", "--runs", str(out / "runs"), "--json")
    ranker_steps = short_run or ("--set", f"training.steps={RANKER_STEPS}")
    num_events = 4 if config.quick else NUM_RECENT_EVENTS
    small_ranker = ("--set", f"model.recent.num_events={num_events}", *ranker_steps)
    # A user's id decides whether the user is held out, so these two settings hold out the same users.
    pretrained_without = ("--set", f"data.validation_share={HELD_OUT_USERS}")
    tested_on = ("--set", "data.validation_share=0", "--set", f"data.test_share={HELD_OUT_USERS}")
    return {
        "data": (
            *("data", "synth", "--world", "demo", *small_world),
            *("--out", str(out / "datasets"), "--name", MODEL, "--json"),
        ),
        "pretrain": ("train", "demo", *pretrained_without, *short_run, *train_options),
        "evaluate": ("evaluate", run, "--json"),
        "requests": (
            *("data", "pseudo-requests", str(dataset), "--candidates", str(OTHER_CANDIDATES)),
            *("--per-user", str(REQUESTS_PER_USER), "--also", "save", "--json"),
        ),
        "ranker": ("train", "finetune-none", *tested_on, *small_ranker, *train_options),
        "ranker-eval": ("evaluate", run, "--json"),
        "finetune": ("train", FINETUNE, "--from", run, *tested_on, *small_ranker, *train_options),
        "finetune-eval": ("evaluate", run, "--json"),
        "export": ("export", run, "--out", str(out / "bundle"), "--name", MODEL, "--json"),
        "serve": (
            *("serve", str(out / "bundle"), "--port", "0", "--port-file", str(out / "port")),
            *("--timeout-ms", str(TIMEOUT_MS)),
            *("--log-features", str(out / "served"), "--log-key", str(out / "log.key")),
        ),
    }


class TrainingWatch:
    """Follows the metrics.jsonl of the next run in the folder `runs` and shows the run's newest step."""

    def __init__(self, runs: Path, display: Display) -> None:
        self.runs = runs
        self.display = display
        self._earlier = set(runs.glob("*"))
        self._run: Path | None = None
        self._offset = 0
        self._num_steps: int | None = None

    def __call__(self) -> None:
        """Reads the lines that were added since the last call. An incomplete line is read at the next call."""
        if self._run is None:
            found = (path.parent for path in self.runs.glob("*/metrics.jsonl") if path.parent.name != "latest")
            self._run = next((run for run in found if run not in self._earlier), None)
            if self._run is None:
                return
            with contextlib.suppress(CorruptFileError, KeyError, TypeError):
                self._num_steps = int(read_json(self._run / "config.json")["training"]["steps"])
        with (self._run / "metrics.jsonl").open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0  # The file became shorter: a run that goes back to a checkpoint cuts its metrics.
            file.seek(self._offset)
            added = file.read()
        end = added.rfind(b"\n") + 1
        self._offset += end
        lines = [json.loads(line) for line in added[:end].splitlines()]
        for line in reversed(lines):
            if "loss" in line:
                self.display.update(line["step"], self._num_steps, f"loss {line['loss']:.3f}")
                break


def _build(config: DemoConfig, display: Display) -> dict[str, Finished]:
    """Runs all stages from `data` to `export`."""
    stages: dict[str, Finished] = {}

    def run(name: str, trained: str = "") -> Finished:
        display.begin(name)
        command = build_commands(config, trained)[name]
        watch = TrainingWatch(config.out / "runs", display) if command[0] == "train" else None
        stages[name] = run_command(name, command, log=config.out / "logs" / f"{name}.log", watch=watch)
        return stages[name]

    def train(name: str, pretrained: str = "") -> str:
        trained = run(name, pretrained)
        display.end(
            f"{trained.require('step'):,} steps, loss {trained.require('final_loss'):.3f}, {trained.require('run')}"
        )
        return str(trained.require("run"))

    data = run("data")
    # The command prints the counts inside `statistics`, but the report and the bench read them from the top level.
    stages["data"] = data = replace(data, answer={**data.answer.get("statistics", {}), **data.answer})
    counts = {name: f"{data.require(f'num_{name}'):,} {name}" for name in ("events", "users", "items")}
    display.end(f"{counts['events']} of {counts['users']} on {counts['items']}")
    pretrained = train("pretrain")
    rates = {row["name"]: row["hr@10"] for row in run("evaluate", pretrained).require("rows")}
    display.end(f"HR@10 {rates['model']:.3f}, the oracle's is {rates['oracle']:.3f}")
    made = run("requests").require("counts")
    display.end(f"{made['requests']:,} requests with {made['candidates']:,} labelled candidates")
    plain = train("ranker")
    display.end(_hits(run("ranker-eval", plain)))
    ranker = train("finetune", pretrained)
    display.end(_hits(run("finetune-eval", ranker)))
    export = run("export", ranker)
    display.end(f"{export.require('bytes') / 1e6:.1f} MB in {export.require('bundle')}")
    return stages


def _hits(evaluated: Finished) -> str:
    """Returns HIT@3 of a ranker, and of ranking by the items' mean labels, for the first label, in words."""
    rows = evaluated.require("rows")
    label = rows[0]["label"]
    hits = {row["name"]: row["hit@3"] for row in rows if row["label"] == label}
    return f"HIT@3 {hits['model']:.3f} ({label}), the item means' is {hits['item mean']:.3f}"


def _serve(
    config: DemoConfig, requests: list[UserRequest], display: Display
) -> tuple[Finished, list[Exchange], list[NDArray[np.float32]]]:
    """Starts the server, sends all requests and stops the server. Returns the stage, the cost of each wire format and
    the scores of the binary requests."""
    arguments = build_commands(config)["serve"]
    write_text_atomic(config.out / "log.key", secrets.token_hex(KEY_BYTES) + "\n")
    port_file = config.out / "port"
    scores: dict[str, list[NDArray[np.float32]]] = {}
    exchanges: list[Exchange] = []
    with Command(arguments, config.out / "logs" / "serve.log") as server:
        client = connect(wait_until_ready(server, port_file))
        try:
            for wire in WIRES:
                binary = wire == "binary"
                send(client, MODEL, requests[:NUM_WARM_UP], binary=binary)
                before = server.cpu_seconds()
                offset = len(exchanges) * len(requests)

                def watch(done: int, latency_ms: float, offset: int = offset) -> None:
                    server.poll()
                    display.update(offset + done, len(WIRES) * len(requests), f"{latency_ms:.1f} ms")

                answers = send(client, MODEL, requests, binary=binary, watch=watch)
                cpu_ms = (server.cpu_seconds() - before) * 1000 / len(requests)
                scores[wire] = answers.scores
                exchanges.append(
                    Exchange(wire=wire, latencies_ms=answers.latencies_ms, server_cpu_ms_per_request=cpu_ms)
                )
        except UnansweredError as error:
            server.poll()
            raise StageError(str(error), fix=f"the server's whole output: {server.log}") from None
        finally:
            client.close()
        if server.stop() != 0:
            raise server.failure("serve")
        for number, (left, right) in enumerate(zip(scores["binary"], scores["JSON"], strict=True)):
            _require_equal(largest_difference(left, right), f"request {number}: binary and JSON scores")
    return server.finished("serve"), exchanges, scores["binary"]


def wait_until_ready(server: Command, port_file: Path) -> int:
    """Waits until the server is ready and returns its port. Raises StageError if the server ends or takes too long."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise server.failure("serve")
        text = port_file.read_text().strip() if port_file.exists() else ""
        if text.isdigit() and is_ready(int(text)):
            return int(text)
        time.sleep(POLL_S)
    raise StageError(f"the server was not ready within {READY_WITHIN_S:.0f} s", fix=f"its whole output: {server.log}")


def _compare(
    config: DemoConfig,
    bundle: Path,
    requests: list[UserRequest],
    served: list[NDArray[np.float32]],
    display: Display,
) -> tuple[Finished, float]:
    """Scores some requests again without the server. Returns one stage for all commands, and the largest difference."""
    folder = config.out / "requests"
    folder.mkdir()
    worst = 0.0
    runs = []
    for number in range(config.num_compared):
        path = folder / f"user-{number + 1}.json"
        write_text_atomic(path, json.dumps(requests[number].document()) + "\n")
        arguments = ("score", str(path), "--offline", "--bundle", str(bundle), "--json")
        runs.append(run_command("compare", arguments, log=config.out / "logs" / f"compare-{number + 1}.log"))
        offline = scores_in_order(runs[-1].require("ranked"), requests[number].candidates)
        difference = largest_difference(served[number], offline)
        _require_equal(difference, f"{path}: server and offline scores")
        worst = max(worst, difference)
        display.update(number + 1, config.num_compared)
    whole = replace(
        runs[0],
        seconds=sum(run.seconds for run in runs),
        cpu_seconds=sum(run.cpu_seconds for run in runs),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
    )
    return whole, worst


def _replay(config: DemoConfig, dataset: Path) -> Finished:
    """Computes every served feature again in batch, from the dataset. The demo fails if a value differs."""
    out = config.out
    arguments = ("features", "replay", str(out / "served"), "--data", str(dataset), "--key", str(out / "log.key"))
    return run_command("replay", (*arguments, "--json"), log=out / "logs" / "replay.log")


def _require_equal(difference: float, what: str) -> None:
    if not difference <= TOLERANCE:
        raise StageError(
            f"{what} differ by {difference:.2e} of the largest absolute score",
            allowed=f"allowed: {TOLERANCE:.0e}",
            fix="this is a bug: these scores must agree",
        )


def _is_demo(out: Path) -> bool:
    try:
        marker = read_json(out / MARKER)
    except CorruptFileError:
        return False
    return isinstance(marker, dict) and marker.get("kind") == KIND
