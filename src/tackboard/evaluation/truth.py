"""Defines the oracle, which ranks items by their true probabilities. Only synthetic worlds have an oracle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tackboard.core.config import from_dict
from tackboard.core.documents import blaming
from tackboard.core.errors import DataError, UsageError
from tackboard.data.sequences import Sequences
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.ranking import ScoreEvents
from tackboard.events.dataset import TRUTH
from tackboard.events.synthetic.oracle import oracle_item_ids, oracle_scores
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.features.entity_tables import find_ids


def oracle(sequences: Sequences) -> ScoreEvents | None:
    """Returns a function that scores items by their true probability; None if the dataset is not a synthetic world."""
    dataset = sequences.source.dataset
    truth = dataset.read_truth()
    if truth is None:
        return None
    path = dataset.path / TRUTH
    with blaming(path):
        config = from_dict(WorldConfig, truth, "world")
        # Both numbers count all items, even items without events. They are compared before memory is allocated.
        if config.num_items != dataset.num_items:
            raise DataError(f"the world has {config.num_items:,} items, but the dataset has {dataset.num_items:,}")
        columns = find_ids(oracle_item_ids(config), sequences.catalogue)
        if (columns < 0).any():
            raise DataError("the world does not have the items of the dataset")

    def score(judged: JudgedEvents) -> NDArray[np.float64]:
        index = judged.lengths(sequences)
        with blaming(path):
            try:
                # Targets are positive events, so the oracle uses probabilities given that the event is not a hide.
                return oracle_scores(config, sequences.user_ids[judged.users], index, given_kept=True)[:, columns]
            except UsageError as error:
                raise DataError(f"the world does not have the events of the dataset: {error.got}") from None

    return score
