"""Does the work of the cells of `tackboard bench finetune`: trains one ranker on requests and tests it once.

A ranker is trained like any other run (`tackboard train finetune-… --from RUN`), on a share of the training users'
requests. Validation users choose the checkpoint, and test users judge it. A killed run continues from its newest
checkpoint. The pretrained parameters come from an earlier cell, which the field `Cell.after` holds. The code of that
cell's stage, `pretrain`, is in bench/transfer/fit.py.

The result holds arrays with one entry per test request, in an order that does not depend on the seed. `users` holds the
users, and `ages` the ages of the true items (positions in `AGES`). For each label, `places_LABEL` holds the 0-based
rank of the true item among the candidates, or -1 if the request has no item with this label. HIT@3 and its intervals
are computed from these arrays.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.bench.finetune.candidate_counts import fit_trees
from tackboard.bench.quality.cell import Machine, Outcome
from tackboard.bench.quality.cells import Cell, Work
from tackboard.bench.transfer.fit import CHECKPOINT
from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_parameters
from tackboard.core.errors import DataError
from tackboard.core.files import remove_directory
from tackboard.core.rundir import RunDirectory
from tackboard.data.config import Part
from tackboard.data.request_loader import RequestSteps
from tackboard.data.source import SequenceSource
from tackboard.evaluation.item_age import age_slices
from tackboard.evaluation.labelled_requests import ScoredCandidates, all_metrics_of, answer
from tackboard.metrics.hits import best_places
from tackboard.models.stored_parameters import load_parameters
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer

BIRTH = "birth_ms"
"""The attribute of items from which their age is computed."""
PLACES = "places_"
NO_PLACE = -1


def run_ranker(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Trains a ranker on a share of the training requests (a setting of the protocol), and tests it once."""
    started = time.perf_counter()
    config, source = open_run(work, cell, machine)
    run = RunDirectory(work.run(cell))
    if not (run.path / "config.json").is_file():
        run.write(config_to_json(config))
    trainer = Trainer(config, run, source)
    trainer.train(quiet=True)
    if trainer.validation.best_step is None:
        raise DataError(f"every validation loss of {cell.label} was infinite or not a number")
    best = load_trained(find_checkpoint(run.path))
    load_parameters(trainer.model, stored_parameters(best), best.path)
    metrics, arrays = judged(answer(trainer.model, steps_of(config, source, "test")), source)
    for path in [path for path in trainer.store.complete() if path.name != best.path.name]:
        remove_directory(path)
    values = {
        "metrics": metrics,
        "validation_loss": round(trainer.validation.best_loss, 6),
        "steps": trainer.validation.best_step,
        "of_steps": config.training.steps,
        "passes": round(trainer.validation.best_step / trainer.steps.plan.steps_per_epoch, 2),
        **_facts(config, source),
        "device": torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    return values, arrays


def run_trees(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits gradient-boosted trees on counts (candidate_counts.py) to the same requests, and tests them once."""
    started = time.perf_counter()
    config, source = open_run(work, cell, machine)
    before = work.datasets / str(cell.protocol["before"])
    train, validation, test = (steps_of(config, source, part) for part in _PARTS)
    trees = fit_trees(before, train, validation, str(cell.protocol["labels"][0]))
    metrics, arrays = judged(answer(trees, test), source)
    values = {
        "metrics": metrics,
        "num_trees": len(trees.fitted.trees),
        "validation_loss": round(trees.fitted.validation_loss, 6),
        **_facts(config, source),
        "device": "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    return values, arrays


_PARTS: tuple[Part, ...] = ("train", "validation", "test")


def open_run(work: Work, cell: Cell, machine: Machine) -> tuple[RunConfig, SequenceSource]:
    """Returns the config of a cell's run on this machine, and the opened dataset of the run. The cell gives a share of
    the requests; the config holds the number of requests instead."""
    config = cell.run_config()
    training = dataclasses.replace(config.training, device=machine.device, num_threads=machine.num_threads)
    start = config.start
    if cell.after is not None:
        result = work.find(cell.after)
        assert result is not None, "run_cell refuses a cell whose earlier cell is not finished"
        start = dataclasses.replace(start, run=str(result.path / CHECKPOINT))
    data = dataclasses.replace(config.data, dataset=str(work.dataset(cell)))
    config = dataclasses.replace(config, training=training, start=start, data=data)
    source = open_source(config)
    share, most = float(cell.protocol["share"]), int(cell.protocol.get("most_requests", 0))
    if share < 1.0 or most:
        every = num_requests(steps_of(config, source, "train"))
        wanted = max(1, round(share * every))
        data = dataclasses.replace(data, max_requests=min(wanted, most) if most else wanted)
    return dataclasses.replace(config, data=data), source


def steps_of(config: RunConfig, source: Any, part: Part) -> RequestSteps:
    """Returns the steps of a part of the requests."""
    found: RequestSteps = config.data.steps(source, config.model.tables, config.seed, part=part)
    return found


def num_requests(steps: RequestSteps) -> int:
    """Returns the number of requests that a pass over `steps` reads."""
    table = steps.source.read_requests(np.arange(steps.source.num_buckets))
    return int(steps.chosen(table).sum())


def _facts(config: RunConfig, source: Any) -> dict[str, int]:
    counts = {f"num_{part}": num_requests(steps_of(config, source, part)) for part in _PARTS}
    return counts | {"num_events": int(source.dataset.num_events)}


def judged(answers: ScoredCandidates, source: Any) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Returns the metrics of each label, as `LABEL/METRIC`, and the arrays that the module's docstring names.

    The first label of the data must be 1 for exactly one candidate of each request: the item that the user chose.
    """
    assert answers.requests is not None and answers.request_ms is not None
    labels = list(answers.labels)
    is_true = answers.labels[labels[0]] == 1
    order = np.lexsort((answers.items[is_true], answers.request_ms[is_true], answers.users[is_true]))
    requests = answers.requests[is_true][order]
    ages = age_slices(source.dataset, BIRTH, answers.items[is_true], answers.request_ms[is_true])
    arrays: dict[str, NDArray[Any]] = {"users": answers.users[is_true][order], "ages": ages[order]}
    metrics: dict[str, float] = {}
    for label in labels:
        chosen = answers.judged(label)
        assert chosen.requests is not None
        metrics |= {f"{label}/{name}": value for name, value in all_metrics_of(answers, label).items()}
        found, places = best_places(chosen.scores, chosen.requests, chosen.labels[label] == 1)
        of_request = np.full(int(answers.requests.max()) + 1, NO_PLACE, dtype=np.int64)
        of_request[found] = places
        arrays[PLACES + label] = of_request[requests]
    return metrics, arrays
