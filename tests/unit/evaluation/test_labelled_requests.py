"""Rankers are judged by hand-made scores, and beside means of items counted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tackboard.batch import RequestBatch
from tackboard.core.errors import ConfigError, DataError
from tackboard.evaluation.item_age import AGES
from tackboard.evaluation.labelled_requests import (
    METRICS,
    MORE_METRICS,
    ScoredCandidates,
    all_metrics_of,
    answer,
    damped_means,
    evaluate_requests,
    hits_by_age,
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


class Headed(Knowing):
    """Has a head for save, which knows the label, and counts how often its other scores were asked for."""

    num_asked = 0

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        self.num_asked += 1
        return -super().scores(batch)

    def scores_by_action(self, batch: RequestBatch) -> dict[str, torch.Tensor]:
        return {"save": self.scale * (2 * batch.labels["save"] - 1), "hide": self.scale * batch.weights}


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
        assert rows["click", "model"]["hit@3"] == expected or scale < 0
        assert rows["click", "model"]["ne"] < 1 if scale > 0 else rows["click", "model"]["ne"] > 1
        assert 0.2 < rows["click", "item mean"]["auc"] < 0.8
        assert list(rows["save", "item mean"]) == ["name", "label", *METRICS, *MORE_METRICS]
        assert 0.5 < rows["click", "item mean"]["calibration"] < 2 and 0 < rows["click", "item mean"]["hit@3"] < 1
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


def test_a_label_is_judged_by_its_head_if_there_is_one(ranker_config: Config) -> None:
    config = ranker_config()
    source = open_source(config)
    test, train = (config.data.steps(source, config.model.tables, 0, part=part) for part in ("test", "train"))
    model = Headed(2.0)
    result = evaluate_requests(model, test, train, quiet=True)
    aucs = {row["label"]: row["auc"] for row in result["rows"] if row["name"] == "model"}
    assert aucs == {"click": 0.0, "save": 1.0} and model.num_asked
    means = {row["label"]: row["auc"] for row in result["rows"] if row["name"] == "item mean"}
    assert means["save"] < 1, "the baseline is not judged by the head"
    config = ranker_config('data.labels=["save"]')
    test = config.data.steps(open_source(config), config.model.tables, 0, part="test")
    model.num_asked = 0
    model.score_of_actions = lambda by_action: -by_action["hide"]  # type: ignore[assignment]
    answers = answer(model, test)
    assert model.num_asked == 0 and (answers.scores == -answers.heads["hide"]).all(), "the heads are computed once"
    assert set(answers.heads) == {"save", "hide"} and metrics_of(answers, "save")["auc"] == 1.0


def test_a_request_is_numbered_through_all_steps(ranker_config: Config) -> None:
    config = ranker_config()
    steps = config.data.steps(open_source(config), config.model.tables, 0, part="test")
    answers = answer(Knowing(1.0), steps)
    batches = [steps[step] for step in range(steps.plan.first_step(1))]
    assert len(batches) > 1 and answers.requests is not None and answers.request_ms is not None
    expected = np.repeat(
        np.arange(sum(b.num_requests for b in batches)),
        np.concatenate([torch.bincount(b.request_of, minlength=b.num_requests).numpy() for b in batches]),
    )
    assert np.array_equal(answers.requests, expected)
    assert np.array_equal(answers.request_ms, torch.cat([b.expand(b.request_ms) for b in batches]).numpy())


def scored(scores: list[float], labels: list[int], requests: list[int], **more: object) -> ScoredCandidates:
    many = np.arange(len(scores))
    known = {"click": np.array(labels, dtype=np.int8)}
    return ScoredCandidates(np.array(scores), many, many, known, requests=np.array(requests), **more)  # type: ignore[arg-type]


def test_hits_leave_out_candidates_whose_label_is_not_known() -> None:
    # Request 0 hits only because the first two are not known; request 1 has no known positive; request 2 misses.
    scores, labels = [9, 8, 7, 6, 5.0, 1, 2, 5, 4, 3, 2, 1], [-1, -1, 0, 0, 1, 0, -1, 0, 0, 0, 1, -1]
    answers = scored(scores, labels, [0] * 5 + [1] * 2 + [2] * 5)
    assert all_metrics_of(answers, "click")["hit@3"] == 0.5


def test_a_weight_counts_as_often_except_in_rankings() -> None:
    scores, labels, weights = [2.0, 1.0, -1.0, 0.5], [1, 0, 0, 1], np.array([1.0, 3.0, 2.0, 1.0])
    answers = scored(scores, labels, [0, 0, 1, 1], weights=weights)
    repeated = np.repeat(np.arange(4), weights.astype(int))
    plain = scored(*(np.array(values)[repeated].tolist() for values in (scores, labels, [0, 0, 1, 1])))
    found, expected = all_metrics_of(answers, "click"), all_metrics_of(plain, "click")
    assert {name: found[name] for name in (*METRICS[::2], "ne", "calibration")} == pytest.approx(
        {name: expected[name] for name in (*METRICS[::2], "ne", "calibration")}
    )
    assert found["hit@3"] == 1.0


def test_hits_by_age_count_positives_of_this_age_only() -> None:
    # Request 0: a young positive at place 0, an old one at place 3. Request 1: an old positive at place 2.
    answers = scored([4.0, 3, 2, 1, 3, 2, 1], [1, 0, 0, 1, 0, 0, 1], [0] * 4 + [1] * 3)
    rows = hits_by_age(answers, "click", np.array([0, 0, 3, 2, 0, 0, 2]))
    assert [row["age"] for row in rows] == list(AGES)
    assert [row["num_requests"] for row in rows] == [1, 0, 2, 0]
    assert [row["hit@3"] for row in rows] == [1.0, None, 0.5, None]


def test_hits_are_sliced_by_the_age_of_the_items(ranker_config: Config) -> None:
    config = ranker_config()
    source = open_source(config)
    test, train = (config.data.steps(source, config.model.tables, 0, part=part) for part in ("test", "train"))
    result = evaluate_requests(Knowing(3.0), test, train, item_time="birth_ms", quiet=True)
    rows = {(row["label"], row["name"], row["age"]): row for row in result["ages"]}
    assert list(rows) == [(row["label"], row["name"], age) for row in result["rows"] for age in AGES]
    births = dict(
        zip(*(source.dataset.read_items()[name].to_pylist() for name in ("item_id", "birth_ms")), strict=True)
    )
    requests: dict[str, int] = dict.fromkeys(AGES, 0)
    for step in range(test.plan.first_step(1)):
        batch = test[step]
        items = batch.histories.item_ids[batch.candidates].tolist()
        for request in range(batch.num_requests):
            met = set()
            for place in torch.nonzero((batch.request_of == request) & (batch.labels["click"] == 1)).flatten().tolist():
                days = (int(batch.request_ms[request]) - births[items[place]]) / 86_400_000
                met.add(AGES[0] if days < 7 else AGES[1] if days < 28 else AGES[2])
            for age in met:
                requests[age] += 1
    found = {age: rows["click", "model", age]["num_requests"] for age in AGES}
    assert found == requests and sum(count > 0 for count in found.values()) > 1
    assert all(rows["click", "model", age]["hit@3"] == 1.0 for age in AGES if found[age])
    with pytest.raises(ConfigError, match="birthms.* is not in .*items.parquet(.|\n)*did you mean birth_ms"):
        evaluate_requests(Knowing(1.0), test, train, item_time="birthms", quiet=True)


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
    with pytest.raises(DataError, match="labels for click in the held-out requests are all alike"):
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
