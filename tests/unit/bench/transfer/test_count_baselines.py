"""Baselines of the transfer study: what each learns from its examples."""

import numpy as np
import pytest

from tackboard.bench.transfer.classifiers import BoostedTrees, LogisticRegression, TreeSettings
from tackboard.bench.transfer.count_baselines import BASELINES, DEPTHS, PENALTIES, TITLES, Known
from tackboard.bench.transfer.counts import NAMES, SAME_AS_BEFORE
from tackboard.bench.transfer.data import Examples
from tackboard.metrics.binary import auc, log_losses


def examples(count: int, seed: int) -> tuple[Examples, np.ndarray]:
    """Examples of which nine in ten are yes if the item is that of the event before, and one in ten if not."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, len(NAMES)))
    rows[:, SAME_AS_BEFORE] = random.random(count) < 0.5
    labels = random.random(count) < np.where(rows[:, SAME_AS_BEFORE] == 1.0, 0.9, 0.1)
    users, items = random.integers(0, 20, count), random.integers(0, 20, count)
    return Examples(users, items, labels, np.arange(count)), rows


@pytest.fixture
def known() -> Known:
    return Known(*examples(2_000, 0), *examples(500, 1))


def test_every_baseline_has_a_name() -> None:
    assert list(BASELINES) == list(TITLES)


def test_one_bit_has_two_probabilities(known: Known) -> None:
    predict, words, tries = BASELINES["previous"](known)
    test, rows = examples(500, 2)
    logits = predict(test, rows)
    odds = {bit: float(known.train.labels[known.train_rows[:, SAME_AS_BEFORE] == bit].mean()) for bit in (0.0, 1.0)}
    for bit, share in odds.items():
        [logit] = np.unique(logits[rows[:, SAME_AS_BEFORE] == bit])
        assert logit == pytest.approx(np.log(share / (1 - share)), abs=0.02)
    assert (words, tries) == ("", 0) and auc(logits, test.labels) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("name", ["logistic", "trees"])
def test_models_of_counts_take_the_setting_that_is_best_on_validation(known: Known, name: str) -> None:
    predict, words, tries = BASELINES[name](known)
    test, rows = examples(500, 2)
    assert auc(predict(test, rows), test.labels) > 0.85
    held_out = (known.validation_rows, known.validation.labels)
    fits: dict[str, LogisticRegression | BoostedTrees] = {
        f"penalty {penalty:g}": LogisticRegression.fit(known.train_rows, known.train.labels, penalty)
        for penalty in PENALTIES
    }
    if name == "trees":
        trees = {
            depth: BoostedTrees.fit(known.train_rows, known.train.labels, held_out, TreeSettings(depth=depth))
            for depth in DEPTHS
        }
        fits = {f"depth {depth}, {len(fit.trees)} trees": fit for depth, fit in trees.items()}
    losses = {words: log_losses(fit.log_odds(held_out[0]), held_out[1]).mean() for words, fit in fits.items()}
    assert tries == len(fits) and words == min(losses, key=lambda one: losses[one])


def test_means_read_no_numbers(known: Known) -> None:
    predict, _, _ = BASELINES["means"](known)
    test, rows = examples(500, 2)
    assert (predict(test, rows) == predict(test, rows * 0)).all()
