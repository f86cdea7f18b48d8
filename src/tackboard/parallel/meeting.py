"""Finds the other processes of a run. It reads the environment that a launcher sets, and returns a `TrainingWorld`.

torchrun, PyTorchJob and Ray Train set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun sets SLURM_PROCID and
SLURM_NTASKS instead, and the batch script sets the two MASTER variables.

Decided: the processes first meet at a board, a text in the TCPStore of process 0 (or of torchrun's agent). Each process
appends a line with its number, the size of the world, its host and its PID, so an error can name processes that did not
come, that came twice, or that state another number of processes. A process that cannot go on appends its reason, and
the others stop with it. Then the processes connect twice: first for a trial, within the time of the meeting, then for
the run, with `timeout_s`. torch has only one time limit for connecting to a group and for working in it. Calls of torch
that may never return run in a thread, which is abandoned after the time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from tackboard.core.errors import TackboardError, UsageError, one_line
from tackboard.core.progress import speak_as
from tackboard.parallel.config import ParallelConfig
from tackboard.parallel.training_world import ALONE, Peer, TrainingWorld, named

T = TypeVar("T")
PrefixStore, TCPStore = distributed.PrefixStore, distributed.TCPStore  # type: ignore[attr-defined]
MEETING_S = 120.0
"""Longest time for the first meeting of the processes, which may start at different times."""
RESOLVE_S = 15.0
"""Longest time for which MASTER_ADDR may be unknown. In Kubernetes, a name appears a moment after its pod."""
LINE_S = 1.0
"""Seconds that a process which cannot go on waits before it ends, so that the others can read the board."""
_has_met = False
LAUNCHERS = "start the run with torchrun, srun, PyTorchJob or Ray Train (docs/distributed.md)"
FROM_TORCHRUN = {name: name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
FROM_SLURM = FROM_TORCHRUN | {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What the environment says about this process. `local_rank` is None if it does not number a host's processes."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    address: str = ""
    port: int = 0
    has_agent: bool = False
    """Whether torchrun's agent keeps the store. Otherwise process 0 keeps it."""
    attempt: str = "0"
    """Number of restarts by torchrun, whose store may outlive an attempt."""


def start_world(config: ParallelConfig, device_setting: str, meeting_s: float | None = None) -> TrainingWorld:
    """Connects all processes of the run and returns their world, or ALONE if the environment names no other process.

    `device_setting` is `training.device`. Raises UsageError if the processes cannot meet within `meeting_s`. None means
    `parallel.timeout_s`, but at most MEETING_S.
    """
    place = read_place(os.environ)
    if place.size == 1:
        return ALONE
    speak_as(place.rank, is_first_on_host=not place.local_rank)
    if distributed.is_initialized():  # Ray Train has connected the processes, without our store and our timeout.
        distributed.destroy_process_group()
    seconds = meeting_s or min(config.timeout_s, MEETING_S)
    deadline = time.monotonic() + seconds
    global _has_met
    _has_met = True
    store = _open_store(place, deadline)
    with _reason_told(store, place.rank):
        check_packages()
        _check_interface()
        peers = _meet(store, place, deadline, seconds)
        place = _with_local_rank(place, peers)
        speak_as(place.rank, is_first_on_host=place.local_rank == 0)
        device = _device(place, device_setting)
        _connect(store, place, peers, seconds)
    timeout = timedelta(seconds=config.timeout_s)
    store.set_timeout(timeout)  # Groups that are made later meet in this store as well.
    # TorchRec reads these variables, and srun does not set them.
    local_size = sum(peer.host == peers[place.rank].host for peer in peers)
    numbers = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    os.environ.update({name: str(number) for name, number in (numbers | {"LOCAL_WORLD_SIZE": local_size}).items()})
    torch.set_num_threads(1)
    backend = "gloo" if device.type == "cpu" else "nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, store=PrefixStore("work", store), rank=place.rank, world_size=place.size, timeout=timeout
    )
    is_host = backend == "gloo"
    return TrainingWorld(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank or 0,
        local_size=local_size,
        device=device,
        host_group=distributed.group.WORLD if is_host else distributed.new_group(backend="gloo", timeout=timeout),
        store=store,
        peers=peers,
        timeout_s=config.timeout_s,
    )


