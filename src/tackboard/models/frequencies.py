"""Estimates, during training, the expected count of each item in a step (streaming frequencies).

The popularity correction divides a negative's weight by its expected count in a step. Counting before training needs a
pass over the data, and the counts go stale if new data keeps coming. Here the count is estimated during training (Yi et
al., RecSys 2019). Each item is hashed to slots. A slot keeps the step in which it was last seen and a moving average of
the interval between two steps that saw it. The inverse of the interval is the probability that a step sees the slot. A
slot also keeps the mean count over the steps that saw it, because a popular item occurs in a step more than once:

    expected count = mean count when seen / mean interval between steps that see it

A slot that several items share is seen more often than each of the items. So each of several independent hash functions
gives every item a slot, and the smallest estimate is used. If no items share slots, all estimates of an item are equal.

Decided, because the publication does not say:
- The interval is averaged, not its inverse, because the loss multiplies by the interval, and the mean interval is
  unbiased.
- The first averages are plain means: the n-th observation has weight 1/n until 1/n falls to `rate`. The first
  interval is counted from the beginning of training, because this interval has the same distribution as all others.
- An item that was not seen for longer than its interval is treated as if it were seen now. So the estimate of an item
  that is no longer popular falls, and an item that was never seen counts as if it were seen once in all steps so far.

The distinct slots of a step depend on the batch alone, so the CPU finds them before the batch is copied to a GPU. If a
GPU found them, the host would have to wait for their number.

Shapes: M items, k hash functions, S distinct slots of a step.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

from tackboard.batch.padding import coarse_size, pad_to
from tackboard.core.config import check
from tackboard.core.errors import DataError
from tackboard.core.hashing import MAX_ROWS

LOWEST_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class SeenSlots:
    """The slots that one step sees [S], and the count of each slot [S]; int64. A repeated slot repeats its count."""

    slots: torch.Tensor
    counts: torch.Tensor

    def padded(self) -> SeenSlots:
        """Returns the slots, padded with repetitions of the last slot. If no slot was seen, nothing is padded."""
        if not len(self.slots):
            return self
        size = coarse_size(len(self.slots))
        return SeenSlots(pad_to(self.slots, size, int(self.slots[-1])), pad_to(self.counts, size, int(self.counts[-1])))


class StreamingFrequencies(nn.Module):
    """Keeps `num_hashes` × `num_rows` slots. An estimate averages about the last 1 / `rate` observations of a slot.

    The state is in buffers, so it is part of a checkpoint and a resumed run continues with the same bits.
    """

    step: torch.Tensor
    last_seen: torch.Tensor
    interval: torch.Tensor
    count: torch.Tensor
    times_seen: torch.Tensor

    def __init__(self, num_hashes: int, num_rows: int, rate: float = 0.05) -> None:
        super().__init__()
        check(1 <= num_hashes <= 64, "num_hashes", num_hashes, "1 to 64")
        check(1 <= num_rows <= MAX_ROWS, "num_rows", num_rows, f"1 to {MAX_ROWS}")
        check(LOWEST_RATE <= rate <= 1.0, "rate", rate, f"{LOWEST_RATE} to 1")
        self.num_hashes = num_hashes
        self.num_rows = num_rows
        self.rate = rate
        num_slots = num_hashes * num_rows
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last_seen", torch.zeros(num_slots, dtype=torch.int32))
        self.register_buffer("interval", torch.zeros(num_slots, dtype=torch.float32))
        self.register_buffer("count", torch.zeros(num_slots, dtype=torch.float32))
        # Values above 1 / rate make no difference, so `times_seen` stops at 1 / rate and fits into two bytes.
        self.register_buffer("times_seen", torch.zeros(num_slots, dtype=torch.int16))

    def seen_slots(self, item_rows_MK: torch.Tensor, counts_M: torch.Tensor) -> SeenSlots:
        """Finds the slots of a step from the rows of its distinct items (int64 [M, k or more]) and their counts [M].

        This method does not read the state, so another thread may call it.
        """
        slots_Mk = self._slots(item_rows_MK)
        if counts_M.shape != slots_Mk.shape[:1] or counts_M.is_floating_point():
            raise DataError(
                f"counts have dtype {counts_M.dtype} and shape {tuple(counts_M.shape)} for {len(slots_Mk)} items",
                allowed="allowed: one whole number per item",
            )
        occurred_M = counts_M > 0
        slots_S, place = torch.unique(slots_Mk[occurred_M], return_inverse=True)
        # Counts are whole numbers, so their sum is the same in any order and on any device.
        counts_S = torch.zeros_like(slots_S)
        counts_S.index_add_(0, place.flatten(), counts_M[occurred_M].to(torch.int64).repeat_interleave(self.num_hashes))
        return SeenSlots(slots_S, counts_S)

    @torch.no_grad()
    def observe(self, seen: SeenSlots) -> None:
        """Observes one step."""
        slots_S = seen.slots
        self.step += 1
        times_S = self.times_seen[slots_S] + 1
        share_S = self._share(times_S)
        gap_S = (self.step - self.last_seen[slots_S]).float()
        interval_S, count_S = self.interval[slots_S], self.count[slots_S]
        self.interval[slots_S] = interval_S + share_S * (gap_S - interval_S)
        self.count[slots_S] = count_S + share_S * (seen.counts.float() - count_S)
        self.times_seen[slots_S] = times_S.clamp_max(math.ceil(1 / self.rate))
        self.last_seen[slots_S] = self.step.to(torch.int32)

    @torch.no_grad()
    def log_expected(self, item_rows_MK: torch.Tensor) -> torch.Tensor:
        """Returns the log of the expected count of each item in one step: float32 [M], always finite."""
        slots_Mk = self._slots(item_rows_MK)
        times_Mk, interval_Mk = self.times_seen[slots_Mk], self.interval[slots_Mk]
        away_Mk = (self.step - self.last_seen[slots_Mk]).float()
        seen_now_Mk = interval_Mk + self._share(times_Mk + 1) * (away_Mk - interval_Mk)
        interval_Mk = torch.maximum(interval_Mk, seen_now_Mk).clamp_min(1.0)
        count_Mk = torch.where(times_Mk > 0, self.count[slots_Mk], 1.0)
        return (count_Mk.log() - interval_Mk.log()).amin(dim=1)

    def _slots(self, item_rows_MK: torch.Tensor) -> torch.Tensor:
        """Returns the slots of items [M, k]; columns beyond the number of hash functions are ignored.

        A negative row is padding and gets any slot.
        """
        if item_rows_MK.dim() != 2 or item_rows_MK.shape[1] < self.num_hashes:
            raise DataError(
                f"item rows have shape {tuple(item_rows_MK.shape)}", allowed=f"allowed: [M, {self.num_hashes} or more]"
            )
        first_rows_k = torch.arange(self.num_hashes, device=item_rows_MK.device) * self.num_rows
        return item_rows_MK[:, : self.num_hashes].clamp_min(0) + first_rows_k

    def _share(self, times: torch.Tensor) -> torch.Tensor:
        """Returns the weight of the `times`-th observation in a moving average: 1 / times, but at least `rate`."""
        return times.float().reciprocal().clamp_min(self.rate)
