from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tackboard.cli.data_synth import data_synth
from tackboard.core.errors import ConfigError, UsageError
from tackboard.events.dataset import open_dataset

app = typer.Typer()
app.command()(data_synth)
SMALL = ("--set", "num_users=30", "--set", "num_items=120")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, list(options))


def test_a_world_becomes_a_dataset(tmp_path: Path) -> None:
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    dataset = open_dataset(tmp_path / "datasets" / "demo")
    assert (dataset.num_users, dataset.num_items) == (30, 120)
    assert f"{dataset.num_events:,}" in result.output


def test_the_seed_changes_the_events_and_json_is_one_object(tmp_path: Path) -> None:
    events = []
    for seed in ("1", "2", "2"):
        result = run(*SMALL, "--seed", seed, "--name", "world", "--json")
        found = json.loads(result.stdout.splitlines()[-1])
        assert found["statistics"]["num_users"] == 30
        events.append(open_dataset(tmp_path / found["dataset"]).read_events())
    assert not events[0].equals(events[1])
    assert events[1].equals(events[2])


def test_a_world_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"num_users": 12, "num_items": 100}))
    assert run("--world", "mine.json").exit_code == 0
    assert open_dataset(tmp_path / "datasets" / "mine").num_users == 12


def test_mistakes_are_explained_and_write_nothing(tmp_path: Path) -> None:
    for options, kind in (
        (["--set", "num_user=5"], ConfigError),
        (["--set", "num_users=-5"], ConfigError),
        (["--world", "nowhere"], UsageError),
        (["--name", "a/b"], UsageError),
    ):
        result = run(*options)
        assert isinstance(result.exception, kind)
        assert len(str(result.exception).splitlines()) <= 3
    assert not list(tmp_path.iterdir())
