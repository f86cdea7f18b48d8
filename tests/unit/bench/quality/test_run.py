"""The whole harness on made-up ratings: cells, a table, nothing done twice; and what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.bench.quality import run as quality
from tackboard.bench.quality.cell import step_of
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.kept_ranks import read_kept
from tackboard.bench.quality.report import report
from tackboard.bench.quality.run import measure, recompute
from tackboard.bench.quality.study_plan import Options
from tackboard.bench.report import table_lines
from tackboard.core.errors import DataError, TackboardError, UsageError
from tackboard.flow.jobs import Step

SMALL = ("training.steps=4", "training.checkpoint_every=2", "model.width=8", "model.backbone.num_layers=1",
         "pinfm-history:model.tables.dim=2")  # fmt: skip


def run(data: Path | None, work: Path, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"quick": True, "methods": ("popularity", "pinfm-history"), "overrides": SMALL} | options
    return measure("ml-1m", Options(**settings), work=work, data=data, jobs=0, device="cpu")


@pytest.fixture(autouse=True)
def settings_of_torch(torch_settings: None) -> None:
    """Training changes them."""


def test_from_files_to_a_table(fake_ml_1m: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    result = run(fake_ml_1m, work)
    assert (result["num_cells"], result["num_finished"], result["num_left"], result["failures"]) == (3, 3, 0, [])
    assert result["data"] == {"num_users": 12, "num_items": 35, "num_events": 144, "last_tied_share": 1.0}
    assert [row["method"] for row in result["table"]["figures"]["rows"]] == ["popularity", "pinfm-history"]
    assert result["table"]["figures"]["comparisons"][0]["against"] == "popularity"
    assert result["devices"] == ["cpu"] and result["table"]["charts"]
    assert table_lines(report(result))[0].startswith("QUICK")
    before = {path: path.stat().st_mtime_ns for path in (work / "cells").rglob("*")}
    again = run(None, work)
    assert again["table"]["figures"]["rows"] == result["table"]["figures"]["rows"], "the files are not needed again"
    assert {path: path.stat().st_mtime_ns for path in (work / "cells").rglob("*")} == before


def test_fair_rivals_and_pinfm_as_published_from_files_to_a_table(fake_ml_1m: Path, tmp_path: Path) -> None:
    names = ("sasrec-fair-history", "hstu-fair-request", "pinfm-published-history")
    small = (*SMALL[:-1], "pinfm-published-history:model.tables.dim=2")
    result = run(fake_ml_1m, tmp_path / "work", methods=names, overrides=small)
    assert (result["num_finished"], result["failures"]) == (6, [])
    [hit, gain] = result["table"]["figures"]["comparisons"]
    assert hit["against"] == gain["against"] == "sasrec-fair-history", "the other rival reads more"
    text = "\n".join(table_lines(report(result)))
    for words in ("HSTU with PinFM's size and loss", "PinFM as published: GPT layers, MLP maps", "0: --quick"):
        assert words in text
    assert "cosines, the batch's items, uncorrected, without the user's own items" in text


@pytest.mark.parametrize(
    "options",
    [
        {"study": "compare", "methods": ("popularity", "pinfm-request"), "ties": ("random", "file")},
        {"study": "validate", "methods": ("pinfm-history",)},
        {"study": "reproduce", "methods": ("sasrec",), "ties": ("random",)},
    ],
    ids=lambda options: options["study"],
)
def test_kept_ranks_give_the_same_table(fake_ml_1m: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    result = run(fake_ml_1m, tmp_path / "work", overrides=SMALL[:4], **options)
    again = recompute(Path(result["ranks"]))
    assert result["num_left"] == 0 and not result["failures"]
    assert again["table"] == result["table"] and again == result
    assert table_lines(report(again)) == table_lines(report(result))


def test_a_method_that_is_no_longer_planned_is_told(
    fake_ml_1m: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(fake_ml_1m, tmp_path / "work", methods=("popularity", "item-to-item"), overrides=())
    kept = read_kept(Path(result["ranks"]))
    fewer = dataclasses.replace(kept, options={**kept.options, "methods": ["popularity"]})
    monkeypatch.setattr(quality, "read_kept", lambda path: fewer)
    with pytest.raises(DataError, match="item-to-item_seed0_baseline, which this version does not plan"):
        recompute(Path(result["ranks"]))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"study": "compete"}, UsageError, r"did you mean compare\?"),
        ({"methods": ("pinfn-history",)}, UsageError, r"did you mean pinfm-history\?"),
        ({"ties": ("revers",)}, UsageError, r"did you mean reverse\?"),
        ({"seeds": -1}, UsageError, "--seeds is -1"),
        ({"overrides": ("model.widht=8",)}, UsageError, "unknown setting model.widht"),
        ({"study": "transfer", "methods": ("sasrec",), "overrides": ()}, UsageError, "not name exactly one PinFM"),
    ],
)
def test_names_that_do_not_exist(
    fake_ml_1m: Path, tmp_path: Path, options: dict[str, Any], error: type[TackboardError], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(fake_ml_1m, tmp_path / "some" / "work", **options)
    assert not (tmp_path / "some").exists(), "nothing is left behind"


def test_the_device_is_chosen_once(fake_ml_1m: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def spy(work: Work, cell: Cell, device: str) -> Step:
        asked.append(device)
        return dataclasses.replace(step_of(work, cell, device), is_finished=lambda: True)

    monkeypatch.setattr(quality, "step_of", spy)
    for is_there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        options = Options(quick=True, methods=("popularity",))
        measure("ml-1m", options, work=tmp_path / "work", data=fake_ml_1m)
    assert asked == ["cuda", "cpu"], "no process may go on without a GPU that this one has seen"


def test_places_that_cannot_be(fake_ml_1m: Path, tmp_path: Path) -> None:
    options = Options()
    with pytest.raises(UsageError, match=r"did you mean ml-1m\?"):
        measure("ml1m", options, work=tmp_path / "work", data=fake_ml_1m)
    for device, words in (("gpu", "allowed: auto, cpu, cuda"), ("cuda:99999", "cuda")):
        if device == "gpu" or not _has_gpu():
            with pytest.raises(UsageError, match=words):
                measure("ml-1m", options, work=tmp_path / "work", data=fake_ml_1m, device=device)
    with pytest.raises(UsageError, match=r"download it from https://grouplens\.org"):
        measure("ml-1m", options, work=tmp_path / "work", data=tmp_path / "absent")
    assert not (tmp_path / "work").exists(), "nothing is left behind"
    with pytest.raises(UsageError, match="--ties random does not fit deskdrop"):
        measure("deskdrop", Options(ties=("random",)), work=tmp_path / "work", data=fake_ml_1m)
    (fake_ml_1m / "ml-1m" / "ml-1m.zip").write_bytes(b"torn")
    with pytest.raises(DataError, match="not ml-1m as published"):
        measure("ml-1m", options, work=tmp_path / "work", data=fake_ml_1m)
    assert not (tmp_path / "work").exists(), "nor where the files are not the dataset"


def test_mistyped_data_is_told_also_where_it_is_not_needed(fake_ml_1m: Path, tmp_path: Path) -> None:
    run(fake_ml_1m, tmp_path / "work", methods=("popularity", "popularity"), overrides=())
    with pytest.raises(UsageError, match="does not exist"):
        run(tmp_path / "absent", tmp_path / "work", methods=("popularity",), overrides=())
    again = run(None, tmp_path / "work", methods=("popularity",), overrides=())
    assert len(again["table"]["figures"]["rows"]) == 1


def test_a_quick_table_shows_nothing_published(fake_ml_1m: Path, tmp_path: Path) -> None:
    result = run(fake_ml_1m, tmp_path / "work", methods=("popularity",), overrides=())
    assert not any("ublished" in line or "0.2853" in line for line in table_lines(report(result)))
    assert result["table"]["figures"]["published"] == {} and result["table"]["charts"][0]["marks"] == {}


def test_a_study_that_judges_otherwise_says_so_in_its_own_words(fake_ml_1m: Path, tmp_path: Path) -> None:
    options = Options(study="ablations", quick=True)
    result = measure("ml-1m", options, work=tmp_path / "work", data=fake_ml_1m, jobs=0, device="cpu", time_limit=0.0)
    assert result["is_stopped"] and result["num_finished"] == 0
    assert result["protocol"]["words"].startswith("Validation: each recipe ranks the") and result["note"] == ""
    assert result["table"]["notes"] == [] and table_lines(report(result))[1] == result["protocol"]["words"]


def test_time_limit_in_this_process(fake_ml_1m: Path, tmp_path: Path) -> None:
    options = Options(quick=True, methods=("popularity", "pinfm-history"),
                      overrides=(*SMALL, "training.steps=100000", "training.checkpoint_every=50000"))  # fmt: skip
    result = measure("ml-1m", options, work=tmp_path / "work", data=fake_ml_1m, jobs=0, device="cpu", time_limit=2.0)
    assert result["is_stopped"] and (result["num_finished"], result["num_left"]) == (1, 2)
    assert list((tmp_path / "work" / "runs").glob("*/checkpoints/step-*")), "its state is saved"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
