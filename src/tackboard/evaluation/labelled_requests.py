"""Evaluates a model on labelled requests of held-out users, label by label, and compares it with a baseline.

Every candidate with a known label in a request of a held-out user is an example. A score is interpreted as the log odds
of label 1. If the model has a head for the label (`scores_by_action`), the head's scores are judged, otherwise the
model's `scores`. `auc` compares examples of all users; `auc_within_users` compares only examples of the same user,
which is closer to ranking; `hit@3` ranks the candidates of each request. The baseline is the mean label of the item in
training. For a rare item, this mean is pulled towards the mean label of all examples. If only a random part
of the negatives was kept, a candidate counts as often as its weight says, as in training. Only `hit@3` ignores the
weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import RequestBatch
from tackboard.core.errors import DataError
from tackboard.core.progress import Progress
from tackboard.data.prefetch import on_device
from tackboard.data.request_loader import RequestSteps
from tackboard.evaluation.item_age import AGES, age_slices
from tackboard.metrics.binary import ProbabilityMetrics, auc, auc_of_users, logit
from tackboard.metrics.hits import RequestHits

METRICS = ("auc", "auc_within_users", "log_loss")
"""The metrics of `metrics_of`; `all_metrics_of` adds those of `MORE_METRICS`."""
MORE_METRICS = ("ne", "calibration", "hit@3")
TOP = 3
"""The k of HIT@k."""
DAMPING = 10.0
"""Each item's mean includes this many additional examples, whose label is the mean label of all training examples."""


