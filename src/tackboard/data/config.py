"""What the two data configs share: the place of the data, the numbered steps, the held-out users.

A data config is a run's way from a dataset to numbered steps: `open` gives the source, `steps` the numbered batches of
one part of its users. Users are dealt to parts by their id alone, so the same user is in the same part of every
snapshot, on every machine, whatever else changes:

    draw of the user's id   0 ──── validation_share ──── + test_share ──────────────── 1
                              validation               test              train
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from tackboard.batch import HashConfig
from tackboard.batch.batches import Batch
from tackboard.core import keyed_random
from tackboard.core.config import check
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.source import SequenceSource, snapshot_path
from tackboard.data.steps import NumberedSteps
from tackboard.features.feature_set import FeatureSet

Part = Literal["train", "validation", "test"]
PART_STREAM = 41
"""Keeps the draw of parts apart from every other use of a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsConfig(abc.ABC):
    """What a run reads, whatever its batches hold."""

    kind: ClassVar[str]
    """Its name in a run's config."""
    batch_type: ClassVar[type[Batch]]
    """The batches of its steps."""

    dataset: str
    """Folder of the dataset: datasets/NAME, or one snapshot inside it."""
    features: str = ""
    """File with your own features, file.py or file.py:name, in addition to the standard ones; empty: none."""
    validation_share: float = 0.0
    """Share of the users, drawn by their ids, whose data judges the model during training and is not trained on."""
    num_workers: int = 1
    """Threads that prepare windows ahead, each holding one window; 0: a window is prepared when it is needed."""
    ray_address: str = ""
    """Ray cluster on which `num_workers` processes prepare the batches: HOST:PORT, or auto; empty: no cluster."""

    def __post_init__(self) -> None:
        check(0.0 <= self.validation_share < 1.0, "data.validation_share", self.validation_share, "0 to below 1")
        check(0 <= self.num_workers <= 64, "data.num_workers", self.num_workers, "0 to 64")
        is_address = re.fullmatch(r"|auto|[^\s/:]+:\d{1,5}", self.ray_address) is not None
        check(is_address, "data.ray_address", self.ray_address, "HOST:PORT, auto, or empty")

    def at(self, lineage: Mapping[str, Any]) -> Self:
        """The same data at the snapshots that `SequenceSource.lineage` recorded; newer snapshots may exist."""
        return dataclasses.replace(self, dataset=str(snapshot_path(lineage)))

    @abc.abstractmethod
    def open(
        self,
        features: Callable[[Vocabulary], FeatureSet],
        *,
        dataset: Any = None,
        vocabulary: Vocabulary | None = None,
    ) -> SequenceSource:
        """Opens and verifies the dataset, or another one in its place; `features` gives what the model reads."""

    @abc.abstractmethod
    def steps(
        self, source: Any, hashing: HashConfig, seed: int, *, part: Part = "train", quiet: bool = True
    ) -> NumberedSteps[Any]:
        """The numbered batches of a part of the users of `source`, which `open` gave."""


@dataclasses.dataclass(frozen=True)
class PartOfUsers:
    """Some of the users, chosen by their ids alone; all users if nobody is held out."""

    part: Part = "train"
    validation_share: float = 0.0
    test_share: float = 0.0

    def of(self, user_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each user is among them."""
        if not self.validation_share and not self.test_share:
            return np.full(len(user_ids), self.part == "train")
        draw = keyed_random.uniform(0, PART_STREAM, user_ids)
        if self.part == "validation":
            return np.asarray(draw < self.validation_share)
        is_train = draw >= self.validation_share + self.test_share
        return is_train if self.part == "train" else ~is_train & (draw >= self.validation_share)
