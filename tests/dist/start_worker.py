"""The processes of tests/dist/test_start.py. This program imports torch once, then forks the processes of all scenes.

Arguments: a JSON file of scenes by name, and a folder. Each process writes what it prints to FOLDER/SCENE-RANK.txt. The
last line of this program is JSON: the exit codes and the seconds of each scene.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tackboard.core.errors import DataError, TackboardError
from tackboard.core.progress import complain, say
from tackboard.parallel.agreement import check_agreement, run_facts
from tackboard.parallel.config import ParallelConfig
from tackboard.parallel.meeting import end_world, start_world
from tackboard.parallel.roll_call import lost_processes_named
from tackboard.parallel.training_world import TrainingWorld

STEPS, BAD_STEP = 6, 3
HANGS = ("sleep", "stop")


def misbehave(how: str, timeout_s: float) -> None:
    if how == "sleep":
        time.sleep(timeout_s + 60)
    elif how in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    elif how == "raise":
        raise DataError("the events of bucket 7 are not sorted", fix="import the log again")


def work(world: TrainingWorld, how: str, bad: int) -> None:
    facts = run_facts(world, {"seed": 1, "data": {"dataset": f"on/host/{world.rank}"}}, "snapshot-1")
    name, _, value = how.partition("=")
    check_agreement(world, facts | ({name: value} if value and world.rank == bad else {}))
    step = 0
    with lost_processes_named(world, lambda: f"step {step}"):
        for step in range(STEPS):
            if step == BAD_STEP and world.rank == bad:
                misbehave(how, world.timeout_s)
            total = world.sum_(torch.tensor([1.0 + world.rank]))
            assert total.item() == world.size * (world.size + 1) / 2
    world.wait_for_all()
    say(f"all {world.size} are done")
    print(f"{world.rank}: {world.local_rank} of {world.local_size}, {torch.get_num_threads()} thread", flush=True)


def take_part(scene: dict[str, Any]) -> int:
    try:
        config = ParallelConfig(timeout_s=scene.get("timeout_s", 4))
        world = start_world(config, "cpu", scene.get("meeting_s", 30))
        try:
            work(world, scene.get("how", ""), scene.get("bad", -1))
        finally:
            with contextlib.suppress(RuntimeError):
                end_world(world)
    except TackboardError as error:
        complain(error, "error: " + str(error).replace("\n", "\n  "))
        return error.exit_code
    return 0


def fork(scene: dict[str, Any], environment: dict[str, str], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        code = take_part(scene)
    except BaseException:  # noqa: BLE001 - a child never leaves this function.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(scenes: dict[str, dict[str, Any]], folder: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # Something that listens, but is no process of a run.
    running: dict[int, tuple[str, int]] = {}
    codes: dict[str, list[int | None]] = {}
    seconds: dict[str, float] = {}
    begin = time.monotonic()
    for name, scene in scenes.items():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str((silent if scene.get("silent") else free).getsockname()[1])
        codes[name] = [None] * len(scene["processes"])
        for number, environment in enumerate(scene["processes"]):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **environment}
            running[fork(scene, place, folder / f"{name}-{number}.txt")] = name, number
    while running:
        pid, status = os.wait()
        name, number = running.pop(pid)
        codes[name][number] = os.waitstatus_to_exitcode(status)
        seconds[name] = time.monotonic() - begin
        left = [pid for pid, (other, _) in running.items() if other == name]
        if scenes[name].get("how") in HANGS and len(left) == 1:
            os.kill(left[0], signal.SIGKILL)  # Nobody else waits for a process that hangs.
    print(json.dumps({"codes": codes, "seconds": seconds}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