@dataclasses.dataclass(frozen=True)
class ScoredCandidates:
    """Scores of candidates [E], with their users, items and labels. A label is 1, 0, or -1 if it is not known.

    `heads` holds the scores of each action for which the model has a head; `scores` are for all other labels.
    `requests` holds the index of each candidate's request. If `weights` is None, all weights are 1.
    """

    scores: NDArray[np.float64]
    users: NDArray[np.int64]
    items: NDArray[np.int64]
    labels: dict[str, NDArray[np.int8]]
    heads: dict[str, NDArray[np.float64]] = dataclasses.field(default_factory=dict)
    weights: NDArray[np.float64] | None = None
    requests: NDArray[np.int64] | None = None
    request_ms: NDArray[np.int64] | None = None

    def take(self, chosen: NDArray[np.bool_]) -> ScoredCandidates:
        """Returns the candidates whose entry in `chosen` is True."""

        def taken(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: array[chosen] for name, array in values.items()}
            return None if values is None else values[chosen]

        return ScoredCandidates(**{field.name: taken(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def judged(self, label: str) -> ScoredCandidates:
        """Returns the candidates whose `label` is known, with the scores that are compared with this label."""
        chosen = self.take(self.labels[label] >= 0)
        return dataclasses.replace(chosen, scores=chosen.heads.get(label, chosen.scores))


def all_scores(model: Any, batch: RequestBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Returns the model's scores [C], and the scores of each action for which the model has a head."""
    heads = model.scores_by_action(batch) if callable(getattr(model, "scores_by_action", None)) else {}
    can_combine = heads and callable(getattr(model, "score_of_actions", None))  # If so, the model runs only once.
    scores = model.score_of_actions(heads) if can_combine else model.scores(batch)
    return scores, {name: head for name, head in heads.items() if name}


@torch.no_grad()
def answer(model: Any, steps: RequestSteps, *, max_users: int | None = None, quiet: bool = True) -> ScoredCandidates:
    """Scores the candidates of all requests of `steps`, or of the requests of at most `max_users` users."""
    model.eval()
    device = next(model.parameters()).device
    parts: list[ScoredCandidates] = []
    numbers, met, num_requests = range(steps.plan.first_step(1)), np.zeros(0, dtype=np.int64), 0
    with Progress("scoring requests", total=len(numbers), unit="steps", quiet=quiet) as progress:
        for _, batch in on_device(steps.iterate(numbers), device):
            scores, heads = all_scores(model, batch)
            users = _numbers(batch.expand(batch.histories.users))
            labels = {name: torch.where(batch.known[name], batch.labels[name], -1.0) for name in steps.source.labels}
            parts.append(
                ScoredCandidates(
                    scores=_numbers(scores.double()),
                    users=users,
                    items=_numbers(batch.histories.item_ids[batch.candidates]),
                    labels={name: _numbers(label).astype(np.int8) for name, label in labels.items()},
                    heads={name: _numbers(head.double()) for name, head in heads.items()},
                    weights=_numbers(batch.weights.double()),
                    requests=num_requests + _numbers(batch.request_of),
                    request_ms=_numbers(batch.expand(batch.request_ms)),
                )
            )
            num_requests += batch.num_requests
            progress.advance(1)
            if max_users is not None:
                met = np.union1d(met, users)
                if len(met) >= max_users:
                    break
    answers = _joined(parts)
    return answers if max_users is None else answers.take(np.isin(answers.users, met[:max_users]))


def _numbers(values: torch.Tensor) -> NDArray[Any]:
    return values.cpu().numpy()


def _joined(parts: list[ScoredCandidates]) -> ScoredCandidates:
    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            return {key: np.concatenate([value[key] for value in values]) for key in values[0]}
        return np.concatenate(values)

    return ScoredCandidates(**{field.name: join(field.name) for field in dataclasses.fields(ScoredCandidates)})


def metrics_of(answers: ScoredCandidates, label: str) -> dict[str, float]:
    """Returns `METRICS` of scores for one label. Raises DataError unless the known labels include both 0 and 1."""
    return {name: all_metrics_of(answers, label, ranked=False)[name] for name in METRICS}


def all_metrics_of(answers: ScoredCandidates, label: str, *, ranked: bool = True) -> dict[str, float]:
    """Returns `METRICS` and `MORE_METRICS` of scores for one label. Raises the same error as `metrics_of`.

    If `ranked` is False, `hit@3` is left out, and `answers` need no requests.
    """
    chosen = answers.judged(label)
    truth = chosen.labels[label] == 1
    if not len(truth) or truth.all() or not truth.any():
        raise DataError(
            f"the labels for {label} in the held-out requests are all alike, or none is known",
            allowed="needed: some labels that are 1 and some that are 0",
            fix="hold out more users: data.test_share",
        )
    _, users = np.unique(chosen.users, return_inverse=True)
    within = auc_of_users(chosen.scores, truth, users.astype(np.int64), chosen.weights)
    probabilities = ProbabilityMetrics()
    probabilities.update(chosen.scores, truth, chosen.weights)
    values = {
        "auc": auc(chosen.scores, truth, chosen.weights),
        "auc_within_users": float(np.nanmean(within)) if not np.isnan(within).all() else float("nan"),
        **probabilities.result(),
    }
    if ranked:
        values["hit@3"] = hits_of(chosen, truth).result()
    return {name: round(float(value), 6) for name, value in values.items()}


def hits_of(chosen: ScoredCandidates, is_wanted: NDArray[np.bool_]) -> RequestHits:
    """Returns HIT@3 of candidates with known labels (`ScoredCandidates.judged`)."""
    assert chosen.requests is not None
    hits = RequestHits(TOP)
    hits.update(chosen.scores, chosen.requests, is_wanted)
    return hits


def hits_by_age(answers: ScoredCandidates, label: str, ages: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Returns HIT@3 of each slice of item age. `ages` [E] holds, for each candidate, the position in `AGES` of its
    item's age.

    A slice counts the requests with a positive of the slice's age. A request is a hit if such a positive is in the
    top 3.
    """
    is_known = answers.labels[label] >= 0
    chosen, ages = answers.judged(label), ages[is_known]
    rows = []
    for place, age in enumerate(AGES):
        hits = hits_of(chosen, (chosen.labels[label] == 1) & (ages == place))
        share = round(hits.result(), 6) if hits.num_requests else None
        rows.append({"age": age, "hit@3": share, "num_requests": hits.num_requests})
    return rows


def evaluate_requests(
    model: Any,
    steps: RequestSteps,
    training: RequestSteps,
    *,
    item_time: str = "",
    max_users: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Returns the metrics of the model and of the item means for each label. The item means come from `training`.

    If `item_time` names a time attribute of the items, the entry `ages` of the result holds HIT@3 by item age, in the
    order of the entry `rows`.
    """
    if item_time:  # A wrong name is refused before the requests are scored.
        age_slices(steps.source.dataset, item_time, np.zeros(0, np.int64), np.zeros(0, np.int64))
    answers = answer(model, steps, max_users=max_users, quiet=quiet)
    assert answers.request_ms is not None
    slices = age_slices(steps.source.dataset, item_time, answers.items, answers.request_ms) if item_time else None
    rows, ages = [], []
    for label in steps.source.labels:
        means = dataclasses.replace(answers, scores=logit(item_means(training, label, answers.items)), heads={})
        for name, given in (("item mean", means), ("model", answers)):
            rows.append({"name": name, "label": label, **all_metrics_of(given, label)})
            if slices is not None:
                ages += [{"name": name, "label": label, **row} for row in hits_by_age(given, label, slices)]
    return {
        "protocol": "requests of held-out users, candidates whose label is known",
        "num_users": len(np.unique(answers.users)),
        "num_candidates": int(np.any([label >= 0 for label in answers.labels.values()], axis=0).sum()),
        "item_time": item_time,
        "rows": rows,
        "ages": ages,
    }


def item_means(steps: RequestSteps, label: str, asked: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the damped mean label of each of the items `asked`, from the requests of `steps`."""
    items, values, weights = [], [], []
    for bucket in range(steps.source.num_buckets):
        table = steps.source.read_requests(np.array([bucket]))
        table = table.take(steps.chosen(table))
        known = table.labels[label] >= 0
        items.append(table.item_ids[known])
        values.append(table.labels[label][known].astype(np.float64))
        weights.append(table.weights[known].astype(np.float64))
    every, weight = np.concatenate(values), np.concatenate(weights)
    mean = float(np.average(every, weights=weight)) if len(every) else 0.5
    return mean + damped_means(np.concatenate(items), every - mean, asked, DAMPING, weight)


def damped_means(
    keys: NDArray[np.int64],
    values: NDArray[np.floating],
    asked: NDArray[np.int64],
    damping: float,
    weights: NDArray[np.floating] | None = None,
) -> NDArray[np.float64]:
    """Returns, for each key of `asked`, the mean of the key's `values` together with `damping` zeros. A key that is not
    in `keys` gets 0. A value of weight 2 counts twice."""
    distinct, places = np.unique(keys, return_inverse=True)
    given = np.ones(len(keys)) if weights is None else weights
    sums = np.bincount(places, values * given, minlength=len(distinct))
    means = np.append(sums / (np.bincount(places, given, minlength=len(distinct)) + damping), 0.0)
    found = np.searchsorted(distinct, asked)
    found[found == len(distinct)] = 0
    is_known = (distinct[found] == asked) if len(distinct) else np.zeros(len(asked), dtype=np.bool_)
    return np.asarray(means[np.where(is_known, found, len(distinct))])
