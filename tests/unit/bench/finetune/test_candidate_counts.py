"""The numbers that trees read are counts of the pretraining events, and cosines of contents."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from tackboard.bench.finetune.candidate_counts import NEWEST, CandidateCounts, fit_trees
from tackboard.bench.finetune.ranker_cells import open_run, steps_of
from tackboard.bench.quality.cell import Machine
from tackboard.evaluation.labelled_requests import answer, metrics_of
from tackboard.events.dataset import open_dataset


def test_counts_and_trees(tiny_study: Callable[..., Any]) -> None:
    work, planned = tiny_study()
    cell = planned.rankers["trees", "all", 0]
    config, source = open_run(work, cell, Machine("cpu", 1))
    before = work.datasets / planned.pretrained[0].prepared
    train, validation, test = (steps_of(config, source, part) for part in ("train", "validation", "test"))
    batch = train[0]
    counts = CandidateCounts(open_dataset(before), source.dataset)
    rows = counts.rows(batch)

    events = open_dataset(before).read_events(["user_id", "item_id"]).to_pylist()
    popularity = Counter(event["item_id"] for event in events)
    pairs = Counter(
        (one["item_id"], two["item_id"]) for one, two in itertools.pairwise(events) if one["user_id"] == two["user_id"]
    )
    items = source.dataset.read_items(["item_id", "content"]).to_pylist()
    content = {row["item_id"]: np.array(row["content"]) for row in items}
    ids, offsets = batch.histories.item_ids.numpy(), batch.histories.offsets.numpy()
    for place in range(0, batch.num_candidates, max(1, batch.num_candidates // 40)):
        request, item = int(batch.request_of[place]), int(ids[batch.candidates[place]])
        history = [int(id) for id in ids[batch.histories.items.numpy()[offsets[request] : offsets[request + 1]]]][::-1]
        expected = [np.log1p(popularity[item]), np.log1p(len(history))]
        for number in NEWEST:
            newest = history[:number]
            expected.append(np.log1p(sum(pairs[one, item] for one in newest)))
            expected.append(np.log1p(sum(pairs[item, one] for one in newest)))
            expected.append(sum(content[one] @ content[item] for one in newest) / max(len(newest), 1))
        assert np.allclose(rows[place], expected, atol=1e-5)

    trees = fit_trees(before, train, validation, "next")
    assert metrics_of(answer(trees, test), "next")["auc"] > 0.55, "they learn from the requests"
