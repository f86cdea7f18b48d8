"""Rankers are judged by hand-made scores, and beside means of items counted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tackboard.batch import RequestBatch
from tackboard.core.errors import DataError
from tackboard.evaluation.labelled_requests import (
    ScoredCandidates,
    answer,
    damped_means,
    evaluate_requests,
    item_means,
    metrics_of,
)
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source

Config = Callable[..., RunConfig]


class Knowing(nn.Module):
    """Gives the click's own label as log odds, or its opposite."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        return self.scale * (2 * batch.labels["click"] - 1)


def test_a_model_that_knows_is_judged_so(ranker_config: Config) -> None:
    config = ranker_config()
    source = open_source(config)
    test, train = (config.data.steps(source, config.model.tables, 0, part=part) for part in ("test", "train"))
    for scale, expected in ((3.0, 1.0), (-3.0, 0.0)):
        result = evaluate_requests(Knowing(scale), test, train, quiet=True)
        rows = {(row["label"], row["name"]): row for row in result["rows"]}
        assert set(rows) == {(label, name) for label in ("click", "save") for name in ("item mean", "model")}
        assert rows["click", "model"]["auc"] == rows["click", "model"]["auc_within_users"] == expected
        assert rows["click", "model"]["log_loss"] == pytest.approx(math.log1p(math.exp(-scale)), rel=1e-5)
        assert 0.2 < rows["click", "item mean"]["auc"] < 0.8
    batches = [test[step] for step in range(test.plan.first_step(1))]
    assert result["num_candidates"] == sum(int((b.known["click"] | b.known["save"]).sum()) for b in batches)


def test_answers_are_those_of_every_request_once(ranker_config: Config) -> None:
    config = ranker_config()
    steps = config.data.steps(open_source(config), config.model.tables, 0, part="test")
    answers = answer(Knowing(1.0), steps)
    batches = [steps[step] for step in range(steps.plan.first_step(1))]
    assert np.array_equal(answers.users, torch.cat([b.expand(b.histories.users) for b in batches]).numpy())
    assert np.array_equal(answers.items, torch.cat([b.histories.item_ids[b.candidates] for b in batches]).numpy())
    assert set(np.unique(answers.labels["click"])) <= {-1, 0, 1}
    few = answer(Knowing(1.0), steps, max_users=1)
    assert len(np.unique(few.users)) == 1 and 0 < len(few.scores) < len(answers.scores)


def test_unknown_labels_are_left_out() -> None:
    answers = ScoredCandidates(
        scores=np.array([2.0, 1.0, -1.0, 9.0]),
        users=np.array([7, 7, 8, 8]),
        items=np.arange(4),
        labels={"click": np.array([1, 0, 0, -1], dtype=np.int8)},
    )
    found = metrics_of(answers, "click")
    assert (found["auc"], found["auc_within_users"]) == (1.0, 1.0)
    losses = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(1.0)), math.log1p(math.exp(-1.0))]
    assert found["log_loss"] == pytest.approx(np.mean(losses), abs=1e-6)


def test_answers_of_one_kind_cannot_be_judged() -> None:
    nothing = ScoredCandidates(np.ones(2), np.arange(2), np.arange(2), {"click": np.array([0, 0], dtype=np.int8)})
    with pytest.raises(DataError, match="labels click of the held-out requests are all alike"):
        metrics_of(nothing, "click")


def test_means_are_damped_and_unknown_items_have_that_of_all(ranker_config: Config) -> None:
    found = damped_means(np.array([5, 5, 9]), np.array([1.0, 1.0, -1.0]), np.array([9, 5, 7, 100]), damping=2.0)
    assert found.tolist() == [-1 / 3, 0.5, 0.0, 0.0]
    assert damped_means(np.zeros(0, np.int64), np.zeros(0), np.array([3]), 1.0).tolist() == [0.0]
    config = ranker_config()
    steps = config.data.steps(open_source(config), config.model.tables, 0)
    counts: dict[int, list[float]] = {}
    for step in range(steps.plan.first_step(1)):
        batch = steps[step]
        ids = batch.histories.item_ids[batch.candidates]
        for item, label, known in zip(ids.tolist(), batch.labels["click"].tolist(), batch.known["click"], strict=True):
            if known:
                counts.setdefault(item, []).append(label)
    mean = float(np.mean([label for labels in counts.values() for label in labels]))
    items = sorted(counts)
    expected = [mean + sum(label - mean for label in counts[item]) / (len(counts[item]) + 10) for item in items]
    assert item_means(steps, "click", np.array(items)) == pytest.approx(expected, rel=1e-9)
