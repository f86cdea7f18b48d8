"""Evaluates a model on labelled requests of held-out users, by AUC and log-loss, and compares it with a baseline.

Every candidate with a known label in a request of a held-out user is an example; the model's score is read as the log
odds of the label. `auc` compares examples of all users; `auc_within_users` compares only examples of the same user,
which is closer to ranking. The baseline is the mean label of the item in training. For a rare item, this mean is pulled
towards the mean of all items.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.progress import Progress
from tackboard.data.prefetch import on_device
from tackboard.data.request_loader import RequestSteps
from tackboard.metrics.binary import auc, auc_of_users, log_losses, logit

METRICS = ("auc", "auc_within_users", "log_loss")
DAMPING = 10.0
"""Each item's mean includes this many additional examples, whose label is the mean of all items."""


@dataclasses.dataclass(frozen=True)
class ScoredCandidates:
    """Scores of candidates [E], with their users, items and labels. A label is 1, 0, or -1 if it is not known."""

    scores: NDArray[np.float64]
    users: NDArray[np.int64]
    items: NDArray[np.int64]
    labels: dict[str, NDArray[np.int8]]

    def take(self, chosen: NDArray[np.bool_]) -> ScoredCandidates:
        """Returns the candidates whose entry in `chosen` is True."""
        labels = {name: values[chosen] for name, values in self.labels.items()}
        return ScoredCandidates(self.scores[chosen], self.users[chosen], self.items[chosen], labels)


@torch.no_grad()
def answer(model: Any, steps: RequestSteps, *, max_users: int | None = None, quiet: bool = True) -> ScoredCandidates:
    """Scores the candidates of all requests of `steps`, or of the requests of at most `max_users` users."""
    model.eval()
    device = next(model.parameters()).device
    parts: list[list[NDArray[Any]]] = []
    labels: dict[str, list[NDArray[np.int8]]] = {name: [] for name in steps.source.labels}
    numbers, met = range(steps.plan.first_step(1)), np.zeros(0, dtype=np.int64)
    with Progress("scoring requests", total=len(numbers), unit="steps", quiet=quiet) as progress:
        for _, batch in on_device(steps.iterate(numbers), device):
            scores = model.scores(batch).double().cpu().numpy()
            users = batch.expand(batch.histories.users).cpu().numpy()
            parts.append([scores, users, batch.histories.item_ids[batch.candidates].cpu().numpy()])
            for name, found in labels.items():
                label = torch.where(batch.known[name], batch.labels[name], -1.0)
                found.append(label.cpu().numpy().astype(np.int8))
            progress.advance(1)
            if max_users is not None:
                met = np.union1d(met, users)
                if len(met) >= max_users:
                    break
    scores, users, items = (np.concatenate(part) for part in zip(*parts, strict=True))
    answers = ScoredCandidates(scores, users, items, {name: np.concatenate(found) for name, found in labels.items()})
    return answers if max_users is None else answers.take(np.isin(users, met[:max_users]))


def metrics_of(answers: ScoredCandidates, label: str) -> dict[str, float]:
    """Returns the metrics of scores for one label. Raises DataError unless the known labels include both 0 and 1."""
    chosen = answers.take(answers.labels[label] >= 0)
    truth = chosen.labels[label] == 1
    if not len(truth) or truth.all() or not truth.any():
        raise DataError(
            f"the labels {label} of the held-out requests are all alike, or none is known",
            allowed="needed: some labels that are 1 and some that are 0",
            fix="hold out more users: data.test_share",
        )
    _, users = np.unique(chosen.users, return_inverse=True)
    within = auc_of_users(chosen.scores, truth, users.astype(np.int64))
    values = (
        auc(chosen.scores, truth),
        float(np.nanmean(within)) if not np.isnan(within).all() else float("nan"),
        float(log_losses(chosen.scores, truth).mean()),
    )
    return {name: round(float(value), 6) for name, value in zip(METRICS, values, strict=True)}


def evaluate_requests(
    model: Any, steps: RequestSteps, training: RequestSteps, *, max_users: int | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Returns the metrics of the model and of the item means for each label. The item means come from `training`."""
    answers = answer(model, steps, max_users=max_users, quiet=quiet)
    rows = []
    for label in steps.source.labels:
        means = dataclasses.replace(answers, scores=logit(item_means(training, label, answers.items)))
        for name, given in (("item mean", means), ("model", answers)):
            rows.append({"name": name, "label": label, **metrics_of(given, label)})
    return {
        "protocol": "requests of held-out users, candidates whose label is known",
        "num_users": len(np.unique(answers.users)),
        "num_candidates": int(np.any([label >= 0 for label in answers.labels.values()], axis=0).sum()),
        "rows": rows,
    }


def item_means(steps: RequestSteps, label: str, asked: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the damped mean label of each of the items `asked`, from the requests of `steps`."""
    items, values = [], []
    for bucket in range(steps.source.num_buckets):
        table = steps.source.read_requests(np.array([bucket]))
        table = table.take(steps.chosen(table))
        known = table.labels[label] >= 0
        items.append(table.item_ids[known])
        values.append(table.labels[label][known].astype(np.float64))
    every = np.concatenate(values)
    mean = float(every.mean()) if len(every) else 0.5
    return mean + damped_means(np.concatenate(items), every - mean, asked, DAMPING)


def damped_means(
    keys: NDArray[np.int64], values: NDArray[np.floating], asked: NDArray[np.int64], damping: float
) -> NDArray[np.float64]:
    """Returns, for each key of `asked`, the mean of the key's `values` together with `damping` zeros. A key that is not
    in `keys` gets 0."""
    distinct, places = np.unique(keys, return_inverse=True)
    sums = np.bincount(places, values, minlength=len(distinct))
    means = np.append(sums / (np.bincount(places, minlength=len(distinct)) + damping), 0.0)
    found = np.searchsorted(distinct, asked)
    found[found == len(distinct)] = 0
    is_known = (distinct[found] == asked) if len(distinct) else np.zeros(len(asked), dtype=np.bool_)
    return np.asarray(means[np.where(is_known, found, len(distinct))])
