"""Names of rows: what the softmax was over and how the method was tuned, read from the config of the cell."""

from pathlib import Path

import pytest

from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.quality.data import find_bench
from tackboard.bench.quality.methods import METHODS
from tackboard.bench.quality.row_labels import softmax_of, title_of, tries_of
from tackboard.bench.quality.study_plan import Options, StudyContext

NUM_ITEMS = {"ml-1m": 3_706, "kakao-brunch": 505_840}


def context_of(dataset: str = "ml-1m", **options: object) -> StudyContext:
    return StudyContext(Work(Path("absent")), find_bench(dataset), Options(**options), is_trial=True)  # type: ignore[arg-type]


def cell_of(context: StudyContext, method: str) -> Cell:
    place = context.places(["file"])["file"]
    return context.cell(place, "file", METHODS[method], 0, "test")


@pytest.mark.parametrize(
    ("dataset", "method", "title", "softmax", "tries"),
    [
        ("ml-1m", "popularity", "popularity", "", ""),
        ("ml-1m", "hstu-large", "HSTU-large, as published", "cosines, 128 drawn items", "0: as published"),
        ("ml-1m", "sasrec-items", "SASRec of width 64", "inner products, all items", "0: not tuned"),
        ("ml-1m", "sasrec-wide-history", "SASRec of PinFM's size", "inner products, all items",
         "12: both inputs, 3 diverged"),
        ("ml-1m", "hstu-fair-request", "HSTU with PinFM's size and loss",
         "cosines, all items, without the user's earlier items", "0: settings of sasrec-wide"),
        ("ml-1m", "pinfm-history", "PinFM, ours: HSTU layers, residual maps, next-token + multi-token × 0.1 loss",
         "cosines, all items, without the user's earlier items", "42: both inputs"),
        ("ml-1m", "pinfm-published-history",
         "PinFM as published: GPT layers, MLP maps, next-token + multi-token + future-token loss",
         "cosines, the batch's items, uncorrected, without the user's own items",
         "0: rates, dropout and steps of the recipe"),
        ("kakao-brunch", "sasrec-wide-history", "SASRec of PinFM's size",
         "inner products, the batch's items and 16,384 drawn items, logQ", "2: with a softmax over 128 items"),
        ("kakao-brunch", "pinfm-history", "PinFM, ours: GPT layers, residual maps, next-token loss",
         "cosines, the batch's items and 16,384 drawn items, logQ, without the user's own items", "3"),
    ],
)  # fmt: skip
def test_a_row_says_what_it_is(dataset: str, method: str, title: str, softmax: str, tries: str) -> None:
    context = context_of(dataset)
    cell = cell_of(context, method)
    assert title_of(cell) == title
    assert softmax_of(cell, NUM_ITEMS[dataset]) == softmax
    assert tries_of(context, cell) == tries


def test_what_the_user_changed_is_in_the_words() -> None:
    changed = context_of(overrides=("sasrec-wide-history:model.loss.kind=sampled", "pinfm-history:model.maps=mlp"))
    cell = cell_of(changed, "sasrec-wide-history")
    assert softmax_of(cell) == "cosines, 128 drawn items"
    assert tries_of(changed, cell) == "12: both inputs, 3 diverged, changed by --set"
    assert tries_of(changed, cell_of(changed, "hstu-large")) == "0: as published"
    assert "MLP maps" in title_of(cell_of(changed, "pinfm-history"))
    some = context_of(overrides=("data.uniform_negatives=100",))
    assert softmax_of(cell_of(some, "sasrec-fair-history"), 3_706).startswith("cosines, 100 drawn items, ")
    both = context_of(overrides=("model.loss.mask_same_user=false", "model.loss.later_negatives=false"))
    assert softmax_of(cell_of(both, "pinfm-history"), 3_706) == "cosines, all items"
    quick = context_of(quick=True)
    assert tries_of(quick, cell_of(quick, "pinfm-history")) == "0: --quick"
