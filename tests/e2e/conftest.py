"""A small workspace that the commands made: a dataset, a run and a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = '''\
"""A run of seconds."""

from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


def recipe() -> RunConfig:
    return RunConfig(
        name="tiny",
        data=DataConfig(dataset="datasets/tiny", max_length=12, tokens_per_step=256),
        model=PinFMConfig(tables=TableConfig(num_hashes=2, num_rows=64, dim=4), width=8, max_history=12),
        training=TrainingConfig(steps=4, checkpoint_every=2, num_threads=1, device="cpu"),
    )
'''
WORLD = ["num_users=60", "num_items=80", "num_topics=5", "median_events=12", "max_events=30"]


@pytest.fixture(scope="session")
def workspace(tackboard: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """datasets/tiny, runs/latest, bundle and recipe.py, made by the commands. Do not change it."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "recipe.py").write_text(RECIPE)
    settings = [word for setting in WORLD for word in ("--set", setting)]
    for arguments in (
        ["data", "synth", "--name", "tiny", *settings],
        ["train", "recipe.py:recipe"],
        ["export", "runs/latest", "--out", "bundle"],
    ):
        answer = tackboard(*arguments, cwd=folder)
        assert answer.code == 0, answer.err
    return folder
