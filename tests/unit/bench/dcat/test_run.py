"""The whole bench at its smallest size: everything is measured, and aims compare with what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tackboard.bench.dcat.run import PUBLISHED, aims, measure
from tackboard.bench.dcat.rungs import DCAT
from tackboard.core.errors import UsageError


def test_everything_is_measured(dcat_result: dict[str, Any]) -> None:
    assert {"equality", "serving", "training", "fixed_length", "aims", "hardware", "commit", "date"} <= set(dcat_result)
    assert dcat_result["device"] == "cpu"
    assert len(dcat_result["equality"]) == len(dcat_result["lines"]) == 4
    json.dumps(dcat_result)


def line_of(candidates: int, wall: float, cpu: float) -> dict[str, Any]:
    entries = [{"name": "whole", "times": 1.0, "cpu_times": 1.0}, {"name": DCAT, "times": wall, "cpu_times": cpu}]
    return {"candidates": candidates, "module": entries}


def test_aims_are_the_published_ratios() -> None:
    result = {
        "device": "cuda",
        "serving": [line_of(1, 1.0, 1.0), line_of(1000, 8.0, 6.0)],
        "training": [line_of(10, 2.0, 4.0), line_of(16, 9.0, 9.0)],
    }
    assert [(aim["value"], aim["met"]) for aim in aims(result)] == [(8.0, True), (2.0, False)]
    assert [(aim["value"], aim["met"]) for aim in aims(result | {"device": "cpu"})] == [(6.0, False), (4.0, True)]
    assert PUBLISHED == {"serving": 7.0, "training": 3.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--device = cuda, but torch sees no GPU"):
        measure(tmp_path, device="cuda", quick=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_everything_is_measured_on_a_gpu(tmp_path: Path) -> None:
    result = measure(tmp_path, device="cuda", quick=True)
    assert result["device"] == "cuda"
    for line in result["training"]:
        assert all(entry["gpu_peak_bytes"] > 0 for entry in line["end_to_end"])
