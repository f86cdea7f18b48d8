"""The publication's ablations, small enough to run: each recipe is a base with one thing changed.

    losses      next-token alone, with multi-token, with future-token too
    rows        of each sub-table
    length      of pretraining
    negatives   of the batch, drawn, both; corrected for popularity or not
    own         a user's own positives among that user's negatives: none of them, later ones, all
    positives   actions that the loss predicts, on a dataset that has several

The base is the recipe of the dataset (recipes/public.py) at width 64 with two layers as published, about 20 passes over
the events, own positives taken out of the negatives as published, without the time of the request: what a choice is
worth shows there too, at a tenth of the cost. `tackboard bench quality --study ablations` runs them all and puts each
result beside the published direction.

Decided: losses are added with weight 1, as the publication is read; how far the multi-token window reaches (8) and how
many events a downstream task reads (100) are our choices, because it does not say.
"""

from __future__ import annotations

import dataclasses

from tackboard.core.config import apply_overrides
from tackboard.recipes.public import deskdrop, ml_1m
from tackboard.train.config import RunConfig

STEPS = 1_240
"""About 20 passes over MovieLens-1M."""
DRAWN = 1_024
"""Items drawn uniformly for a step, where not all of the catalogue are negatives."""
SAVES = ("bookmark", "like")
"""The actions of Deskdrop that mean what a save does: whoever does this wants to keep the article."""


def ml_1m_base(name: str, *changes: str) -> RunConfig:
    """The base on MovieLens-1M with `changes`, given as `a.b=c`."""
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
    """The base on Deskdrop, whose loss predicts `positives`; none named means all."""
    base = deskdrop()
    backbone = dataclasses.replace(base.model.backbone, num_layers=2)
    model = dataclasses.replace(base.model, backbone=backbone, width=64, request_time=False)
    data = dataclasses.replace(base.data, positive_actions=positives)
    training = dataclasses.replace(base.training, checkpoint_every=base.training.steps)
    return dataclasses.replace(base, name=name, data=data, model=model, training=training)


# ---- losses ----


def losses_next() -> RunConfig:
    """The next-token loss alone: the base itself."""
    return ml_1m_base("ablation-losses-next")


def losses_multi() -> RunConfig:
    """And the multi-token loss: up to 8 events ahead, a quarter of the pairs."""
    return ml_1m_base("ablation-losses-multi", *_MULTI)


def losses_multi_light() -> RunConfig:
    """The same with a tenth of the weight."""
    return ml_1m_base("ablation-losses-multi-light", *_MULTI, "model.loss.multi_token_weight=0.1")


def losses_all() -> RunConfig:
    """And the future-token loss: the 8 events after the first 100 of a segment, predicted from there."""
    future = (
        "model.loss.future_token_weight=1.0",
        "model.loss.future_token_anchor=100",
        "model.loss.future_token_window=8",
    )
    return ml_1m_base("ablation-losses-all", *_MULTI, *future)


_MULTI = ("model.loss.multi_token_weight=1.0", "model.loss.multi_token_window=8", "model.loss.multi_token_share=0.25")


# ---- rows of a sub-table ----


def rows_256() -> RunConfig:
    """256 rows in each of 8 sub-tables, for 3,883 films."""
    return ml_1m_base("ablation-rows-256", "model.tables.num_rows=256")


def rows_1024() -> RunConfig:
    """1,024 rows."""
    return ml_1m_base("ablation-rows-1024", "model.tables.num_rows=1024")


def rows_4096() -> RunConfig:
    """4,096 rows."""
    return ml_1m_base("ablation-rows-4096", "model.tables.num_rows=4096")


def rows_16384() -> RunConfig:
    """16,384 rows: hardly two films share one."""
    return ml_1m_base("ablation-rows-16384", "model.tables.num_rows=16384")


def rows_plain() -> RunConfig:
    """One table with a row for each film, as wide as the eight together: what hashing costs."""
    plain = ("model.tables.method=modulo", "model.tables.num_hashes=1", "model.tables.dim=128")
    return ml_1m_base("ablation-rows-plain", *plain)


