"""`tackboard predict`: what it says to people and to machines, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tackboard.train.config import RunConfig

Program = Callable[..., Any]


def test_a_job_says_what_it_wrote_and_then_that_it_is_finished(
    tackboard: Program, labelled_dataset: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    asked = ["predict", labelled_dataset, "--bundle", tiny_bundle, "--out", tmp_path / "deep" / "out"]
    first = tackboard(*asked, "--device", "cpu")
    assert first.code == 0, first.err
    parts = sorted((tmp_path / "deep" / "out" / "scores").iterdir())
    num_rows = sum(pq.read_metadata(part).num_rows for part in parts)
    lines = first.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'deep' / 'out'}: {num_rows:,} candidates of ")
    assert lines[0].endswith(f" requests with tiny version 3, {len(parts)} files")
    assert lines[1].endswith(" rows/s")
    assert "scoring: " in first.err and " rows/s, " in first.err
    (tmp_path / "deep" / "out" / "MANIFEST.json").unlink()
    parts[0].unlink()
    again = tackboard(*asked)
    assert again.out.splitlines()[0] == f"{lines[0]}, {len(parts) - 1} of them from before"
    finished = tackboard(*asked)
    assert finished.out.splitlines()[0].endswith(" with tiny version 3; nothing was written")
    assert "was finished before" in finished.out
    result = tackboard(*asked, "--json").json()
    assert (result["num_candidates"], result["num_parts"], result["was_finished"]) == (num_rows, len(parts), True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_a_gpu_scores_as_the_cpu(tackboard: Program, labelled_dataset: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    scores = {}
    for device in ("cpu", "cuda"):
        asked = ["predict", labelled_dataset, "--bundle", tiny_bundle, "--out", tmp_path / device]
        answer = tackboard(*asked, "--device", device)
        assert answer.code == 0, answer.err
        scores[device] = pq.read_table(tmp_path / device / "scores")["score"].to_pylist()
    assert scores["cuda"] == pytest.approx(scores["cpu"], rel=1e-3, abs=1e-4)
    refused = tackboard("predict", labelled_dataset, "--bundle", tiny_bundle, "--out", tmp_path / "cpu")
    assert refused.code == 2 and "holds predictions with another device (cpu)" in refused.err


def test_mistakes_are_told_in_three_lines(
    tackboard: Program, labelled_dataset: Path, tiny_bundle: Path, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    unlabelled = tiny_config().data.dataset
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for code, said, dataset, bundle, out, more in (
        (3, f"tackboard data label {Path(unlabelled).resolve()}", unlabelled, tiny_bundle, "out", ()),
        (3, "is not a folder", labelled_dataset, tmp_path / "none", "out", ()),
        (2, "is not empty and holds no predictions", labelled_dataset, tiny_bundle, "full", ()),
        (2, "--device gpu is no device", labelled_dataset, tiny_bundle, "out", ("--device", "gpu")),
    ):
        answer = tackboard("predict", dataset, "--bundle", bundle, "--out", tmp_path / out, *more)
        assert (answer.code, said in answer.err) == (code, True), answer.err
        assert len([line for line in answer.err.splitlines() if not line.startswith("warning")]) <= 3
    assert not (tmp_path / "out").exists()
