"""`tackboard bench sequences`: a table, one JSON object as the last line, and a result file on request."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.bench import report as writer
from tackboard.bench import sequences
from tackboard.cli.bench_sequences import bench_sequences

app = typer.Typer()
app.command()(bench_sequences)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """Replaces the measurement; returns the folders it was asked to use."""
    calls: list[tuple[Path, bool]] = []

    def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
        calls.append((folder, quick))
        return {"bench": "sequences"}

    monkeypatch.setattr(sequences, "measure", measure)
    monkeypatch.setattr(sequences, "report", lambda result: result)
    monkeypatch.setattr(writer, "table_lines", lambda result: [f"the {result['bench']} table"])
    monkeypatch.setattr(writer, "write_result", lambda result, results, hardware: results / f"{hardware}.md")
    return calls


def test_json_is_the_last_line(measured: list[tuple[Path, bool]]) -> None:
    result = CliRunner().invoke(app, ["--json", "--quick"])
    assert result.exit_code == 0
    table, last = result.stdout.splitlines()
    assert table == "the sequences table" and json.loads(last) == {"bench": "sequences"}
    assert measured[0][1] is True
    assert not measured[0][0].exists(), "the temporary folder stayed"


def test_result_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--results", str(tmp_path), "--hardware", "vm2"])
    assert result.exit_code == 0
    assert result.stdout == "the sequences table\n"
    assert "vm2.md" in result.stderr
