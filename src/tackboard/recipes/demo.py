"""The recipes of the demo. `demo` is a small PinFM for the synthetic world. It trains in about a minute on two cores.

The sizes of `demo` were chosen on worlds with seeds that differ from the seed of the demo's world (docs/log.md).
"""

from __future__ import annotations

from tackboard.data.loader import DataConfig
from tackboard.data.request_loader import RequestConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import HeadConfig, RankerConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, StartConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig


def demo() -> RunConfig:
    """Uses four sub-tables of 2,048 rows and two layers of width 128. All actions except `hide` are positive."""
    return RunConfig(
        name="demo",
        data=DataConfig(
            dataset="datasets/demo",
            features="tackboard.recipes.demo_features",
            positive_actions=("click", "save", "share"),
            max_length=64,
            tokens_per_step=4096,
        ),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=4, num_rows=2048, dim=32),
            width=128,
            max_history=64,
            # In this world, unlike in real logs, the time since the previous event says little about the next event.
            num_time_buckets=0,
            request_features=("recency", "actions_1d", "saves_7d"),
        ),
        optimizer=OptimizerConfig(dense_learning_rate=1e-3, warmup_steps=40),
        training=TrainingConfig(steps=300, checkpoint_every=100),
    )


def demo_ranker() -> RunConfig:
    """Returns a ranker that predicts clicks with the model of `demo`.

    To begin with a pretrained model, use `--set start.run=runs/NAME`. The dataset must be labelled before training:
    `tackboard data label datasets/demo --label click=1h`.
    """
    base = demo()
    return RunConfig(
        name="demo-ranker",
        data=RequestConfig(
            dataset="datasets/demo",
            features=base.data.features,
            labels=("click",),
            max_history=64,
            tokens_per_step=8192,
        ),
        model=RankerConfig.on(base.model, HeadConfig(labels=("click",))),
        start=StartConfig(prefix="pinfm."),
        optimizer=OptimizerConfig(dense_learning_rate=1e-3, warmup_steps=20, multipliers={"pinfm.": 0.1}),
        training=TrainingConfig(steps=200, checkpoint_every=100, validate_every=50, validation_steps=20, patience=2),
    )
