"""`tackboard bench skeleton`: one JSON object, or a table, and a result file on request."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.bench import skeleton
from tackboard.cli.bench_skeleton import bench_skeleton

app = typer.Typer()
app.command()(bench_skeleton)

RESULT: dict[str, Any] = {
    **dict.fromkeys(skeleton.UNITS, 12.5),
    "bench": "skeleton",
    "quick": True,
    "others_share": 0.5,
    "disturbed": True,
    "date": "2026-11-15",
    "commit": None,
    "python": "3.11.7",
    "packages": {},
    "hardware": {"cpu": "c", "usable_cores": 2, "memory_bytes": 2**30},
    "num_events": 10,
    "requests": 4,
    "candidates_per_request": 1000,
    "stages": {"data": {"seconds": 1.0, "cpu_seconds": 1.0, "peak_rss_bytes": 10**6}},
}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """Replaces the measurement; returns the folders it was asked to use."""
    calls: list[tuple[Path, bool]] = []

    def measure(out: Path, *, quick: bool) -> dict[str, Any]:
        calls.append((out, quick))
        return RESULT

    monkeypatch.setattr(skeleton, "measure", measure)
    return calls


def test_json_is_one_object(measured: list[tuple[Path, bool]]) -> None:
    result = CliRunner().invoke(app, ["--json", "--quick"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == RESULT
    assert measured[0][1] is True
    assert not measured[0][0].parent.exists(), "the temporary folder stayed"


def test_table_for_people() -> None:
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert lines[-1].startswith("disturbed: other processes used 50%")
    row = next(line for line in lines if "events_per_cpu_s" in line)
    assert "12.5" in row and "events per CPU-second" in row


def test_result_file(tmp_path: Path, measured: list[tuple[Path, bool]]) -> None:
    result = CliRunner().invoke(app, ["--results", str(tmp_path), "--hardware", "vm2", "--out", str(tmp_path / "d")])
    assert result.exit_code == 0
    assert (tmp_path / "skeleton_vm2_202611.md").exists()
    assert measured[0][0] == tmp_path / "d"
