"""Pads a batch on the host, so that the sizes of its tensors repeat from step to step.

The input is a batch. The output is the same batch with more events, histories and items at its end, all of which are
padding. A compiled step, an allocator and a recorded CUDA graph work best with sizes that they have seen before.
Padding changes no result:

    a padding item          has the row -1 in every table: it reads zeros and is never updated; it is never a negative
    a padding event         is not positive, so nothing predicts it, and it is in a padding history
    a padding history       belongs to the last user; the first padding history has at least one event

A size n is rounded up to a multiple of p/16, where p is the largest power of two that is at most n. Then SPARE is
added. So a large size grows by less than 7%, and there is always at least one element of padding, to which the padding
of other tensors can point. Sizes that hardly influence the work, such as the number of histories, are rounded more
coarsely (`coarse_size`). The fewer values each size can take, the fewer different shapes a step can have. All sizes are
multiples of 16, because compiled kernels are faster for them.

Decided: a size is a function of the batch alone and not of earlier batches, so a resumed run gets the same sizes. The
plan of steps fills all steps of an epoch almost equally, so most sizes take only one or two different values.

Shapes: B rows (histories), N packed events, M distinct items, K drawn items.
"""

from __future__ import annotations

import dataclasses

import torch

from tackboard.batch.batches import Feature, Jagged, SequenceBatch

STEPS_PER_OCTAVE = 16
"""Number of sizes between a power of two and the next."""
COARSE_STEPS_PER_OCTAVE = 4
"""The same number for sizes that hardly influence the work."""
SPARE = 16
"""Number of elements that are added after rounding up, because a step often fills a power of two exactly."""


def padded_size(count: int) -> int:
    """Returns the size to which `count` elements are padded; it is larger than `count`."""
    return _size(count, STEPS_PER_OCTAVE, SPARE)


def coarse_size(count: int) -> int:
    """Returns the size to which `count` elements are padded if their number hardly influences the work."""
    return _size(count, COARSE_STEPS_PER_OCTAVE, 2 * SPARE)


def _size(count: int, steps_per_octave: int, least_step: int) -> int:
    octave = 1 << count.bit_length() >> 1
    step = max(least_step, octave // steps_per_octave)
    return -(-count // step) * step + SPARE


def pad_to(tensor: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """Returns the tensor with elements of `value` appended, until its first dimension is `size`."""
    return torch.cat([tensor, tensor.new_full((size - len(tensor), *tensor.shape[1:]), value)])


def pad_batch(batch: SequenceBatch) -> SequenceBatch:
    """Returns the batch with padded events, histories, items and drawn items. The batch must be on the CPU.

    The features of requests must have a value for each event, as in training.
    """
    num_events, num_rows = padded_size(batch.num_events), batch.num_rows
    lengths_B = batch.lengths()
    # Padding histories are no longer than the longest real history: a model may have no positions beyond its end.
    longest = max(1, int(lengths_B.max()) if num_rows else 1)
    num_added = num_events - batch.num_events
    num_rows = coarse_size(num_rows + num_added // longest)
    added = torch.arange(num_rows - batch.num_rows)
    # The added events are spread evenly. If they do not divide evenly, the first padding histories have one more.
    lengths_B = torch.cat([lengths_B, (num_added + len(added) - 1 - added) // len(added)])
    num_items = padded_size(len(batch.item_ids))
    num_drawn = len(batch.sampled)
    padded = dataclasses.replace(
        batch,
        offsets=torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)]),
        users=pad_to(batch.users, num_rows, int(batch.users[-1]) if batch.num_rows else 0),
        items=pad_to(batch.items, num_events, num_items - 1),
        columns={name: pad_to(column, num_events, 0) for name, column in batch.columns.items()},
        request={name: _pad_feature(feature, num_events) for name, feature in batch.request.items()},
        is_positive=pad_to(batch.is_positive, num_events, 0),
        item_ids=pad_to(batch.item_ids, num_items, 0),
        item_rows=pad_to(batch.item_rows, num_items, -1),
        item_log_q=pad_to(batch.item_log_q, num_items, 0.0),
        # Drawing an item twice is the same as drawing it once.
        sampled=pad_to(batch.sampled, coarse_size(num_drawn), int(batch.sampled[-1])) if num_drawn else batch.sampled,
    )
    return padded.with_padding(num_added)


def _pad_feature(feature: Feature, size: int) -> Feature:
    """Pads a feature with zeros, or with empty lists. The elements of lists are not padded."""
    if isinstance(feature, Jagged):
        return Jagged(feature.values, pad_to(feature.offsets, size + 1, len(feature.values)))
    return pad_to(feature, size, 0)
