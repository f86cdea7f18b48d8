"""Finds out which process is gone or hangs when the connections of a run break.

torch says only that a connection was closed, or that something took longer than the timeout. So a process whose
communication fails writes a note, its word, into the store of the run, and waits a moment for the words of the others.
Then it knows more: a process that stopped by an error of its own has said so, and a process without a word is gone or
hangs. If any process timed out, the silent process hangs (or its host is cut off); if connections were closed, the
silent process has ended.

Decided: this needs no heartbeat. A heartbeat from a thread goes on while the work of its process hangs. The step number
would not help either: in a synchronous run, a hung process and those that wait for it are at the same step.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import distributed

from tackboard.core.errors import LostProcess, TackboardError, one_line
from tackboard.parallel.meeting import within
from tackboard.parallel.training_world import TrainingWorld, named

GRACE_S = 5.0
"""Seconds that a process gives the others to write their words. Processes that wait fail at about the same time."""
SAME_ERROR_S = 0.5
"""Seconds for which a process with an error checks whether process 0 reports the same error."""
FAREWELL_S = 1.0
"""Seconds that process 0 goes on after it has read the words, because others may still read the store that it keeps."""
CLOSED = re.compile(r"Connection (closed|reset|refused)|Broken pipe|(Read|Write) error|Socket closed|ncclRemoteError")
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
FIX = "then continue with --resume auto"

KEEPER = "process 0 keeps the notes that name a lost process, so another process may have been lost before process 0"


@contextlib.contextmanager
def lost_processes_named(world: TrainingWorld, doing: Callable[[], str] = lambda: "") -> Iterator[None]:
    """If communication fails in the block, raises LostProcess that names the lost process.

    `doing` returns what this process does at the moment, for example `step 12`. Any other error passes, after the other
    processes have been told of it.
    """
    try:
        yield
    except BaseException as error:
        if world.is_alone:
            raise
        if failure := broken_by(error):
            raise call_roll(world, failure, doing()) from error
        reason = error.got if isinstance(error, TackboardError) else f"{type(error).__name__}: {one_line(str(error))}"
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(GRACE_S, lambda: _write(world, "stopped", reason[:200], doing()))
            if isinstance(error, TackboardError) and not error.is_common:
                error.is_common = within(GRACE_S, lambda: _says_first(world, reason[:200]))
        raise


def broken_by(error: BaseException | None) -> str:
    """Returns `closed` or `timed out` if an error comes from a broken connection between processes, else an empty text.

    Errors that caused the error count as well.
    """
    while error is not None:
        if isinstance(error, RuntimeError):  # torch raises plain RuntimeErrors, and subclasses of RuntimeError.
            text = str(error)
            if CLOSED.search(text):
                return "closed"
            if TIMED_OUT.search(text):
                return "timed out"
            if isinstance(error, distributed.DistError):
                return "closed"
        error = error.__cause__
    return ""


def call_roll(world: TrainingWorld, failure: str, doing: str) -> LostProcess:
    """Tells the others that communication failed here; returns the error that names the lost process."""
    deadline = time.monotonic() + GRACE_S
    words: dict[int, dict[str, str]] = {}
    try:
        within(GRACE_S, lambda: _write(world, failure, "", doing))
        while time.monotonic() < deadline:
            words = within(max(0.1, deadline - time.monotonic()), lambda: _read(world))
            if len(words) == world.size or any(word["kind"] == "stopped" for word in words.values()):
                break
            time.sleep(0.1)
    except (RuntimeError, TimeoutError):
        words = {}  # The store went with its keeper.
    if words and world.is_first:
        time.sleep(FAREWELL_S)
    elif 0 in words or any(word["kind"] == "stopped" for word in words.values()):
        time.sleep(2 * FAREWELL_S)  # Process 0 prints first: a launcher that sees one process end ends the others.
    return verdict(world, words, failure, doing)


def verdict(world: TrainingWorld, words: dict[int, dict[str, str]], failure: str, doing: str) -> LostProcess:
    """Returns the error for the words that processes wrote. Without any word, process 0 and its store are gone."""
    at = f" at {doing}" if doing else ""
    stopped = [rank for rank, word in words.items() if word["kind"] == "stopped"]
    silent = [rank for rank in range(world.size) if rank not in words] if words else [0]
    timed_out = failure == "timed out" or any(word["kind"] == "timed out" for word in words.values())
    where = ", ".join(f"{world.peers[rank].host}, PID {world.peers[rank].pid}" for rank in (stopped or silent)[:3])
    if stopped:
        who = f"{named(stopped, world.size)} ({where})"
        error = LostProcess(
            f"{who} stopped{at}: {words[stopped[0]]['reason']}",
            allowed="all processes of a run work together, so this one stops too",
            fix=f"see what {named(stopped, None)} printed; {FIX}",
        )
    elif not silent:
        what = f"waited for each other for {world.timeout_s:g} s" if timed_out else "lost their connections"
        error = LostProcess(
            f"the {world.size} processes {what}{at}, but none is gone",
            allowed="every process must reach every other one, and do the same work",
            fix=f"check the network between the hosts; {FIX}",
        )
    elif timed_out:
        error = LostProcess(
            f"no word from {named(silent, world.size)} ({where}) for {world.timeout_s:g} s{at}",
            allowed=f"a process may keep the others waiting for parallel.timeout_s = {world.timeout_s:g} s",
            fix=f"see what hangs there, or whether the host is cut off; {FIX}",
        )
    else:
        error = LostProcess(
            f"{named(silent, world.size)} ({where}) {'is' if len(silent) == 1 else 'are'} gone{at}",
            allowed="all processes of a run work together, so this one stops too" if words else KEEPER,
            fix=f"see what it printed last, and whether its host ran out of memory (dmesg); {FIX}",
        )
    error.is_common = 0 in words or bool(stopped)  # Then process 0 prints this error, or has printed its own.
    return error


def _says_first(world: TrainingWorld, reason: str) -> bool:
    """Returns whether process 0 stops for the same reason as this process. If so, this process need not print it."""
    deadline = time.monotonic() + SAME_ERROR_S
    while not world.is_first and time.monotonic() < deadline:
        if (word := _read(world).get(0)) is not None:
            return bool(word["reason"] == reason)
        time.sleep(0.05)
    return False


def _write(world: TrainingWorld, kind: str, reason: str, doing: str) -> None:
    word = {"rank": world.rank, "kind": kind, "reason": reason, "doing": doing}
    world.store.append("words", json.dumps(word) + "\n")


def _read(world: TrainingWorld) -> dict[int, dict[str, Any]]:
    """Returns the first word of each process."""
    found: dict[int, dict[str, Any]] = {}
    for line in bytes(world.store.get("words")).decode().splitlines():
        word = json.loads(line)
        found.setdefault(word["rank"], word)
    return found
