"""The command on a small made-up dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tackboard.cli.bench_feeding import bench_feeding


def test_a_made_up_dataset_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench_feeding(data=None, num_events=20_000, tokens=1024, json_output=True)
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["num_events"] == 20_000
    assert list(result["host"]) == ["0", "1", "2", "4", "8"]
    assert lines[0].startswith("workers")
    if not torch.cuda.is_available():
        assert result["device"] is None and any("no GPU" in line for line in lines)
