"""`tackboard demo`: what it prints and when it fails. Its pipeline is tested in tests/unit/flow."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("options", "gap_closed", "code", "says"),
    [
        (["--out", "here"], 0.55, 0, "Met: the model closes 55.0%"),
        ([], 0.2, 1, "Not met"),
        (["--quick", "--json"], 0.0, 0, ""),
    ],
)
def test_a_demo_says_whether_it_met_its_target(
    monkeypatch: pytest.MonkeyPatch, options: list[str], gap_closed: float, code: int, says: str
) -> None:
    configs: list[Any] = []

    def run_demo(config: Any) -> Any:
        configs.append(config)
        summary = {"gap_closed": gap_closed}
        return SimpleNamespace(
            quick=config.quick, gap_closed=gap_closed, target_met=gap_closed >= 0.4, summary=lambda: summary
        )

    monkeypatch.setattr(flow_demo, "run_demo", run_demo)
    result = CliRunner().invoke(app, options)
    assert result.exit_code == code
    assert says in result.stderr
    out = Path("here" if "here" in options else "demo")
    assert (configs[0].out, configs[0].quick) == (out, "--quick" in options)
    if "--json" in options:
        assert json.loads(result.stdout.splitlines()[-1]) == {"gap_closed": gap_closed}
    else:
        assert result.stdout == f"report: {out / 'report.html'}\n"