# ---- length of pretraining ----


def length_eighth() -> RunConfig:
    """An eighth of the base's steps, about 2.5 passes."""
    return _of_length("eighth", STEPS // 8)


def length_half() -> RunConfig:
    """Half of the base's steps, about 10 passes."""
    return _of_length("half", STEPS // 2)


def length_base() -> RunConfig:
    """The base's steps, about 20 passes."""
    return _of_length("base", STEPS)


def length_double() -> RunConfig:
    """Twice the base's steps, about 40 passes."""
    return _of_length("double", 2 * STEPS)


def _of_length(name: str, steps: int) -> RunConfig:
    warmup = f"optimizer.warmup_steps={min(ml_1m().optimizer.warmup_steps, steps // 6)}"
    lengths = (f"training.steps={steps}", f"training.checkpoint_every={steps}")
    return ml_1m_base(f"ablation-length-{name}", *lengths, warmup)


# ---- negatives ----


def negatives_batch() -> RunConfig:
    """The batch's other positives, uncorrected: popular films are negatives too often."""
    return ml_1m_base("ablation-negatives-batch", *_BATCH, "model.loss.correct_popularity=false")


def negatives_batch_corrected() -> RunConfig:
    """The batch's other positives, each divided by the count expected of it."""
    return ml_1m_base("ablation-negatives-batch-corrected", *_BATCH)


def negatives_batch_streaming() -> RunConfig:
    """The same with counts that are estimated while training."""
    return ml_1m_base("ablation-negatives-batch-streaming", *_BATCH, "model.loss.streaming_frequencies=true")


def negatives_drawn() -> RunConfig:
    """1,024 films drawn uniformly for each step, and no others."""
    return ml_1m_base(
        "ablation-negatives-drawn", "model.loss.in_batch_negatives=false", f"data.uniform_negatives={DRAWN}"
    )  # fmt: skip


def negatives_mixed() -> RunConfig:
    """Both, corrected over the mixture."""
    return ml_1m_base(
        "ablation-negatives-mixed", "model.loss.in_batch_negatives=true", f"data.uniform_negatives={DRAWN}"
    )


def negatives_all() -> RunConfig:
    """Every film of the catalogue: an exact softmax."""
    return ml_1m_base("ablation-negatives-all", "model.loss.in_batch_negatives=false", "data.uniform_negatives=3883")


_BATCH = ("model.loss.in_batch_negatives=true", "data.uniform_negatives=0")


# ---- a user's own positives ----


def own_none() -> RunConfig:
    """A user's own positives are never that user's negatives, as published: the base itself."""
    return ml_1m_base("ablation-own-none")


def own_later() -> RunConfig:
    """Those that come later are: the next film is told from the ones after it."""
    return ml_1m_base("ablation-own-later", "model.loss.later_negatives=true")


def own_all() -> RunConfig:
    """All are, as in SASRec and HSTU."""
    return ml_1m_base("ablation-own-all", "model.loss.mask_same_user=false")


def own_later_multi() -> RunConfig:
    """Those that come later are, and the multi-token loss asks for them too."""
    return ml_1m_base("ablation-own-later-multi", *_MULTI, "model.loss.later_negatives=true")


# ---- actions that are positives ----


def positives_saves() -> RunConfig:
    """Bookmarks and likes alone."""
    return deskdrop_base("ablation-positives-saves", SAVES)


def positives_saves_comments() -> RunConfig:
    """And comments: rarer, and meant as much."""
    return deskdrop_base("ablation-positives-saves-comments", (*SAVES, "comment_created"))


def positives_saves_views() -> RunConfig:
    """And views: nine times as many as all others."""
    return deskdrop_base("ablation-positives-saves-views", (*SAVES, "view"))


def positives_all() -> RunConfig:
    """Everything that people do."""
    return deskdrop_base("ablation-positives-all", ())
