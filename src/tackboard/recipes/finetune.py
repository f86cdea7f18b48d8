"""Recipes that fine-tune a ranker on the PinFM of the recipe `demo`, one recipe for each way to use the PinFM.

    finetune-none            no PinFM: features, and a sequence module of its own over the newest events
    finetune-late-mean       PinFM's user vector, from the mean of the hidden vectors
    finetune-late-last       PinFM's user vector, from the last hidden vector
    finetune-early           the candidate is a token after the user's events
    finetune-content         early; the content vector of the candidate is added to its token
    finetune-content-token   content; a learned token is put before the candidate
    finetune-frozen          late-last; the pretrained part does not learn
    finetune-losses          late-last; the next-token loss of pretraining, a loss of PinFM's outputs alone, and the
                             agreement of these outputs with the ranker are added
    finetune-random-ids      early; a tenth of the candidates get a random id in training (CIR)
    finetune-dropout         random-ids; training also drops PinFM's outputs of young items, by their age
    finetune-cold-start      dropout; with content vector and learned token

All recipes with early fusion also have a loss of PinFM's outputs alone. Recipes with a content vector also have a loss
that aligns content tokens with id tokens. Every recipe except the first needs `--from RUN`, where RUN is a run of
`demo`. All rankers share the rest: the features of `ranking_features`, the sequence module, cross layers, and heads for
the next item and for a save. The data are requests of `tackboard data pseudo-requests … --also save`.
docs/finetuning.md says how to run the recipes, and `tackboard bench finetune` compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from tackboard.core.config import apply_overrides
from tackboard.data.request_loader import RequestConfig
from tackboard.events.synthetic.world_items import CONTENT_WIDTH
from tackboard.models.fusion import FusionConfig
from tackboard.models.ranker import HeadConfig, RankerConfig, RankerFeaturesConfig
from tackboard.models.recent_events import RecentEventsConfig
from tackboard.recipes.demo import demo
from tackboard.train.config import RunConfig, StartConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

PINFM = "pinfm."
"""Prefix of the pretrained parameters in a ranker."""
_EARLY = ("model.fusion.kind=early", "model.extra_loss.outputs=1.0")
_CONTENT = (*_EARLY, "model.fusion.content=content", f"model.fusion.content_width={CONTENT_WIDTH}")
_ALIGNED = (*_CONTENT, "model.extra_loss.alignment=0.1")
_TOKEN = (*_ALIGNED, "model.fusion.learnable_token=true")
_LOSSES = (
    "model.loss.in_batch_negatives=true",  # Batches of requests have no drawn negatives.
    *(f"model.extra_loss.{name}" for name in ("next_token=0.1", "outputs=1.0", "agreement=1.0")),
)
_RANDOM_IDS = (
    *_EARLY,
    "model.cold_start.random_id_share=0.1",
)
_DROPOUT = (*_RANDOM_IDS, "model.cold_start.age_feature=item_age_days")
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": ("model.fusion.kind=none", "optimizer.multipliers={}", "start.prefix=", "start.needs_run=false"),
    "late-mean": ("model.fusion.kind=late-mean",),
    "late-last": (),
    "early": _EARLY,
    "content": _ALIGNED,
    "content-token": _TOKEN,
    "frozen": (f'optimizer.multipliers={{"{PINFM}": 0}}',),
    "losses": _LOSSES,
    "random-ids": _RANDOM_IDS,
    "dropout": _DROPOUT,
    "cold-start": (*_TOKEN, *_DROPOUT),
}
"""Name of a variant → settings that differ from `finetune-late-last`."""


def finetune(variant: str = "late-last", pretrained: RunConfig | None = None) -> RunConfig:
    """Returns the recipe of a variant, for a PinFM with the settings of `pretrained` (by default the recipe `demo`)."""
    pretrained = demo() if pretrained is None else pretrained
    # Early fusion takes positions from the history, so the model's parts must be known before the variant is applied.
    is_early = "model.fusion.kind=early" in VARIANTS[variant]
    fusion = FusionConfig(
        kind="early" if is_early else "late-last",
        learnable_token="model.fusion.learnable_token=true" in VARIANTS[variant],
    )
    model = RankerConfig.on(
        pretrained.model,
        HeadConfig(labels=("next", "save"), num_cross_layers=2),
        fusion,
        recent=RecentEventsConfig(num_events=32, num_layers=1),
        features=RankerFeaturesConfig(
            numbers=("recency", "actions_1d", "saves_7d"), vectors={"content": CONTENT_WIDTH}
        ),
    )
    config = RunConfig(
        name=f"finetune-{variant}",
        data=RequestConfig(
            dataset=pretrained.data.dataset,
            features="tackboard.recipes.ranking_features",
            labels=("next", "save"),
            max_history=model.max_history,
            tokens_per_step=4096,
        ),
        model=model,
        start=StartConfig(prefix=PINFM, needs_run=True),
        optimizer=OptimizerConfig(dense_learning_rate=1e-3, warmup_steps=20, multipliers={PINFM: 0.1}),
        training=TrainingConfig(steps=150, checkpoint_every=50),
    )
    config = apply_overrides(config, VARIANTS[variant])
    if not config.model.extra_loss.next_token:
        return config
    # Only the next-token loss reads which actions are positive. It predicts the same actions as in pretraining.
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, positive_actions=pretrained.data.positive_actions)
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {f"finetune-{name}": partial(finetune, name) for name in VARIANTS}
