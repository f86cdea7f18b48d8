"""`tackboard bench features`: one JSON object, or a table, and a result file on request."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.bench import report as writer
from tackboard.bench.features import run as features
from tackboard.cli.bench_features import bench_features

app = typer.Typer()
app.command()(bench_features)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """Replaces the measurement; returns the folders it was asked to use."""
    calls: list[tuple[Path, bool]] = []

    def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
        calls.append((folder, quick))
        return {"bench": "features"}

    monkeypatch.setattr(features, "measure", measure)
    monkeypatch.setattr(features, "report", lambda result: result)
    monkeypatch.setattr(writer, "table_lines", lambda result: [f"the {result['bench']} table"])
    monkeypatch.setattr(writer, "write_result", lambda result, results, hardware: results / f"{hardware}.md")
    return calls


def test_json_is_one_object(measured: list[tuple[Path, bool]]) -> None:
    result = CliRunner().invoke(app, ["--json", "--quick"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"bench": "features"}
    assert measured[0][1] is True
    assert not measured[0][0].exists(), "the temporary folder stayed"


def test_table_for_people() -> None:
    assert CliRunner().invoke(app, []).stdout == "the features table\n"


def test_result_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--results", str(tmp_path), "--hardware", "vm2"])
    assert result.exit_code == 0
    assert "vm2.md" in result.stderr
