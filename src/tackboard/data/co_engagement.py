"""Makes vectors of items from the co-engagement graph.

In this graph, two items are neighbours if users engaged with both within a few steps:

    events of a user    a  b  c  d          window 2: the pairs ab, ac, bc, bd, cd
    counts              c_ij                how often the items i and j formed a pair
    weights             max(0, ln(c_ij · T / (c_i · c_j)))       positive pointwise mutual information (PPMI)
    vectors             U · √S of the largest singular values of the matrix of weights, scaled to length 1

c_i is the sum of row i of the counts, and T the sum of all rows. The singular vectors come from a randomised subspace
iteration (Halko, Martinsson and Tropp 2011), which multiplies the sparse matrix with a few dozen vectors at a time.
Decided: memory grows with the number of distinct pairs, so this number is limited. When there are too many pairs, the
pairs that occurred least often so far are dropped, and the drops are counted. c_i and T still include dropped pairs.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.progress import Progress

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

PAIRS_AT_ONCE = 1 << 23
"""Number of pairs that are collected before they are added to the counts."""
ITERATIONS = 4
"""Number of subspace iterations. Each iteration multiplies with the matrix once."""
_SPARE = 16
"""Number of singular vectors that are computed in addition to the wanted ones, for accuracy."""
_STREAM_START, _STREAM_DROP = 71, 72


class PairCounts:
    """Counts how often two different items occur within `window` events of one user. Items are 0 to num_items - 1."""

    def __init__(self, num_items: int, *, window: int, max_pairs: int, seed: int) -> None:
        self.num_items = num_items
        self.sums = np.zeros(num_items, dtype=np.int64)
        """Number of counted pairs that contain each item, including repeats and pairs that were dropped later."""
        self.num_dropped = 0
        """How many times a pair was dropped because of `max_pairs`."""
        self._window, self._max_pairs, self._seed = window, max_pairs, seed
        self._keys, self._counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._pending: list[Ints] = []
        self._num_pending = 0

    def add(self, users: Ints, items: Ints) -> None:
        """Adds events, sorted by user and time. All events of a user must be given in the same call."""
        for distance in range(1, self._window + 1):
            first, second = items[:-distance], items[distance:]
            paired = (users[:-distance] == users[distance:]) & (first != second)
            low, high = np.minimum(first, second)[paired], np.maximum(first, second)[paired]
            for each in (low, high):
                self.sums += np.bincount(each, minlength=self.num_items)
            self._pending.append(low * self.num_items + high)
            self._num_pending += len(low)
        if self._num_pending >= PAIRS_AT_ONCE:
            self._merge()

    def result(self) -> tuple[Ints, Ints, Ints]:
        """Returns (i, j, count) of each pair with i < j, sorted by i, then by j."""
        self._merge()
        return *np.divmod(self._keys, self.num_items), self._counts

    def _merge(self) -> None:
        if not self._pending:
            return
        fresh, counts = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending, self._num_pending = [], 0
        keys = np.concatenate([self._keys, fresh])
        # A stable sort merges two sorted arrays in linear time.
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], np.concatenate([self._counts, counts])[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        self._keys = keys[starts]
        self._counts = np.add.reduceat(counts, starts) if len(starts) else counts
        if len(self._keys) > self._max_pairs:
            self._drop_rarest()

    def _drop_rarest(self) -> None:
        """Keeps the `max_pairs` most frequent pairs. Among equal counts, a random number keyed by the pair decides."""
        excess = len(self._keys) - self._max_pairs
        highest = np.partition(self._counts, excess - 1)[excess - 1]
        kept = self._counts > highest
        tied = np.flatnonzero(self._counts == highest)
        draws = keyed_random.bits(self._seed, _STREAM_DROP, self._keys[tied])
        kept[tied[np.argsort(draws, kind="stable")[: self._max_pairs - int(kept.sum())]]] = True
        self._keys, self._counts = self._keys[kept], self._counts[kept]
        self.num_dropped += excess


def ppmi(pairs: PairCounts) -> tuple[Ints, Ints, Floats]:
    """Returns (i, j, weight) of each pair with i < j and a positive weight."""
    first, second, counts = pairs.result()
    sums = pairs.sums.astype(np.float64)
    weights = np.log(counts * sums.sum() / (sums[first] * sums[second]))
    positive = weights > 0
    return first[positive], second[positive], weights[positive].astype(np.float32)


def vectors_of(
    edges: tuple[Ints, Ints, Floats], item_ids: Ints, width: int, seed: int, *, quiet: bool = True
) -> tuple[Floats, NDArray[np.bool_]]:
    """Returns vectors of length 1 [num_items, width], and which items have an edge. Other items get zeros.

    The same arguments give the same vectors on the same machine. On other machines, the results can differ by rounding.
    """
    connected = np.zeros(len(item_ids), dtype=bool)
    for ends in edges[:2]:
        connected[ends] = True
    vectors = np.zeros((len(item_ids), width), dtype=np.float32)
    rows = np.flatnonzero(connected)
    if len(rows):
        place = np.cumsum(connected) - 1
        matrix = _symmetric(place[edges[0]], place[edges[1]], edges[2], len(rows))
        # Random numbers are keyed by item ids, so an added item does not change the starting values of other items.
        columns = np.arange(min(width + _SPARE, len(rows)), dtype=np.int64)
        start = keyed_random.normal(seed, _STREAM_START, item_ids[rows][:, None], columns).astype(np.float32)
        found = _singular_vectors(matrix, start, quiet=quiet)[:, :width]
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        vectors[rows, : found.shape[1]] = found / np.maximum(lengths, np.finfo(np.float32).tiny)
    return vectors, connected


def _symmetric(first: Ints, second: Ints, weights: Floats, num_rows: int) -> Any:
    """Returns the sparse matrix that has each weight at (i, j) and at (j, i)."""
    keys = np.concatenate([first * num_rows + second, second * num_rows + first])
    order = np.argsort(keys)
    rows, columns = np.divmod(keys[order], num_rows)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    values = np.concatenate([weights, weights])[order]
    with warnings.catch_warnings():
        # torch calls its sparse matrices a beta feature. Only the product with a dense matrix is used here.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        return torch.sparse_csr_tensor(
            *(torch.from_numpy(starts), torch.from_numpy(columns), torch.from_numpy(values)),
            size=(num_rows, num_rows),
            check_invariants=True,
        )


def _singular_vectors(matrix: Any, start: Floats, *, quiet: bool) -> Floats:
    """Returns U · √S of the largest singular values. The entry of largest magnitude in each column is positive."""

    def product(dense: NDArray[Any]) -> Floats:
        answer = matrix @ torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32))
        progress.advance(1)
        return np.asarray(answer.numpy())

    with Progress("finding vectors", total=ITERATIONS + 2, unit="products", quiet=quiet) as progress:
        basis = product(start)
        for _ in range(ITERATIONS):
            basis = product(np.linalg.qr(basis)[0])
        basis = np.linalg.qr(basis)[0]
        # The matrix is symmetric, so product(basis) is the transpose of P = basis' · matrix. Only the left singular
        # vectors of P are needed. With product(basis) = Q · R, they equal those of the small matrix R'.
        small, values, _ = np.linalg.svd(np.asarray(np.linalg.qr(product(basis), mode="r")).T)
    found = (basis @ small) * np.sqrt(values)
    peaks = found[np.abs(found).argmax(axis=0), np.arange(found.shape[1])]
    return np.asarray(found * np.where(peaks < 0, -1.0, 1.0), dtype=np.float32)
