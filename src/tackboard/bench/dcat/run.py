"""`tackboard bench dcat` compares DCAT with running every candidate through its whole sequence.

The bench returns a dictionary of figures:

    equality       differences of scores and gradients between the lines of the ladder (`equality`); checked first
    serving        times of scoring, for several ratios of unique users to candidates (`speed`)
    training       times of training steps, at 1:10 and 1:16 (`speed`)
    fixed_length   what a fixed length changes in the scores of a trained ranker (`fixed_length`)

The publication of PinFM compares DCAT with self-attention by FlashAttention on GPUs. It reports 7 times the throughput
in serving and 3 times in training; skipping the last layer and a fixed length of 256 add a quarter. The published
ratios of unique users to candidates are about 1:1000 in serving and 1:10 to 1:16 in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tackboard.bench.dcat.data import device_word, find_dcat_preset, requests_dataset
from tackboard.bench.dcat.equality import check_equality
from tackboard.bench.dcat.fixed_length import QUICK, STUDIED, fixed_length_effect
from tackboard.bench.dcat.rungs import DCAT, RUNGS
from tackboard.bench.dcat.speed import ratio_of, serving_speed, training_speed
from tackboard.bench.report import where_and_when
from tackboard.bench.turns import Neighbours, judged
from tackboard.core.machine import usable_cores
from tackboard.core.progress import say
from tackboard.train.devices import choose_device
from tackboard.train.start import open_source

PUBLISHED = {"serving": 7.0, "training": 3.0}
"""Published throughput of DCAT, as a multiple of the throughput of self-attention."""


def measure(
    folder: Path, *, device: str = "auto", quick: bool = False, rounds: int | None = None, num_threads: int = 0
) -> dict[str, Any]:
    """Measures everything and writes files to `folder`. `num_threads` 0 means all cores.

    Raises TackboardError if a line of the ladder computes something else than it must, and UsageError if there is no
    such device.
    """
    place = choose_device(device, "--device", "--device ")
    name = "tiny" if quick else device_word(place)
    preset = find_dcat_preset(name)
    rounds = rounds or preset.rounds
    torch.set_num_threads(num_threads or usable_cores())
    result: dict[str, Any] = {"bench": "dcat", "quick": quick, "device": place.type, "size": name}
    result |= {"words": preset.words, "rounds": rounds, "lines": {rung.name: rung.words for rung in RUNGS}}
    with Neighbours() as neighbours:
        say("values and gradients")
        datasets = {number: requests_dataset(preset, number, folder / "datasets") for number in preset.training}
        config = preset.config(str(datasets[preset.training[0]]), preset.training[0])
        few = config.data.steps(open_source(config), config.model.tables, config.seed)
        result["equality"] = check_equality(config, few.source.vocabulary, few[0], place)
        say("serving")
        result["serving"] = serving_speed(preset, config, place, rounds)
        say("training")
        result["training"] = training_speed(preset, datasets, place, rounds, folder / "runs", num_threads)
        say("what a fixed length changes")
        result["fixed_length"] = fixed_length_effect(
            QUICK if quick else STUDIED, folder / "fixed-length", place, num_threads
        )
    disturbance = neighbours.report()
    return result | {"aims": judged(aims(result), disturbance), **disturbance, **where_and_when()}


def aims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the published speed-ups as aims. Our value beside an aim is that of the line `dcat` for PinFM alone."""
    figure, clock = ratio_of(result["device"])
    found = []
    for part, line in (("serving", result["serving"][-1]), ("training", result["training"][0])):
        value = next(entry[figure] for entry in line["module"] if entry["name"] == DCAT)
        words = f"{part}, 1:{line['candidates']}, PinFM alone: times as fast as whole sequences by {clock}, at least "
        found.append(
            {"aim": f"{words}{PUBLISHED[part]:g} (published)", "value": value, "met": value >= PUBLISHED[part]}
        )
    return found
