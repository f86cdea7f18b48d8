"""A recipe for pretraining on your own dataset. `tackboard init` writes it with sizes that fit the dataset."""

from __future__ import annotations

from tackboard.data.loader import DataConfig
from tackboard.data.time_split import Split
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

EPOCHS = 10
"""Number of passes over a small dataset. Large datasets need fewer passes."""
TOKENS_PER_STEP = 4096


def pretrain_recipe(
    *,
    dataset: str,
    num_items: int,
    num_events: int,
    name: str = "pretrain",
    positive_actions: tuple[str, ...] = (),
    split: Split = "last",
    cut: str = "",
    filter_seen: bool = False,
    uniform_negatives: int = 0,
) -> RunConfig:
    """Returns a PinFM for a dataset of `num_items` items and `num_events` events, small enough for a laptop.

    The number of rows per sub-table is the number of items, rounded up to a power of two, between 1,024 and 2 million.
    With four hash functions it is unlikely that two items share all four rows. The run makes about 10 passes over a
    dataset of 20 thousand to two million events, more passes over a smaller dataset, and fewer over a larger dataset.
    `split`, `cut` and `uniform_negatives` are settings of the data, and `filter_seen` is a setting of the evaluation.
    """
    rows = min(1 << 21, max(1024, 1 << (max(1, num_items) - 1).bit_length()))
    steps = int(min(5000, max(50, EPOCHS * num_events / TOKENS_PER_STEP)))
    return RunConfig(
        name=name,
        data=DataConfig(
            dataset=dataset,
            positive_actions=positive_actions,
            split=split,
            cut=cut,
            max_length=64,
            uniform_negatives=uniform_negatives,
            tokens_per_step=TOKENS_PER_STEP,
        ),
        model=PinFMConfig(tables=TableConfig(num_hashes=4, num_rows=rows, dim=32), width=128, max_history=64),
        optimizer=OptimizerConfig(dense_learning_rate=1e-3, warmup_steps=max(1, steps // 20)),
        training=TrainingConfig(steps=steps, checkpoint_every=max(25, steps // 5)),
        evaluation=EvaluationConfig(filter_seen=filter_seen),
    )
