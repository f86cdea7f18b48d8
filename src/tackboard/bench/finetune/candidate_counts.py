"""Ranks candidates by gradient-boosted trees on counts, as a baseline without a sequence model.

The input is the dataset of pretraining and the same requests that rankers learn from. The counts of items, and of pairs
of items that follow each other in a user's history, come from the events of pretraining. The user's newest events come
from the request's history. The trees (transfer/classifiers.py) also read how close the content of a candidate is to the
content of the newest events' items, because rankers read the content too. The number of trees is chosen by log-loss on
validation requests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tackboard.batch import RequestBatch
from tackboard.bench.transfer.classifiers import BoostedTrees, Numbers, TreeSettings
from tackboard.data.request_loader import RequestSteps
from tackboard.events.columns import one_array
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.schema import numpy_column
from tackboard.features.entity_tables import find_ids

NEWEST = (1, 5, 20)
"""A candidate is compared with the user's newest event, with the newest 5, and with the newest 20."""
SETTINGS = TreeSettings(depth=4, num_rounds=200)
Ints = NDArray[np.int64]


class TreeRanker(nn.Module):
    """Scores candidates by trees. It takes batches like any model, so it is evaluated like any model."""

    def __init__(self, counts: CandidateCounts, fitted: BoostedTrees) -> None:
        super().__init__()
        self.counts, self.fitted = counts, fitted
        self.place = nn.Parameter(torch.zeros(()), requires_grad=False)  # Says on which device batches are expected.

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        """Returns the log odds of each candidate [C]."""
        return torch.from_numpy(self.fitted.log_odds(self.counts.rows(batch)))


class CandidateCounts:
    """Describes the candidates of a batch by counts over the events of pretraining."""

    def __init__(self, before: Dataset, items: Dataset) -> None:
        """`before` holds the events of pretraining. `items` is the dataset of the requests, with the items' content."""
        table = items.read_items(["item_id", "content"])
        self.item_ids = numpy_column(table, "item_id")
        content = one_array(table["content"])
        self.content = np.asarray(content.flatten().to_numpy(zero_copy_only=False)).reshape(len(self.item_ids), -1)
        events = before.read_events(["user_id", "item_id"])
        users, places = numpy_column(events, "user_id"), find_ids(self.item_ids, numpy_column(events, "item_id"))
        self.popularity = np.bincount(places, minlength=len(self.item_ids))
        follows = users[1:] == users[:-1]
        keys = places[:-1][follows] * len(self.item_ids) + places[1:][follows]
        self.pairs, self.pair_counts = np.unique(keys, return_counts=True)

    def followed(self, first: Ints, second: Ints) -> Ints:
        """Returns how often the item `second` came directly after the item `first`. Both are positions in
        `item_ids`."""
        found = find_ids(self.pairs, first * len(self.item_ids) + second)
        return np.where(found >= 0, self.pair_counts[found], 0) if len(self.pairs) else np.zeros_like(first)

    def rows(self, batch: RequestBatch) -> Numbers:
        """Returns numbers for each candidate [C, F]: counts, and cosines of contents."""
        histories = batch.histories
        places = find_ids(self.item_ids, histories.item_ids.cpu().numpy())
        items = places[batch.candidates.cpu().numpy()]
        events = places[histories.items.cpu().numpy()]
        request_of, offsets = batch.request_of.cpu().numpy(), histories.offsets.cpu().numpy()
        lengths = np.diff(offsets)[request_of]
        # Slot 0 holds the newest event of a candidate's user, slot 1 the event before it. Missing events have weight 0.
        slots = np.arange(max(NEWEST))
        has_event = slots < lengths[:, None]
        newest = events[np.where(has_event, offsets[request_of + 1][:, None] - 1 - slots, 0)] if len(events) else None
        columns = [np.log1p(self.popularity[items]), np.log1p(lengths)]
        if newest is None:
            newest = np.zeros(has_event.shape, dtype=np.int64)
        given = np.broadcast_to(items[:, None], newest.shape)
        before = np.where(has_event, self.followed(newest, given), 0)
        after = np.where(has_event, self.followed(given, newest), 0)
        cosines = np.where(has_event, np.einsum("cw,csw->cs", self.content[items], self.content[newest]), 0.0)
        for number in NEWEST:
            columns.append(np.log1p(before[:, :number].sum(axis=1)))
            columns.append(np.log1p(after[:, :number].sum(axis=1)))
            columns.append(cosines[:, :number].sum(axis=1) / np.maximum(has_event[:, :number].sum(axis=1), 1))
        return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)

    def examples(self, steps: RequestSteps, label: str) -> tuple[Numbers, NDArray[np.bool_]]:
        """Returns the numbers and the labels of all candidates of one pass over `steps`."""
        batches = [batch for _, batch in steps.iterate(range(steps.plan.first_step(1)))]
        labels = [batch.labels[label].numpy() == 1 for batch in batches]
        return np.concatenate([self.rows(batch) for batch in batches]), np.concatenate(labels)


def fit_trees(before: Path, train: RequestSteps, validation: RequestSteps, label: str) -> TreeRanker:
    """Fits trees to a label of the training requests. `before` is the path of the dataset of pretraining."""
    counts = CandidateCounts(open_dataset(before, verify=False), train.source.dataset)
    rows, labels = counts.examples(train, label)
    return TreeRanker(counts, BoostedTrees.fit(rows, labels, counts.examples(validation, label), SETTINGS))
