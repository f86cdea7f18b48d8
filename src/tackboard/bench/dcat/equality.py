"""Checks that every line of the ladder (rungs.py) computes what it must, before anything is timed.

The module takes a config and a batch of labelled requests. It computes scores, loss and all gradients (tables
included) with each line, in fp32 and with the same parameters. The lines `dcat` and `skip` must equal the line `whole`.
The line `fixed` must equal a version of `whole` in which candidates may not see the slots that they overwrite
(`hiding`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from tackboard.batch import RequestBatch
from tackboard.bench.dcat.rungs import RUNGS, DcatRung, hiding
from tackboard.core.errors import TackboardError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.interface import build_model
from tackboard.models.tables import rows_on
from tackboard.train.config import RunConfig

SCORE_TOLERANCE = 1e-4
"""Largest difference of scores, as a share of the largest absolute score."""
GRADIENT_TOLERANCE = 1e-3
"""Largest difference in the gradient of a parameter, as a share of its largest absolute value."""


class Computed(NamedTuple):
    """What a line of the ladder computes from a batch."""

    scores_C: torch.Tensor
    gradients: dict[str, torch.Tensor]


def ranker_of(config: RunConfig, vocabulary: Vocabulary, device: torch.device) -> Any:
    """Builds the ranker of a config. The seed decides the parameters, so they are the same in all lines of the
    ladder."""
    torch.manual_seed(config.seed)
    with rows_on(device):
        return build_model(config.model, vocabulary).to(device)


def check_equality(
    config: RunConfig, vocabulary: Vocabulary, batch: RequestBatch, device: torch.device
) -> list[dict[str, Any]]:
    """Returns for each line the largest differences of scores and gradients from what the line must equal.

    Raises TackboardError if a difference is too large.
    """
    found: list[dict[str, Any]] = []
    whole = RUNGS[0]
    expected = _computed(whole, config, vocabulary, batch, device)
    for rung in RUNGS:
        computed = expected if rung is whole else _computed(rung, config, vocabulary, batch, device)
        against = expected
        if not rung.is_exact:
            against = _computed(
                whole, config, vocabulary, batch, device, slots=rung.config(config).model.fusion.fixed_length
            )
        line: dict[str, Any] = {
            "name": rung.name,
            "scores": _difference(computed.scores_C, against.scores_C),
            "gradients": max(
                _difference(gradient, against.gradients[name]) for name, gradient in computed.gradients.items()
            ),
            "change": _difference(computed.scores_C, expected.scores_C),
        }
        for what, allowed in (("scores", SCORE_TOLERANCE), ("gradients", GRADIENT_TOLERANCE)):
            if not line[what] <= allowed:
                raise TackboardError(
                    f"the {what} of the line {rung.name} differ by {line[what]:.1e} of the largest from the right ones",
                    allowed=f"allowed: {allowed:g}",
                )
        found.append(line)
    return found


def _computed(
    rung: DcatRung,
    config: RunConfig,
    vocabulary: Vocabulary,
    batch: RequestBatch,
    device: torch.device,
    *,
    slots: int = 0,
) -> Computed:
    """Computes a batch with a line of the ladder. With `slots`, candidates see only this number of slots."""
    model = ranker_of(rung.config(config), vocabulary, device)
    with rung.active(), hiding(slots) if slots else nullcontext():
        prepared = model.prepare(batch).to(device)
        model.eval()
        with torch.inference_mode():
            scores_C = model.scores(prepared)
        model.train()
        model.loss(prepared).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients["tables"] = model.tables.pending_gradient()
    return Computed(scores_C.clone(), gradients)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference as a share of the largest absolute expected value."""
    largest = float(expected.abs().max())
    return float((found - expected).abs().max()) / max(largest, 1e-12)
