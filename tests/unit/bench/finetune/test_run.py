"""A whole study on a tiny world: nothing is done twice, and the tables can be made again; and what is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.bench.finetune import finetune_study
from tackboard.bench.finetune.data import SOURCES
from tackboard.bench.finetune.finetune_study import FinetuneOptions
from tackboard.bench.finetune.run import measure, recompute, report
from tackboard.bench.quality.kept_ranks import write_kept
from tackboard.bench.report import table_lines, write_result
from tackboard.core.errors import CorruptFileError, DataError, UsageError

pytestmark = pytest.mark.usefixtures("tiny_sizes", "torch_settings")


def run(work: Path, dataset: str = "synthetic", **options: Any) -> dict[str, Any]:
    return measure(FinetuneOptions(dataset=dataset, quick=True), work=work, jobs=0, device="cpu", **options)


@pytest.fixture
def few_rankers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_study, "WAYS", ("none", "late-last"))
    monkeypatch.setattr(finetune_study, "COLD", ("none", "early"))
    monkeypatch.setattr(finetune_study, "OF_LABELS", ("trees",))


def test_from_a_world_to_tables(few_rankers: None, tmp_path: Path) -> None:
    work = tmp_path / "work"
    stopped = run(work, time_limit=1e-6)
    assert stopped["is_stopped"] and stopped["num_finished"] == 0
    result = run(work)
    assert (result["num_cells"], result["num_left"], result["failures"]) == (6, 0, [])
    assert result["data"]["num_users"] == 150 and result["data"]["rules"]["seed"] == 19
    assert 3 / 21 < result["data"]["random_hit"] < 1.0
    text = table_lines(report(result))
    assert text[0].startswith("QUICK") and any("only the signs of differences" in line for line in text)
    before = {path: path.stat().st_mtime_ns for path in (work / "cells").rglob("*")}
    again = run(work)
    assert again["table"] == result["table"]
    assert {path: path.stat().st_mtime_ns for path in (work / "cells").rglob("*")} == before, "nothing runs twice"

    page = write_result(report(result), tmp_path / "results", "here")
    [kept] = (tmp_path / "results").glob("*_places.npz")
    assert f"tackboard bench finetune --recompute {kept.name}" in page.read_text()
    assert recompute(kept)["table"] == result["table"], "from the kept places alone"


@pytest.mark.slow
def test_kakao_brunch_from_files_to_tables(fake_brunch: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "work", "kakao-brunch", data=fake_brunch)
    assert (result["num_left"], result["failures"]) == (0, [])
    assert result["num_cells"] == len(finetune_study.plan(FinetuneOptions(dataset="kakao-brunch", quick=True)).cells)
    titles = " ".join(part["title"] for part in result["table"]["sections"] if part["rows"])
    assert all(words in titles for words in ("Ways to use PinFM", "Cold start", "Does pretraining pay"))
    assert "stands in for the article's birth" in " ".join(report(result).words)


def test_movielens_from_files_to_tables(
    fake_ml_1m: Path, few_rankers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "ml-1m", dataclasses.replace(SOURCES["ml-1m"], quick_stride=1))
    result = run(tmp_path / "work", "ml-1m", data=fake_ml_1m)
    assert (result["num_finished"], result["failures"]) == (3, [])
    assert not any("Cold start" in part["title"] for part in result["table"]["sections"])


def test_what_is_refused_before_anything_is_written(tmp_path: Path, made_up_ratings: Callable[..., None]) -> None:
    work = tmp_path / "work"
    for dataset, more, said in (
        ("synthetic", {"data": tmp_path}, "--data has no meaning with --dataset synthetic"),
        ("ml-1m", {}, "the files of ml-1m are not given: use --data DIR"),
        ("kakao-brunch", {"data": tmp_path / "absent"}, "--data .*absent does not exist"),
    ):
        with pytest.raises(UsageError, match=said):
            run(work, dataset, **more)
    with pytest.raises(UsageError, match="--device tpu does not exist"):
        measure(FinetuneOptions(), work=work, device="tpu")
    assert not work.exists()


def test_what_cannot_be_recomputed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--recompute .*absent_places.npz does not exist"):
        recompute(tmp_path / "absent_places.npz")
    (tmp_path / "bad_places.npz").write_bytes(b"PK")
    with pytest.raises(CorruptFileError, match="is damaged or is no file with ranks"):
        recompute(tmp_path / "bad_places.npz")
    write_kept(tmp_path / "other.npz", {}, {"bench": "quality"}, [])
    with pytest.raises(UsageError, match="holds results of tackboard bench quality"):
        recompute(tmp_path / "other.npz")
    assert issubclass(CorruptFileError, DataError)
