"""Says which tokens each candidate of a request sees: its context. The host computes this without asking the device.

A context row holds the packed tokens of one request's history. The input is the offsets of the context rows (one row
per request) and the row of each candidate, both on the CPU. The output is a `CrossLayout`, which
`ops.crossed_attention` reads. Each context row is stored once, for all of its candidates. The candidates of a row are
cut into groups of at most PIECE candidates, called pieces, and the layout pairs each piece with its row:

    context rows      ▷ a b c        ▷ d                 3 + 1 and 1 + 1 tokens
    candidates        p q r          s                   of row 0, and of row 1
    pieces            (row 0: p q r) (row 1: s)          at most PIECE candidates each

Pieces with similar numbers of candidates and context rows of similar length share a grid [V pieces, c candidates, S
tokens]. Padded cells repeat a token or a candidate. Scores of padded tokens are masked, and the results of padded
candidates are never read.

Shapes: B rows, T context tokens, C candidates, V pieces of a grid.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch.row_layout import cuts_of
from tackboard.core.errors import DataError

PIECE = 256
"""Largest number of candidates of a piece. A row with more candidates has several pieces."""


@dataclasses.dataclass(frozen=True)
class CrossGroup:
    """Describes a grid by its three sizes, and by the positions of its first piece and of its first cells.

    `num_candidates` is the size of the largest piece, and `num_tokens` the length of the longest row.
    """

    num_pieces: int
    num_candidates: int
    num_tokens: int
    first_piece: int
    first_candidate_cell: int
    first_token_cell: int


@dataclasses.dataclass(frozen=True)
class CrossLayout:
    """The grids of a batch, and index tensors (int64) on the host or on a device."""

    groups: tuple[CrossGroup, ...]
    tokens: torch.Tensor
    """The context token of each token cell of all grids."""
    candidates: torch.Tensor
    """The candidate of each candidate cell of all grids."""
    cells: torch.Tensor
    """The candidate cell of each candidate [C]."""
    lengths: torch.Tensor
    """The number of context tokens of each piece's row, in the order of the pieces."""
    first_visible: torch.Tensor
    """For each piece, the first place in its row that its candidates may see; 0 unless the length is fixed."""
    places: torch.Tensor
    """The place of each candidate: the number of context tokens before it [C]."""

    @classmethod
    def of(cls, offsets: torch.Tensor, row_of_candidate: torch.Tensor, fixed_length: int = 0) -> CrossLayout:
        """Returns the layout of the context rows with these `offsets` [B + 1].

        `row_of_candidate` [C], in ascending order, gives the row that each candidate sees. A `fixed_length` other than
        0 limits the number of tokens that take part: the candidate itself and the newest tokens of its row. The
        candidate does not see the older tokens.
        """
        offsets_np, row_of = offsets.numpy().astype(np.int64), row_of_candidate.numpy().astype(np.int64)
        lengths_B = np.diff(offsets_np)
        rises = not len(row_of) or (row_of[0] >= 0 and row_of[-1] < len(lengths_B) and not (np.diff(row_of) < 0).any())
        if not rises:
            raise DataError(
                f"the row numbers of candidates are not ascending numbers from 0 to {len(lengths_B) - 1}",
                fix="sort the candidates by their request",
            )
        rows_V, firsts_V, counts_V = _pieces(np.bincount(row_of, minlength=len(lengths_B)))
        groups, order, tokens, candidates = _grids(offsets_np, lengths_B, rows_V, firsts_V, counts_V)
        # Padding repeats a candidate in later cells, so the first cell of a candidate is its own.
        cells = np.zeros(len(row_of), dtype=np.int64)
        cells[candidates[::-1]] = np.arange(len(candidates))[::-1]
        lengths_V = lengths_B[rows_V[order]]
        hidden_V = np.maximum(lengths_V + 1 - fixed_length, 0) if fixed_length else np.zeros_like(lengths_V)
        parts = (tokens, candidates, cells, lengths_V, hidden_V, lengths_B[row_of])
        return cls(groups, *(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))

    def to(self, device: torch.device) -> CrossLayout:
        """Returns the same layout with its tensors on `device`."""
        tensors = (self.tokens, self.candidates, self.cells, self.lengths, self.first_visible, self.places)
        return CrossLayout(self.groups, *(tensor.to(device) for tensor in tensors))

    @property
    def num_candidates(self) -> int:
        return len(self.cells)


def _pieces(counts_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cuts the candidates of each row into pieces. Returns the row, first candidate and size of each piece."""
    num_pieces = -(-counts_B // PIECE)
    rows = np.repeat(np.arange(len(counts_B)), num_pieces)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = (np.cumsum(counts_B) - counts_B)[rows] + place * PIECE
    return rows, starts, np.minimum(counts_B[rows] - place * PIECE, PIECE)


def _grids(
    offsets: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    rows_V: NDArray[np.int64],
    firsts_V: NDArray[np.int64],
    counts_V: NDArray[np.int64],
) -> tuple[tuple[CrossGroup, ...], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns groups, order of the pieces, token of each token cell, and candidate of each candidate cell."""
    lengths_V = lengths_B[rows_V]
    octave_V = np.ceil(np.log2(np.maximum(counts_V, 1))).astype(np.int64)
    order = np.lexsort((lengths_V, octave_V))
    groups: list[CrossGroup] = []
    tokens, candidates = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    token_cell = candidate_cell = 0
    for begin, end in _bounds(octave_V[order], lengths_V[order]):
        pieces = order[begin:end]
        most, longest = int(counts_V[pieces].max()), int(lengths_V[pieces].max())
        groups.append(CrossGroup(len(pieces), most, longest, begin, candidate_cell, token_cell))
        place_S = np.minimum(np.arange(longest), np.maximum(lengths_V[pieces] - 1, 0)[:, None])
        # A row without tokens in a grid with tokens reads token 0, and the mask hides it.
        start_V1 = np.minimum(offsets[rows_V[pieces]], max(0, int(offsets[-1]) - 1))[:, None]
        tokens.append((start_V1 + place_S).ravel())
        candidates.append((firsts_V[pieces, None] + np.minimum(np.arange(most), counts_V[pieces, None] - 1)).ravel())
        token_cell, candidate_cell = token_cell + len(tokens[-1]), candidate_cell + len(candidates[-1])
    return tuple(groups), order, np.concatenate(tokens), np.concatenate(candidates)


def _bounds(octave_V: NDArray[np.int64], lengths_V: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns where each grid of the sorted pieces begins and ends."""
    bounds: list[tuple[int, int]] = []
    edges = [0, *(np.flatnonzero(np.diff(octave_V)) + 1).tolist(), len(octave_V)]
    for begin, end in itertools.pairwise(edges):
        cuts = [0, *cuts_of(np.maximum(lengths_V[begin:end], 1))] if end > begin else []
        bounds += [(begin + first, begin + last) for first, last in itertools.pairwise(cuts)]
    return bounds
