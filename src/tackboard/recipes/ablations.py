"""Repeats published ablations, most of them from PinFM, at a small size. Each recipe is a base recipe with one change.

    losses      next-token loss alone; with multi-token loss; with multi-token loss and future-token loss
    rows        number of rows in each sub-table
    length      length of pretraining
    negatives   negatives of the batch, drawn negatives or both; corrected for popularity or not
    own         which of a user's own positives may be negatives for the same user: none, later positives, or all
    positives   which actions the loss predicts, on a dataset with several actions
    ladder      the steps from the published configuration to the recipe that we ship, on MovieLens-1M
    reads       the same steps on Kakao Brunch

The base on MovieLens-1M is the recipe of the dataset (recipes/public.py), with width 64, two layers of the published
kind (GPT) and about 20 passes over the events. As published, a user's own positives are never negatives for the same
user. The base on Deskdrop is the recipe of that dataset, which has width 64 and two layers. Neither base reads the
request time. A small base shows the effect of a change at a tenth of the cost of the full recipe. `tackboard bench
quality --study ablations` runs all recipes and compares the direction of each effect with the published direction. The
two ladders (`ladder` and `reads`) have the size, learning rates, dropout and number of steps of the shipped recipe.
Each recipe of a ladder differs from the recipe before it in one respect (LADDER), and the last recipe is the shipped
recipe without the request time.

Decided: losses are added with weight 1, which is how we understand the publication. The length of the multi-token
window (8 events) and the number of events that a downstream task reads (100) are our choices, because the publication
does not give them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from tackboard.core.config import apply_overrides
from tackboard.recipes.public import deskdrop, kakao_brunch, ml_1m
from tackboard.train.config import RunConfig

STEPS = 1_240
"""Number of training steps that make about 20 passes over MovieLens-1M."""
SAVES = ("bookmark", "like")
"""The actions of Deskdrop that correspond to a save: the user wants to keep the article."""
_MULTI = ("model.loss.multi_token_weight=1.0", "model.loss.multi_token_window=8", "model.loss.multi_token_share=0.25")
_FUTURE = ("weight=1.0", "anchor=100", "window=8")
_BATCH = ("model.loss.in_batch_negatives=true", "data.uniform_negatives=0")
_DRAWN = "data.uniform_negatives=1024"


def _of_length(steps: int) -> tuple[str, ...]:
    warmup = min(ml_1m().optimizer.warmup_steps, steps // 6)
    return f"training.steps={steps}", f"training.checkpoint_every={steps}", f"optimizer.warmup_steps={warmup}"


ML_1M: dict[str, tuple[str, ...]] = {
    "losses-next": (),
    # Predicts up to 8 events ahead, for a quarter of all pairs (token, later event).
    "losses-multi": _MULTI,
    "losses-multi-light": (*_MULTI, "model.loss.multi_token_weight=0.1"),
    # Also predicts the 8 events after the first 100 events of a segment.
    "losses-all": (*_MULTI, *(f"model.loss.future_token_{setting}" for setting in _FUTURE)),
    # These recipes set the number of rows in each of 8 sub-tables. There are 3,883 films. With 16,384 rows about a
    # fifth of the films share their row of a sub-table.
    **{f"rows-{rows}": (f"model.tables.num_rows={rows}",) for rows in (256, 1024, 4096, 16384)},
    # This recipe has one table with a row for each film. The table is as wide as the eight sub-tables together. The
    # recipe shows how much quality is lost by hashing.
    "rows-plain": ("model.tables.method=modulo", "model.tables.num_hashes=1", "model.tables.dim=128"),
    "length-eighth": _of_length(STEPS // 8),
    "length-half": _of_length(STEPS // 2),
    "length-base": _of_length(STEPS),
    "length-double": _of_length(2 * STEPS),
    # Without the correction, popular films are negatives too often.
    "negatives-batch": (*_BATCH, "model.loss.correct_popularity=false"),
    "negatives-batch-corrected": _BATCH,
    "negatives-batch-streaming": (*_BATCH, "model.loss.streaming_frequencies=true"),
    "negatives-drawn": ("model.loss.in_batch_negatives=false", _DRAWN),
    "negatives-mixed": ("model.loss.in_batch_negatives=true", _DRAWN),
    # Every film of the catalogue is drawn, so the softmax is exact, except that a user's own films are left out.
    "negatives-all": ("model.loss.in_batch_negatives=false", "data.uniform_negatives=3883"),
    "own-none": (),
    # The user's later films are negatives, so the model learns to tell the next film from later films.
    "own-later": ("model.loss.later_negatives=true",),
    # All positives of a user may be negatives for the same user, as in SASRec and HSTU.
    "own-all": ("model.loss.mask_same_user=false",),
    "own-later-multi": (*_MULTI, "model.loss.later_negatives=true"),
}
"""Maps the name of a recipe on MovieLens-1M, without the prefix `ablation-`, to the settings that it changes."""
DESKDROP: dict[str, tuple[str, ...]] = {
    "positives-saves": SAVES,
    "positives-saves-comments": (*SAVES, "comment_created"),
    # There are more than five times as many views as other actions.
    "positives-saves-views": (*SAVES, "view"),
    "positives-all": (),
}
"""Maps the name of a recipe on Deskdrop, without the prefix `ablation-`, to the actions that its loss predicts. An
empty tuple stands for all actions."""


def ml_1m_base(name: str, *changes: str) -> RunConfig:
    """Returns the base recipe on MovieLens-1M with `changes`, each in the form `a.b=c`."""
    base = ml_1m()
    model = base.model
    small = dataclasses.replace(
        model,
        tables=dataclasses.replace(model.tables, dim=16),
        backbone=dataclasses.replace(model.backbone, kind="gpt", num_layers=2, positions="rotary"),
        loss=dataclasses.replace(
            model.loss, mask_same_user=True, later_negatives=False, multi_token_weight=0.0, multi_token_window=8
        ),
        width=64,
        maps="mlp",
        dropout=0.3,
        request_time=False,
    )
    training = dataclasses.replace(base.training, steps=STEPS, checkpoint_every=STEPS)
    return apply_overrides(dataclasses.replace(base, name=name, model=small, training=training), changes)


def deskdrop_base(name: str, positives: tuple[str, ...]) -> RunConfig:
    """Returns the base recipe on Deskdrop. Its loss predicts `positives`, or all actions if `positives` is empty."""
    base = deskdrop()
    backbone = dataclasses.replace(base.model.backbone, num_layers=2)
    model = dataclasses.replace(base.model, backbone=backbone, width=64, request_time=False)
    data = dataclasses.replace(base.data, positive_actions=positives)
    training = dataclasses.replace(base.training, checkpoint_every=base.training.steps)
    return dataclasses.replace(base, name=name, data=data, model=model, training=training)


# ---- from the published configuration to ours ----

LADDER: dict[str, tuple[str, ...]] = {
    # In the publication, the sum over negatives has no weights.
    "correction": ("model.loss.correct_popularity=false",),
    "negatives": ("data.uniform_negatives=0", "model.loss.in_batch_negatives=true"),
    # The three losses are added, which is how we understand the publication.
    "losses": (*_MULTI, "model.loss.future_token_weight=1.0", "model.loss.future_token_window=8"),
    "own": ("model.loss.mask_same_user=true", "model.loss.later_negatives=false"),
    "layers": ("model.backbone.kind=gpt", "model.backbone.positions=learned"),
    "maps": ("model.maps=mlp",),
}
"""The keys are the respects in which a shipped recipe may differ from the publication; the values are the published
settings. A ladder changes one respect after another, in this order. The publication does not give the size, the
learning rates and the dropout, and does not say how times and positions are read."""


def as_published(config: RunConfig, *respects: str) -> RunConfig:
    """Returns `config` with the published settings in some respects of LADDER, or in all respects by default.

    The predicting token of the future-token loss has read half as many events as the longest history has.
    """
    settings = [setting for respect in respects or LADDER for setting in LADDER[respect]]
    if "losses" in (respects or LADDER):
        settings.append(f"model.loss.future_token_anchor={max(1, config.model.max_history // 2)}")
    return apply_overrides(config, settings)


def ladder(prefix: str, recipe: Callable[[], RunConfig]) -> dict[str, Callable[[], RunConfig]]:
    """Returns name → recipe: the published configuration, then the recipe after each further change towards `recipe`.

    If the shipped recipe is as published in some respect, the ladder has no recipe for this respect.
    """
    found: dict[str, Callable[[], RunConfig]] = {f"{prefix}-published": partial(_rung, f"{prefix}-published", recipe)}
    before = _rung(prefix, recipe)
    for number, respect in enumerate(LADDER):
        left = tuple(LADDER)[number + 1 :]
        after = _rung(prefix, recipe, left)
        if after != before:
            found[f"{prefix}-{respect}"] = partial(_rung, f"{prefix}-{respect}", recipe, left)
        before = after
    return found


def _rung(name: str, recipe: Callable[[], RunConfig], published: tuple[str, ...] = tuple(LADDER)) -> RunConfig:
    """Returns the recipe without the request time, as published in the respects `published`."""
    config = recipe()
    config = dataclasses.replace(
        config,
        name=name,
        model=dataclasses.replace(config.model, request_time=False),
        training=dataclasses.replace(config.training, checkpoint_every=config.training.steps),
    )
    return as_published(config, *published) if published else config


RECIPES: dict[str, Callable[[], RunConfig]] = {
    **{f"ablation-{name}": partial(ml_1m_base, f"ablation-{name}", *changes) for name, changes in ML_1M.items()},
    **{f"ablation-{name}": partial(deskdrop_base, f"ablation-{name}", actions) for name, actions in DESKDROP.items()},
    **ladder("ablation-ladder", ml_1m),
    **ladder("ablation-reads", kakao_brunch),
}
