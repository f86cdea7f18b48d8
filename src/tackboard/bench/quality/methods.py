"""The methods of `tackboard bench quality`: a name in, the whole config of a run out.

A method says what it reads, because only methods with the same inputs may be compared:

    items      which items, in which order
    times      also when, and the time of the request, as HSTU was published
    history    what was done with each item (the rating, say) and the time between events, not that of the request
    request    all of these

Rivals that are named as published (sasrec, hstu, hstu-large) have the published sizes and loss. Sizes are
chosen on validation, never on the test event; how far that has come is in docs/log.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tackboard.bench.quality.data import Bench, Facts
from tackboard.core.config import apply_overrides, suggest
from tackboard.core.errors import UsageError
from tackboard.data.loader import DataConfig
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import SequentialConfig, hstu, hstu_large, sasrec
from tackboard.models.tables import TableConfig
from tackboard.recipes.registry import find_recipe
from tackboard.train.config import RunConfig, TrainingConfig
from tackboard.train.optimizers import OptimizerConfig

INPUTS = {
    "items": ("items",),
    "times": ("items", "times", "request's time"),
    "history": ("items", "actions", "times"),
    "request": ("items", "actions", "times", "request's time"),
}
USERS_PER_STEP = 128
QUICK_EPOCHS, QUICK_LENGTH, QUICK_USERS = 8, 50, 32
"""Passes, events of a history and users of a step of `--quick`."""
QUICK_RATE = 3e-3
"""Learning rate of `--quick`, which has few steps."""
PUBLISHED_EPOCHS = 101
EPOCHS, LARGE_EPOCHS = 60, 3
"""Passes over the data at most; the number that is used is chosen on validation. The second where there is much."""
DRAWN_ITEMS, QUICK_DRAWN_ITEMS = 16_384, 1_024
"""Items drawn for each step from a large catalogue; the second where it shall be quick."""
LARGE_CATALOGUE = 50_000
"""Above so many items a softmax over all of them is not computed at every step."""
RIVAL_RATES = {"deskdrop": 1e-2, "kakao-brunch": 3e-3}
"""Learning rates of rivals that have the inputs of ours, where other than 1e-3."""
RIVAL_STEPS = {"ml-1m": 3_700}
"""Steps of rivals of PinFM's size, where other than PinFM's: they learn for longer."""
RIVAL_DROPOUT = {"ml-1m": 0.3, "deskdrop": 0.3}
"""Dropout of rivals of PinFM's size, where other than PinFM's."""
SASREC_SIZES = {"width": 64, "backbone": {"ffn_width": 64}}
"""Sizes of the SASRec that has the inputs of ours."""
FIXED = {
    "seed": "use --seeds",
    "data.dataset": "use --dataset",
    "data.held_out": "leave it out: the study says which event is held out",
    "data.positive_actions": "leave it out: all methods are judged on the same events",
    "training.device": "use --device",
    "training.num_threads": "use --jobs",
}
"""Settings that are the harness's, and what to do instead."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a method runs: its sizes may depend on it."""

    bench: Bench
    facts: Facts
    prepared: str
    quick: bool = False

    @property
    def max_length(self) -> int:
        """Events of a history that a method reads at most."""
        return min(self.bench.max_length, QUICK_LENGTH) if self.quick else self.bench.max_length

    @property
    def is_large(self) -> bool:
        """Whether the catalogue is too large for an exact softmax."""
        return self.facts.num_items > LARGE_CATALOGUE

    @property
    def drawn_items(self) -> int:
        """Items drawn as negatives for each step: the catalogue, or some where it is large."""
        if not self.is_large:
            return self.facts.num_items
        return QUICK_DRAWN_ITEMS if self.quick else DRAWN_ITEMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A named way to rank."""

    name: str
    title: str
    inputs: str
    is_ours: bool = False
    build: Callable[[Place], RunConfig] | None = None
    """The config of its run; None where nothing is fit."""

    @property
    def reads(self) -> str:
        """What it reads, for people."""
        return ", ".join(INPUTS[self.inputs])

    def reads_no_more_than(self, other: Method) -> bool:
        """Whether the other one reads all that this one does."""
        return set(INPUTS[self.inputs]) <= set(INPUTS[other.inputs])


def find_method(name: str) -> Method:
    """The method of that name; another name raises UsageError with the closest."""
    if name not in METHODS:
        close = suggest(name, METHODS)
        raise UsageError(
            f"--methods {name}", allowed=f"allowed: {', '.join(METHODS)}", fix=f"did you mean {close}?" if close else ""
        )
    return METHODS[name]


def config_of(method: Method, place: Place, seed: int, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a method's run. `overrides` are `a.b=c` for every method, or `METHOD:a.b=c` for one."""
    if method.build is None:
        raise UsageError(f"{method.name} has no settings")
    config = dataclasses.replace(method.build(place), seed=seed)
    parts = [split_override(override) for override in overrides]
    return apply_overrides(config, [setting for name, setting in parts if name in ("", method.name)])


