"""Recipes for PinFM on a stream of events that is made on the fly, at the published size and at a size for two cores.

The publication has 8 tables of 80 million rows × 32. The stream has 200 million items, so rows are shared, as they are
in production. Every part of the run scales with the arguments of `published_recipe`, so the small recipe tests the code
of the large recipe. docs/pretraining.md says how to run both and what they show.

Decided: a user's own items stay among the negatives (`mask_same_user` is off), because users of the stream often return
to an item. With this setting, the loss estimates a softmax, and the evaluation measures the log-loss of the same
softmax. The negatives are the batch's positives and a few items drawn from the whole catalogue. Without the drawn
items, nothing would push down the items that no batch contains. The initial values of table rows are drawn with a
standard deviation of 0.5, so that items differ from each other already at the start of training. In a run with 2
million items, the model began to learn topics after about 190 steps; with a standard deviation of 0.1, only after about
380 steps.
"""

from __future__ import annotations

from tackboard.data.stream import StreamConfig
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.events.synthetic.stream_law import StreamLawConfig
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig


def published() -> RunConfig:
    """PinFM at the published size, 20.48 billion parameters in tables, for one GPU of 80 GB or more."""
    return published_recipe(
        name="published",
        law=StreamLawConfig(),
        num_rows=80_000_000,
        dim=32,
        width=512,
        num_layers=8,
        num_heads=8,
        tokens_per_step=65_536,
        uniform_negatives=4096,
        evaluated_items=100_000,
        steps=2000,
        checkpoint_every=500,
        dense_learning_rate=1e-3,
        num_workers=4,
    )


def published_small() -> RunConfig:
    """The same run with 200 thousand items and small tables: two minutes on two cores."""
    return published_recipe(
        name="published-small",
        law=StreamLawConfig(
            num_items=200_000, num_topics=20, max_events=64, mean_events=24, num_users=1_000_000, num_test_users=4096
        ),
        num_rows=20_000,
        dim=8,
        width=64,
        num_layers=2,
        num_heads=2,
        tokens_per_step=4096,
        uniform_negatives=512,
        evaluated_items=10_000,
        steps=400,
        checkpoint_every=100,
        dense_learning_rate=3e-3,
        num_workers=1,
    )


def published_recipe(
    *,
    name: str,
    law: StreamLawConfig,
    num_rows: int,
    dim: int,
    width: int,
    num_layers: int,
    num_heads: int,
    tokens_per_step: int,
    uniform_negatives: int,
    evaluated_items: int,
    steps: int,
    checkpoint_every: int,
    dense_learning_rate: float,
    num_workers: int,
) -> RunConfig:
    """Returns a PinFM with 8 hash functions and fp16 tables; `law` says how the events of the stream are drawn."""
    return RunConfig(
        name=name,
        data=StreamConfig(
            law=law,
            tokens_per_step=tokens_per_step,
            uniform_negatives=uniform_negatives,
            evaluated_items=evaluated_items,
            num_workers=num_workers,
        ),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=8, num_rows=num_rows, dim=dim, init_std=0.5, storage="fp16"),
            backbone=BackboneConfig(num_layers=num_layers, num_heads=num_heads, positions="rotary"),
            loss=LossConfig(mask_same_user=False),
            width=width,
            max_history=law.max_events,
            # All events are an hour apart, so their times say nothing about the next event.
            num_time_buckets=0,
        ),
        optimizer=OptimizerConfig(
            dense_learning_rate=dense_learning_rate, table_learning_rate=0.3, warmup_steps=max(1, steps // 20)
        ),
        training=TrainingConfig(
            steps=steps, checkpoint_every=checkpoint_every, precision="auto", compile="auto", num_threads=0
        ),
        evaluation=EvaluationConfig(cutoffs=(10, 50)),
    )
