"""Cells are named by what they are, finished once, and found again by later versions."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality.cells import Cell, Work
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import write_json_atomic
from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, config_to_json

CONFIG = RunConfig(
    name="small", data=DataConfig(dataset="ml-1m-file"), model=PinFMConfig(tables=TableConfig(num_rows=64))
)
VALIDATION = Cell(
    prepared="ml-1m-file",
    ties="file",
    method="pinfm-history",
    seed=0,
    stage="validate",
    protocol={"filter_seen": True, "max_users": 0},
    config=config_to_json(CONFIG),
)
GOLDEN = Path(__file__).parents[3] / "golden"
TEST = dataclasses.replace(VALIDATION, stage="test", seed=1, after=VALIDATION)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work.open(tmp_path / "work")


def test_name_says_what_it_is_and_changes_with_everything_that_decides() -> None:
    assert TEST.name.startswith("ml-1m-file_pinfm-history_seed1_test-")
    wider = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, width=32))
    other = dataclasses.replace(VALIDATION, config=config_to_json(wider))
    changed = [
        dataclasses.replace(TEST, seed=2),
        dataclasses.replace(TEST, protocol={"filter_seen": False, "max_users": 0}),
        dataclasses.replace(TEST, config=other.config),
        dataclasses.replace(TEST, after=other),
        dataclasses.replace(TEST, after=None),
    ]
    assert len({cell.name for cell in [TEST, *changed]}) == 6


def test_description_is_json_and_comes_back() -> None:
    description = json.loads(json.dumps(TEST.describe()))
    assert Cell.from_description(description) == TEST
    assert Cell.from_description(description).run_config() == CONFIG
    with pytest.raises(DataError, match="fits nothing and has no run"):
        dataclasses.replace(TEST, config=None).run_config()


def test_result_is_kept_and_found(work: Work) -> None:
    assert work.find(TEST) is None
    saved = work.save(TEST, {"metrics": {"hr@10": 0.5}}, {"ranks": np.array([3, 1])})
    found = work.find(TEST)
    assert found is not None and found.path == saved.path == work.cells / TEST.name
    assert found.values["metrics"] == {"hr@10": 0.5}
    assert found.values["environment"]["commit"] is None or found.values["environment"]["commit"]
    assert found.array().tolist() == [3, 1]
    assert json.loads((found.path / "cell.json").read_text()) == TEST.describe()
    again = work.save(TEST, {"metrics": {"hr@10": 0.9}}, {})
    assert again.values["metrics"] == {"hr@10": 0.5}, "what is finished is never written again"
    with pytest.raises(DataError, match=r"absent\.npy"):
        found.array("absent")
    assert work.find(VALIDATION) is None and work.find(dataclasses.replace(TEST, seed=2)) is None


def test_a_folder_is_kept_as_a_folder(work: Work, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "dense.safetensors").write_bytes(b"numbers")
    saved = work.save(TEST, {}, {"checkpoint": folder})
    assert [path.name for path in (saved.path / "checkpoint").iterdir()] == ["dense.safetensors"]
    assert (saved.path / "checkpoint" / "dense.safetensors").read_bytes() == b"numbers"


def test_older_description_that_means_the_same_is_the_same_cell(work: Work) -> None:
    """A setting that an older version did not have counts as today's default, here and in the cell before."""
    older = TEST.describe()
    for description in (older, older["after"]):
        del description["config"]["model"]["config"]["dropout"]
        del description["config"]["training"]["log_every"]
    old_cell = Cell.from_description(older)
    assert old_cell.name != TEST.name
    work.save(old_cell, {"metrics": {}}, {})
    found = work.find(TEST)
    assert found is not None and found.path.name == old_cell.name
    other = json.loads(json.dumps(TEST.describe()))
    other["config"]["model"]["config"]["dropout"] = 0.3
    assert work.find(Cell.from_description(other)) is None


@pytest.mark.parametrize("kind", ["pinfm", "sasrec"])
def test_a_cell_whose_model_was_described_by_flat_settings_is_found(work: Work, kind: str) -> None:
    flat = json.loads((GOLDEN / f"checkpoint-v1-flat-{kind}" / "state.json").read_text())["config"]
    old_cell = dataclasses.replace(TEST, config=flat, after=dataclasses.replace(VALIDATION, config=flat))
    today = old_cell.in_todays_words()
    assert today.config is not None and set(today.config["model"]["config"]) >= {"tables", "backbone", "loss"}
    assert today.name != old_cell.name
    work.save(old_cell, {"metrics": {}}, {})
    found = work.find(today)
    assert found is not None and found.path.name == old_cell.name
    deeper = dataclasses.replace(today, config=json.loads(json.dumps(today.config)))
    assert deeper.config is not None
    deeper.config["model"]["config"]["backbone"]["num_layers"] += 1
    assert work.find(deeper) is None


def test_description_that_cannot_be_read_today_is_passed_over(work: Work) -> None:
    folder = work.cells / f"{TEST.label}-{'0' * 12}"
    folder.mkdir()
    contents: list[Any] = [{"after": None, "nonsense": 1}, [], {**TEST.describe(), "config": {"model": {}}}]
    for content in contents:
        write_json_atomic(folder / "cell.json", content)
        assert work.find(TEST) is None


def test_half_a_result_is_none(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        work.save(TEST, {"metrics": object()}, {"ranks": np.zeros(2)})
    assert work.find(TEST) is None
    assert not list(work.cells.iterdir())


def test_work_is_a_folder_of_ours(tmp_path: Path) -> None:
    Work.open(tmp_path / "new")
    Work.open(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    Work.open(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("")
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "quality.json").write_text('{"kind": "wine"}')
    for name, words in {"file": "is a file", "foreign": "did not write", "marked": "another program"}.items():
        with pytest.raises(UsageError, match=words):
            Work.open(tmp_path / name)
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.txt"]
