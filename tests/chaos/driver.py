"""Runs `tackboard` again and again in fresh processes, and kills them where it is told to.

Importing torch takes seconds; a trial should take a fraction of one. So this process imports everything once, runs
nothing itself, and forks one child per trial. The child is the ordinary program: it sets the arguments and calls the
command line's own entry. Orders come as JSON lines on standard input, answers go to standard output:

    {"arguments": [...], "folder": PATH, "log": PATH}    run to the end
    … "at": [POINT, K], "action": "kill"                 SIGKILL itself at the K-th time the writer stands at POINT
    … "at": [POINT, K], "action": "ENOSPC" or "EIO"      a write fails there, once
    … "max_file_bytes": N                                the kernel refuses to let a file grow past N
    … "after_s": SECONDS, "signal": "SIGKILL"            a signal from outside, so long after the start
    … "from": GLOB                                       … counted from when a path in the folder matches, not the start
    … "points": PATH                                     record the points that the writer passes
    … "disk": PATH, "copied": [PATH], "free_bytes": N    empty that disk, copy paths onto it, leave N bytes free
    {"reap": true}                                       wait until no process of any trial is left
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tackboard.cli import main as command_line
from tackboard.core import files

PR_SET_CHILD_SUBREAPER = 36
REAP_S = 20.0
PRELOADED = (
    "torch",
    "torch._dynamo",
    "pyarrow.parquet",
    "tackboard.train.trainer",
    "tackboard.recipes.registry",
    "tackboard.evaluation.prediction",
    "tackboard.features.backfill",
    "tackboard.data.request_layout",
    "tackboard.events.importer",
)
"""What a trial would import; importing starts no threads, running would."""


def observe(order: dict[str, Any]) -> None:
    """Installs the observer that an order asks for."""
    passed: Counter[str] = Counter()
    wanted, occurrence = order.get("at") or (None, 0)
    points = open(order["points"], "a", buffering=1) if "points" in order else None  # noqa: SIM115

    def stand(point: str) -> None:
        # The names of runs and snapshots are new every time.
        point = re.sub(r"^\d{4}-\d\d-\d\d_.*:", "RUN:", point)
        point = re.sub(r"^\d{8}T\d{6}Z-[0-9a-f]{8}:", "SNAPSHOT:", point)
        passed[point] += 1
        if points is not None:
            points.write(point + "\n")
        if point == wanted and passed[point] == occurrence:
            if order["action"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, order["action"])
            raise OSError(number, os.strerror(number), point)

    files.observer = stand


def fill_disk(disk: Path, copied: list[str], free_bytes: int) -> None:
    """Leaves on a small disk only `copied` and a file that fills it but for `free_bytes`."""
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for source in map(Path, copied):
        if source.is_dir():
            shutil.copytree(source, disk / source.name, symlinks=True)
        else:
            shutil.copy(source, disk / source.name)
    state = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - free_bytes))


def run_trial(order: dict[str, Any]) -> None:
    """The child: becomes `tackboard ARGUMENTS` and ends."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
    if "max_file_bytes" in order:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["max_file_bytes"], resource.RLIM_INFINITY))
    if "disk" in order:
        fill_disk(Path(order["disk"]), order.get("copied", []), order["free_bytes"])
    sys.argv = ["tackboard", *order["arguments"]]
    observe(order)
    command_line.run()


def wait_for(pid: int, order: dict[str, Any], started: float) -> int:
    """Waits for a child, sending it the ordered signal on the way; its exit code, negative for a signal."""
    signal_at = started + order["after_s"] if "after_s" in order and "from" not in order else None
    awaited = order.get("from")
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if awaited and next(Path(order["folder"]).glob(awaited), None):
            awaited, signal_at = None, time.monotonic() + order["after_s"]
        if signal_at is not None and time.monotonic() >= signal_at:
            os.kill(pid, getattr(signal, order.get("signal", "SIGKILL")))
            signal_at = None
        time.sleep(0.001)


def reap() -> int:
    """Waits for loader workers whose trainer was killed; returns how many were still there at the end."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return 0
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def main() -> None:
    """Obeys until standard input ends."""
    # Orphaned workers become children of this process, so that `reap` can wait for them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in PRELOADED:
        importlib.import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("reap"):
            print(json.dumps({"left": reap()}), flush=True)
            continue
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                run_trial(order)
            finally:
                # Only reached when `run` raised: SystemExit carries the code.
                error = sys.exc_info()[1]
                sys.stderr.flush()
                os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 99)
        code = wait_for(pid, order, started)
        print(json.dumps({"code": code, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
