"""`tackboard bench loader`: a table, then on request one JSON object as the last line and a result file."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.bench import report as writer
from tackboard.bench.loader import report as loader_report
from tackboard.bench.loader import run as loader
from tackboard.cli.bench_loader import bench_loader

app = typer.Typer()
app.command()(bench_loader)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the measurement; returns what it was asked for."""
    calls: list[dict[str, Any]] = []

    def measure(folder: Path, **asked: Any) -> dict[str, Any]:
        calls.append({"folder": folder, **asked})
        return {"bench": "loader"}

    monkeypatch.setattr(loader, "measure", measure)
    monkeypatch.setattr(loader_report, "report", lambda result: result)
    monkeypatch.setattr(writer, "table_lines", lambda result: [f"the {result['bench']} table"])
    monkeypatch.setattr(writer, "write_result", lambda result, results, hardware: results / f"{hardware}.md")
    return calls


def test_json_is_the_last_line(measured: list[dict[str, Any]]) -> None:
    result = CliRunner().invoke(app, ["--json", "--quick", "--data", "datasets/logs", "--repeats", "5"])
    assert result.exit_code == 0
    table, last = result.stdout.splitlines()
    assert table == "the loader table" and json.loads(last) == {"bench": "loader"}
    asked = measured[0]
    assert (asked["quick"], asked["data"], asked["repeats"]) == (True, Path("datasets/logs"), 5)
    assert not asked["folder"].exists(), "the temporary folder stayed"


def test_result_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--results", str(tmp_path), "--hardware", "vm2"])
    assert result.exit_code == 0
    assert "vm2.md" in result.stderr and result.stdout == "the loader table\n"
