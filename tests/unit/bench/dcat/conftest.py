"""One measurement at the smallest size, in this process, and the requests and config that it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tackboard.bench.dcat.data import PRESETS, DcatPreset, requests_dataset
from tackboard.bench.dcat.run import measure
from tackboard.train.config import RunConfig


@pytest.fixture(scope="session")
def smallest() -> DcatPreset:
    return PRESETS["tiny"]


@pytest.fixture(scope="session")
def dcat_config(smallest: DcatPreset, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return smallest.config(str(requests_dataset(smallest, 10, tmp_path_factory.mktemp("bench-dcat"))), 10)


@pytest.fixture(scope="session")
def dcat_result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        return measure(tmp_path_factory.mktemp("bench-dcat"), device="cpu", quick=True, num_threads=1)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
