"""Measures what a fixed length changes in the scores of a ranker that was trained without a fixed length.

The data are requests of a synthetic world. The candidates of a request are the item that the user chose next, and items
that other users chose in the same hour. The ranker has early fusion, cross layers and nothing else, so that the
overwritten slots are the only difference. It is trained with the full context, and held-out requests are scored with
the full context and with each fixed length. Scores are compared over the requests whose candidates overwrite at least
one slot.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.bench.dcat.data import LABEL
from tackboard.bench.pretrain.ours import TimedTrainer
from tackboard.core.config import apply_overrides
from tackboard.data.pseudo_requests import PseudoRequestConfig, make_pseudo_requests
from tackboard.data.request_loader import RequestConfig
from tackboard.evaluation.labelled_requests import ScoredCandidates, all_metrics_of, answer
from tackboard.events.dataset import open_dataset
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.models.fusion import FusionConfig
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import ExtraLossConfig, HeadConfig, RankerConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig
from tackboard.train.start import open_source

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedLengthPreset:
    """The sizes of this measurement."""

    world: WorldConfig
    max_history: int = 32
    lengths: tuple[int, ...] = (32, 24, 16, 8)
    """The fixed lengths, in slots. A full context has max_history + 1 tokens, and the candidate is one more."""
    width: int = 32
    num_candidates: int = 20
    """Candidates of a request beside the chosen item."""
    per_user: int = 8
    """Requests of a user."""
    steps: int = 200
    """Training steps."""


STUDIED = FixedLengthPreset(
    world=WorldConfig(seed=7, num_users=800, num_items=300, num_topics=8, median_events=70.0, max_events=150)
)
QUICK = FixedLengthPreset(
    world=WorldConfig(seed=7, num_users=60, num_items=60, num_topics=4, median_events=30.0, max_events=60),
    max_history=12,
    lengths=(12, 8),
    width=16,
    num_candidates=9,
    per_user=4,
    steps=6,
)


def study_config(preset: FixedLengthPreset, dataset: Path) -> RunConfig:
    """Returns the run that trains the ranker, without a fixed length."""
    pinfm = PinFMConfig(
        tables=TableConfig(num_hashes=2, num_rows=2048, dim=16, init_std=0.1),
        width=preset.width,
        max_history=preset.max_history,
        num_positions=preset.max_history + 2,
        num_time_buckets=0,
    )
    return RunConfig(
        name="bench-dcat-fixed-length",
        data=RequestConfig(
            dataset=str(dataset),
            labels=(LABEL,),
            max_history=preset.max_history,
            tokens_per_step=2048,
            validation_share=0.0,
            test_share=0.25,
        ),
        model=RankerConfig.on(
            pinfm,
            HeadConfig(labels=(LABEL,), num_cross_layers=2),
            FusionConfig(kind="early"),
            extra_loss=ExtraLossConfig(next_token=0.3),
        ),
        optimizer=OptimizerConfig(dense_learning_rate=5e-3, warmup_steps=20),
        training=TrainingConfig(steps=preset.steps),
    )


def fixed_length_effect(
    preset: FixedLengthPreset, folder: Path, device: torch.device, num_threads: int = 0
) -> dict[str, Any]:
    """Trains the ranker and returns what each fixed length changes. Writes the world and the run to `folder`."""
    write_world(preset.world, folder / "datasets", "world")
    rules = PseudoRequestConfig(candidates=preset.num_candidates, per_user=preset.per_user, label=LABEL)
    dataset = make_pseudo_requests(open_dataset(folder / "datasets" / "world"), rules, quiet=True).path
    settings = [f"training.device={device.type}", f"training.num_threads={num_threads}"]
    config = apply_overrides(study_config(preset, dataset), settings)
    source = open_source(config)
    trainer = TimedTrainer(config, folder / "runs", source, warmup=1, timed=preset.steps - 1)
    trainer.train(quiet=True)
    steps = config.data.steps(source, config.model.tables, config.seed, part="test")
    full = answer(trainer.model, steps)
    lines = []
    for length in preset.lengths:
        model: Any = build_model(
            apply_overrides(config, [f"model.fusion.fixed_length={length}"]).model, source.vocabulary
        ).to(device)
        model.load_state_dict(trainer.model.state_dict())
        lines.append({"length": length} | compare_scores(full, answer(model, steps)))
    assert full.requests is not None
    return {
        "max_history": preset.max_history,
        "steps": preset.steps,
        "candidates": preset.num_candidates + 1,
        "requests": int(full.requests.max()) + 1,
        "full": _quality(full),
        "lengths": lines,
    }


def compare_scores(full: ScoredCandidates, fixed: ScoredCandidates) -> dict[str, Any]:
    """Compares the scores of the same requests with the full context and with a fixed length.

    `difference` is the mean absolute difference, in standard deviations of the full scores. `kendall` is Kendall's τ
    between both orders of a request's candidates, and `same_best` the share of requests with the same best candidate.
    These three figures are means over the requests whose scores changed. `changed` is the share of these requests.
    """
    assert full.requests is not None
    is_changed = np.zeros(int(full.requests.max()) + 1, dtype=bool)
    np.logical_or.at(is_changed, full.requests, full.scores != fixed.scores)
    taus, same = [], []
    for request in np.flatnonzero(is_changed):
        of_request = full.requests == request
        one, other = full.scores[of_request], fixed.scores[of_request]
        taus.append(kendall(one, other))
        same.append(int(one.argmax()) == int(other.argmax()))
    chosen = is_changed[full.requests]
    apart = np.abs(full.scores - fixed.scores)[chosen]
    return {
        "changed": float(is_changed.mean()),
        "difference": float(apart.mean() / full.scores.std()) if chosen.any() else 0.0,
        "kendall": float(np.mean(taus)) if taus else 1.0,
        "same_best": float(np.mean(same)) if same else 1.0,
        **_quality(fixed),
    }


def kendall(one: Floats, other: Floats) -> float:
    """Returns Kendall's τ-a: the share of pairs in the same order minus the share in the opposite order."""
    upper = np.triu_indices(len(one), 1)
    signs = np.sign(one[:, None] - one)[upper] * np.sign(other[:, None] - other)[upper]
    return float(signs.mean()) if len(signs) else 1.0


def _quality(answers: ScoredCandidates) -> dict[str, float]:
    found = all_metrics_of(answers, LABEL)
    return {"auc": found["auc"], "hit@3": found["hit@3"]}
