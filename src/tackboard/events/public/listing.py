"""This module lists the public datasets that can be imported, and finds a dataset by its name.

Census-Income (KDD) is left out, because it is not a log of events: it has no users, no items and no times.
"""

from __future__ import annotations

from tackboard.core.config import did_you_mean
from tackboard.core.errors import UsageError
from tackboard.events.public.deskdrop import DESKDROP
from tackboard.events.public.histories import SEQUENCES
from tackboard.events.public.kakao_brunch import KAKAO_BRUNCH
from tackboard.events.public.kuairand import KUAIRAND
from tackboard.events.public.movielens import ML_1M, ML_100K
from tackboard.events.public.open_bandit import OPEN_BANDIT
from tackboard.events.public.publisher import PublicDataset
from tackboard.events.public.retailrocket import RETAILROCKET

DATASETS = {
    dataset.name: dataset
    for dataset in (ML_100K, ML_1M, KAKAO_BRUNCH, *SEQUENCES, RETAILROCKET, DESKDROP, OPEN_BANDIT, KUAIRAND)
}


def find_public(name: str) -> PublicDataset:
    """Returns the dataset of this name. An unknown name raises UsageError, which suggests the closest name."""
    if name not in DATASETS:
        raise UsageError(
            f"there is no public dataset named {name!r}",
            allowed=f"allowed: {', '.join(DATASETS)}",
            fix=did_you_mean(name, tuple(DATASETS)) or "see `tackboard data import --list`",
        )
    return DATASETS[name]