def has_met() -> bool:
    """Returns whether this process has connected to others."""
    return _has_met


def end_world(world: TrainingWorld) -> None:
    """Closes the connections to the other processes."""
    if not world.is_alone and distributed.is_initialized():
        distributed.destroy_process_group()


def read_place(environment: Mapping[str, str]) -> Place:
    """Returns the place of this process. Raises UsageError if variables are missing or are not numbers."""
    names = FROM_TORCHRUN
    # A batch script has SLURM_PROCID as well, but only the tasks of srun are processes of a run.
    is_task = "SLURM_PROCID" in environment and ("SLURM_STEP_NUM_TASKS" in environment or "MASTER_ADDR" in environment)
    if is_task and "RANK" not in environment and "WORLD_SIZE" not in environment:
        names = FROM_SLURM
    there = {name: environment[source] for name, source in names.items() if environment.get(source)}
    if there.get("WORLD_SIZE", "" if "RANK" in there else "1") == "1":
        return Place()
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [names[name] for name in needed if name not in there]:
        raise UsageError(
            f"the environment lacks {', '.join(missing)}, but has {', '.join(names[name] for name in there)}",
            allowed="allowed: all of them, or neither RANK nor WORLD_SIZE for a single process",
            fix=LAUNCHERS,
        )
    size = _number(there["WORLD_SIZE"], names["WORLD_SIZE"], 1, 1 << 20)
    reason = f", because {names['WORLD_SIZE']} is {size}"
    local_rank = there.get("LOCAL_RANK")
    return Place(
        rank=_number(there["RANK"], names["RANK"], 0, size - 1, reason),
        size=size,
        local_rank=None if local_rank is None else _number(local_rank, names["LOCAL_RANK"], 0, size - 1, reason),
        address=there["MASTER_ADDR"],
        port=_number(there["MASTER_PORT"], "MASTER_PORT", 1, 65535),
        has_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(text: str, name: str, least: int, largest: int, reason: str = "") -> int:
    if text.isascii() and text.isdigit() and least <= int(text) <= largest:
        return int(text)
    raise UsageError(
        f"{name} is {text!r} in the environment", allowed=f"allowed: {least} to {largest}{reason}", fix=LAUNCHERS
    )


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what `call` returns. Raises TimeoutError after `seconds`; the call then goes on in a thread of its own,
    and its result is ignored."""
    found: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised again below.
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return found[0]


def _open_store(place: Place, deadline: float) -> Any:
    """Returns the store in which the processes meet. Process 0 opens it, if torchrun's agent has not done so."""
    is_keeper = place.rank == 0 and not place.has_agent
    where = f"{place.address}:{place.port}"
    _check_address(place, deadline)
    if not is_keeper:
        _wait_for_listener(place, deadline)
    left = max(1.0, deadline - time.monotonic())

    def connect() -> Any:
        return TCPStore(
            place.address, place.port, place.size, is_keeper, timedelta(seconds=left), wait_for_workers=False
        )

    try:
        store = within(left, connect)
    except TimeoutError:
        raise UsageError(
            f"{where} (MASTER_ADDR, MASTER_PORT) does not answer as process 0 of a run would",
            allowed="allowed: an address of the host of process 0, and a port that no other program uses",
            fix="choose another MASTER_PORT; give every process the same MASTER_ADDR and the same MASTER_PORT",
        ) from None
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise _unreachable(place, _plain(error)) from None
        raise UsageError(
            f"process 0 cannot listen on port {place.port} (MASTER_PORT): another program uses it",
            allowed="allowed: a free port of the host of process 0",
            fix="give every process another MASTER_PORT, or end the earlier run that still holds this one",
        ) from None
    return PrefixStore(f"tackboard-{place.attempt}", store)


def _check_address(place: Place, deadline: float) -> None:
    """Raises UsageError if MASTER_ADDR cannot be resolved within RESOLVE_S."""
    until = min(deadline, time.monotonic() + RESOLVE_S)
    while True:
        try:
            within(until - time.monotonic(), lambda: socket.getaddrinfo(place.address, place.port))
            return
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else str(error)
            if time.monotonic() + 1 >= until:
                raise UsageError(
                    f"MASTER_ADDR is {place.address!r}, which {socket.gethostname()} cannot resolve: {reason}",
                    allowed="allowed: a name or an IP address of the host of process 0",
                    fix="correct MASTER_ADDR, or give the IP address",
                ) from None
        time.sleep(1)


def _wait_for_listener(place: Place, deadline: float) -> None:
    """Returns when something listens at the address of process 0. torch itself may wait twice as long as it should."""
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((place.address, place.port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() + 0.2 >= deadline:
                raise _unreachable(place, error.strerror or str(error)) from None
        time.sleep(0.2)


def _unreachable(place: Place, reason: str) -> UsageError:
    keeper = "torchrun" if place.has_agent else "process 0"
    return UsageError(
        f"process {place.rank} on {socket.gethostname()} cannot reach {place.address}:{place.port}: {reason}",
        allowed=f"{keeper} must listen there within the time of the first meeting, and no firewall may be in between",
        fix=f"check {keeper} at that address, MASTER_ADDR and MASTER_PORT; this host's interfaces: {_interfaces()}",
    )


@contextlib.contextmanager
def _reason_told(store: Any, rank: int) -> Iterator[None]:
    """If the block raises an error that only this process has, tells the others, so that they do not wait for it.

    Then waits a moment: when process 0 ends, the board is lost, and the others must have read it before that.
    """
    try:
        yield
    except TackboardError as error:
        if not error.is_common:
            line = {"rank": rank, "stopped": error.got}
            with contextlib.suppress(RuntimeError, TimeoutError):
                within(5.0, lambda: _write(store, line))
        time.sleep(LINE_S)
        raise


def check_packages() -> None:
    """Raises UsageError if training in several processes is not possible because TorchRec or FBGEMM is missing."""
    if missing := [name for name in ("torchrec", "fbgemm_gpu") if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"training in several processes needs TorchRec, but {' and '.join(missing)} cannot be imported",
            allowed="one process trains without TorchRec",
            fix="make distributed",
        )


def _check_interface() -> None:
    """Raises UsageError if GLOO_SOCKET_IFNAME names an interface that this host lacks."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = {name for _, name in socket.if_nameindex()}
    if missing := [name for name in wanted.split(",") if name and name not in there]:
        raise UsageError(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which {socket.gethostname()} does not have",
            allowed=f"allowed: {_interfaces()}",
            fix="choose the interface that reaches the other hosts (lo if there are none), or unset the variable",
        )


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def _write(store: Any, line: Mapping[str, Any]) -> None:
    store.append("board", json.dumps(line) + "\n")


def _meet(store: Any, place: Place, deadline: float, seconds: float) -> tuple[Peer, ...]:
    """Waits until every process has written its line; returns the processes by rank."""
    own = {"rank": place.rank, "size": place.size, "host": socket.gethostname(), "pid": os.getpid()}
    here: dict[int, Peer] = {}
    while time.monotonic() < deadline:
        try:
            text = within(deadline - time.monotonic(), lambda: _read_board(store, own))
        except (TimeoutError, RuntimeError):
            break
        lines = [json.loads(line) for line in text.splitlines()]
        _check_board(lines, place)
        here = {line["rank"]: Peer(line["host"], line["pid"]) for line in lines if "host" in line}
        if len(here) == place.size:
            return tuple(here[rank] for rank in range(place.size))
        time.sleep(0.1)
    missing = [rank for rank in range(place.size) if rank not in here]
    raise _common(
        f"{named(missing, place.size)} did not come within {seconds:.0f} s",
        allowed=f"{named(here, place.size)} waited at {place.address}:{place.port}",
        fix="see what the missing processes print; they need the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
    )


def _read_board(store: Any, own: dict[str, Any]) -> str:
    """Returns the board. Before that, writes the line `own`, and empties it, so that no later call writes it again."""
    if own:
        _write(store, own)
        own.clear()
    return bytes(store.get("board")).decode()


def _check_board(lines: list[dict[str, Any]], place: Place) -> None:
    """Raises UsageError if the board shows that the processes cannot become one world."""
    for line in lines:
        if "stopped" in line:
            raise _common(
                f"process {line['rank']} of {place.size} stopped: {line['stopped']}",
                allowed="all processes of a run work together, so this one stops too",
                fix=f"see what process {line['rank']} printed",
            )
    sizes: dict[int, list[int]] = {}
    hosts: dict[int, list[str]] = {}
    for line in lines:
        sizes.setdefault(line["size"], []).append(line["rank"])
        hosts.setdefault(line["rank"], []).append(f"{line['host']}, PID {line['pid']}")
    if len(sizes) > 1:
        told = "; ".join(f"{size} by {named(ranks, None)}" for size, ranks in sorted(sizes.items()))
        raise _common(
            f"the processes count themselves differently: {told}",
            allowed="allowed: the same WORLD_SIZE in the environment of every process",
            fix=LAUNCHERS,
        )
    for rank, where in sorted(hosts.items()):
        if len(where) > 1:
            raise _common(
                f"{len(where)} processes have rank {rank}: {'; '.join(where)}",
                allowed="allowed: each rank from 0 to WORLD_SIZE - 1 once",
                fix=f"{LAUNCHERS}, and end processes of earlier runs that use the same MASTER_PORT",
            )


def _plain(error: BaseException) -> str:
    """Returns the first line of torch's error, without the places in torch's source code that it names."""
    return re.sub(r"\[/\S+\] *", "", one_line(str(error).partition("\n")[0]))[:200]


def _common(got: str, *, allowed: str, fix: str) -> UsageError:
    error = UsageError(got, allowed=allowed, fix=fix)
    error.is_common = True
    return error


def _with_local_rank(place: Place, peers: tuple[Peer, ...]) -> Place:
    if place.local_rank is not None:
        return place
    host = peers[place.rank].host
    return dataclasses.replace(place, local_rank=sum(peer.host == host for peer in peers[: place.rank]))


def _device(place: Place, setting: str) -> torch.device:
    """Returns the device of this process: the CPU, or the GPU with the number that the process has on its host."""
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus, number = torch.cuda.device_count(), place.local_rank or 0
    if setting not in ("auto", "cuda"):
        raise UsageError(
            f"training.device is {setting}, but there are {place.size} processes",
            allowed="allowed: cuda, which gives each process of a host its own GPU, or cpu",
            fix="--set training.device=cuda",
        )
    if number >= num_gpus:
        raise UsageError(
            f"process {place.rank} is number {number} on {socket.gethostname()}, where torch sees {num_gpus} GPUs",
            allowed="allowed: at most one process for each GPU of a host, counted from 0",
            fix="start fewer processes on this host, or --set training.device=cpu",
        )
    return torch.device("cuda", number)


def _connect(store: Any, place: Place, peers: tuple[Peer, ...], seconds: float) -> None:
    """Connects every process to every other one, as a trial. Raises UsageError if that fails or takes too long."""

    def connect() -> bool:
        distributed.init_process_group(
            "gloo",
            store=PrefixStore("meeting", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=seconds),
        )
        distributed.barrier()
        distributed.destroy_process_group()
        return True

    try:
        within(seconds + 5, connect)
    except (RuntimeError, TimeoutError) as error:
        with contextlib.suppress(RuntimeError, TimeoutError):  # Another process may have written the true reason.
            text = within(LINE_S, lambda: _read_board(store, {}))
            _check_board([json.loads(line) for line in text.splitlines()], place)
        others = sorted({peer.host for peer in peers} - {peers[place.rank].host})
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        used = f"GLOO_SOCKET_IFNAME={interface}" if interface else "the interface of its host name"
        raise UsageError(
            f"process {place.rank} on {peers[place.rank].host} cannot connect to the others by {used}: "
            + _plain(error),
            allowed="allowed: an interface whose address every other host can reach"
            + (f" (hosts: {', '.join(others)[:200]})" if others else ""),
            fix=f"set GLOO_SOCKET_IFNAME on every host; this host has: {_interfaces()}",
        ) from None
