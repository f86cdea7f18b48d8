"""`tackboard init`: a dataset, a recipe and a summary."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tackboard.cli.init import init
from tackboard.core.errors import UsageError
from tackboard.events.checks.advice import advise
from tackboard.events.checks.turnover import measure_turnover
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.forgetting import add_forgotten, user_ids_of
from tackboard.train.config import RunConfig

app = typer.Typer()
app.command()(init)

LOG = """\
who,what,when,how
ann,x,2024-05-01T10:00:00Z,click
bob,y,2024-05-01T10:01:00Z,save
ann,y,2024-05-01T09:00:00Z,click
"""
COLUMNS = ("--user", "who", "--item", "what", "--time", "when")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my log.csv").write_text(LOG)
    return tmp_path


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["--from", "my log.csv", *COLUMNS, *options])


def test_a_log_becomes_a_dataset_and_a_recipe_with_a_summary(folder: Path) -> None:
    result = run("--action", "how")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "rows read 3" in lines
    assert "users 2 (string ids)" in lines
    assert "fixed 1 rows out of order: sorted by time, file order kept within a tie" in lines
    assert "time span 2024-05-01 09:00:00 to 2024-05-01 10:01:00 UTC (read as ISO 8601 text)" in lines
    assert "tackboard train recipe.py:recipe" in lines
    dataset = open_dataset(folder / "datasets" / "my-log")
    assert dataset.actions == ["click", "save"]
    text = (folder / "recipe.py").read_text()
    assert 'dataset="datasets/my-log"' in text
    assert "num_events=3" in text


def test_fields_and_contexts_are_kept(folder: Path) -> None:
    rows = [f"ann,x,{1_700_000_000 + n},{n},{{}}" for n in range(3)]
    (folder / "my log.csv").write_text("\n".join(["who,what,when,Dwell,more", *rows]))
    result = run("--field", "more", "--field", "dwell_ms=Dwell", "--context", "more")
    assert result.exit_code == 0, result.output
    assert "fields       more (string), dwell_ms (int)" in result.output.splitlines()
    dataset = open_dataset(folder / "datasets" / "my-log")
    assert dataset.fields == {"more": "string", "dwell_ms": "int"}
    assert dataset.read_events(["context", "dwell_ms"]).to_pylist()[2] == {"context": "{}", "dwell_ms": 2}


def test_the_written_recipe_is_a_run_of_the_dataset(folder: Path) -> None:
    assert run("--json").exit_code == 0
    config = recipe_in(folder)
    assert config.data.dataset == "datasets/my-log"
    assert config.name == "my-log"


def test_choices_are_printed_and_written_with_their_reasons(folder: Path) -> None:
    """News: an item comes every hour and is read for 32 hours, and nobody reads it twice."""
    rows = [
        f"user {10 * back + hour % 10},item {hour - back},{1_700_000_000 + 3600 * hour + back}"
        for hour in range(400)
        for back in range(32)
    ]
    (folder / "my log.csv").write_text("\n".join(["who,what,when", *rows]))
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    dataset = open_dataset(folder / "datasets" / "my-log")
    assert found["measures"] == dataclasses.asdict(measure_turnover(dataset))
    advice = advise(measure_turnover(dataset))
    assert found["advice"] == dataclasses.asdict(advice)
    assert found["advice"]["split"]["value"] == "time" and found["advice"]["cut"] == "0.9"
    config = recipe_in(folder)
    assert (config.data.split, config.data.cut) == ("time", "0.9")
    assert config.evaluation.filter_seen is advice.filter_seen.value
    assert config.data.uniform_negatives == advice.uniform_negatives.value
    comments = "".join(line.strip() for line in (folder / "recipe.py").read_text().splitlines())
    assert all(word in comments for word in advice.split.reason.split())
    lines = run("--force").output.splitlines()
    assert [line for line in lines if line.startswith("advice")] == [f"advice       {line}" for line in advice.lines()]


@pytest.mark.parametrize(
    "rows",
    [
        ["ann,x,5"],
        ["ann,x,5", "ann,y,5", "bob,x,5"],
        [f"ann,x,{n}" for n in range(200)],
        ["ann,x,1", "bob,y,1700000000"],
    ],
    ids=["one event", "one instant", "one user and item", "54 years"],
)
def test_an_odd_log_gets_the_defaults(folder: Path, rows: list[str]) -> None:
    (folder / "my log.csv").write_text("\n".join(["who,what,when", *rows]))
    result = run("--json")
    assert result.exit_code == 0, result.output
    advice = json.loads(result.output)["advice"]
    assert (advice["filter_seen"]["value"], advice["split"]["value"], advice["cut"]) == (False, "last", "")
    assert recipe_in(folder).data.split == "last"


def recipe_in(folder: Path) -> RunConfig:
    """The config that the written recipe returns."""
    namespace: dict = {"__name__": "recipe"}
    exec(compile((folder / "recipe.py").read_text(), "recipe.py", "exec"), namespace)  # noqa: S102 - our own file
    config: RunConfig = namespace["recipe"]()
    return config


def test_files_and_folders_are_given_by_name_or_by_option(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "a.csv").write_text(LOG)
    (folder / "more.csv").write_text(LOG.replace("2024-05-01", "2024-05-02"))
    options = ("--json", "--out", "elsewhere", "--recipe", "mine.py")
    result = CliRunner().invoke(app, ["logs", "more.csv", "--from", "my log.csv", *COLUMNS, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["report"]["rows_read"], found["report"]["duplicates"]) == (9, 3)
    assert Path(found["dataset"]).parent == Path("elsewhere/logs")
    assert found["recipe"] == "mine.py" and found["statistics"]["num_items"] == 2


def test_without_a_log_it_says_so(folder: Path) -> None:
    result = CliRunner().invoke(app, [*COLUMNS])
    assert isinstance(result.exception, UsageError)
    assert "no log was given" in str(result.exception)


def test_forgotten_users_and_missing_positions_are_told(folder: Path) -> None:
    (folder / "my log.csv").write_text(LOG.replace("how", "call"))
    (folder / "shown.csv").write_text("who,what,when,call\nann,x,2024-05-01T10:00:00Z,click\n")
    options = ("--request", "call", "--impressions", "shown.csv")
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert (
        "impressions             1  (1 without a position; name the column of positions with --position)"
        in result.output
    )
    add_forgotten(folder / "datasets" / "my-log", user_ids_of("bob"))
    lines = [" ".join(line.split()) for line in run(*options, "--force").output.splitlines()]
    assert "rows kept 2" in lines and "left out 1 events of forgotten users" in lines
