"""The ranker's own sequence module: it reads the newest events only, and has an answer for a user without events."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, RequestBatch
from tackboard.batch.builder import make_requests
from tackboard.batch.items import distinct_items
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, INT
from tackboard.models.recent_events import RecentEvents, RecentEventsConfig

VOCABULARY = Vocabulary(actions=("click", "save"), surfaces=("home",))
ROWS = torch.randn(50, 6, generator=torch.Generator().manual_seed(3))


def read(module: RecentEvents, histories: list[list[int]], candidates: list[list[int]]) -> torch.Tensor:
    """The outputs for candidates of requests whose histories are items; item i has the rows ROWS[i]."""
    events = [item for history in histories for item in history]
    asked = [item for items in candidates for item in items]
    history = sequence_column(
        np.array([len(items) for items in histories], dtype=np.int64),
        item=Column.of(ID, events),
        action=Column(INT, np.array(events, dtype=np.int64) % 3),
        surface=Column(INT, np.array(events, dtype=np.int64) % 2),
    )
    batch: RequestBatch = make_requests(
        history=history,
        items=distinct_items(np.array([*events, *asked], dtype=np.int64), HashConfig(num_hashes=1, num_rows=5)),
        request_of=np.repeat(np.arange(len(candidates)), [len(items) for items in candidates]),
    )
    items = ROWS[batch.histories.item_ids]
    with torch.no_grad():
        found: torch.Tensor = module(batch, items, items[batch.candidates])
    return found


@pytest.fixture
def module() -> RecentEvents:
    torch.manual_seed(0)
    return RecentEvents(RecentEventsConfig(num_events=3, width=4, num_kept=2), VOCABULARY, 6).eval()


def test_only_the_newest_events_count(module: RecentEvents) -> None:
    found = read(module, [[9, 8, 1, 2, 3], [1, 2, 3], [2, 1, 3]], [[7, 5], [7, 5], [7, 5]])
    assert found.shape == (6, module.width)
    torch.testing.assert_close(found[:2], found[2:4])
    assert not torch.allclose(found[:2], found[4:]), "the order of events counts"
    assert not torch.allclose(found[0], found[1]), "the candidate counts"


def test_users_with_few_events_or_none(module: RecentEvents) -> None:
    together = read(module, [[], [4], [4, 6, 1]], [[7], [7, 2], [7]])
    assert not together[0].any()
    assert together.isfinite().all()
    torch.testing.assert_close(read(module, [[4]], [[7, 2]]), together[1:3])
    assert not read(module, [[]], [[1, 2]]).any(), "no user has events"


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="model.recent.width"):
        RecentEventsConfig(num_events=3, width=5)
