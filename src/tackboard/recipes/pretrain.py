"""A recipe for pretraining on your own dataset. `tackboard init` writes it with sizes that fit the dataset."""

from __future__ import annotations

from tackboard.data.loader import DataConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

EPOCHS = 10
"""Number of passes over a small dataset. Large datasets need fewer passes."""
TOKENS_PER_STEP = 4096


def pretrain_recipe(
    *, dataset: str, num_items: int, num_events: int, name: str = "pretrain", positive_actions: tuple[str, ...] = ()
) -> RunConfig:
    """Returns a PinFM for a dataset of `num_items` items and `num_events` events, small enough for a laptop.

    The number of rows per sub-table is the number of items, rounded up to a power of two, between 1,024 and 2 million.
    With four hash functions it is unlikely that two items share all four rows. The run makes about 10 passes over a
    dataset of 20 thousand to two million events, more passes over a smaller dataset, and fewer over a larger dataset.
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
