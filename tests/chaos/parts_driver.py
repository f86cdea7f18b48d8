"""Saves checkpoints by several processes again and again, and kills one of them where it is told to.

Like driver.py, this process imports everything once, runs nothing itself, and forks one child per rank. Orders come as
JSON lines on standard input, answers go to standard output:

    {"folder": PATH, "step": N, "token": TEXT}    three ranks save that step; {"codes": [...], "points": [[...], ...]}
    … "at": [RANK, POINT, K]                      that rank kills itself at the K-th time its writer stands at POINT;
                                                  the others are killed then, as torchrun would
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tackboard.checkpoint.parts import SharedSave, part_name
from tackboard.checkpoint.store import CheckpointStore
from tackboard.core import files

SIZE = 3
NUM_ROWS = 12


def groups_of(rank: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    rows = torch.arange(rank, NUM_ROWS, SIZE, dtype=torch.int32)
    values = (rows[:, None] * 10.0 + step).expand(-1, 2)
    own = {
        part_name("tables", rank): {"t.weight:rows": rows, "t.weight:values": values},
        part_name("optimizer", rank): {"adagrad.t:rows": rows, "adagrad.t:values": values[:, 0] + 1},
    }
    if rank == 0:
        own |= {"dense": {"bias": torch.full((3,), float(step))}, "optimizer": {"adamw.bias.step": torch.tensor(step)}}
    return own


def run_rank(rank: int, order: dict[str, Any], points: Path) -> None:
    """The child: writes its part, or puts the parts together."""
    victim, wanted, occurrence = order.get("at") or (None, None, 0)
    passed: list[str] = []

    def stand(point: str) -> None:
        passed.append(point)
        with points.open("a") as file:
            file.write(point + "\n")
        if (rank, point) == (victim, wanted) and passed.count(point) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    files.observer = stand
    folder, step = Path(order["folder"]), order["step"]
    store = CheckpointStore(folder)
    shared = SharedSave(folder=folder, step=step, rank=rank, size=SIZE, token=order["token"], timeout_s=20)
    if rank:
        store.save_part(groups_of(rank, step), shared)
    else:
        state = {"step": step, "fresh_rows": {"t.weight": {"key": 1, "std": 0.1, "num_rows": NUM_ROWS}}}
        store.save(step, groups_of(rank, step), state, shared=shared)


def obey(order: dict[str, Any]) -> dict[str, Any]:
    CheckpointStore(Path(order["folder"])).clean()
    with tempfile.TemporaryDirectory() as place:
        points = [Path(place, str(rank)) for rank in range(SIZE)]
        pids = {}
        for rank in range(SIZE):
            if (pid := os.fork()) == 0:
                code = 99
                try:
                    run_rank(rank, order, points[rank])
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids[pid] = rank
        codes = [0] * SIZE
        while pids:
            pid, status = os.wait()
            rank = pids.pop(pid)
            codes[rank] = os.waitstatus_to_exitcode(status)
            if codes[rank] == -signal.SIGKILL:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
        passed = [path.read_text().split("\n")[:-1] if path.exists() else [] for path in points]
    return {"codes": codes, "points": passed}


def main() -> None:
    """Obeys until standard input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
