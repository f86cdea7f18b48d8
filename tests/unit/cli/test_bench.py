"""`tackboard bench …`: a table, on request one JSON object and a result file, exit codes. The measurements stand in."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.bench.finetune.finetune_study import FinetuneOptions
from tackboard.bench.quality.study_plan import Options
from tackboard.bench.report import Report

Program = Callable[..., Any]
MODULES = {
    "skeleton": ("skeleton", "skeleton"),
    "features": ("features.run", "features.run"),
    "sequences": ("sequence_store", "sequence_store"),
    "loader": ("loader.run", "loader.run"),
    "overload": ("overload", "overload"),
    "dcat": ("dcat.run", "dcat.report"),
    "parallel": ("parallel_training", "parallel_training"),
    "quality": ("quality.run", "quality.report"),
    "finetune": ("finetune.run", "finetune.run"),
}
"""Of each bench, the modules that measure and that report."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Replaces the measurement of a bench by one that gives `outcome`; returns what it will be asked for."""

    def replace(name: str, **outcome: Any) -> list[Any]:
        asked: list[Any] = []

        def measure(*given: Any, **more: Any) -> dict[str, Any]:
            asked.append((*given, more))
            return {"bench": name, "others_share": 0.5, "disturbed": True} | outcome

        measuring, reporting = (importlib.import_module(f"tackboard.bench.{module}") for module in MODULES[name])
        monkeypatch.setattr(measuring, "measure", measure)
        made = Report(
            result={}, theme=name, title=name, command=f"bench {name}", tables=[], words=[f"the {name} table"]
        )
        monkeypatch.setattr(reporting, "report", lambda result: dataclasses.replace(made, result=result))
        monkeypatch.setattr("tackboard.bench.report.write_result", lambda report, results, word: results / f"{word}.md")
        return asked

    return replace


