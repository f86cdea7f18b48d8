"""Defines the settings that all data configs have, such as the dataset and the share of the validation users.

A data config turns a dataset into numbered steps. Its method `open` returns the source, and `steps` returns the
numbered batches of one part of the source's users. In a dataset, a hash of the user's id, from 0 to 1, decides the
user's part. So, with the same shares, a user is in the same part in every snapshot and on every machine:

    hash of the user's id   0 ──────────── validation_share ─────── validation_share + test_share ─────────── 1
                                validation                    test                                  train
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
"""Random stream that assigns users to parts, separate from all other uses of a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsConfig(abc.ABC):
    """Settings of the data that a run reads, for any type of batch."""

    kind: ClassVar[str]
    """Name of this kind of data in a run's config."""
    batch_type: ClassVar[type[Batch]]
    """Type of the batches."""

    dataset: str
    """Folder of the dataset: datasets/NAME, or one snapshot inside it."""
    features: str = ""
    """File with your own features, file.py or file.py:name, in addition to the standard features; empty means none."""
    validation_share: float = 0.0
    """Share of the users, chosen by their ids, whose data is used for validation and not for training."""
    num_workers: int = 1
    """Number of threads that prepare windows in advance, one window each; 0 prepares a window when it is needed."""
    ray_address: str = ""
    """Ray cluster on which `num_workers` processes prepare the batches: HOST:PORT or auto; empty means no cluster."""

    def __post_init__(self) -> None:
        check(0.0 <= self.validation_share < 1.0, "data.validation_share", self.validation_share, "0 to below 1")
        check(0 <= self.num_workers <= 64, "data.num_workers", self.num_workers, "0 to 64")
        is_address = re.fullmatch(r"|auto|[^\s/:]+:\d{1,5}", self.ray_address) is not None
        check(is_address, "data.ray_address", self.ray_address, "HOST:PORT, auto, or empty")

    def at(self, lineage: Mapping[str, Any]) -> Self:
        """Returns this config with the snapshot that `SequenceSource.lineage` recorded, even if a newer one exists."""
        return dataclasses.replace(self, dataset=str(snapshot_path(lineage)))

    @abc.abstractmethod
    def open(
        self,
        features: Callable[[Vocabulary], FeatureSet],
        *,
        dataset: Any = None,
        vocabulary: Vocabulary | None = None,
    ) -> SequenceSource:
        """Opens and verifies `dataset`; None means the config's dataset. `features` returns the model's features."""

    @abc.abstractmethod
    def steps(
        self,
        source: Any,
        hashing: HashConfig,
        seed: int,
        *,
        part: Part = "train",
        quiet: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> NumberedSteps[Any]:
        """Returns the numbered batches of one part of the users of `source`, which `open` returned.

        If several processes train together, each batch is the share of the process `rank`.
        """


@dataclasses.dataclass(frozen=True)
class PartOfUsers:
    """One part of the users, chosen by their ids and the shares. If both shares are 0, all users belong to `train`.

    If the log has a validation slice (time_split.py), users are not divided. Training and validation then have all
    users, and validation predicts the events of the slice.
    """

    part: Part = "train"
    validation_share: float = 0.0
    test_share: float = 0.0
    is_slice: bool = False
    """Whether this is the validation slice."""

    def of(self, user_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether each user belongs to this part."""
        if not self.validation_share and not self.test_share:
            return np.full(len(user_ids), self.part == "train")
        draw = keyed_random.uniform(0, PART_STREAM, user_ids)
        if self.part == "validation":
            return np.asarray(draw < self.validation_share)
        is_train = draw >= self.validation_share + self.test_share
        return is_train if self.part == "train" else ~is_train & (draw >= self.validation_share)
