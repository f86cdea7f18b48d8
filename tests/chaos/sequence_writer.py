"""Writes to a sequence store and dies, again and again, until everything is written or it has died often enough.

    python sequence_writer.py URL ACKS NUM_CALLS kill DELAY_MS SEED NUM_KILLS   killed from outside after some calls
    python sequence_writer.py URL ACKS NUM_CALLS point POINT EVERY              kills itself at every EVERY-th POINT
    python sequence_writer.py URL ACKS NUM_CALLS once                           one writer, not disturbed by us

Imports are paid once: each writer and each checker is a fork of this process. A writer notes every acknowledgement in
the file ACKS, and the next one starts with the call behind the last of them, as a client that got no answer would.
After every death a checker looks for every acknowledged event. The last line of the output is a JSON object.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tackboard.core import files
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.opening import open_store

NUM_USERS = 3


def event(number: int) -> dict[str, Any]:
    """The `number`-th event: some are late, two of three share their time with another."""
    time_ms = 10_000 + number // 3 * 10 - (137 if number % 4 == 0 else 0)
    return {
        "item_id": number,
        "action": f"action {number % 5}",
        "surface": "home",
        "time_ms": time_ms,
        "received_ms": time_ms + 5,
    }


def numbers_of(call: int) -> list[int]:
    """The events of a call: one to nine, of several users."""
    first = sum(1 + c % 9 for c in range(call % 9)) + 45 * (call // 9)
    return list(range(first, first + 1 + call % 9))


def user_of(number: int) -> int:
    return number * 7 % NUM_USERS


def write(url: str, acks: Path, num_calls: int) -> None:
    """Makes the calls that are not acknowledged yet."""
    with open_store(url) as store, acks.open("ab", buffering=0) as noted:
        for call in range(num_acknowledged(acks), num_calls):
            numbers = numbers_of(call)
            store.append_many([user_of(number) for number in numbers], [event(number) for number in numbers])
            noted.write(b".")


def num_acknowledged(acks: Path) -> int:
    return acks.stat().st_size


def check(url: str, acks: Path, num_calls: int) -> None:
    """Every acknowledged event is there, once, in order; at most one call more than was acknowledged is."""
    num_acks = num_acknowledged(acks)
    acknowledged = {number for call in range(num_acks) for number in numbers_of(call)}
    allowed = acknowledged | (set(numbers_of(num_acks)) if num_acks < num_calls else set())
    with open_store(url) as store:
        found: list[int] = []
        for user in range(NUM_USERS):
            mine = store.read(user, ["item_id", "time_ms"]).columns
            items = mine["item_id"].values.tolist()
            assert items == sorted(items, key=lambda number: (event(number)["time_ms"], number)), "out of order"
            assert all(user_of(number) == user for number in items)
            found += items
        assert len(found) == len(set(found)), "an event is there twice"
        assert acknowledged <= set(found), f"lost: {sorted(acknowledged - set(found))[:5]}"
        assert set(found) <= allowed
        check_integrity(store)


def check_integrity(store: SequenceStore) -> None:
    database = getattr(store, "_db", None)
    if database is not None:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def fork(function: Any, *arguments: Any) -> int:
    """Runs a function in a child; the child's process id."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the child must end here.
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(point: str, every: int) -> None:
    passed = 0

    def stand(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed % every == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    files.observer = stand


def main() -> None:
    url, acks, num_calls, mode = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    acks.touch()
    # A writer that first had to import this would be killed before its first call, for ever.
    with contextlib.suppress(ImportError):
        importlib.import_module("redis")
    if mode == "once":
        write(url, acks, num_calls)
        return
    num_kills = 0
    draw = random.Random(int(sys.argv[6]) if mode == "kill" else 0)
    most_kills = int(sys.argv[7]) if mode == "kill" else num_calls
    while num_acknowledged(acks) < num_calls and num_kills < most_kills:
        if mode == "point":
            # Another number of steps each time, so that the calls at which it dies differ.
            die_at(sys.argv[5], int(sys.argv[6]) + num_kills % 3)
            pid = fork(write, url, acks, num_calls)
            files.observer = None
        else:
            before = num_acknowledged(acks)
            pid = fork(write, url, acks, num_calls)
            # Mostly among its calls, sometimes on its way to the first of them.
            while draw.random() < 0.99 and num_acknowledged(acks) == before:
                time.sleep(0.0005)
            time.sleep(draw.random() * float(sys.argv[5]) / 1000)
            os.kill(pid, signal.SIGKILL)
        code = code_of(pid)
        assert code in (0, -signal.SIGKILL), f"a writer ended with {code}"
        num_kills += code != 0
        assert code_of(fork(check, url, acks, num_calls)) == 0
    print(json.dumps({"num_kills": num_kills, "num_calls": num_acknowledged(acks)}))


if __name__ == "__main__":
    main()
