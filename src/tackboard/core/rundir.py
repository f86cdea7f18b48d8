"""Makes and opens run directories. A run directory holds all files of one run, for people and programs to read.

    runs/<utc time>_<name>_<random>/   config.json · env.json · metrics.jsonl · events.jsonl · log.txt · STATUS
    runs/latest                        -> the newest run

Each line of the JSON-lines files is written and flushed separately. A kill may cut the last line; `clean` removes a cut
line. A resumed run removes the metrics of steps after its checkpoint, so each step is in the file once.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tackboard.core.errors import DataError, UsageError, counted
from tackboard.core.files import (
    append_line,
    new_directory,
    read_json,
    remove_leftovers,
    replace_symlink,
    write_bytes_atomic,
    write_json_atomic,
    write_text_atomic,
)
from tackboard.core.processes import ask
from tackboard.core.progress import say

STATUSES = ("running", "done", "preempted")
RECORDED_PACKAGES = ("tackboard", "torch", "numpy", "pyarrow", "safetensors")


class RunDirectory:
    """One run's folder. `new` chooses its name and `write` makes it; `open` opens an existing run.

    If several processes train together, only one of them has `is_writer`. The others write nothing into the folder.
    """

    def __init__(self, path: Path, *, is_writer: bool = True) -> None:
        self.path = path
        self.is_writer = is_writer
        self.checkpoints = path / "checkpoints"

    @classmethod
    def new(cls, runs: Path, name: str) -> RunDirectory:
        """Chooses a name for a new run under `runs` and writes nothing. If `runs` is a file, UsageError is raised."""
        if runs.exists() and not runs.is_dir():
            raise UsageError(f"{runs} is a file", allowed="allowed: a folder of runs", fix="give another --runs")
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime())
        return cls(runs / f"{stamp}_{name}_{os.urandom(3).hex()}")

    @classmethod
    def create(cls, runs: Path, name: str, config: Mapping[str, Any]) -> RunDirectory:
        """Makes a new run under `runs` and writes its resolved config and environment."""
        run = cls.new(runs, name)
        run.write(config)
        return run

    def write(self, config: Mapping[str, Any]) -> None:
        """Makes the folder and writes its resolved config and environment. Only `make_latest` changes `latest`."""
        runs = self.path.parent
        if not self.is_writer:
            return
        remove_leftovers(runs)
        with new_directory(self.path) as folder:
            (folder / "checkpoints").mkdir()
            write_json_atomic(folder / "config.json", config)
            write_json_atomic(folder / "env.json", describe_environment())

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Opens an existing run. Nothing is changed, because another process may be writing to the run."""
        run = cls(path.resolve())
        if not (run.path / "config.json").is_file():
            raise DataError(
                f"{path} is not a run", allowed="a run folder holds config.json", fix="list your runs: ls runs/"
            )
        return run

    def clean(self) -> None:
        """Removes the temporary files and cut last lines that a kill left. The caller must hold the run's lock."""
        remove_leftovers(self.path)
        for name in ("metrics.jsonl", "events.jsonl"):
            _cut_torn_line(self.path / name)

    def make_latest(self) -> None:
        """Points `latest`, in the folder of runs, at this run."""
        if self.is_writer:
            replace_symlink(self.path.parent / "latest", self.path.name)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the run, as plain JSON."""
        config: dict[str, Any] = read_json(self.path / "config.json")
        return config

    @property
    def status(self) -> str:
        """`running`, `done`, `preempted` or `failed: reason`; `new` if there is no STATUS file; else `unknown`."""
        try:
            text = (self.path / "STATUS").read_bytes().decode(errors="replace").strip()
        except FileNotFoundError:
            return "new"
        return text if text in STATUSES or text.startswith("failed: ") else "unknown"

    def set_status(self, status: str) -> None:
        if self.is_writer:
            write_text_atomic(self.path / "STATUS", status + "\n")

    def log_metrics(self, step: int, **values: Any) -> None:
        self._append("metrics.jsonl", {"step": step, "time": round(time.time(), 3), **values})

    def log_event(self, event: str, **values: Any) -> None:
        """Appends an event to events.jsonl as JSON, and to log.txt as text."""
        self._append("events.jsonl", {"event": event, "time": round(time.time(), 3), **values})
        details = " ".join(f"{key}={value}" for key, value in values.items())
        self.log_line(f"{event} {details}".strip())

    def log_line(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.is_writer:
            append_line(self.path / "log.txt", f"{stamp} {line}")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the metrics of all lines that can be read, in order."""
        return [metrics for _, metrics in self._metric_lines() if metrics is not None]

    def cut_metrics_after(self, step: int) -> None:
        """Drops damaged lines, and drops the metrics of steps after `step`, which a resumed run writes again.

        Metrics are for people. A checkpoint has everything that a run needs, so a damaged line only causes a warning.
        """
        if not self.is_writer:
            return
        lines = self._metric_lines()
        if num_damaged := sum(metrics is None for _, metrics in lines):
            say(f"warning: {self.path / 'metrics.jsonl'} has {counted(num_damaged, 'damaged line')}, now removed")
        kept = [line for line, metrics in lines if metrics is not None and metrics["step"] <= step]
        if len(kept) < len(lines):
            write_bytes_atomic(self.path / "metrics.jsonl", b"".join(line + b"\n" for line in kept))

    def _metric_lines(self) -> list[tuple[bytes, dict[str, Any] | None]]:
        """Returns each line of metrics.jsonl with its parsed content. The content is None for a damaged line."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [(line, _metrics_in(line)) for line in lines]

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        # JSON has no infinity and no NaN, so null is written instead.
        value = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in value.items()}
        if self.is_writer:
            append_line(self.path / name, json.dumps(value))


def describe_environment() -> dict[str, Any]:
    """Describes how a run was started: versions, machine, command, commit."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "command": sys.argv,
        "commit": git_commit(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def git_commit() -> str | None:
    """Returns the commit of this package's source, with a `+` if files have changed since; None if unknown."""
    source = Path(__file__).parent
    try:
        answer = ask(
            ["git", "-C", str(source), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"], timeout_s=5
        )
    except OSError:
        return None
    return answer.output.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cut_torn_line(path: Path) -> None:
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        write_bytes_atomic(path, data[: data.rfind(b"\n") + 1])


def _metrics_in(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None
