"""Adds live counts to a model's scores: what is read right now, how old an item is, and what the user has read.

A model of ids knows an item only after it was trained on the item's events. Live counts know every item at once, but
not the user. The head joins the model and the counts: its score is a weighted sum of features of a user and an item at
an instant t.

    model        the model's score, and this score times log(1 + events of the history); both are 0 for items that the
                 model was not trained on
    known        1 for items that the model was trained on, 0 for all other items
    counts       log(1 + positive events of the item) in each window before t; items that the model was trained on have
                 one weight for this feature, all other items have another
    age          log(1 + hours since the item's first event), with two weights in the same way
    own          whether the user had an event with the item, how many, and how long ago

The weights are fitted on events that the model was not trained on: those of the validation slice. They maximise the
likelihood of the chosen item among the items that could have been chosen (a conditional logit). That problem is convex,
so there is one answer and nothing to tune. Decided: the head has few weights, so a thousand events and one
second of computing suffice, and a site can fit it every night. Decided: the weights are not learned together with the
model, because a model is surer on its own training events than on later events.

Shapes: J judged events, V items of the catalogue, C choices of an event, K features of an item, O features of an own
item, F features in all, P rows (the own items or the choices of all events).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.data.sequences import Sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.live_counts import LiveCounts
from tackboard.evaluation.ranking import ScoreEvents
from tackboard.evaluation.slices import history_items

WINDOWS_H = (1.0, 6.0, 24.0, 168.0)
CHOICES = 4096
"""If the log has at most this number of items, every item that has appeared is a choice."""
CHOICES_PER_SOURCE = 128
"""Otherwise the choices are the user's own items, this number of items with the best scores of the model, and this
number of items with the highest counts in each window."""
AT_ONCE = 128
"""Number of judged events whose features are computed at a time."""
PENALTY = 1e-3
"""The loss of the fit includes the sum of squared weights times this factor, for features with standard deviation 1."""
OF_MODEL = ("model", "model × history")
OF_OWN = ("seen", "times seen", "hours since seen")
Floats = NDArray[np.float32]


class LiveFeatures:
    """Computes the features of the items of a log at any instant, for a model that was trained on the items `known`."""

    def __init__(
        self, sequences: Sequences, counts: LiveCounts, appears_ms: NDArray[np.int64], known: NDArray[np.bool_]
    ) -> None:
        """`counts` and `appears_ms` [V] (see `first_seen`) are those of `sequences`; making them takes a pass each."""
        self.sequences, self.appears_ms, self.known = sequences, appears_ms, known
        self._windows = [counts.window(round(hours * HOUR_MS)) for hours in WINDOWS_H]
        names = [*(f"counts {hours:g} h" for hours in WINDOWS_H), "age"]
        self.of_items = ("known", *(f"{name}, {kind}" for name in names for kind in ("known", "unknown")))

    def items_at(self, time_ms: int) -> Floats:
        """Returns the features of all items at an instant [V, K]."""
        known, unknown = self.known.astype(np.float32), (~self.known).astype(np.float32)
        hours = np.maximum(0, time_ms - self.appears_ms) / HOUR_MS
        values = [np.log1p(window.at(time_ms)) for window in self._windows]
        values.append(np.log1p(hours).astype(np.float32))
        return np.stack([known, *(value * kind for value in values for kind in (known, unknown))], axis=1)

    def own(self, judged: JudgedEvents) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Returns the distinct items before each judged event: (row of the event, item, features [P, O])."""
        rows, items = history_items(self.sequences, judged)
        num_items = len(self.known)
        keys, last, counts = _last_of_each(rows * num_items + items)
        lengths = judged.lengths(self.sequences)
        first_events = np.repeat(self.sequences.offsets[:-1][judged.users] - (np.cumsum(lengths) - lengths), lengths)
        events = (np.arange(len(rows)) + first_events)[last]
        times = self.sequences.events.times
        hours = (times[judged.events][keys // num_items] - times[events]) / HOUR_MS
        values = np.stack([np.ones(len(keys)), np.log1p(counts), np.log1p(np.maximum(0.0, hours))], axis=1)
        return keys // num_items, keys % num_items, values.astype(np.float32)

    def of_model(self, judged: JudgedEvents, scores_JV: torch.Tensor) -> tuple[Floats, Floats]:
        """Returns the model's scores [J, V], 0 for unknown items, and log(1 + events of the history) [J]."""
        scores = np.where(self.known, scores_JV.cpu().numpy(), np.float32(0.0))
        return scores, np.log1p(judged.lengths(self.sequences)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LiveHead:
    """The fitted weights, by the name of the feature."""

    weights: dict[str, float]
    num_events: int
    """Number of events that the weights were fitted on."""

    def scores(self, features: LiveFeatures, score: ScoreEvents) -> ScoreEvents:
        """Returns a function that computes the head's scores from those of the model."""
        of_items = self._weights(features.of_items)
        of_model, of_own = self._weights(OF_MODEL), self._weights(OF_OWN)
        times = features.sequences.events.times

        def total(judged: JudgedEvents) -> Floats:
            scores, lengths = features.of_model(judged, torch.as_tensor(score(judged)))
            scores *= (of_model[0] + of_model[1] * lengths)[:, None]
            at = times[judged.events]
            for time in np.unique(at):
                scores[at == time] += features.items_at(int(time)) @ of_items
            rows, items, values = features.own(judged)
            scores[rows, items] += values @ of_own
            return scores

        return total

    def _weights(self, names: tuple[str, ...]) -> Floats:
        return np.array([self.weights[name] for name in names], dtype=np.float32)


def fit_live_head(features: LiveFeatures, score: ScoreEvents, judged: JudgedEvents) -> LiveHead | None:
    """Fits the weights to judged events, which are in the order of their times. `score` gives the model's scores.

    Events whose item is not among the choices are left out. Returns None if no event is left.
    """
    parts = [
        _choices(features, score, judged.take(slice(begin, begin + AT_ONCE)))
        for begin in range(0, len(judged), AT_ONCE)
    ]
    values = [torch.from_numpy(rows) for part in parts for rows in part]
    if not values:
        return None
    names = (*OF_MODEL, *features.of_items, *OF_OWN)
    sizes = torch.tensor([len(rows) for rows in values])
    values_PF = torch.cat(values).double()
    scale_F = values_PF.std(dim=0).clamp_min(1e-6)
    values_PF /= scale_F
    event_P = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    chosen_J = torch.cumsum(sizes, 0) - sizes
    weights_F = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights_F], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores_P = values_PF @ weights_F
        top_J = torch.full((len(sizes),), -torch.inf, dtype=torch.float64)
        top_J = top_J.scatter_reduce(0, event_P, scores_P.detach(), "amax")
        sums_J = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, event_P, (scores_P - top_J[event_P]).exp())
        total = (sums_J.log() + top_J - scores_P[chosen_J]).mean() + PENALTY * weights_F.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    found = (weights_F.detach() / scale_F).tolist()
    return LiveHead(dict(zip(names, found, strict=True)), len(sizes))


def _choices(features: LiveFeatures, score: ScoreEvents, judged: JudgedEvents) -> list[Floats]:
    """Returns for each judged event the features of its choices [C, F], the chosen item first. The rule for choices
    does not look at the chosen item. So leaving out events whose item is not among the choices does not bias the
    weights."""
    scores, lengths = features.of_model(judged, torch.as_tensor(score(judged)))
    rows, items, of_own = features.own(judged)
    starts = np.searchsorted(rows, np.arange(len(judged) + 1))
    times, targets = features.sequences.events.times[judged.events], judged.items(features.sequences)
    found, time, of_items, popular = [], -1, np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype=np.int64)
    for place in range(len(judged)):
        if time != times[place]:
            time = int(times[place])
            of_items = features.items_at(time)
            popular = _candidates(features, of_items, time)
        mine = slice(starts[place], starts[place + 1])
        choices = popular
        if len(features.known) > CHOICES:
            best = np.argpartition(-scores[place], CHOICES_PER_SOURCE)[:CHOICES_PER_SOURCE]
            choices = np.unique(np.concatenate([popular, best, items[mine]]))
            choices = choices[features.appears_ms[choices] < time]
        if targets[place] not in choices:
            continue
        choices = np.append(targets[place], choices[choices != targets[place]])
        of_model = np.stack([scores[place, choices], scores[place, choices] * lengths[place]], axis=1)
        own = np.zeros((len(scores[place]), of_own.shape[1]), dtype=np.float32)
        own[items[mine]] = of_own[mine]
        found.append(np.concatenate([of_model, of_items[choices], own[choices]], axis=1))
    return found


def _candidates(features: LiveFeatures, of_items: Floats, time_ms: int) -> NDArray[np.int64]:
    """Returns the items that are choices for every user at an instant, in ascending order."""
    appeared = np.flatnonzero(features.appears_ms < time_ms)
    if len(features.known) <= CHOICES:
        return appeared
    counts = of_items[:, 1 : 1 + 2 * len(WINDOWS_H)].reshape(len(of_items), len(WINDOWS_H), 2).sum(axis=2)
    best = [np.argpartition(-column, CHOICES_PER_SOURCE)[:CHOICES_PER_SOURCE] for column in counts.T]
    return np.unique(np.concatenate(best))


def _last_of_each(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the distinct keys in ascending order, the index of each key's last occurrence, and its count."""
    reverse, first, counts = np.unique(keys[::-1], return_index=True, return_counts=True)
    return reverse, len(keys) - 1 - first, counts
