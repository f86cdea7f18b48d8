"""Processes meet, agree, and name the one that does not come, differs, ends or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(170)]
WORKER = Path(__file__).parent / "start_worker.py"


def processes(size: int, *ranks: int, **variables: str) -> list[dict[str, str]]:
    """The environments of processes with these ranks, or of all ranks."""
    return [{"WORLD_SIZE": str(size), "RANK": str(rank), **variables} for rank in ranks or range(size)]


def slurm(size: int) -> list[dict[str, str]]:
    return [
        {"SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_PROCID": str(rank)}
        for rank in range(size)
    ]


SCENES: dict[str, dict[str, Any]] = {
    "good": {"processes": processes(3)},
    "slurm": {"processes": slurm(2)},
    "sleeps": {"processes": processes(3), "how": "sleep", "bad": 1},
    "stopped": {"processes": processes(3), "how": "stop", "bad": 2},
    "first-stopped": {"processes": processes(2), "how": "stop", "bad": 0},
    "killed": {"processes": processes(3), "how": "kill", "bad": 1},
    "first-killed": {"processes": processes(3), "how": "kill", "bad": 0},
    "raises": {"processes": processes(3), "how": "raise", "bad": 2},
    "seed": {"processes": processes(3), "how": "setting seed=4", "bad": 2},
    "code": {"processes": processes(2), "how": "tackboard's code=abc", "bad": 1},
    "missing": {"processes": processes(3, 0, 2), "meeting_s": 6},
    "no-first": {"processes": processes(2, 1), "meeting_s": 3},
    "twice": {"processes": processes(3, 0, 1, 1), "meeting_s": 20},
    "sizes": {"processes": [*processes(2, 0), *processes(3, 1)], "meeting_s": 20},
    "interface": {"processes": [*processes(2, 0), *processes(2, 1, GLOO_SOCKET_IFNAME="eth77")], "meeting_s": 20},
    "silent": {"processes": processes(2, 1), "meeting_s": 3, "silent": True},
    "taken": {"processes": processes(2, 0), "meeting_s": 3, "silent": True},
    "half": {"processes": [{"RANK": "1", "LOCAL_RANK": "1"}]},
}


class Scene:
    def __init__(self, codes: list[int], texts: list[str], seconds: float) -> None:
        self.codes, self.texts, self.seconds = codes, texts, seconds


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "scenes.json").write_text(json.dumps(SCENES))
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "LOCAL_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WORKER), str(folder / "scenes.json"), str(folder)],
        env=environment | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    yield {
        name: Scene(
            codes, [(folder / f"{name}-{n}.txt").read_text() for n in range(len(codes))], found["seconds"][name]
        )
        for name, codes in found["codes"].items()
    }


def test_processes_meet_and_work(scenes: dict[str, Scene]) -> None:
    seen = scenes["good"]
    assert seen.codes == [0, 0, 0], seen.texts
    # Only process 0 says something; what is printed for a caller comes from all.
    assert seen.texts == [
        "all 3 are done\n0: 0 of 3, 1 thread\n",
        "1: 1 of 3, 1 thread\n",
        "2: 2 of 3, 1 thread\n",
    ]


def test_tasks_of_slurm_meet(scenes: dict[str, Scene]) -> None:
    assert scenes["slurm"].codes == [0, 0], scenes["slurm"].texts


@pytest.mark.parametrize(("name", "bad"), [("sleeps", 1), ("stopped", 2), ("first-stopped", 0)])
def test_a_process_that_hangs_is_named(scenes: dict[str, Scene], name: str, bad: int) -> None:
    seen = scenes[name]
    size = len(seen.codes)
    assert [code for rank, code in enumerate(seen.codes) if rank != bad] == [75] * (size - 1)
    first = seen.texts[0 if bad else 1]
    assert f"error: no word from process {bad} of {size} (" in first
    assert "for 4 s at step 3" in first
    assert len(first.splitlines()) == 3


@pytest.mark.parametrize(("name", "bad"), [("killed", 1), ("first-killed", 0)])
def test_a_process_that_is_killed_is_named(scenes: dict[str, Scene], name: str, bad: int) -> None:
    seen = scenes[name]
    assert [code for rank, code in enumerate(seen.codes) if rank != bad] == [75] * 2
    first = seen.texts[0 if bad else 1]
    assert f"error: process {bad} of 3 (" in first
    assert "is gone at step 3" in first
    assert len(first.splitlines()) == 3


def test_an_error_of_one_process_reaches_the_others(scenes: dict[str, Scene]) -> None:
    seen = scenes["raises"]
    assert seen.codes == [75, 75, 3]
    assert seen.texts[2] == "[process 2] error: the events of bucket 7 are not sorted\n  import the log again\n"
    assert "process 2 of 3" in seen.texts[0]
    assert "stopped at step 3: the events of bucket 7 are not sorted" in seen.texts[0]
    assert seen.texts[1] == ""  # The first process of a host speaks for all.


def test_processes_that_differ_stop_before_the_first_step(scenes: dict[str, Scene]) -> None:
    seen = scenes["seed"]
    assert seen.codes == [2, 2, 2]
    assert "do not agree: setting seed is 1 in processes 0-1, 4 in process 2" in seen.texts[0]
    assert seen.texts[1:] == ["", ""]
    seen = scenes["code"]
    assert seen.codes == [2, 2]
    assert "tackboard's code is" in seen.texts[0]
    assert "abc in process 1" in seen.texts[0]
    assert "install the same version" in seen.texts[0]


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("missing", 0, "process 1 of 3 did not come within 6 s"),
        ("missing", 1, "process 1 of 3 did not come within 6 s"),
        ("no-first", 0, "cannot reach 127.0.0.1"),
        ("twice", 0, "2 processes have rank 1"),
        ("sizes", 0, "the processes count themselves differently: 2 by process 0; 3 by process 1"),
        ("sizes", 1, "the processes count themselves differently"),
        ("interface", 1, "GLOO_SOCKET_IFNAME names eth77"),
        ("interface", 1, "allowed: lo"),
        ("interface", 0, "process 1 of 2 stopped: GLOO_SOCKET_IFNAME names eth77"),
        ("silent", 0, "does not answer as process 0 of a run would"),
        ("taken", 0, "another program uses it"),
        ("half", 0, "the environment lacks WORLD_SIZE, but has RANK, LOCAL_RANK"),
    ],
)
def test_processes_that_cannot_meet_say_why(scenes: dict[str, Scene], name: str, number: int, text: str) -> None:
    seen = scenes[name]
    assert seen.codes == [2] * len(seen.codes), seen.texts
    assert text in seen.texts[number]
    assert len(seen.texts[number].splitlines()) == 3


def test_every_end_comes_in_bounded_time(scenes: dict[str, Scene]) -> None:
    assert max(scene.seconds for scene in scenes.values()) < 60