@pytest.mark.parametrize("name", ["skeleton", "features", "sequences", "loader", "overload", "dcat", "parallel"])
def test_a_table_or_json_and_a_file(
    tackboard: Program, stand_in: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    asked = stand_in(name)
    table = tackboard("bench", name, "--results", tmp_path, "--hardware", "vm2")
    assert table.code == 0, table.err
    assert "vm2.md" in table.err
    assert table.out == f"the {name} table\n"
    answer = tackboard("bench", name, "--quick", "--json")
    assert answer.code == 0 and answer.json()["bench"] == name
    assert len(answer.out.splitlines()) == (1 if name in ("skeleton", "features") else 2)
    folder, options = asked[1]
    assert options["quick"] is True
    scratch = folder.parent if name == "skeleton" else folder
    assert scratch.name.startswith("tackboard-bench-") and not scratch.exists(), "the temporary folder stayed"


def test_options_of_one_bench(tackboard: Program, stand_in: Callable[..., list[Any]], tmp_path: Path) -> None:
    asked = stand_in("loader")
    assert tackboard("bench", "loader", "--data", "datasets/logs", "--repeats", "5").code == 0
    assert asked[0][1] == {"data": Path("datasets/logs"), "repeats": 5, "quick": False}
    asked = stand_in("dcat")
    assert tackboard("bench", "dcat", "--device", "cpu", "--rounds", "2").code == 0
    assert asked[0][1] == {"device": "cpu", "quick": False, "rounds": 2}
    asked = stand_in("skeleton")
    assert tackboard("bench", "skeleton", "--out", tmp_path / "kept").code == 0
    assert asked[0][0] == tmp_path / "kept"


def test_feeding_measures_a_synthetic_dataset(tackboard: Program) -> None:
    answer = tackboard("bench", "feeding", "--events", "20000", "--tokens", "1024", "--json")
    result, lines = answer.json(), answer.out.splitlines()
    assert result["num_events"] == 20_000
    assert list(result["host"]) == ["0", "1", "2", "4", "8"]
    assert lines[0].startswith("workers")
    if not torch.cuda.is_available():
        assert result["device"] is None and any("no GPU" in line for line in lines)


def test_options_of_quality(tackboard: Program, stand_in: Callable[..., list[Any]]) -> None:
    asked = stand_in("quality", failures=[], is_stopped=False)
    answer = tackboard(
        *("bench", "quality", "--dataset", "deskdrop", "--data", "files", "--study", "validate"),
        *("--methods", "sasrec, hstu,", "--seeds", "2", "--ties", "file,random", "--set", "a.b=1", "--set", "m:c=2"),
        *("--quick", "--work", "w", "--jobs", "3", "--device", "cpu", "--time-limit", "60", "--json"),
    )
    assert answer.code == 0, answer.err
    table, last = answer.out.splitlines()
    assert table == "the quality table" and json.loads(last)["bench"] == "quality"
    dataset, options, more = asked[0]
    assert dataset == "deskdrop"
    assert options == Options(
        study="validate", quick=True, methods=("sasrec", "hstu"), seeds=2, ties=("file", "random"),
        overrides=("a.b=1", "m:c=2"),
    )  # fmt: skip
    assert more == {"data": Path("files"), "work": Path("w"), "jobs": 3, "device": "cpu", "time_limit": 60.0}


def test_options_of_finetune(
    tackboard: Program, stand_in: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in("finetune", failures=[], is_stopped=False)
    answer = tackboard(
        *("bench", "finetune", "--dataset", "ml-1m", "--data", "files", "--seeds", "2", "--quick", "--work", "w"),
        *("--jobs", "3", "--device", "cpu", "--time-limit", "60", "--json"),
    )
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0] == "the finetune table" and answer.json()["bench"] == "finetune"
    options, more = asked[0]
    assert options == FinetuneOptions(dataset="ml-1m", quick=True, seeds=2)
    assert more == {"data": Path("files"), "work": Path("w"), "jobs": 3, "device": "cpu", "time_limit": 60.0}
    monkeypatch.setenv("TACKBOARD_DATA", "everywhere")
    assert tackboard("bench", "finetune").code == 0
    assert asked[1][0] == FinetuneOptions() and asked[1][1]["data"] is None, "the synthetic world needs no files"
    stand_in("finetune", failures=[], is_stopped=True)
    assert tackboard("bench", "finetune").code == 75
    stand_in("finetune", failures=[{"code": 4}], is_stopped=False)
    assert tackboard("bench", "finetune").code == 4
    answer = tackboard("bench", "finetune", "--recompute", "x_places.npz", "--seeds", "2")
    assert answer.code == 2 and "--seeds has no meaning with --recompute" in answer.err
    answer = tackboard("bench", "finetune", "--dataset", "syntetic")
    assert answer.code == 2 and "did you mean synthetic?" in answer.err


def test_recompute_takes_no_other_question(tackboard: Program, tmp_path: Path) -> None:
    answer = tackboard("bench", "quality", "--recompute", tmp_path, "--set", "model.width=8")
    assert answer.code == 2 and "--set has no meaning with --recompute" in answer.err
    answer = tackboard("bench", "quality", "--recompute", tmp_path, "--json")
    assert answer.code == 2 and f"--recompute {tmp_path} holds no file" in answer.err
    (tmp_path / "a_ranks.npz").write_bytes(b"PK")
    answer = tackboard("bench", "quality", "--recompute", tmp_path)
    assert answer.code == 3 and "a_ranks.npz is damaged or is no file with ranks" in answer.err


def test_defaults_of_quality_and_the_variable_for_data(
    tackboard: Program, stand_in: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in("quality", failures=[], is_stopped=False)
    monkeypatch.setenv("TACKBOARD_DATA", "downloads")
    answer = tackboard("bench", "quality", "--results", tmp_path)
    assert answer.code == 0 and "cpu.md" in answer.err
    assert asked[0][1] == Options() and asked[0][2]["data"] == Path("downloads")


@pytest.mark.parametrize(
    ("failures", "is_stopped", "code"),
    [([], True, 75), ([4, 4], False, 4), ([4, 3], False, 1), ([-9], True, 1)],
)
def test_exit_codes_of_quality(
    tackboard: Program, stand_in: Callable[..., list[Any]], failures: list[int], is_stopped: bool, code: int
) -> None:
    stand_in("quality", failures=[{"code": failure} for failure in failures], is_stopped=is_stopped)
    answer = tackboard("bench", "quality", "--json")
    assert answer.code == code
    assert [failure["code"] for failure in answer.json()["failures"]] == failures, "JSON comes first"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "use --data DIR or set TACKBOARD_DATA"),
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "-1"], "--jobs"),
        (["--study", "x"], "allowed: reproduce"),
    ],
)
def test_wrong_use_of_quality(
    tackboard: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACKBOARD_DATA", raising=False)
    answer = tackboard("bench", "quality", *arguments)
    assert answer.code == 2 and words in answer.err
    assert answer.err.startswith("error: ") and len(answer.err.splitlines()) <= 3
    assert not list(tmp_path.iterdir()), "nothing is left behind"
