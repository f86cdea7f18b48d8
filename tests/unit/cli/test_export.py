"""`tackboard export`: a bundle where the user said, and a word on how to serve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_a_bundle_for_training_says_how_to_use_it(
    tackboard: Program, trained_run: RunDirectory, tmp_path: Path
) -> None:
    text = tackboard("export", trained_run.path, "--out", tmp_path / "one", "--for-training").out
    assert "tables in fp32" in text
    assert f"start a run from it with: tackboard train RECIPE --from {tmp_path / 'one'}" in text
    answer = tackboard("verify", tmp_path / "one")
    assert "bundle intact" in answer.out
    answer = tackboard("export", trained_run.path, "--out", tmp_path / "two", "--for-training", "--tables", "fp16")
    assert answer.code == 2 and "leave out --tables" in answer.err
