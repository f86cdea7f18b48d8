"""Runs `tackboard train` in several processes. This program imports torch and TorchRec once, and forks all processes.

Argument: a JSON file with a list of scenes. A scene has the number of processes, the arguments of the command, and a
folder in which it runs. With `kill`, process `rank` kills itself at its n-th communication. The last line of this
program is JSON: the exit codes of the processes, and for each process the number of its communications.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
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


def main(scenes: list[dict[str, Any]]) -> None:
    results = []
    for number, scene in enumerate(scenes):
        folder = Path(scene["folder"]) / f"scene-{number}"
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        pids = [start(scene, rank, port, folder) for rank in range(scene["size"])]
        if "signal_after" in scene:  # SIGTERM to one process, as soon as the run has made this step.
            wait_for_step(Path(scene["folder"]), scene["signal_after"])
            os.kill(pids[-1], signal.SIGTERM)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        counts = [folder / f"{rank}.count" for rank in range(scene["size"])]
        results.append(
            {
                "codes": codes,
                "communications": [int(path.read_text() or 0) if path.exists() else 0 for path in counts],
                "said": [(folder / f"{rank}.txt").read_text(errors="replace") for rank in range(scene["size"])],
            }
        )
    print(json.dumps(results))


def wait_for_step(folder: Path, step: int) -> None:
    while True:
        for path in folder.glob("runs/latest/metrics.jsonl"):
            if path.read_text().count("\n") >= step:
                return


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
