"""Recipes for pretraining on public datasets. `tackboard bench quality` measures the same models.

The settings of MovieLens-1M and Deskdrop were chosen by their results on the users' validation events (docs/log.md). Of
the settings of Kakao Brunch, only `model.maps` was chosen in this way, by the validation results of three training
runs.

Before training, `tackboard data import NAME FILE…` writes the dataset to datasets/NAME. docs/pretraining-measured.md
shows the effect of each choice.
"""

from __future__ import annotations

from tackboard.data.loader import DataConfig
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig


def ml_1m() -> RunConfig:
    """MovieLens-1M: a million ratings as actions. All films are drawn as negatives; the request time is read."""
    return RunConfig(
        name="ml-1m",
        data=DataConfig(dataset="datasets/ml-1m", max_length=200, tokens_per_step=16_384, uniform_negatives=3_883),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=8, num_rows=4096, dim=32),
            backbone=BackboneConfig(kind="hstu", num_layers=4, num_heads=4, positions="none"),
            loss=LossConfig(
                in_batch_negatives=False, later_negatives=True, multi_token_weight=0.1, multi_token_window=4
            ),
            width=256,
            maps="residual",
            max_history=200,
            request_time=True,
            dropout=0.4,
        ),
        optimizer=OptimizerConfig(dense_learning_rate=2e-3, table_learning_rate=0.3, warmup_steps=200),
        training=TrainingConfig(steps=2_800, checkpoint_every=280, precision="auto", compile="auto"),
        evaluation=EvaluationConfig(cutoffs=(10, 50, 200), filter_seen=True),
    )


def kakao_brunch() -> RunConfig:
    """Kakao Brunch: 22 million reads of half a million articles. Uses in-batch and 16,384 uniform negatives."""
    return RunConfig(
        name="kakao-brunch",
        data=DataConfig(
            dataset="datasets/kakao-brunch", max_length=200, tokens_per_step=65_536, uniform_negatives=16_384
        ),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=8, num_rows=1 << 19, dim=16),
            backbone=BackboneConfig(num_layers=4, num_heads=2, positions="rotary"),
            width=128,
            maps="residual",
            max_history=200,
            request_time=True,
            dropout=0.1,
        ),
        optimizer=OptimizerConfig(dense_learning_rate=2e-3, table_learning_rate=0.3, warmup_steps=100),
        training=TrainingConfig(steps=1_000, checkpoint_every=100, precision="auto", compile="auto"),
        evaluation=EvaluationConfig(cutoffs=(10, 50, 200)),
    )


def deskdrop() -> RunConfig:
    """Deskdrop: 72 thousand views, likes, bookmarks, comments and follows of articles."""
    return RunConfig(
        name="deskdrop",
        data=DataConfig(dataset="datasets/deskdrop", max_length=64, tokens_per_step=4_096, uniform_negatives=2_987),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=8, num_rows=4096, dim=8),
            backbone=BackboneConfig(num_layers=2, num_heads=2, positions="rotary"),
            loss=LossConfig(in_batch_negatives=False, multi_token_weight=0.1, multi_token_window=16),
            width=64,
            maps="residual",
            max_history=64,
            request_time=True,
            dropout=0.4,
        ),
        optimizer=OptimizerConfig(dense_learning_rate=1e-2, table_learning_rate=0.3, warmup_steps=50),
        training=TrainingConfig(steps=500, checkpoint_every=100, precision="auto", compile="auto"),
        evaluation=EvaluationConfig(cutoffs=(10, 50)),
    )
