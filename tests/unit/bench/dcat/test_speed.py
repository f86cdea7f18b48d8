"""Timed work is the compared work: what each line times, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tackboard.bench.dcat import speed
from tackboard.bench.dcat.data import DcatPreset, made_up_requests
from tackboard.bench.dcat.rungs import DCAT, RUNGS, WHOLE
from tackboard.bench.dcat.speed import Served, check_served, check_trained, medians, ratio_of, timed
from tackboard.core.errors import TackboardError

CPU = torch.device("cpu")


def test_work_is_repeated_until_the_time_is_over() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        time.sleep(0.004)

    once = timed(work, CPU, 0.0)
    assert len(calls) == 1
    assert once["wall_ms"] >= 4.0
    many = timed(work, CPU, 0.02)
    assert 2 <= len(calls) - 1 <= 5
    assert many["cpu_ms"] < many["wall_ms"]


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    runs = {
        "whole": [{"wall_ms": wall, "cpu_ms": 8.0} for wall in (10.0, 100.0, 20.0)],
        "dcat": [{"wall_ms": wall, "cpu_ms": 2.0} for wall in (5.0, 25.0, 1.0)],
    }
    whole, dcat = medians(runs)
    assert (whole["wall_ms"], whole["times"], whole["cpu_times"]) == (20.0, 1.0, 1.0)
    assert (dcat["wall_ms"], dcat["times"], dcat["cpu_times"]) == (5.0, 4.0, 4.0)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_a_context_is_read_once_or_for_every_candidate(smallest: DcatPreset, rung: Any) -> None:
    asked = made_up_requests(smallest, num_candidates=6, num_requests=2)
    served = Served(rung, smallest.config(), asked, CPU, at_once=4)
    assert len(served.parts) == (3 if rung.name == WHOLE else 1)
    tokens: list[int] = []
    first_layer = served.model.pinfm.decoder.layers_in_order()[0]
    project = first_layer.project
    first_layer.project = lambda x_TD, rotation: tokens.append(len(x_TD)) or project(x_TD, rotation)
    scores = served.answer()
    assert scores.shape == (12,)
    assert scores.std() > 0
    context = 1 + smallest.max_history
    assert sum(tokens) == (12 * (context + 1) if rung.name == WHOLE else 2 * context + 12)
    tokens.clear()
    served.outputs()
    assert sum(tokens) == (12 * (context + 1) if rung.name == WHOLE else 2 * context + 12)


def test_other_scores_and_losses_are_refused() -> None:
    exact, fixed = RUNGS[1], RUNGS[3]
    expected = torch.tensor([1.0, -2.0])
    check_served(exact, expected + 1e-5, expected, "fp32")
    check_served(fixed, expected + 0.1, expected, "fp32")
    with pytest.raises(TackboardError, match="the scores of the line dcat differ by 5.0e-02"):
        check_served(exact, expected + 0.1, expected, "fp32")
    with pytest.raises(TackboardError, match="differ by nan"):
        check_served(exact, expected * float("nan"), expected, "bf16")
    check_trained(exact, [0.5, 0.5001], 0.5, "fp32")
    check_trained(fixed, [0.7], 0.5, "fp32")
    with pytest.raises(TackboardError, match="the loss with the line dcat is 0.51, but with the line whole it is 0.5"):
        check_trained(exact, [0.5, 0.51], 0.5, "fp32")


def test_every_ratio_has_a_line_of_the_ladder(smallest: DcatPreset, dcat_result: dict[str, Any]) -> None:
    assert [line["candidates"] for line in dcat_result["serving"]] == list(smallest.serving)
    assert [line["candidates"] for line in dcat_result["training"]] == [10, 16]
    for line in (*dcat_result["serving"], *dcat_result["training"]):
        for key in ("end_to_end", "module"):
            assert [entry["name"] for entry in line[key]] == [rung.name for rung in RUNGS]
            assert all(entry["wall_ms"] > 0 and entry["times"] > 0 for entry in line[key])
    for line in dcat_result["training"]:
        whole, dcat, skip, fixed = (entry["loss"] for entry in line["end_to_end"])
        assert dcat == pytest.approx(whole, rel=1e-4)
        assert skip == dcat
        assert fixed != dcat
    assert speed.WHOLE != DCAT


def test_the_clock_depends_on_the_device() -> None:
    assert ratio_of("cuda") == ("times", "wall time")
    assert ratio_of("cpu") == ("cpu_times", "CPU time")
