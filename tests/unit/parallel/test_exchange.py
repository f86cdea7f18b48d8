"""The items of a step, shared by several ranks, against the items of the whole step in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tackboard.batch import SequenceBatch
from tackboard.models.losses import positive_counts
from tackboard.parallel.exchange import share_items

InRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
DRAWN = [3, 9, 11]
"""Ids that every rank has drawn as negatives."""


def batch_of(events: list[int], drawn: list[int] = DRAWN) -> SequenceBatch:
    """A history of these items, all positive, with drawn negatives."""
    ids = torch.tensor(sorted({*events, *drawn}))
    place = {int(item): number for number, item in enumerate(ids)}
    return SequenceBatch(
        offsets=torch.tensor([0, len(events)]),
        users=torch.tensor([1]),
        items=torch.tensor([place[item] for item in events], dtype=torch.int64),
        columns={},
        request={},
        is_positive=torch.ones(len(events), dtype=torch.bool),
        item_ids=ids,
        item_rows=torch.stack([ids * 2, ids * 3], dim=1),
        item_log_q=-ids.float(),
        sampled=torch.tensor([place[item] for item in drawn], dtype=torch.int64),
        sample_rate=torch.tensor(0.25),
    )


EVENTS = [[3, 5, 5, 7], [5, 9, 2], []]


def shared(world: Any) -> Any:
    batch = batch_of(EVENTS[world.rank])
    mine, place_M, items = share_items(batch, positive_counts(batch), [len(EVENTS[world.rank]), 1], world)
    # The vector of an item is made from its id, so that it can be recognised.
    vectors = items.owned(mine.item_ids[:, None].float()).requires_grad_()
    gathered = items.gather(vectors)
    (gathered * (world.rank + 1)).sum().backward()
    return batch, mine, place_M, items, gathered.detach(), vectors


def test_every_rank_knows_the_items_of_the_step(in_ranks: InRanks) -> None:
    whole = batch_of([item for events in EVENTS for item in events])
    for batch, mine, place_M, items, gathered, _ in in_ranks(3, shared):
        assert items.pool.item_ids.tolist() == whole.item_ids.tolist()
        assert torch.equal(items.pool.item_rows, whole.item_rows)
        assert torch.equal(items.pool.item_log_q, whole.item_log_q)
        assert torch.equal(items.counts_G, positive_counts(whole))
        assert items.pool.item_ids[items.pool.sampled].tolist() == DRAWN
        assert items.totals == (7, 3)
        assert torch.equal(items.pool.item_ids[place_M], batch.item_ids)
        assert torch.equal(mine.item_ids[mine.items], batch.item_ids[batch.items]), "the events keep their items"
        assert gathered.squeeze(1).tolist() == whole.item_ids.tolist(), "every vector stands at the place of its item"


def test_every_item_has_one_owner_that_gets_the_whole_gradient(in_ranks: InRanks) -> None:
    found = in_ranks(3, shared)
    owned = [mine.item_ids[items.owned_O].tolist() for _, mine, _, items, _, _ in found]
    assert sorted(item for own in owned for item in own) == [2, 3, 5, 7, 9, 11]
    assert found[0][3].num_owned == tuple(map(len, owned))
    assert max(map(len, owned)) <= 3, "no rank owns most of the items"
    for _, mine, _, _, _, vectors in found:
        assert torch.equal(vectors.grad, torch.full_like(vectors, 1 + 2 + 3))
        assert len(mine.sampled) == 0
        # Drawn items that another rank owns are looked up there alone.
        assert set(mine.item_ids.tolist()) <= set(mine.item_ids[mine.items].tolist()) | {
            item for own in owned for item in own
        }


def test_a_step_of_one_rank_is_the_batch_itself(in_ranks: InRanks) -> None:
    (result,) = in_ranks(1, lambda world: share_items(batch_of([4, 4, 8]), torch.tensor([0, 2, 1, 0, 0]), [3], world))
    mine, place_M, items = result
    assert torch.equal(mine.item_ids, items.pool.item_ids) and place_M.tolist() == [0, 1, 2, 3, 4]
    assert dataclasses.asdict(items)["num_owned"] == (5,)
