"""The program in this process: arguments in; exit code, output and errors out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tackboard.cli import main


class Answer(NamedTuple):
    """What one call of the program did."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The object on the last line of the output."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def tackboard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torch_settings: None
) -> Iterator[Callable[..., Answer]]:
    """`tackboard("train", "demo", …)` runs the program and gives its `Answer`."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tackboard", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main.run()
        return Answer(int(stopped.value.code or 0), *capsys.readouterr())

    with mock.patch.dict(os.environ):
        os.environ.pop("TACKBOARD_DEBUG", None)
        yield run
