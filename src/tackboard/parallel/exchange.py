"""Lets the processes of a step share their items, so that each item of the step is a negative for every process.

Each process reads its own histories of a step. Before the step, the processes tell each other the ids, counts and
frequencies of their items (numbers on the CPU). Each item then has one owner among the processes that have it. In the
step, each process computes the vectors of the items that it owns, and all processes gather these vectors. In the
backward pass the gradients of a vector are summed over all processes and go to its owner. So the loss of all processes
together is the loss that one process would compute, and no item's vector is computed twice.

Decided: a process keeps the items of its own events and the items that it owns. Drawn negatives are the same in every
process; each of them is looked up by its owner alone.

Shapes: M items of this process, O items that it owns, G items of all processes, D width.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tackboard.batch import SequenceBatch
from tackboard.parallel.training_world import TrainingWorld


@dataclasses.dataclass(frozen=True)
class StepItems:
    """The items of all processes of a step, and which of these items this process owns."""

    owned_O: torch.Tensor
    """Positions, among the items of this process, of the items that it owns."""
    order_G: torch.Tensor
    """Position of each item of the step among the owned items of all processes, one process after the other."""
    num_owned: tuple[int, ...]
    """Number of items that each process owns."""
    pool: SequenceBatch
    """A batch with the items of all processes instead of the items of this process, and no events."""
    counts_G: torch.Tensor
    """Number of positive events of each item, in all processes."""
    totals: tuple[int, ...]
    """Sums over all processes of the numbers that were given to `share_items`."""
    world: TrainingWorld

    def owned(self, items_ME: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the items that this process owns [O, E]."""
        return items_ME.index_select(0, self.owned_O)

    def gather(self, owned_OD: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of all items of the step [G, D], given those of the items that this process owns."""
        gathered: torch.Tensor = _Gather.apply(owned_OD, self.num_owned, self.world)
        return gathered.index_select(0, self.order_G)


class _Gather(torch.autograd.Function):
    """Joins the rows of all processes. The gradient of a row is summed over all processes."""

    @staticmethod
    def forward(ctx: Any, own_OD: torch.Tensor, lengths: Sequence[int], world: TrainingWorld) -> torch.Tensor:
        ctx.lengths, ctx.world = lengths, world
        return torch.cat(world.gather_tensors(own_OD, lengths))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = ctx.world.sum_(gradients[0].contiguous())
        begin = sum(ctx.lengths[: ctx.world.rank])
        return total[begin : begin + ctx.lengths[ctx.world.rank]], None, None


def share_items(
    batch: SequenceBatch,
    counts_M: torch.Tensor,
    numbers: Sequence[int],
    world: TrainingWorld,
    ahead: TrainingWorld | None = None,
) -> tuple[SequenceBatch, torch.Tensor, StepItems]:
    """Tells the other processes the items of this process's batch, and learns theirs.

    Returns the batch with the items that this process keeps, the position of each item of `batch` among the items of
    all processes [M], and the items of the step. `counts_M` holds the number of positive events of each item. `numbers`
    are summed over the processes. On a GPU another thread prepares batches; it uses the connections of `ahead`
    (`TrainingWorld.for_another_thread`).
    """
    device, main = batch.item_ids.device, world
    if ahead is not None and threading.current_thread() is not threading.main_thread():
        world = ahead
    told = torch.tensor([len(batch.item_ids), *numbers])
    told_by_rank = torch.stack(world.gather_tensors(told[None], [1] * world.size)).squeeze(1)
    lengths = told_by_rank[:, 0].tolist()
    totals = tuple(int(number) for number in told_by_rank[:, 1:].sum(dim=0))
    ids = torch.cat(world.gather_tensors(batch.item_ids, lengths))
    counts = torch.cat(world.gather_tensors(counts_M, lengths))
    log_q = torch.cat(world.gather_tensors(batch.item_log_q, lengths))
    rows = torch.cat(world.gather_tensors(batch.item_rows, lengths))
    ranks = torch.repeat_interleave(torch.arange(world.size), torch.tensor(lengths)).to(device)
    ids_G, place, holders_G = torch.unique(ids, return_inverse=True, return_counts=True)
    # Sorted by item, then by process. An item's owner is one of its holders, chosen so that no process owns most items.
    holdings = torch.argsort(place, stable=True)
    first_G = holders_G.cumsum(0) - holders_G
    chosen_G = holdings[first_G + torch.arange(len(ids_G), device=device) % holders_G]
    owner_G = ranks[chosen_G]
    own = slice(sum(lengths[: world.rank]), sum(lengths[: world.rank + 1]))
    global_of_M = place[own]
    is_owned_M = owner_G[global_of_M] == world.rank
    is_read_M = torch.zeros_like(batch.item_ids, dtype=torch.bool).index_fill(0, batch.items, True)
    kept = (is_owned_M | is_read_M).nonzero().squeeze(1)
    places = torch.arange(len(kept), device=device)
    new_place_M = torch.zeros_like(batch.item_ids, dtype=torch.int64).index_copy(0, kept, places)
    shared = StepItems(
        owned_O=is_owned_M[kept].nonzero().squeeze(1),
        # An owner lists its items in ascending order, as the items of the step are.
        order_G=torch.argsort(torch.argsort(owner_G, stable=True)),
        num_owned=tuple(torch.bincount(owner_G, minlength=world.size).tolist()),
        pool=dataclasses.replace(
            batch,
            offsets=batch.offsets[:1],
            users=batch.users[:0],
            items=batch.items[:0],
            columns={},
            request={},
            is_positive=batch.is_positive[:0],
            item_ids=ids_G,
            item_rows=rows[chosen_G],
            item_log_q=log_q[chosen_G],
            sampled=global_of_M[batch.sampled].sort().values,
        ),
        counts_G=torch.zeros_like(ids_G, dtype=torch.int64).index_add_(0, place, counts),
        totals=totals,
        world=main,
    )
    mine = dataclasses.replace(
        batch,
        items=new_place_M[batch.items],
        item_ids=batch.item_ids[kept],
        item_rows=batch.item_rows[kept],
        item_log_q=batch.item_log_q[kept],
        sampled=batch.sampled[:0],
    )
    return mine, global_of_M, shared
