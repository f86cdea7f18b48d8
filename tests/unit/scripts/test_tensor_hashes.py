"""Digests of a checkpoint's tensors: equal for the same run, other for another bit, a type, a shape or a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tensor_hashes
from tackboard.checkpoint.store import find_checkpoint
from tackboard.core.rundir import RunDirectory


def test_a_run_is_equal_to_itself_and_not_to_another(
    trained_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tensor_hashes.main([str(trained_run.path)]) == 0
    before = json.loads(capsys.readouterr().out)
    assert "tables/item_tables.weight" in before and len(before["dense/start"]) == 64
    (tmp_path / "before.json").write_text(json.dumps(before))
    against = ["--against", str(tmp_path / "before.json")]
    assert tensor_hashes.main([str(find_checkpoint(trained_run.path)), *against]) == 0
    assert f"{len(before)} tensors are equal" in capsys.readouterr().out
    (tmp_path / "before.json").write_text(json.dumps({**before, "dense/start": "0" * 64, "dense/gone": "1" * 64}))
    assert tensor_hashes.main([str(trained_run.path), *against]) == 1
    assert capsys.readouterr().out.splitlines() == ["dense/gone: only before", "dense/start: other bytes"]


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(2, 2), torch.tensor([0.0, 0.0, 0.0, -0.0])])
def test_type_shape_and_every_bit_count(other: torch.Tensor) -> None:
    assert tensor_hashes.digest_of(torch.zeros(4, dtype=torch.int32)) != tensor_hashes.digest_of(other)


def test_renamed_tensors_are_matched_by_the_map() -> None:
    assert tensor_hashes.differences({"a": "1", "b": "2"}, {"c": "1", "b": "2"}, {"a": "c"}) == []
    assert tensor_hashes.differences({"a": "1"}, {"c": "1"}, {}) == ["a: only before", "c: only after"]
