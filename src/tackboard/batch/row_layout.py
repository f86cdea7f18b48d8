"""Says where the rows of a batch lie among its packed tokens. The host knows this without asking the device.

The input is the offsets of the rows, on the CPU. The output is a `RowLayout`: numbers that the host needs to start
kernels, and index tensors that the kernels read. `RowLayout.to` moves the tensors to the device in one copy. So a model
that is given a layout never asks the device for a length, and a step need not wait for the device.

Attention without a kernel for packed rows works on padded grids. One grid for all rows would be mostly padding: with
rows of 48 tokens on average and 256 at most, 4 of 5 cells are padding. So rows are sorted by length and cut into a few
groups of similar length, and each group is a grid of its own. The cuts minimise the estimated time, in units of the
time of one attention score. A group costs GROUP_COST, and each cell of its grid costs S + CELL_COST, where S is the
length of the group's longest row. Cells are numbered consecutively, group by group. A padded cell holds a copy of its
row's last token. No token of the row sees this copy, because attention is causal.

Shapes: B rows, T packed tokens, C cells of all grids, N blocks of at most BLOCK tokens of one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.core.errors import DataError

BLOCK = 64
"""Largest number of tokens in a block. Kernels for packed rows start one program for each block."""
GROUP_COST = 8192
"""Fixed cost of a group; the unit is the time of one attention score. Measured on a CPU with 2 heads of width 32."""
CELL_COST = 48
"""Cost of a cell of a grid in addition to the cell's scores, in the same unit and measured in the same way."""
STEPS_PER_OCTAVE = 8
"""Number of possible cuts between the lengths 2^n and 2^(n + 1), for each n. In total there are at most about 100."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A grid of rows of similar length: its first cell, its number of rows, and the length of its longest row."""

    first_cell: int
    num_rows: int
    length: int

    @property
    def num_cells(self) -> int:
        return self.num_rows * self.length


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The rows of a batch: counts and groups on the host, and index tensors (int32) on the host or on a device."""

    num_rows: int
    num_tokens: int
    longest: int
    """Number of tokens of the longest row."""
    bound: int
    """`longest` rounded up to a power of two, so that kernels see few different numbers. It is stored, because compiled
    code that computed it would be compiled again for every `longest`."""
    num_tiles: int
    """Number of tiles, padded by `size_of`. A tile pairs a block of queries with a block of keys of the same row: the
    same block or an earlier block."""
    groups: tuple[Group, ...]
    """The grids, from short rows to long rows. Empty rows are in no grid."""
    offsets: torch.Tensor
    """The first token of each row, followed by the number of all tokens [B + 1]."""
    places: torch.Tensor
    """The place of each token in its row [T]."""
    cells: torch.Tensor
    """The cell of each token [T]."""
    block_rows: torch.Tensor
    """The row of each block [N]. N depends only on B and T, so the last blocks may have no tokens."""
    block_starts: torch.Tensor
    """The place at which each block starts in its row [N]; a block without tokens starts at the end of row 0."""
    row_tiles: torch.Tensor
    """The first tile of each row, followed by the number of all tiles [B + 1]. Tiles of a row are numbered by block of
    queries, then by block of keys."""
    tokens: torch.Tensor
    """The token that each cell holds [C]. C does not follow from B and T, so `packed` holds these numbers last."""
    packed: torch.Tensor
    """One tensor that holds all index tensors, so that one copy moves them all."""

    @classmethod
    def of(cls, offsets: torch.Tensor, size_of: Callable[[int], int] = int) -> RowLayout:
        """Returns the layout of rows with these offsets [B + 1], a CPU tensor of whole numbers.

        `size_of` takes a size and returns the padded size. It decides the sizes of `packed` and `num_tiles`.
        """
        if offsets.is_cuda:
            raise DataError("the offsets of a layout are on a GPU", fix="build the layout where the batch is built")
        offsets_np: NDArray[np.int64] = offsets.numpy().astype(np.int64)
        lengths, num_tokens = np.diff(offsets_np), int(offsets_np[-1])
        if num_tokens >= 1 << 31 or offsets_np[0] != 0 or (lengths < 0).any():
            raise DataError(
                f"offsets run from {offsets_np[0]:,} to {num_tokens:,}",
                allowed="allowed: rising numbers that start at 0 and stay below 2**31",
                fix="build offsets from the lengths of the rows",
            )
        places = np.arange(num_tokens) - np.repeat(offsets_np[:-1], lengths)
        groups, cells, tokens = _grids(offsets_np, lengths, places)
        blocks = _blocks(lengths, num_tokens)
        row_blocks = -(-lengths // BLOCK)
        row_tiles = np.append(0, np.cumsum(row_blocks * (row_blocks + 1) // 2))
        parts = (offsets_np, places, cells, *blocks, row_tiles, tokens)
        longest = int(lengths.max(initial=0))
        bound = 1 << max(0, longest - 1).bit_length()
        index = _split(_joined(parts, size_of), [len(part) for part in parts])
        return cls(len(lengths), num_tokens, longest, bound, size_of(int(row_tiles[-1])), groups, *index)

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor, size_of: Callable[[int], int] = int) -> RowLayout:
        """Returns the layout of rows of these lengths [B], on the device of `lengths`. The host waits for a GPU."""
        host = lengths.detach().cpu().long()
        return cls.of(torch.cat([host.new_zeros(1), host.cumsum(0)]), size_of).to(lengths.device)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RowLayout:
        """Returns the layout with `change` applied to its index tensors, all at once."""
        parts: dict[str, Any] = dict(zip(INDEX_FIELDS, _split(change(self.packed), self._sizes()), strict=True))
        return dataclasses.replace(self, **parts)

    def to(self, device: torch.device | str) -> RowLayout:
        """Returns the layout with its tensors on a device, moved by one copy."""
        if self.packed.device == torch.device(device):
            return self
        return self.mapped(lambda packed: packed.to(device, non_blocking=True))

    @property
    def replay_key(self) -> tuple[Any, ...]:
        """The numbers that kernels for packed rows take from the host. Sizes of tensors are not included."""
        return (self.num_rows, self.num_tokens, self.bound, self.num_tiles)

    def check_fits(self, max_positions: int) -> None:
        """Raises DataError if a row has more tokens than there are learned positions."""
        if self.longest > max_positions:
            raise DataError(
                f"a row has {self.longest:,} tokens",
                allowed=f"allowed: at most {max_positions:,}, the positions that the model has learned",
                fix="read shorter histories, or build the model with rotary positions",
            )

    def _sizes(self) -> list[int]:
        return [len(getattr(self, name)) for name in INDEX_FIELDS[:-1]]


INDEX_FIELDS = ("offsets", "places", "cells", "block_rows", "block_starts", "row_tiles", "tokens", "packed")


def cuts_of(lengths: NDArray[np.int64]) -> list[int]:
    """Cuts rows into groups and returns where each group ends. The rows must be sorted by length and not be empty."""
    octave = np.maximum(np.floor(np.log2(lengths)).astype(np.int64), STEPS_PER_OCTAVE.bit_length() - 1)
    step = (1 << octave) // STEPS_PER_OCTAVE
    ends = np.append(np.flatnonzero(np.diff(-(-lengths // step) * step)) + 1, len(lengths))
    starts = np.append(0, ends[:-1])
    longest = lengths[ends - 1]
    per_row = longest * (longest + CELL_COST)
    # least[i] is the least cost of the rows before starts[i]. The last group of these rows begins at
    # starts[origin[i - 1]].
    least, origin = np.zeros(len(ends) + 1), np.zeros(len(ends), dtype=np.int64)
    for last in range(len(ends)):
        costs = least[: last + 1] + (ends[last] - starts[: last + 1]) * per_row[last] + GROUP_COST
        origin[last] = costs.argmin()
        least[last + 1] = costs[origin[last]]
    cuts, last = [], len(ends) - 1
    while last >= 0:
        cuts.append(int(ends[last]))
        last = int(origin[last]) - 1
    return cuts[::-1]


def _grids(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[tuple[Group, ...], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the groups, the cell of each token, and the token of each cell."""
    order = np.argsort(lengths, kind="stable")
    order = order[np.searchsorted(lengths[order], 1) :]
    if not len(order):
        return (), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    groups, tokens, first_cells = [], [], np.zeros(len(lengths), dtype=np.int64)
    begin = cell = 0
    for end in cuts_of(lengths[order]):
        rows, longest = order[begin:end], int(lengths[order[end - 1]])
        groups.append(Group(cell, len(rows), longest))
        first_cells[rows] = cell + np.arange(len(rows)) * longest
        tokens.append((offsets[rows, None] + np.minimum(np.arange(longest), lengths[rows, None] - 1)).ravel())
        begin, cell = end, cell + len(rows) * longest
    return tuple(groups), np.repeat(first_cells, lengths) + places, np.concatenate(tokens)


def _blocks(lengths: NDArray[np.int64], num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns row and start of each block. Blocks that start late in a row come first: they read the most keys."""
    counts = -(-lengths // BLOCK)
    rows = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * BLOCK
    order = np.argsort(-starts, kind="stable")
    none = num_tokens // BLOCK + len(lengths) - len(rows)
    end = lengths[0] if len(lengths) else 0
    return np.append(rows[order], np.zeros(none, np.int64)), np.append(starts[order], np.full(none, end))


def _joined(parts: tuple[NDArray[np.int64], ...], size_of: Callable[[int], int]) -> torch.Tensor:
    """Joins index arrays. Each array starts at a multiple of 16 bytes, the alignment that suits kernels."""
    joined = np.zeros(size_of(sum(_padded(len(part)) for part in parts)), dtype=np.int32)
    begin = 0
    for part in parts:
        joined[begin : begin + len(part)] = part
        begin += _padded(len(part))
    return torch.from_numpy(joined)


def _split(joined: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Returns the index tensors that `_joined` has joined, and the joined tensor itself."""
    begins = [sum(map(_padded, sizes[:number])) for number in range(len(sizes))]
    return [*(joined[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)), joined]


def _padded(size: int) -> int:
    return -(-size // 4) * 4
