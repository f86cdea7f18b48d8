"""What the environment says about a process, and the errors of a process that cannot meet the others.

tests/dist/test_start.py lets processes meet.
"""

from __future__ import annotations

import socket
import time

import pytest
import torch

from tackboard.core.errors import UsageError
from tackboard.parallel import meeting
from tackboard.parallel.config import ParallelConfig
from tackboard.parallel.meeting import Place, end_world, read_place, start_world, within
from tackboard.parallel.training_world import ALONE, Peer

MASTER = {"MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MASTER}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", **MASTER}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", **MASTER},
        MASTER,
        {"LOCAL_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # A batch script without srun.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_without_others_is_alone(environment: dict[str, str]) -> None:
    assert read_place(environment) == Place()


def test_launchers_say_the_place() -> None:
    assert read_place(TORCHRUN) == Place(rank=5, size=8, local_rank=1, address="host-a", port=29500)
    assert read_place(SLURM) == Place(rank=3, size=4, local_rank=1, address="host-a", port=29500)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = read_place(SLURM | TORCHRUN | agent)  # torchrun inside a task of Slurm
    assert (place.rank, place.has_agent, place.attempt) == (5, True, "2")
    without_local = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert read_place(without_local).local_rank is None


@pytest.mark.parametrize(
    ("environment", "got"),
    [
        ({"RANK": "0"}, "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT, but has RANK"),
        ({"WORLD_SIZE": "2", **MASTER}, "lacks RANK, but has WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "lacks MASTER_PORT"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
            "lacks MASTER_ADDR, MASTER_PORT, but has SLURM_PROCID, SLURM_NTASKS",
        ),
        (TORCHRUN | {"RANK": "8"}, "RANK is '8'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        (SLURM | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID is '4'"),
    ],
)
def test_half_an_environment_is_refused(environment: dict[str, str], got: str) -> None:
    with pytest.raises(UsageError, match=got) as caught:
        read_place(environment)
    assert caught.value.allowed and caught.value.fix


def test_one_process_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert start_world(ParallelConfig(), "cpu") is ALONE
    end_world(ALONE)


def test_an_address_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_place: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match="MASTER_ADDR is 'nowhere', which .* cannot resolve: Name or service"):
        meeting._check_address(Place(address="nowhere", port=1), time.monotonic() + 0.5)


def test_missing_packages_name_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs TorchRec, but torchrec and fbgemm_gpu cannot") as caught:
        meeting.check_packages()
    assert caught.value.fix == "make distributed"


def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME names eth77") as caught:
        meeting._check_interface()
    assert "lo" in caught.value.allowed


def test_hosts_number_their_processes() -> None:
    peers = (Peer("a", 1), Peer("b", 2), Peer("a", 3), Peer("b", 4))
    places = [meeting._with_local_rank(Place(rank=rank, size=4), peers) for rank in range(4)]
    assert [place.local_rank for place in places] == [0, 0, 1, 1]
    told = Place(rank=2, size=4, local_rank=3)
    assert meeting._with_local_rank(told, peers) is told


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = Place(rank=3, size=4, local_rank=1)
    assert meeting._device(place, "auto") == meeting._device(place, "cuda") == torch.device("cuda", 1)
    assert meeting._device(place, "cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="training.device is cuda:0, but there are 4 processes"):
        meeting._device(place, "cuda:0")
    with pytest.raises(UsageError, match="number 2 on .*, where torch sees 2 GPUs"):
        meeting._device(Place(rank=2, size=4, local_rank=2), "auto")


def test_a_call_without_an_answer_is_given_up() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.1, lambda: time.sleep(1))
    assert time.monotonic() - began < 0.9
