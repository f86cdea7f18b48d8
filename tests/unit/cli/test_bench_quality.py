"""`tackboard bench quality`: options to the harness, a table, on request one JSON object and files, exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tackboard.bench import report as writer
from tackboard.bench.quality import report as quality_report
from tackboard.bench.quality import run as quality
from tackboard.bench.quality.plan import Options
from tackboard.cli.bench_quality import bench_quality

app = typer.Typer()
app.command()(bench_quality)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the measurement; returns what it was asked for. `outcome` of an entry may be set beforehand."""
    calls: list[dict[str, Any]] = []

    def measure(dataset: str, options: Options, **more: Any) -> dict[str, Any]:
        calls.append({"dataset": dataset, "options": options, **more})
        return {"bench": "quality", "failures": [], "is_stopped": False} | outcome

    outcome: dict[str, Any] = {}
    monkeypatch.setattr(quality, "measure", measure)
    monkeypatch.setattr(quality_report, "report", lambda result: result)
    monkeypatch.setattr(writer, "table_lines", lambda result: [f"the {result['bench']} table"])
    monkeypatch.setattr(writer, "write_result", lambda result, results, hardware: results / f"{hardware}.md")
    calls.append(outcome)
    return calls


def test_options(asked: list[dict[str, Any]]) -> None:
    arguments = [
        *("--dataset", "deskdrop", "--data", "files", "--study", "validate", "--methods", "sasrec, hstu,"),
        *("--seeds", "2", "--ties", "file,random", "--set", "a.b=1", "--set", "m:c=2", "--quick", "--work", "w"),
        *("--jobs", "3", "--device", "cpu", "--time-limit", "60", "--json"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    table, last = result.stdout.splitlines()
    assert table == "the quality table" and json.loads(last)["bench"] == "quality"
    given = asked[1]
    assert given["options"] == Options(
        study="validate", quick=True, methods=("sasrec", "hstu"), seeds=2, ties=("file", "random"),
        overrides=("a.b=1", "m:c=2"),
    )  # fmt: skip
    assert (given["dataset"], given["data"], given["work"]) == ("deskdrop", Path("files"), Path("w"))
    assert (given["jobs"], given["device"], given["time_limit"]) == (3, "cpu", 60.0)


def test_defaults_and_the_variable_for_data(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--results", str(tmp_path)], env={"TACKBOARD_DATA": "downloads"})
    assert result.exit_code == 0 and "cpu.md" in result.stderr
    assert asked[1]["options"] == Options() and asked[1]["data"] == Path("downloads")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"is_stopped": True}, 75),
        ({"failures": [{"code": 4}, {"code": 4}]}, 4),
        ({"failures": [{"code": 4}, {"code": 3}]}, 1),
        ({"failures": [{"code": -9}], "is_stopped": True}, 1),
    ],
)
def test_exit_codes(asked: list[dict[str, Any]], outcome: dict[str, Any], code: int) -> None:
    asked[0].update(outcome)
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout.splitlines()[-1])["failures"] == outcome.get("failures", []), "JSON comes first"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--dataset", "ml1m"], 2, "did you mean ml-1m?"),
        (["--data", "nowhere"], 2, "https://grouplens.org"),
        ([], 2, "give --data DIR or set TACKBOARD_DATA"),
        (["--seeds", "0"], 2, "--seeds"),
        (["--methods", "sasrek"], 2, "did you mean sasrec?"),
        (["--study", "x"], 2, "allowed: reproduce"),
        (["--ties", "fil"], 2, "did you mean file?"),
        (["--jobs", "-1"], 2, "--jobs"),
        (["--device", "gpu"], 2, "auto, cpu, cuda"),
        (["--set", "seed=5"], 2, "use --seeds"),
        (["--set", "sasrek:model.width=8"], 2, "--set sasrek:model.width=8"),
        (["--dataset", "deskdrop", "--ties", "random"], 2, "--ties random for deskdrop"),
        (["--study", "validate", "--methods", "popularity"], 2, "--study validate --methods popularity"),
        (["--study", "ablations", "--methods", "sasrec"], 2, "--study ablations --methods sasrec"),
    ],
)
def test_wrong_use_is_told_in_three_lines(
    tackboard: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACKBOARD_DATA", raising=False)
    answer = tackboard("bench", "quality", *arguments)
    assert answer.code == code and words in answer.err
    assert answer.err.startswith("error: ") and len(answer.err.splitlines()) <= 3
    assert not list(tmp_path.iterdir()), "nothing is left behind"
