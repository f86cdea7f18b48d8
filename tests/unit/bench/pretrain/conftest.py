"""The synthetic log of the smallest size, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tackboard.bench.pretrain.contender import Spec
from tackboard.bench.pretrain.data import PRESETS, config_of, dataset_of
from tackboard.data.source import SequenceSource
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(PRESETS["tiny"], tmp_path_factory.mktemp("bench-pretrain"))


@pytest.fixture
def tiny_config(tiny_dataset: Path) -> RunConfig:
    return config_of(PRESETS["tiny"], tiny_dataset)


@pytest.fixture
def tiny_bench_source(tiny_config: RunConfig) -> SequenceSource:
    return open_source(tiny_config)


@pytest.fixture
def tiny_spec(tiny_dataset: Path) -> Spec:
    return Spec(
        preset="tiny",
        dataset=str(tiny_dataset),
        device="cpu",
        warmup=1,
        timed=2,
        overrides=("training.num_threads=1",),
    )
