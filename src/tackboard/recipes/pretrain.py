"""Pretraining on one's own events: sizes that follow the dataset, so that `tackboard init` can write a ready recipe."""

from __future__ import annotations

from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

EPOCHS = 10
"""Passes over a small dataset; large ones need fewer."""
TOKENS_PER_STEP = 4096


def pretrain_recipe(
    *, dataset: str, num_items: int, num_events: int, name: str = "pretrain", positive_actions: tuple[str, ...] = ()
) -> RunConfig:
    """A PinFM for a dataset of `num_items` items and `num_events` events, within a laptop's reach.

    Rows: as many as items, to the next power of two, from 1,024 to 2 million; with four hash functions that leaves a
    collision of whole vectors unlikely. Steps: about 10 passes over up to two million events, fewer passes over more.
    """
    rows = min(1 << 21, max(1024, 1 << (max(1, num_items) - 1).bit_length()))
    steps = int(min(5000, max(50, EPOCHS * num_events / TOKENS_PER_STEP)))
    return RunConfig(
        name=name,
        data=DataConfig(
            dataset=dataset, positive_actions=positive_actions, max_length=64, tokens_per_step=TOKENS_PER_STEP
        ),
        model=PinFMConfig(tables=TableConfig(num_hashes=4, num_rows=rows, dim=32), width=128, max_history=64),
        optimizer=OptimizerConfig(dense_learning_rate=1e-3, warmup_steps=max(1, steps // 20)),
        training=TrainingConfig(steps=steps, checkpoint_every=max(25, steps // 5)),
    )
