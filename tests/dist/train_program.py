"""Runs `tackboard train` in several processes. This program imports torch and TorchRec once, and forks all processes.

Arguments: a JSON file with a list of chains, and the number of chains to run at once. A chain is a list of scenes that
run one after another. A scene has the number of processes, the arguments of the command, and a folder in which it runs.
With `kill`, process `rank` kills itself at its n-th communication; with `signal_after`, the last process gets SIGTERM
when the run has made this step. The last line of this program is JSON: for each scene the exit codes of the processes,
the numbers of their communications, and what they said.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - imported before the forks.
import torchrec  # noqa: F401 - imported before the forks.

import tackboard.train.trainer  # noqa: F401 - imported before the forks.
from tackboard.cli.main import run
from tackboard.parallel.training_world import TrainingWorld


def count_communications(kill_at: int | None, output: Path) -> None:
    """Counts the sums and gathers of this process, and kills it before number `kill_at`."""
    count = 0

    def counted(method: Any) -> Any:
        def call(self: TrainingWorld, *arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            output.write_text(str(count))
            return method(self, *arguments)

        return call

    for name in ("sum_", "gather_tensors"):
        setattr(TrainingWorld, name, counted(getattr(TrainingWorld, name)))


def start(scene: dict[str, Any], rank: int, port: str, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    file = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(scene["folder"])
    size = str(scene["size"])
    if scene["size"] > 1:
        place = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
        os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"})
    kill = scene.get("kill")
    count_communications(kill["at"] if kill and kill["rank"] == rank else None, folder / f"{rank}.count")
    sys.argv = ["tackboard", "train", *scene["arguments"]]
    try:
        run()
    except SystemExit as stopped:
        sys.stdout.flush()
        os._exit(int(stopped.code or 0))
    finally:
        os._exit(99)


def play(chain: list[dict[str, Any]]) -> Iterator[dict[str, Any] | None]:
    """Yields None while a scene runs, and its result when it has ended."""
    for number, scene in enumerate(chain):
        folder = Path(scene["folder"]) / f"scene-{number}"
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        pids = [start(scene, rank, port, folder) for rank in range(scene["size"])]
        codes: dict[int, int] = {}
        is_asked = "signal_after" not in scene
        while len(codes) < len(pids):
            if not is_asked and has_made(Path(scene["folder"]), scene["signal_after"]):
                os.kill(pids[-1], signal.SIGTERM)
                is_asked = True
            for pid in set(pids) - codes.keys():
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            yield None
        counts = [folder / f"{rank}.count" for rank in range(scene["size"])]
        yield {
            "codes": [codes[pid] for pid in pids],
            "communications": [int(path.read_text() or 0) if path.exists() else 0 for path in counts],
            "said": [(folder / f"{rank}.txt").read_text(errors="replace") for rank in range(scene["size"])],
        }


def main(chains: list[list[dict[str, Any]]], at_once: int) -> None:
    results: list[list[dict[str, Any]]] = [[] for _ in chains]
    waiting = list(enumerate(map(play, chains)))
    running: list[tuple[int, Iterator[dict[str, Any] | None]]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
        for number, chain in list(running):
            result = next(chain, "over")
            if result == "over":
                running.remove((number, chain))
            elif isinstance(result, dict):
                results[number].append(result)
        time.sleep(0.01)
    print(json.dumps(results))


def has_made(folder: Path, step: int) -> bool:
    return any(path.read_text().count("\n") >= step for path in folder.glob("runs/latest/metrics.jsonl"))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
