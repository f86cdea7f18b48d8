"""`tackboard bench overload`: a table, a JSON object as the last line, and a result file on request."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.bench import overload
from tackboard.bench import report as writer
from tackboard.cli.bench_overload import bench_overload

app = typer.Typer()
app.command()(bench_overload)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replaces the measurement; returns whether it was asked to be quick."""
    calls: list[bool] = []

    def measure(_folder: Path, *, quick: bool) -> dict[str, Any]:
        calls.append(quick)
        return {"bench": "overload"}

    monkeypatch.setattr(overload, "measure", measure)
    monkeypatch.setattr(overload, "report", lambda result: result)
    monkeypatch.setattr(writer, "table_lines", lambda _result: ["a table"])
    monkeypatch.setattr(writer, "write_result", lambda _result, results, hardware: results / hardware)
    return calls


def test_the_table_comes_first_and_json_last(measured: list[bool], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json", "--quick", "--results", str(tmp_path), "--hardware", "vm2"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "a table" and json.loads(lines[-1]) == {"bench": "overload"}
    assert str(tmp_path / "vm2") in result.stderr
    assert measured == [True]
    assert CliRunner().invoke(app, []).stdout == "a table\n"
