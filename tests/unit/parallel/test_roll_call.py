"""The verdict on a lost process, from the words of the others. tests/dist/test_start.py loses real processes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tackboard.core.errors import DataError, LostProcess
from tackboard.parallel import roll_call
from tackboard.parallel.roll_call import broken_by, call_roll, lost_processes_named, verdict
from tackboard.parallel.training_world import ALONE, Peer, TrainingWorld

# What gloo says, in torch 2.13.
CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:13742. This is typically caused by a remote worker"
RESET = "[pair.cc:537] Read error [127.0.0.1]:13742: Connection reset by peer. This is typically caused by a remote"
LATE = "[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"


class Notes:
    """A store with the words that the other processes have written."""

    def __init__(self, *lines: str) -> None:
        self.text = "".join(f"{line}\n" for line in lines)

    def append(self, _key: str, text: str) -> None:
        self.text += text

    def get(self, _key: str) -> bytes:
        return self.text.encode()


def word(rank: int, kind: str, reason: str = "") -> str:
    return f'{{"rank": {rank}, "kind": "{kind}", "reason": "{reason}", "doing": "step 7"}}'


WORLD = TrainingWorld(rank=1, size=4, timeout_s=60, peers=tuple(Peer(f"host-{n}", 100 + n) for n in range(4)))


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "GRACE_S", 0.3)
    monkeypatch.setattr(roll_call, "FAREWELL_S", 0.0)
    monkeypatch.setattr(roll_call, "SAME_ERROR_S", 0.1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(CLOSED), "closed"),
        (RuntimeError(RESET), "closed"),
        (RuntimeError(LATE), "timed out"),
        (torch.distributed.DistBackendError("NCCL error"), "closed"),
        (RuntimeError("shape mismatch"), ""),
        (DataError("Timed out waiting"), ""),
        (None, ""),
    ],
)
def test_errors_of_a_connection_are_known(error: BaseException | None, kind: str) -> None:
    assert broken_by(error) == kind


def test_the_cause_of_an_error_counts() -> None:
    error = ValueError("the backward pass failed")
    error.__cause__ = RuntimeError(CLOSED)
    assert broken_by(error) == "closed"


@pytest.mark.parametrize(
    ("failure", "words", "got"),
    [
        ("closed", [word(0, "closed"), word(3, "closed")], "process 2 of 4 (host-2, PID 102) is gone at step 7"),
        ("closed", [word(0, "closed")], "processes 2-3 of 4 (host-2, PID 102, host-3, PID 103) are gone at step 7"),
        ("timed out", [word(0, "closed"), word(3, "closed")], "no word from process 2 of 4 (host-2, PID 102) for 60 s"),
        # The first to time out closes its connections, so the others see these closed.
        ("closed", [word(0, "timed out"), word(3, "closed")], "no word from process 2 of 4 (host-2, PID 102) for 60 s"),
        ("closed", [word(2, "stopped", "no disk")], "process 2 of 4 (host-2, PID 102) stopped at step 7: no disk"),
        (
            "timed out",
            [word(0, "timed out"), word(2, "timed out"), word(3, "timed out")],
            "the 4 processes waited for each other for 60 s at step 7, but none is gone",
        ),
        (
            "closed",
            [word(0, "closed"), word(2, "closed"), word(3, "closed")],
            "the 4 processes lost their connections at step 7",
        ),
    ],
)
def test_the_words_name_the_lost(failure: str, words: list[str], got: str) -> None:
    error = call_roll(dataclasses.replace(WORLD, store=Notes(*words)), failure, "step 7")
    assert got in error.got
    assert error.is_common
    assert len(str(error).splitlines()) == 3


def test_without_a_store_process_0_is_named() -> None:
    class Gone(Notes):
        def append(self, _key: str, _text: str) -> None:
            raise RuntimeError("Broken pipe")

    error = call_roll(dataclasses.replace(WORLD, store=Gone()), "closed", "")
    assert error.got == "process 0 of 4 (host-0, PID 100) is gone"
    assert "another process may have been lost before" in error.allowed
    assert not error.is_common  # Process 0 cannot say it.


def test_the_block_names_the_lost_process() -> None:
    world = dataclasses.replace(WORLD, store=Notes(word(0, "closed"), word(3, "closed")))
    with (
        pytest.raises(LostProcess, match="process 2 of 4 .* is gone at step 5"),
        lost_processes_named(world, lambda: "step 5"),
    ):
        raise RuntimeError(CLOSED)


def test_another_error_passes_and_is_told() -> None:
    store = Notes()
    with pytest.raises(ZeroDivisionError), lost_processes_named(dataclasses.replace(WORLD, store=store)):
        raise ZeroDivisionError("by zero")
    assert '"kind": "stopped", "reason": "ZeroDivisionError: by zero"' in store.text


def test_a_process_that_is_alone_keeps_its_errors() -> None:
    with pytest.raises(RuntimeError, match="Connection closed"), lost_processes_named(ALONE):
        raise RuntimeError(CLOSED)


def test_the_fix_goes_on_from_the_last_checkpoint() -> None:
    assert "--resume auto" in verdict(WORLD, {}, "closed", "").fix
    assert verdict(WORLD, {}, "closed", "").exit_code == 75


@pytest.mark.parametrize(
    ("rank", "words", "is_common"),
    [
        (1, [word(0, "stopped", "no such folder")], True),
        (1, [word(0, "stopped", "another reason")], False),
        (1, [word(2, "stopped", "no such folder")], False),
        (0, [word(1, "stopped", "no such folder")], False),
    ],
)
def test_an_error_that_process_0_has_too_is_printed_once(rank: int, words: list[str], *, is_common: bool) -> None:
    world = dataclasses.replace(WORLD, rank=rank, store=Notes(*words))
    with pytest.raises(DataError) as caught, lost_processes_named(world):
        raise DataError("no such folder")
    assert caught.value.is_common is is_common
