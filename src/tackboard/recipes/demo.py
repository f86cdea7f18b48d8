"""The demo's run: a small PinFM on the synthetic world, learnt in about two minutes on two cores."""

from __future__ import annotations

from tackboard.batch import HashConfig
from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig


def demo() -> RunConfig:
    """Four hash functions over 2,048 rows each, two layers of width 64; every action but `hide` is positive."""
    return RunConfig(
        name="demo",
        data=DataConfig(
            dataset="datasets/demo",
            positive_actions=("click", "save", "share"),
            max_length=64,
            tokens_per_step=4096,
        ),
        model=PinFMConfig(hashing=HashConfig(num_hashes=4, num_rows=2048), table_dim=16, width=64, max_history=64),
        optimizer=OptimizerConfig(warmup_steps=40),
        training=TrainingConfig(steps=800, checkpoint_every=200),
    )
