"""Defines the sizes that `tackboard bench pretrain` measures, and makes up the datasets for them.

A preset holds the config of a run and the sizes of a synthetic log. `rows` says how long the rows of a batch are:
"mixed" gives rows of 48 events on average and at most 256, "full" gives rows of exactly 256 events. A few items are in
many events. Decided: every event is a positive, and all negatives are drawn uniformly. So every implementation computes
the same number of scores for the loss of a step: tokens × `negatives`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from tackboard.bench.loader.data import START_MS, made_up_events
from tackboard.core.errors import UsageError
from tackboard.data.loader import DataConfig
from tackboard.events.dataset import write_dataset
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.recipes.public import ml_1m
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

MAX_LENGTH = 256
MEAN_LENGTH = 50
"""Mean number of events of a user. Histories are cut into rows of at most 256 training events, 48 on average."""
GAP_MS = 60_000
SEED = 20261115


def sized(
    *,
    width: int,
    layers: int,
    heads: int,
    tables: tuple[int, int, int],
    tokens: int,
    negatives: int,
    precision: str = "fp32",
    compiled: str = "off",
    storage: str = "fp32",
) -> RunConfig:
    """Returns a run of a PinFM. `tables` holds the number of sub-tables, the number of rows of each, and the width of a
    row."""
    num_hashes, num_rows, dim = tables
    return RunConfig(
        name="bench-pretrain",
        data=DataConfig(dataset="", max_length=MAX_LENGTH, tokens_per_step=tokens, uniform_negatives=negatives),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=num_hashes, num_rows=num_rows, dim=dim, storage=storage),
            backbone=BackboneConfig(num_layers=layers, num_heads=heads),
            loss=LossConfig(in_batch_negatives=False),
            width=width,
            max_history=MAX_LENGTH,
        ),
        optimizer=OptimizerConfig(warmup_steps=10),
        training=TrainingConfig(precision=precision, compile=compiled),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A size to measure."""

    words: str
    config: Callable[[], RunConfig]
    rows: Literal["mixed", "full"] = "mixed"
    num_events: int = 600_000
    """Number of events of the synthetic log. 0 means that there is no synthetic log and --data must name a dataset."""
    num_items: int = 100_000
    warmup: int = 5
    """Steps before the timed steps."""
    steps: int = 20
    """Timed steps."""
    rounds: int = 3
    """Number of rounds. Every contender is measured once in each round."""


def _cpu() -> RunConfig:
    return sized(width=64, layers=2, heads=2, tables=(4, 65_536, 16), tokens=4096, negatives=4096)


def _cpu_256() -> RunConfig:
    return sized(width=256, layers=4, heads=4, tables=(4, 65_536, 16), tokens=4096, negatives=4096)


def _tiny() -> RunConfig:
    return sized(width=16, layers=1, heads=2, tables=(2, 1024, 8), tokens=512, negatives=64)


def _h200(width: int = 512, layers: int = 8) -> RunConfig:
    return sized(
        width=width,
        layers=layers,
        heads=width // 64,
        tables=(8, 1 << 24, 32),
        tokens=65_536,
        negatives=32_768,
        precision="bf16",
        compiled="on",
    )


PRESETS = {
    "cpu": Preset(words="width 64 × 2 layers, 4 tables × 65,536 × 16", config=_cpu),
    "cpu-256": Preset(words="width 256 × 4 layers, 4 tables × 65,536 × 16", config=_cpu_256, steps=8, rounds=2),
    "h200": Preset(
        words="width 512 × 8 layers, 8 tables × 16.8M × 32, rows of 48 events on average",
        config=_h200,
        num_events=12_000_000,
        num_items=2_000_000,
        warmup=60,
        steps=60,
    ),
    "h200-256": Preset(
        words="width 512 × 8 layers, 8 tables × 16.8M × 32, rows of 256 events",
        config=_h200,
        rows="full",
        num_events=12_000_000,
        num_items=2_000_000,
        warmup=60,
        steps=60,
    ),
    "h200-1024": Preset(
        words="width 1024 × 12 layers, 8 tables × 16.8M × 32, rows of 48 events on average",
        config=lambda: _h200(1024, 12),
        num_events=12_000_000,
        num_items=2_000_000,
        warmup=60,
        steps=60,
    ),
    "ml-1m": Preset(words="the recipe ml-1m on its dataset", config=ml_1m, num_events=0, warmup=60, steps=60),
    "tiny": Preset(
        words="width 16 × 1 layer, only to check that the bench works",
        config=_tiny,
        num_events=6000,
        num_items=300,
        warmup=2,
        steps=3,
        rounds=1,
    ),
}


def find_preset(name: str) -> Preset:
    """Returns a preset by name. Raises UsageError if there is no preset of this name."""
    if name not in PRESETS:
        raise UsageError(f"there is no size {name!r}", allowed=f"allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


def dataset_of(preset: Preset, folder: Path, data: Path | None = None) -> Path:
    """Returns `data` if it is given. Otherwise writes the preset's synthetic log to `folder` and returns its snapshot.

    Raises UsageError if the preset has no synthetic log and `data` is None.
    """
    if data is not None:
        return data
    if not preset.num_events:
        raise UsageError(f"this size ({preset.words}) reads a real dataset", fix="name it: --data datasets/ml-1m")
    events = made_up_events(preset.num_events, preset.num_items, MEAN_LENGTH, SEED)
    if preset.rows == "full":
        # The last event of each user is held out, so 257 events make one row of 256.
        users, places = np.divmod(np.arange(events.num_rows), MAX_LENGTH + 1)
        times = START_MS + GAP_MS * places
        for name, values in (("user", users), ("time_ms", times), ("received_ms", times)):
            events = events.set_column(events.schema.get_field_index(name), name, [values])
    return write_dataset(folder, f"rows-{preset.rows}", events)


def config_of(preset: Preset, dataset: Path) -> RunConfig:
    """Returns the config of a run of `preset` over `dataset`."""
    config = preset.config()
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dataset=str(dataset)))
