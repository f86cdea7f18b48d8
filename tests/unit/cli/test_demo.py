"""`tackboard demo`: what it prints and when it fails. The pipeline itself is tested in tests/unit/flow."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.cli.demo import demo
from tackboard.flow import demo as flow_demo

app = typer.Typer()
app.command()(demo)


def stand_in(monkeypatch: pytest.MonkeyPatch, gap_closed: float) -> list[Any]:
    """Replaces the pipeline by one that ends at once; returns the configs it was called with."""
    configs: list[Any] = []

    def run(config: Any) -> Any:
        configs.append(config)
        return SimpleNamespace(
            quick=config.quick,
            gap_closed=gap_closed,
            target_met=gap_closed >= 0.4,
            summary=lambda: {"gap_closed": gap_closed},
        )

    monkeypatch.setattr(flow_demo, "run_demo", run)
    return configs


def test_a_demo_that_meets_its_target_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = stand_in(monkeypatch, 0.55)
    result = CliRunner().invoke(app, ["--out", "here"])
    assert result.exit_code == 0
    assert result.stdout == f"report: {Path('here') / 'report.html'}\n"
    assert "at least 40% of the gap" in result.stderr and "Met: the model closes 55.0%" in result.stderr
    assert configs[0].out == Path("here") and configs[0].quick is False


def test_json_is_the_last_line_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0.55)
    result = CliRunner().invoke(app, ["--json"])
    assert json.loads(result.stdout.splitlines()[-1]) == {"gap_closed": 0.55}


def test_a_missed_target_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0.2)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert "Not met" in result.stderr


def test_a_quick_demo_has_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = stand_in(monkeypatch, 0.0)
    result = CliRunner().invoke(app, ["--quick"])
    assert result.exit_code == 0
    assert configs[0].quick is True
