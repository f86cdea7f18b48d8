"""`tackboard bench quality` as somebody would type it: with made-up files of MovieLens, and with the real ones."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.events.public import listing
from tackboard.events.public.publisher import PublishedCounts

ROOT = Path(__file__).resolve().parents[2]
SMALL = [word for setting in ("training.steps=2", "training.checkpoint_every=1", "model.width=8",
                              "model.backbone.num_layers=1")
         for word in ("--set", setting)]  # fmt: skip


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ml-1m.zip of 18 users, which passes for the publisher's."""
    ratings = [
        f"{user}::{(user + place) % 9 + 1}::3::{978_000_000 + place // 2}"
        for user in range(1, 19)
        for place in range(8)
    ]
    films = [f"{film}::Film {film}::Drama" for film in range(1, 12)]
    people = [f"{user}::F::25::1::00000" for user in range(1, 19)]
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        for name, lines in {"ratings": ratings, "movies": films, "users": people}.items():
            archive.writestr(f"ml-1m/{name}.dat", "\n".join(lines) + "\n")
    small = dataclasses.replace(listing.DATASETS["ml-1m"], counts=PublishedCounts(users=18, items=9, events=144))
    monkeypatch.setitem(listing.DATASETS, "ml-1m", small)
    return tmp_path


def test_a_study_is_spread_over_calls(tackboard: Callable[..., Any], downloads: Path) -> None:
    command = ["bench", "quality", "--data", str(downloads), "--methods", "item-to-item,sasrec-history", "--quick",
               "--work", "work", "--device", "cpu", "--json", *SMALL]  # fmt: skip
    answer = tackboard(*command, "--jobs", "0", "--results", "results", cwd=downloads)
    assert answer.code == 0, answer.err
    *table, last = answer.out.splitlines()
    result = json.loads(last)
    assert table[0].startswith("QUICK, says nothing about quality: compare on ml-1m: 3 users, 11 items, 24 events")
    assert result["num_finished"] == result["num_cells"] == 3
    assert [row["method"] for row in result["table"]["figures"]["rows"]] == ["item-to-item", "sasrec-history"]
    files = sorted(path.suffix for path in (downloads / "results").iterdir())
    assert files == [".md", ".npz", ".svg", ".svg"]
    remade = tackboard("bench", "quality", "--recompute", "results", "--json", cwd=downloads)
    assert remade.code == 0 and remade.out.splitlines()[1:-1] == table, "the same table without data and training"
    assert json.loads(remade.out.splitlines()[-1])["table"] == result["table"]
    again = tackboard(*command, "--methods", "popularity,item-to-item,sasrec-history", cwd=downloads)
    assert again.code == 0 and "4 cells, 3 of them finished before" in again.err, again.err
    assert json.loads(again.out.splitlines()[-1])["num_finished"] == 4, "the new one in a process of its own"


@pytest.mark.slow
def test_failing_cells_are_named_with_their_logs(tackboard: Callable[..., Any], downloads: Path) -> None:
    # Settings are checked when they are read, but whether data can be cut into such steps shows only in the cell.
    answer = tackboard("bench", "quality", "--data", str(downloads), "--methods", "popularity,pinfm-history", "--quick",
                       "--work", "work", "--device", "cpu", *SMALL, "--set", "pinfm-history:data.tokens_per_step=8",
                       "--set", "pinfm-history:data.max_length=7", cwd=downloads)  # fmt: skip
    assert answer.code == 2, answer.err
    [line] = [line for line in answer.out.splitlines() if line.startswith("FAILED")]
    log = Path(line.rpartition("see ")[2])
    assert "tokens_per_step" in (downloads / log).read_text()
    assert "popularity" in answer.out and "1 cell is not finished" in answer.out


def test_foreign_folder_and_broken_archive(tackboard: Callable[..., Any], downloads: Path) -> None:
    (downloads / "thesis").mkdir()
    (downloads / "thesis" / "chapter.txt").write_text("")
    foreign = tackboard("bench", "quality", "--data", str(downloads), "--work", "thesis", cwd=downloads)
    assert foreign.code == 2 and "thesis holds files that this command did not write" in foreign.err
    (downloads / "ml-1m.zip").write_bytes(b"PK torn")
    broken = tackboard("bench", "quality", "--data", str(downloads), "--work", "work", cwd=downloads)
    assert broken.code == 3 and "not ml-1m as published" in broken.err and "grouplens.org" in broken.err
    assert len(broken.err.splitlines()) == 3
    assert not (downloads / "work").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_on_the_real_files(tackboard: Callable[..., Any], tmp_path: Path) -> None:
    folder = Path(os.environ.get("TACKBOARD_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "ml-1m").is_dir():
        pytest.skip(f"no ml-1m in {folder}: set TACKBOARD_DATA to the folder of your downloads")
    answer = tackboard("bench", "quality", "--data", str(folder), "--quick", "--json", "--jobs", "2", cwd=tmp_path)
    assert answer.code == 0, answer.err
    result = json.loads(answer.out.splitlines()[-1])
    means = {row["method"]: row for row in result["table"]["figures"]["means"]}
    assert set(means) == {"popularity", "item-to-item", "sasrec-history", "pinfm-history"}
    assert min(means[name]["hr@10"] for name in means if name != "popularity") > means["popularity"]["hr@10"]
