"""Small models of every kind that has parts to compile, and batches to feed them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, INT, TIME
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import hstu, sasrec
from tackboard.models.tables import TableConfig

VOCABULARY = Vocabulary.from_names(["click", "hide"], ["home"])
SHARED: dict[str, Any] = {
    "tables": TableConfig(num_hashes=1, num_rows=256, method="modulo"),
    "width": 16,
    "max_history": 20,
}
INPUTS: dict[str, Any] = {"use_actions": True, "use_time_gap": True, "use_request_time": True, "max_history": 20}
CONFIGS: dict[str, Any] = {
    "gpt, two losses": PinFMConfig(
        **SHARED,
        backbone=BackboneConfig(positions="rotary"),
        loss=LossConfig(in_batch_negatives=False, later_negatives=True, multi_token_weight=0.5),
    ),
    "hstu": PinFMConfig(
        **SHARED,
        backbone=BackboneConfig(kind="hstu", positions="none"),
        loss=LossConfig(in_batch_negatives=False),
        request_time=True,
    ),
    "sasrec, sampled": sasrec(256, **INPUTS, loss={"num_negatives": 8}, dropout=0.0),
    "sasrec, contrastive": sasrec(
        256, **INPUTS, loss={"kind": "contrastive", "in_batch_negatives": False, "later_negatives": True}, dropout=0.0
    ),
    "hstu, full": hstu(256, **INPUTS, loss={"kind": "full"}, dropout=0.0),
}


def histories_over_all_items(seed: int, num_rows: int = 32, num_items: int = 200) -> SequenceBatch:
    """Histories of up to 19 events over some items, each of which occurs; all of them are drawn as negatives."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 20, num_rows)
    count = int(lengths.sum())
    items = np.concatenate([np.arange(num_items), random.integers(0, num_items, count - num_items)])
    batch = make_batch(
        history=sequence_column(
            lengths,
            item=Column(ID, items),
            action=Column(INT, random.integers(0, 3, count)),
            surface=Column(INT, random.integers(0, 2, count)),
            time=Column(TIME, np.cumsum(random.integers(0, 10**7, count))),
            gap=Column(INT, random.integers(0, 24, count)),
        ),
        is_positive=random.random(count) < 0.8,
        hashing=HashConfig(num_hashes=1, num_rows=256, method="modulo"),
    )
    request = {"since_last": torch.rand(count) * 1e5}
    return SequenceBatch(
        **(vars(batch) | {"sampled": torch.arange(num_items), "sample_rate": torch.tensor(1.0), "request": request})
    )
