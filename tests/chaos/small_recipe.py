"""The run that the chaos tests kill: twelve steps of a tiny model, a checkpoint every three, judged every four."""

from __future__ import annotations

from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig


def recipe() -> RunConfig:
    """Dropout is on: a resumed run must draw the masks that the killed one would have drawn."""
    return RunConfig(
        name="small",
        data=DataConfig(
            dataset="datasets/small",
            positive_actions=("click", "save", "share"),
            max_length=16,
            tokens_per_step=128,
            window_buckets=2,
            validation_share=0.2,
        ),
        model=PinFMConfig(tables=TableConfig(num_hashes=2, num_rows=64, dim=4), width=8, max_history=16, dropout=0.1),
        optimizer=OptimizerConfig(warmup_steps=4),
        training=TrainingConfig(steps=12, checkpoint_every=3, validate_every=4, log_every=1, num_threads=1),
    )
