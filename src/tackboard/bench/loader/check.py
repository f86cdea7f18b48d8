"""Checks whether a contender (a loader in `tackboard bench loader`) gives the batches that `make_batch` gives.

The module `contender` writes a file with the digests of all segments of an epoch and with the tensors of some batches.
The check compares this file with the dataset and returns a sentence for each difference. The epoch must hold every
training segment once and no other segment. Each tensor must equal, bit for bit, the tensor that `make_batch` makes from
the same segments.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.loader.data import Setting
from tackboard.core.hashing import mix64

HISTORY_COLUMNS = ("action", "surface", "time")


def batch_arrays(batch: Any) -> dict[str, NDArray[Any]]:
    """Returns every tensor of a batch by name. If a field is a dictionary, its tensors are named field/key."""
    arrays = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        for name, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            arrays[f"{field.name}/{name}" if name else field.name] = tensor.numpy()
    return arrays


def digests(
    users: NDArray[np.int64], offsets: NDArray[np.int64], columns: dict[str, NDArray[Any]]
) -> NDArray[np.uint64]:
    """Returns a hash for each segment [B]. The hash covers the user and all values of the events, in their order."""
    state = np.zeros(int(offsets[-1]), dtype=np.uint64)
    for seed, name in enumerate(("item", *HISTORY_COLUMNS, "is_positive")):
        state = mix64(state + mix64(columns[name].astype(np.int64), seed), seed)
    lengths = np.diff(offsets)
    place = np.arange(len(state)) - np.repeat(offsets[:-1], lengths)
    state = mix64(state + mix64(place, 5), 6)
    return np.add.reduceat(state, offsets[:-1]) + mix64(users, 7)


def digests_of_batch(batch: Any) -> NDArray[np.uint64]:
    """Returns the digest of each segment of a batch."""
    columns = {name: batch.columns[name].numpy() for name in HISTORY_COLUMNS}
    columns |= {"item": batch.item_ids[batch.items].numpy(), "is_positive": batch.is_positive.numpy()}
    return digests(batch.users.numpy(), batch.offsets.numpy(), columns)


class Reference:
    """All segments of a dataset with their digests, in memory."""

    def __init__(self, setting: Setting) -> None:
        from tackboard.data.index import index_training
        from tackboard.data.step_plan import cut_segments
        from tackboard.features.column import offsets_of, ranges

        source = setting.open()
        self.setting = setting
        self.frequencies = index_training(source, setting.max_length).frequencies
        self.sequences = source.read()
        begins, ends = self.sequences.offsets[:-1], self.sequences.train_ends
        segments = cut_segments(begins, ends, setting.max_length)
        fields = dict(self.sequences.histories(segments.starts, segments.lengths).fields or {})
        columns = {name: fields[name].values for name in ("item", *HISTORY_COLUMNS)}
        columns["is_positive"] = self.sequences.is_positive[ranges(segments.starts, segments.lengths)]
        found = digests(self.sequences.user_ids[segments.users], offsets_of(segments.lengths), columns)
        order = np.argsort(found)
        self.digests = found[order]
        self.segments = segments.take(order)

    def differences(self, path: Path) -> list[str]:
        """Compares the epoch in the file `path` with the dataset, and returns a sentence for each difference."""
        with np.load(path) as told:
            if not np.array_equal(told["digests"], self.digests):
                missing = len(np.setdiff1d(self.digests, told["digests"]))
                counts = f"{len(told['digests'])} segments instead of {len(self.digests)}"
                return [f"the epoch has {counts}; {missing} of ours are missing"]
            numbers = sorted({name.partition("/")[0] for name in told.files if "/" in name})
            return [sentence for number in numbers for sentence in self._compare(number, told)]

    def _compare(self, number: str, told: Any) -> list[str]:
        from tackboard.data.loader import stored_batch

        chosen = self.segments.take(np.searchsorted(self.digests, told[f"{number}/digests"]))
        ours = batch_arrays(
            stored_batch(
                self.sequences, chosen.users, chosen.starts, chosen.lengths, self.setting.hashing, self.frequencies
            )
        )
        names = {name.partition("/")[2] for name in told.files if name.startswith(f"{number}/")} - {"digests"}
        if names != set(ours):
            return [f"batch {number}: only one side has {', '.join(sorted(names ^ set(ours)))}"]
        return [
            f"batch {number}: {name} differs"
            for name, array in ours.items()
            if (theirs := told[f"{number}/{name}"]).dtype != array.dtype or not np.array_equal(theirs, array)
        ]