def split_override(override: str) -> tuple[str, str]:
    """(method, or nothing where it is for every one, and `a.b=c`) of an override."""
    name, separator, setting = override.partition(":")
    return (name, setting) if separator and "=" not in name else ("", override)


def check_overrides(overrides: Sequence[str], names: Sequence[str]) -> None:
    """Raises UsageError for an override that would do nothing, or harm: `names` are the methods that are run."""
    for override in overrides:
        name, setting = split_override(override)
        if name and name not in names:
            close = suggest(name, names) or suggest(name, METHODS)
            raise UsageError(
                f"--set {override}",
                allowed=f"{name} is not run; these are: {', '.join(names) or 'none that has settings'}",
                fix=f"add it to --methods: {name}" if name in METHODS else f"did you mean {close}?" if close else "",
            )
        key = setting.partition("=")[0].strip()
        for fixed, instead in FIXED.items():
            if key == fixed or fixed.startswith(f"{key}."):
                raise UsageError(f"--set {override}", allowed=f"{fixed} cannot be set here", fix=instead)
        if not names:
            raise UsageError(f"--set {override}", allowed="no method that is run has settings")


# ---- sizes of a run ----


def newest_steps(place: Place, epochs: int) -> tuple[int, int]:
    """(tokens of a step, steps) where each user's newest events are read once an epoch, about 128 users a step."""
    facts = place.facts
    # Of a large catalogue every step moves a large table, so that few steps are quick.
    few = place.quick and not place.is_large
    users = min(QUICK_USERS if few else USERS_PER_STEP, max(1, facts.num_users // 4))
    tokens = facts.newest_tokens(place.max_length) * users / max(1, facts.num_users)
    steps = max(1, round((QUICK_EPOCHS if place.quick else epochs) * facts.num_users / users))
    # The plan cuts at tokens_per_step less the longest segment, which it leaves room for.
    return max(2 * place.max_length, round(tokens) + place.max_length), steps


def _run(
    place: Place,
    name: str,
    model: Any,
    *,
    data: dict[str, Any],
    steps: int,
    optimizer: OptimizerConfig,
) -> RunConfig:
    """A run of `steps` steps, judged at about 12 checkpoints, or 4 where it shall be quick."""
    return RunConfig(
        name=name,
        data=DataConfig(dataset=place.prepared, window_buckets=64, **data),
        model=model,
        optimizer=optimizer,
        training=TrainingConfig(
            steps=steps,
            checkpoint_every=-(-steps // (4 if place.quick else 12)),
            precision="auto",
            compile="off" if place.quick else "auto",
        ),
    )


# ---- SASRec and HSTU ----


def _sequential(place: Place, name: str, model: SequentialConfig, epochs: int, *, published: bool = False) -> RunConfig:
    """A run of a rival over the newest events of each user."""
    tokens, steps = newest_steps(place, epochs)
    optimizer = OptimizerConfig(
        dense_learning_rate=QUICK_RATE if place.quick else 1e-3 if published else rival_rate(place),
        weight_decay=0.0,
        warmup_steps=0 if published else min(200, steps // 20),
        final_share=1.0 if published else 0.1,
        # Nothing is clipped where it was not when the figures were published.
        clip_norm=1e9 if published else 1.0,
    )
    data = {
        "max_length": place.max_length,
        "segments": "newest",
        "tokens_per_step": tokens,
        "uniform_negatives": place.drawn_items,
    }
    return _run(place, name, model, data=data, steps=steps, optimizer=optimizer)


def _as_published(name: str, make: Callable[..., SequentialConfig]) -> Callable[[Place], RunConfig]:
    """Sizes, loss and rates as published."""

    def build(place: Place) -> RunConfig:
        model = make(place.facts.num_rows, max_history=place.max_length)
        return _sequential(place, name, model, PUBLISHED_EPOCHS, published=True)

    return build


def rival_rate(place: Place) -> float:
    """The rate at which rivals learn, chosen on validation as ours is."""
    return RIVAL_RATES.get(place.bench.name, 1e-3)


def _rival(
    name: str, inputs: str, make: Callable[..., SequentialConfig], sizes: dict[str, Any]
) -> Callable[[Place], RunConfig]:
    """The published architecture with the exact softmax where the catalogue allows it, and the inputs of ours."""

    def build(place: Place) -> RunConfig:
        model = make(
            place.facts.num_rows,
            max_history=place.max_length,
            loss={"kind": "mixed" if place.is_large else "full"},
            use_actions="actions" in INPUTS[inputs],
            use_time_gap="times" in INPUTS[inputs],
            use_request_time="request's time" in INPUTS[inputs],
            **sizes,
        )
        return _sequential(place, name, model, LARGE_EPOCHS if place.is_large else EPOCHS)

    return build


def _rival_of_our_size(name: str, inputs: str, make: Callable[..., SequentialConfig]) -> Callable[[Place], RunConfig]:
    """A rival with the width, depth, dropout, events and steps of the PinFM beside it: what is left is the design."""

    def build(place: Place) -> RunConfig:
        recipe = _quick_pinfm(place) if place.quick else find_recipe(place.bench.name)
        ours = recipe.model
        # HSTU has no pointwise network, and heads of a width of their own.
        special = {"ffn_width": ours.backbone.mlp_ratio * ours.width} if make is sasrec else {"head_width": 0}
        sizes = {"num_layers": ours.backbone.num_layers, "num_heads": ours.backbone.num_heads}
        model = make(
            place.facts.num_rows,
            max_history=min(ours.max_history, place.max_length),
            loss={"kind": "mixed" if place.is_large else "full"},
            width=ours.width,
            backbone=sizes | special,
            dropout=ours.dropout if place.quick else RIVAL_DROPOUT.get(place.bench.name, ours.dropout),
            use_actions="actions" in INPUTS[inputs],
            use_time_gap="times" in INPUTS[inputs],
            use_request_time="request's time" in INPUTS[inputs],
            request_vector="input",
        )
        optimizer = dataclasses.replace(recipe.optimizer, dense_learning_rate=rival_rate(place))
        steps = recipe.training.steps if place.quick else RIVAL_STEPS.get(place.bench.name, recipe.training.steps)
        return _like(recipe, place, name, model, optimizer, steps)

    return build


# ---- PinFM ----


def _pinfm(name: str, inputs: str) -> Callable[[Place], RunConfig]:
    """The recipe that ships for the dataset; a small model where it shall be quick."""

    def build(place: Place) -> RunConfig:
        recipe = _quick_pinfm(place) if place.quick else find_recipe(place.bench.name)
        max_history = min(recipe.model.max_history, place.max_length)
        model = dataclasses.replace(recipe.model, request_time=inputs == "request", max_history=max_history)
        return _like(recipe, place, name, model, recipe.optimizer, recipe.training.steps)

    return build


def _quick_pinfm(place: Place) -> RunConfig:
    facts, max_length = place.facts, place.max_length
    tokens, steps = newest_steps(place, QUICK_EPOCHS)
    return RunConfig(
        name="quick",
        data=DataConfig(
            dataset=place.prepared,
            max_length=max_length,
            segments="newest",
            tokens_per_step=tokens,
            uniform_negatives=place.drawn_items,
        ),
        model=PinFMConfig(
            tables=TableConfig(num_hashes=4, num_rows=1 << (facts.num_items - 1).bit_length()),
            backbone=BackboneConfig(positions="rotary"),
            loss=LossConfig(in_batch_negatives=place.is_large),
            max_history=max_length,
            dropout=0.2,
        ),
        optimizer=OptimizerConfig(
            dense_learning_rate=QUICK_RATE, table_learning_rate=0.3, warmup_steps=max(1, steps // 20)
        ),
        training=TrainingConfig(steps=steps),
    )


def _like(recipe: RunConfig, place: Place, name: str, model: Any, optimizer: OptimizerConfig, steps: int) -> RunConfig:
    """A run of `model` on the data of a recipe."""
    data = {
        "max_length": min(recipe.data.max_length, place.max_length),
        "segments": recipe.data.segments,
        "tokens_per_step": recipe.data.tokens_per_step,
        "uniform_negatives": place.drawn_items,
    }
    return _run(place, name, model, data=data, steps=steps, optimizer=optimizer)


METHODS = {
    method.name: method
    for method in (
        Method(name="popularity", title="popularity", inputs="items"),
        Method(name="item-to-item", title="item-to-item, cosine", inputs="items"),
        Method(name="recently-seen", title="recently seen items", inputs="items"),
        Method(
            name="sasrec",
            title="SASRec, sampled softmax, as published",
            inputs="items",
            build=_as_published("sasrec", sasrec),
        ),
        Method(name="hstu", title="HSTU, as published", inputs="times", build=_as_published("hstu", hstu)),
        Method(
            name="hstu-large",
            title="HSTU-large, as published",
            inputs="times",
            build=_as_published("hstu-large", hstu_large),
        ),
        *(
            Method(
                name=f"{name}-{inputs}",
                title=f"{title}, cross-entropy",
                inputs=inputs,
                build=_rival(f"{name}-{inputs}", inputs, make, sizes),
            )
            for name, title, make, sizes, all_inputs in (
                ("sasrec", "SASRec", sasrec, SASREC_SIZES, ("items", "history", "request")),
                ("hstu-large", "HSTU-large", hstu_large, {}, ("history", "request")),
            )
            for inputs in all_inputs
        ),
        *(
            Method(
                name=f"{name}-wide-{inputs}",
                title=f"{title} of PinFM's size, cross-entropy",
                inputs=inputs,
                build=_rival_of_our_size(f"{name}-wide-{inputs}", inputs, make),
            )
            for name, title, make in (("sasrec", "SASRec", sasrec), ("hstu", "HSTU", hstu))
            for inputs in ("history", "request")
        ),
        *(
            Method(
                name=f"pinfm-{inputs}",
                title="PinFM",
                inputs=inputs,
                is_ours=True,
                build=_pinfm(f"pinfm-{inputs}", inputs),
            )
            for inputs in ("history", "request")
        ),
    )
}
