"""The same users and requests with more and more candidates: what is read, copied and looked up of histories stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.batch import HashConfig
from tackboard.data.deduplication import DeduplicationCounters
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.events.dataset import open_dataset, write_dataset

NUM_USERS, NUM_EVENTS, NUM_ITEMS = 20, 30, 50


def counters_of(root: Path, num_candidates: int) -> tuple[DeduplicationCounters, int]:
    """Counters of an epoch, and the bytes of events that were read for it."""
    users = np.repeat(np.arange(NUM_USERS), NUM_EVENTS)
    count = len(users)
    items = np.arange(count) * 7 % NUM_ITEMS
    requests = np.arange(count)
    events = pa.table(
        {
            "user": users,
            "item": items,
            "action": pa.array(["click"] * count).dictionary_encode(),
            "surface": pa.array(["home"] * count).dictionary_encode(),
            "time_ms": np.tile(np.arange(NUM_EVENTS), NUM_USERS) * 1000,
            "received_ms": np.tile(np.arange(NUM_EVENTS), NUM_USERS) * 1000,
            "order": np.arange(count),
            "request": requests,
        }
    )
    shown = (items[:, None] + np.arange(num_candidates)) % NUM_ITEMS
    impressions = pa.table(
        {
            "request": np.repeat(requests, num_candidates),
            "position": np.tile(np.arange(num_candidates), count).astype(np.int32),
            "item_id": shown.ravel(),
        }
    )
    name = f"with-{num_candidates}"
    write_dataset(root, name, events, impressions=impressions)
    label_dataset(open_dataset(root / name), LabelConfig(labels=(Label("click", 500),)), quiet=True)
    config = RequestConfig(
        dataset=str(root / name), max_history=16, tokens_per_step=20_000, validation_share=0.0, test_share=0.0
    )
    source = RequestSource(config)
    steps = RequestSteps(source, config, HashConfig(num_hashes=2, num_rows=100), seed=0)
    before = source.counters.num_bytes
    counters = DeduplicationCounters()
    # One step more or less would change how often an item is looked up: count per request, not per step.
    for step in range(steps.plan.steps_per_epoch):
        counters.add(steps[step])
    return counters, source.counters.num_bytes - before


def test_histories_are_read_copied_and_looked_up_per_request_not_per_candidate(tmp_path: Path) -> None:
    few, few_bytes_read = counters_of(tmp_path, 4)
    many, many_bytes_read = counters_of(tmp_path, 40)
    assert few.num_requests == many.num_requests == NUM_USERS * NUM_EVENTS
    assert many.num_candidates == 10 * few.num_candidates
    # Ten times the candidates: the events are read as often, their copies and rows grow only with the items of a step.
    assert many_bytes_read == few_bytes_read
    assert many.history_bytes < 1.1 * few.history_bytes
    assert many.rows <= 3 * few.rows  # Two or three steps instead of one, each with all fifty items.
    assert many.history_bytes_flat == pytest.approx(10 * few.history_bytes_flat)
    assert many.history_bytes_flat > 30 * many.history_bytes
    assert many.rows_flat > 100 * many.rows
    assert few.num_users == NUM_USERS
