"""Lines that compute something else are found before anything is timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tackboard.bench.dcat import equality
from tackboard.bench.dcat.equality import check_equality
from tackboard.bench.dcat.rungs import FIXED, RUNGS, WHOLE
from tackboard.core.errors import TackboardError
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source

CPU = torch.device("cpu")


def check(config: RunConfig, device: torch.device = CPU) -> dict[str, dict[str, float]]:
    source = open_source(config)
    batch = config.data.steps(source, config.model.tables, config.seed)[0]
    return {line["name"]: line for line in check_equality(config, source.vocabulary, batch, device)}


def test_every_line_equals_what_it_must(dcat_config: RunConfig) -> None:
    found = check(dcat_config)
    assert set(found) == {rung.name for rung in RUNGS}
    assert found[WHOLE]["scores"] == found[WHOLE]["gradients"] == 0.0
    assert all(0 <= line["scores"] < 1e-5 and 0 <= line["gradients"] < 1e-4 for line in found.values())
    assert found[FIXED]["change"] > 10 * found[FIXED]["scores"], "a fixed length is another model"


@pytest.mark.parametrize("what", ["scores", "gradients"])
def test_a_line_that_differs_fails(dcat_config: RunConfig, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(equality, "SCORE_TOLERANCE", 1.0 if what == "gradients" else 1e-5)
    wrong = dataclasses.replace(RUNGS[1], settings=lambda _: ("model.fusion.fixed_length=3",))
    monkeypatch.setattr(equality, "RUNGS", (RUNGS[0], wrong))
    with pytest.raises(TackboardError, match=f"the {what} of the line dcat differ by"):
        check(dcat_config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_every_line_equals_what_it_must_on_a_gpu(dcat_config: RunConfig) -> None:
    found = check(dcat_config, torch.device("cuda"))
    assert found[WHOLE]["scores"] == 0.0
    assert found[FIXED]["change"] > found[FIXED]["scores"]
