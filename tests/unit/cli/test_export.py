"""`tackboard export`: a bundle where the user said, and a word on how to serve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.bundle.signature import read_bundle
from tackboard.core.rundir import RunDirectory

Program = Callable[..., Any]


def test_a_run_becomes_a_bundle(tackboard: Program, trained_run: RunDirectory, tmp_path: Path) -> None:
    answer = tackboard(
        "export", trained_run.path, "--out", tmp_path / "one", "--name", "shop", "--version", "7", "--json"
    )
    assert answer.code == 0, answer.err
    signature = read_bundle(tmp_path / "one")
    assert (signature.name, signature.version) == ("shop", "7")
    assert signature.tables["item_tables.weight"]["dtype"] == "fp16"
    assert answer.json()["bytes"] == sum(p.stat().st_size for p in (tmp_path / "one").rglob("*") if p.is_file())
    text = tackboard("export", trained_run.path, "--out", tmp_path / "two", "--tables", "fp32").out
    assert text.splitlines()[-1] == f"serve it with: tackboard serve {tmp_path / 'two'}"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["{run}", "--out", "{out}", "--name", "a/b"], 2, "--name a/b"),
        (["{run}", "--out", "{out}", "--tables", "int3"], 2, "fp32, fp16"),
        (["{run}", "--out", "{out}", "--version", "new"], 2, "a whole number"),
        (["{run}", "--out", "{existing}"], 2, "exists already"),
        (["{run}"], 2, "--out"),
        (["{existing}", "--out", "{out}"], 3, "holds no complete checkpoint"),
        (["{out}", "--out", "{out}"], 3, "does not exist"),
    ],
)
def test_mistakes_leave_nothing(
    tackboard: Program, trained_run: RunDirectory, tmp_path: Path, arguments: list[str], code: int, expected: str
) -> None:
    places = {"run": trained_run.path, "out": tmp_path / "out", "existing": tmp_path}
    answer = tackboard("export", *(argument.format(**places) for argument in arguments))
    assert answer.code == code
    assert expected in answer.err
    assert len(answer.err.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []
