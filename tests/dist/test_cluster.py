"""Two raylets and a trainer in neither: batches equal, step by step, those made in one process."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset
from tackboard.events.dataset import open_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
WORLD = WorldConfig(num_users=120, num_items=80, num_topics=5, median_events=12.0, max_events=60)
MARK = "TACKBOARD_TEST_OF_CLUSTER"
WARNINGS = ("-W", "error", "-W", "ignore::DeprecationWarning:ray.data.context")
"""Making its own context, Ray Data warns of a setting of its own."""


def network_of_its_own() -> list[str]:
    """The words before a command that give it a network with nothing but loopback: Ray listens on every other one."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: make install GROUP=ray")
    for words in (["unshare", "-n"], ["unshare", "-r", "-n"]):
        command = [*words, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        try:
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("no network of its own for Ray: this needs `unshare` and `ip`, and the right to use them")


def marked_processes(mark: str) -> list[int]:
    """Processes that were started with `mark` in their environment, by whichever process in between."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    command = network_of_its_own()
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 128)
        dataset = write_world(WORLD, folder, "small")
        write_world(WORLD, folder, "asked")
    asked = folder / "asked"
    label_dataset(open_dataset(asked), LabelConfig(labels=(Label("click", 3_600_000),)), quiet=True)
    # Ray's sockets lie there, and a socket's path has at most 107 characters.
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    words = [
        sys.executable,
        *WARNINGS,
        str(HERE / "cluster_trainer.py"),
        str(dataset),
        str(asked),
        str(folder / "answers"),
        sockets,
    ]
    # Ray writes its address to RAY_TMPDIR/ray whatever other folder it was given, and does not make that folder.
    Path(sockets, "ray").mkdir()
    environment = os.environ | {MARK: sockets, "RAY_TMPDIR": sockets, "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            [*command, *words], env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        until = time.monotonic() + 20
        while (left := marked_processes(sockets)) and time.monotonic() < until:
            time.sleep(0.1)
        found = {"left": left}
        for line in (folder / "answers").read_text().splitlines():
            found |= json.loads(line)
        yield found
    finally:
        for pid in marked_processes(sockets):
            os.kill(pid, 9)
        shutil.rmtree(sockets, ignore_errors=True)


def test_one_trainer_gets_every_step_of_two_epochs(answers: dict[str, Any]) -> None:
    seen = answers["one_trainer"]
    assert seen["steps"] == seen["expected"] == list(range(len(seen["expected"])))
    assert not seen["different"]
    assert len(seen["expected"]) > seen["tasks"] > 10


def test_both_raylets_work_and_the_trainer_is_in_neither(answers: dict[str, Any]) -> None:
    seen = answers["killed"]
    assert len(set(seen["raylets"])) == 2
    assert seen["trainer"] not in seen["raylets"]


def test_it_begins_at_any_step_and_leaves_out_any(answers: dict[str, Any]) -> None:
    seen = answers["resumed"]
    assert seen["steps"] == seen["expected"]
    assert seen["expected"][0] > 0
    assert not seen["different"]


def test_two_trainers_get_their_shares(answers: dict[str, Any]) -> None:
    seen = answers["two_trainers"]
    assert [rank["steps"] for rank in seen["ranks"]] == [seen["expected"]] * 2
    assert [rank["different"] for rank in seen["ranks"]] == [[], []]
    assert len({rank["pid"] for rank in seen["ranks"]} | {seen["trainer"]}) == 3
    sizes = [rank["num_bytes"] for rank in seen["ranks"]]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


def test_two_trainers_get_their_shares_of_requests(answers: dict[str, Any]) -> None:
    seen = answers["requests"]
    assert [rank["steps"] for rank in seen["ranks"]] == [seen["expected"]] * 2
    assert [rank["different"] for rank in seen["ranks"]] == [[], []]
    assert len(seen["expected"]) > seen["tasks"] > 4
    assert all(rank["num_bytes"] > 0 for rank in seen["ranks"])


def test_a_killed_worker_changes_no_batch(answers: dict[str, Any]) -> None:
    seen = answers["killed"]
    assert (len(seen["raylets"]), seen["new_workers"]) == (2, 1)
    assert seen["steps"] == seen["expected"]
    assert not seen["different"]


def test_a_lost_cluster_is_named(answers: dict[str, Any]) -> None:
    kind, got, _, fix = answers["lost"]["error"]
    assert kind == "UsageError"
    assert "stopped sending batches: ActorDied" in got
    assert "--resume auto" in fix


def test_workers_that_do_not_see_the_dataset_say_so(answers: dict[str, Any]) -> None:
    kind, got, _, fix = answers["unseen"]["error"]
    assert kind == "DataError"
    assert "MANIFEST.json" in got and "worker on" in got
    assert "every machine" in fix


def test_more_workers_than_the_cluster_has_are_refused(answers: dict[str, Any]) -> None:
    kind, got, _, fix = answers["too_many"]["error"]
    assert kind == "UsageError"
    assert "data.num_workers is 3" in got and "2 CPUs" in got
    assert "data.num_workers=2" in fix


def test_no_steps_are_no_batches(answers: dict[str, Any]) -> None:
    assert answers["nothing"]["steps"] == []


def test_no_process_is_left(answers: dict[str, Any]) -> None:
    assert answers["left"] == []
