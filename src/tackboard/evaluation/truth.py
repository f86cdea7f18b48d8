"""The oracle's row of the table: what the maker of a synthetic world would rank, where the dataset is one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tackboard.core.config import from_dict
from tackboard.data.sequences import Sequences
from tackboard.evaluation.ranking import ScoreUsers
from tackboard.events.dataset import open_dataset
from tackboard.events.oracle import oracle_item_ids, oracle_scores
from tackboard.events.world_config import WorldConfig


def oracle(sequences: Sequences) -> ScoreUsers | None:
    """Exact next-item probabilities as scores, or None where the dataset is not a synthetic world."""
    truth = open_dataset(sequences.path).read_truth()
    if truth is None:
        return None
    config = from_dict(WorldConfig, truth, "world")
    columns = np.searchsorted(oracle_item_ids(config), sequences.catalogue)

    def score(users: NDArray[np.int64]) -> NDArray[np.float64]:
        index = sequences.targets[users] - sequences.offsets[:-1][users]
        # Targets are positive events, so the oracle too is told that what comes is not a hide.
        return oracle_scores(config, sequences.user_ids[users], index, given_kept=True)[:, columns]

    return score
