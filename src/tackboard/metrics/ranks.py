"""Computes HR@k and NDCG@k of rankings in which each user has one relevant item.

The input is the rank of each user's held-out item (0 is best); the output is means over users. With one relevant item,
HR@k is the share of ranks below k. NDCG@k is the mean of 1/log2(rank + 2), with 0 for ranks of k or more.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray


@dataclasses.dataclass
class RankingMetrics:
    """HR@k and NDCG@k for several k, over all users that calls of `update` added."""

    cutoffs: tuple[int, ...]
    num_users: int = 0
    hits: dict[int, int] = dataclasses.field(default_factory=dict)
    gains: dict[int, float] = dataclasses.field(default_factory=dict)

    def update(self, ranks: NDArray[np.int64]) -> None:
        """Adds users. `ranks` holds the 0-based rank of the relevant item of each user."""
        self.num_users += len(ranks)
        for k in self.cutoffs:
            inside = ranks[ranks < k]
            self.hits[k] = self.hits.get(k, 0) + len(inside)
            self.gains[k] = self.gains.get(k, 0.0) + float(np.sum(1.0 / np.log2(inside + 2.0)))

    def result(self) -> dict[str, float]:
        """Returns `hr@k` and `ndcg@k` by name; all are 0 if there are no users."""
        users = max(1, self.num_users)
        rates = {f"hr@{k}": self.hits.get(k, 0) / users for k in self.cutoffs}
        return rates | {f"ndcg@{k}": self.gains.get(k, 0.0) / users for k in self.cutoffs}


def ranks_of_targets(scores: NDArray[np.floating] | torch.Tensor, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the 0-based rank of column `targets[i]` in row i of `scores` [U, C]. Ties count against the target.

    This is pessimistic on purpose: a model whose scores are all equal, or NaN, ranks the target last, not first.
    """
    values = torch.as_tensor(scores)
    own = values.gather(1, torch.from_numpy(targets).to(values.device)[:, None])
    # `values >= own` would be wrong: with a NaN it is false everywhere, and the target would rank first.
    ranks: NDArray[np.int64] = ((~(values < own)).sum(dim=1) - 1).cpu().numpy()
    return ranks
