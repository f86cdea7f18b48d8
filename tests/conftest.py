"""What every test shares: one thread per process, property tests that give the same answer every time, the program."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

# Before anything imports torch. Tests start processes of their own, and two cores carry them all.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `train` records code to trust: a folder of the tests', in this process and in those it starts."""
    folder = tmp_path_factory.mktemp("state")
    with mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(folder)}):
        yield folder


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str


def run_command(*arguments: str, cwd: Path) -> Answer:
    """`tackboard ARGUMENTS` in this process, from the folder `cwd`. Starting a process would cost seconds each time."""
    import torch

    from tackboard.cli import main

    out, err = io.StringIO(), io.StringIO()
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TACKBOARD_")}
    try:
        with (
            contextlib.chdir(cwd),
            mock.patch.object(sys, "argv", ["tackboard", *arguments]),
            mock.patch.dict(os.environ, environment, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main.run()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert isinstance(ended.value.code, int)
    return Answer(ended.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def tackboard() -> Callable[..., Answer]:
    """`tackboard("train", …, cwd=folder)` runs a command and gives its code and what it printed."""
    return run_command
