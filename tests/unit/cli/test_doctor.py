"""The doctor command prints findings for people or as JSON, and its exit code says whether something is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tackboard.cli.doctor import doctor
from tackboard.core import doctor as core_doctor

MISSING = core_doctor.Facts(python=(3, 11, 7), installed={"numpy": "2.4.6"})


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr(core_doctor, "collect", lambda folder: MISSING)
    return CliRunner()


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(doctor)
    return made


def test_problems_are_printed_with_their_repair(runner: CliRunner, app: typer.Typer) -> None:
    result = runner.invoke(app, [])
    assert result.exit_code == 2
    lines = result.output.splitlines()
    broken = next(number for number, line in enumerate(lines) if line.startswith("broken  torch "))
    assert lines[broken + 1].strip() == "repair: make install"
    assert any(line.startswith("absent  torchrec") for line in lines)


def test_json_is_one_object(runner: CliRunner, app: typer.Typer) -> None:
    result = runner.invoke(app, ["--json"])
    assert result.exit_code == 2
    answer = json.loads(result.output)
    assert answer["ok"] is False
    assert {"name": "numpy", "status": "ok", "value": "2.4.6", "repair": ""} in answer["findings"]


def test_folder_is_the_current_one(
    runner: CliRunner, app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Path] = []

    def collect(folder: Path) -> core_doctor.Facts:
        seen.append(folder)
        return MISSING

    monkeypatch.setattr(core_doctor, "collect", collect)
    monkeypatch.chdir(tmp_path)
    runner.invoke(app, [])
    assert seen == [tmp_path]
