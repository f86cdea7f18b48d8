"""Ranks that are kept: the published table comes out of them again, and a bad file is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench.quality import run as quality
from tackboard.bench.quality.cell import metrics_of
from tackboard.bench.quality.cells import Cell, Result
from tackboard.bench.quality.kept_ranks import STUDY, SUFFIX, find_kept, read_kept, write_kept
from tackboard.bench.quality.report import report
from tackboard.bench.report import write_result
from tackboard.core.errors import CorruptFileError, DataError, UsageError

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
PUBLISHED = sorted(RESULTS.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_a_published_table_comes_out_of_its_ranks(path: Path, tmp_path: Path) -> None:
    """Every byte of the Markdown file and of its charts, from the file of ranks alone."""
    hardware = path.name.split("_")[1]
    made = write_result(report(quality.recompute(path)), tmp_path, hardware)
    assert made.name == path.name.replace(SUFFIX, ".md")
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (RESULTS / file.name).read_bytes(), f"{file.name} is not what its ranks say"


def test_a_study_is_published_with_its_ranks() -> None:
    assert any("deskdrop-compare" in path.name for path in PUBLISHED)
    assert sum(path.stat().st_size for path in PUBLISHED) < 20 * 2**20, "ranks are to stay small"


def a_result(folder: Path, method: str, ranks: list[int], **values: Any) -> Result:
    cell = Cell(prepared="deskdrop-file", ties="file", method=method, seed=0, stage="baseline", protocol={})
    kept = {"metrics": {"hr@10": 9.9}, "environment": {"commit": "abc", "command": ["secret"]}} | values
    arrays = {"ranks": np.array(ranks), "gaps": np.array([0, 2**31 - 1])}
    return Result(folder, cell, kept, arrays)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / f"study{SUFFIX}"
    results = [a_result(tmp_path, "popularity", [3, 70_000]), a_result(tmp_path, "item-to-item", [0, 1])]
    options = {"study": "compare", "methods": ["popularity", "item-to-item"], "ties": ["file"]}
    write_kept(path, options, {"dataset": "deskdrop", "table": {}, "ranks": "x", "date": "2026-11-18"}, results)
    return path


def test_metrics_come_from_the_ranks(kept: Path) -> None:
    study = read_kept(kept)
    assert study.result == {"dataset": "deskdrop", "date": "2026-11-18"}
    one = study.results["deskdrop-file_popularity_seed0_baseline"]
    assert one.values["metrics"] == metrics_of(np.array([3, 70_000])), "not what the result said of itself"
    assert one.array().tolist() == [3, 70_000] and one.array().dtype == np.int32
    assert one.values["environment"] == {"commit": "abc"}, "nothing of the machine is published"
    assert study.find(one.cell) is one
    with np.load(kept) as file:
        assert len(file.files) == 4, "equal arrays are stored once"


def test_the_same_study_gives_the_same_bytes(kept: Path) -> None:
    study, before = read_kept(kept), kept.read_bytes()
    write_kept(kept, study.options, study.result, list(study.results.values()))
    assert kept.read_bytes() == before


def test_a_damaged_file_is_told(kept: Path, tmp_path: Path) -> None:
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"0.npy") + 60] ^= 1
    for content in (whole[: len(whole) // 2], bytes(flipped), b"", b"# a page"):
        kept.write_bytes(content)
        with pytest.raises(CorruptFileError, match="damaged or is no file with ranks"):
            read_kept(kept)
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    with pytest.raises(CorruptFileError, match="no file with ranks"):
        read_kept(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"format_version": 2}, DataError, "has format version 2\n.*reads format version 1"),
        ({"kind": "cookies"}, CorruptFileError, "does not name the kind"),
        ({"cells": [{}]}, CorruptFileError, "damaged"),
    ],
)
def test_another_format_is_refused(kept: Path, change: dict[str, Any], error: type[DataError], words: str) -> None:
    with np.load(kept) as file:
        arrays = {name: file[name] for name in file.files}
    study = json.loads(arrays.pop(STUDY).tobytes()) | change
    np.savez(kept, **{STUDY: np.frombuffer(json.dumps(study).encode(), dtype=np.uint8)}, **arrays)
    with pytest.raises(error, match=words):
        read_kept(kept)


def test_which_files_are_read(kept: Path, tmp_path: Path) -> None:
    assert find_kept(kept) == [kept] == find_kept(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no file …_ranks.npz"):
        find_kept(tmp_path / "empty")
    with pytest.raises(UsageError, match="does not exist"):
        find_kept(tmp_path / "nowhere")
