"""Predicts the answers of a transfer task without a sequence model: the stage `transfer-baselines`.

    means                the damped mean answer of the item, plus how far the user's answers lie above the mean answers
                         of their items
    previous event       one of two mean answers: of the examples with the item of the user's previous event, or of the
                         other examples
    logistic regression  on counts of the user, the item and the pair, and on the previous event (counts.py)
    boosted trees        on the same numbers

Baselines get what the arms get (fit.py): the same examples to learn from, the same validation users to choose settings
and the number of trees by log-loss, and one test. The counts of an item come from the events that pretraining reads. In
a task without repeats, no example has the item of the previous event, so the baseline `previous event` is left out. The
results also hold the AUC for each random resample of test users; the resamples are the same as for the arms.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.quality.cell import Machine, Outcome
from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.transfer.classifiers import BoostedTrees, LogisticRegression, TreeSettings
from tackboard.bench.transfer.counts import SAME_AS_BEFORE, Numbers, describe_examples
from tackboard.bench.transfer.data import YES, Examples, additive_means, task_of
from tackboard.bench.transfer.fit import facts_of, judged, task_data
from tackboard.evaluation.labelled_requests import ScoredCandidates, damped_means
from tackboard.metrics.binary import log_losses, logit

PENALTIES = (0.01, 1.0, 100.0)
"""Penalties on the squared weights of logistic regression to try."""
DEPTHS = (2, 4, 6)
"""Depths of trees to try."""
TITLES = {
    "means": "means of item and user",
    "previous": "previous event",
    "logistic": "logistic regression on counts",
    "trees": "boosted trees on counts",
}
"""Baseline → its name in tables."""


@dataclasses.dataclass(frozen=True)
class Known:
    """Examples with their numbers: to learn from, and to choose settings with."""

    train: Examples
    train_rows: Numbers
    validation: Examples
    validation_rows: Numbers


Predict = Callable[[Examples, Numbers], Numbers]
"""A function that takes examples and their numbers, and returns the log odds of yes for each example."""
Fitted = tuple[Predict, str, int]
"""A prediction, the chosen settings in words, and the number of tries that they were chosen from."""


def fit_means(known: Known) -> Fitted:
    """Returns the prediction from the means of item and user."""
    return lambda asked, _: logit(additive_means(known.train, asked, with_users=True)), "", 0


def fit_previous(known: Known) -> Fitted:
    """Returns the prediction from one bit: whether the example has the same item as the event before."""
    mean = float(known.train.labels.mean())
    bits = known.train_rows[:, SAME_AS_BEFORE].astype(np.int64)

    def predict(_: Examples, rows: Numbers) -> Numbers:
        asked = rows[:, SAME_AS_BEFORE].astype(np.int64)
        return logit(mean + damped_means(bits, known.train.labels - mean, asked, 1.0))

    return predict, "", 0


def fit_logistic(known: Known) -> Fitted:
    """Returns logistic regression with the best of PENALTIES."""
    fits = [LogisticRegression.fit(known.train_rows, known.train.labels, penalty) for penalty in PENALTIES]
    losses = [float(log_losses(fit.log_odds(known.validation_rows), known.validation.labels).mean()) for fit in fits]
    best = int(np.argmin(losses))
    return lambda _, rows: fits[best].log_odds(rows), f"penalty {PENALTIES[best]:g}", len(PENALTIES)


def fit_trees(known: Known) -> Fitted:
    """Returns boosted trees of the best of DEPTHS."""
    held_out = (known.validation_rows, known.validation.labels)
    fits = [
        BoostedTrees.fit(known.train_rows, known.train.labels, held_out, TreeSettings(depth=depth)) for depth in DEPTHS
    ]
    best = int(np.argmin([fit.validation_loss for fit in fits]))
    return (
        lambda _, rows: fits[best].log_odds(rows),
        f"depth {DEPTHS[best]}, {len(fits[best].trees)} trees",
        len(DEPTHS),
    )


BASELINES: Mapping[str, Callable[[Known], Fitted]] = {
    "means": fit_means,
    "previous": fit_previous,
    "logistic": fit_logistic,
    "trees": fit_trees,
}


def run_baselines(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits every baseline on a share of the examples (a setting of the protocol), and tests each of them once."""
    del machine
    started, config = time.perf_counter(), cell.run_config()
    task, data, hashing = task_of(cell.protocol), task_data(work, cell), config.model.tables
    source = data.open(None)
    train = Examples.of(data.steps(source, hashing, cell.seed))
    validation, test = (
        Examples.of(data.steps(source, hashing, cell.seed, part=part)) for part in ("validation", "test")
    )
    numbers = describe_examples(work.dataset(cell), task, train, validation, test)
    known = Known(train, numbers[0], validation, numbers[1])
    rows: dict[str, dict[str, Any]] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for name, fit in BASELINES.items():
        if name == "previous" and not any(rows_of[:, SAME_AS_BEFORE].any() for rows_of in numbers):
            continue
        predict, words, tries = fit(known)
        logits = predict(test, numbers[2])
        metrics, draws = judged(ScoredCandidates(logits, test.users, test.items, {YES: test.labels.astype(np.int8)}))
        loss = float(log_losses(predict(validation, numbers[1]), validation.labels).mean())
        rows[name] = {"metrics": metrics, "settings": words, "tries": tries, "validation_log_loss": round(loss, 6)}
        arrays[f"draws_auc_{name}"] = draws["draws_auc"]
    facts = {"num_examples": len(train), **facts_of(data, source, hashing)}
    return {"rows": rows, **facts, "seconds": round(time.perf_counter() - started, 1)}, arrays


def result_of(result: Result, name: str) -> Result | None:
    """Returns the result of one baseline from the result of `run_baselines`, in the form of the result of an arm."""
    row = result.values["rows"].get(name)
    if row is None:
        return None
    draws = {"draws_auc": result.array(f"draws_auc_{name}")}
    return dataclasses.replace(result, values={**result.values, **row}, loaded=draws)
