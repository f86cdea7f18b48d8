"""Measures how much padding `training.pad_shapes` adds to the batches of an epoch, and how many shapes remain.

The script takes a size of `tackboard bench pretrain` and, if the size needs one, a dataset. It prints the padding of
each kind of element in percent, and the number of different shapes with and without padding:

    python scripts/padding_share.py cpu
    python scripts/padding_share.py ml-1m --data datasets/ml-1m
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tackboard.bench.pretrain.data import config_of, dataset_of, find_preset
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import rows_on
from tackboard.train.config import RunConfig, features_for


def sizes_of(batch: Any) -> dict[str, int]:
    """Returns the sizes of a prepared batch that decide the work of a step."""
    return {
        "tokens": batch.targets.layout.num_tokens,
        "rows": batch.num_rows,
        "predicting tokens": len(batch.targets.tokens),
        "pairs": len(batch.targets.pairs),
        "distinct items": len(batch.item_ids),
        "drawn items": len(batch.sampled),
    }


def measure(config: RunConfig, most_steps: int) -> None:
    """Prints the padding of the first steps of an epoch, at most `most_steps` of them."""
    assert isinstance(config.model, PinFMConfig)
    source = config.data.open(features_for(config))
    with rows_on("meta"):
        model = build_model(config.model, source.vocabulary)
    assert isinstance(model, PinFM)
    steps = config.data.steps(source, config.model.tables, config.seed)
    totals: dict[str, list[int]] = {}
    shapes: tuple[Counter[Any], Counter[Any]] = Counter(), Counter()
    num_steps = min(most_steps, steps.plan.steps_per_epoch)
    for number in range(num_steps):
        for pad in (False, True):
            batch = model.prepare(steps[number], torch.Generator().manual_seed(number), pad=pad)
            for name, size in sizes_of(batch).items():
                totals.setdefault(name, [0, 0])[pad] += size
            shapes[pad][tuple(tuple(tensor.shape) for tensor in batch.tensors())] += 1
    print(f"{config.name}: {num_steps} steps")
    for name, (plain, padded) in totals.items():
        if plain:
            print(f"  {name:20} {plain / num_steps:12,.0f} a step, padding {100 * (padded / plain - 1):.1f}%")
    most = shapes[True].most_common(1)[0][1]
    print(f"  different shapes: {len(shapes[False])} without padding, {len(shapes[True])} with padding")
    print(f"  the most frequent shape has {most} of the steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the padding of an epoch.")
    parser.add_argument("size", help="a size of tackboard bench pretrain, such as cpu or ml-1m")
    parser.add_argument("--data", type=Path, help="read this dataset instead of the size's synthetic log")
    parser.add_argument("--steps", type=int, default=1 << 31, help="the largest number of steps to read")
    asked = parser.parse_args()
    preset = find_preset(asked.size)
    with tempfile.TemporaryDirectory() as folder:
        measure(config_of(preset, dataset_of(preset, Path(folder), asked.data)), asked.steps)
