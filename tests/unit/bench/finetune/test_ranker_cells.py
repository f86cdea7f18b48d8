"""A cell trains and tests one ranker; results of different cells can be paired request by request."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tackboard.bench.finetune.ranker_cells import NO_PLACE
from tackboard.bench.quality.cell import Machine, run_cell

CPU = Machine("cpu", 1)


def test_cells_of_one_study(tiny_study: Callable[..., Any]) -> None:
    work, planned = tiny_study()
    run_cell(work, planned.pretrained[0], CPU)
    names = [("late-last", "all"), ("none", "third"), ("trees", "all")]
    cells = {key: planned.rankers[*key, 0] for key in planned_keys(planned, names)}
    results = {key: run_cell(work, cell, CPU) for key, cell in cells.items()}
    first = next(iter(results.values()))
    for result in results.values():
        values = result.values
        for name in ("users", "ages"):
            assert np.array_equal(result.array(name), first.array(name)), "the same requests in the same order"
        assert len(result.array("users")) == values["num_test"] == first.values["num_test"]
        for label in ("next", "save"):
            places = result.array(f"places_{label}")
            known = places[places != NO_PLACE]
            assert np.isclose((known < 3).mean(), values["metrics"][f"{label}/hit@3"], atol=1e-6)
        assert (result.array("places_next") != NO_PLACE).all()
        assert 0 < (result.array("places_save") != NO_PLACE).sum() < values["num_test"]
        saved = result.array("places_save") != NO_PLACE
        if "steps" not in values:  # Trees have no head of their own for saves, so the true item keeps its place.
            assert np.array_equal(result.array("places_save")[saved], result.array("places_next")[saved])
    whole, third = (results[key].values["num_train"] for key in cells if key[0] != "trees")
    assert third == round(whole / 3)


def planned_keys(planned: Any, wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The wanted keys; a ranker that the study does not train on a share is replaced by one that it does."""
    return [key if (*key, 0) in planned.rankers else ("scratch", key[1]) for key in wanted]
