"""This module lists the methods that `tackboard bench quality` compares. A method builds the whole config of a run.

A comparison is fair only if the baseline reads no more than our method. So each method names one of these inputs:

    items      the items of the history in their order
    times      the items, the times of events and the request time, as in the publication of HSTU
    history    the items, the action on each item (for example the rating) and the time between events, but not the
               request time
    request    the inputs of `history` and the request time

There are four kinds of rivals:

    sasrec, hstu, hstu-large     the published sizes, loss and training
    …-INPUTS                     the published sizes, with the inputs that the name ends with. Unlike the published
                                 methods, these score by inner products, with a softmax over all items (or an estimate
                                 of it)
    …-wide-INPUTS                the same with the width, depth, heads and training data of PinFM
    …-fair-INPUTS                the same with PinFM's loss too: cosines, learned temperature, negatives and their
                                 weights, and a mask that keeps a user's own items out of the negatives
                                 (models/sequential.py, kind `contrastive`)

`pinfm-INPUTS` is the recipe that we ship for the dataset. `pinfm-published-INPUTS` is the published configuration, with
the size of that recipe, because the publication does not give a size. Settings are chosen on the validation event,
never on the test event. tuned.py has the chosen settings of rivals, and the number of tries (fits that served to choose
settings) of each method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tackboard.bench.quality.data import Bench, DatasetFacts
from tackboard.bench.quality.tuned import NOT_TUNED, TUNED, Tuned
from tackboard.core.config import apply_overrides, did_you_mean
from tackboard.core.errors import UsageError
from tackboard.data.loader import DataConfig
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import SequentialConfig, hstu, hstu_large, sasrec
from tackboard.models.tables import TableConfig
from tackboard.recipes.ablations import as_published
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
"""Number of passes, events per history and users per step with `--quick`."""
QUICK_RATE = 3e-3
"""Learning rate with `--quick`; it is high because there are few steps."""
PUBLISHED_EPOCHS = 101
EPOCHS, LARGE_EPOCHS = 60, 3
"""Largest number of passes of a rival, for small and for large catalogues. Validation chooses the actual number."""
DRAWN_ITEMS, QUICK_DRAWN_ITEMS = 16_384, 1_024
"""Number of items drawn for each step from a large catalogue, without and with `--quick`."""
LARGE_CATALOGUE = 50_000
"""A catalogue with more items than this is called large. Training then computes no softmax over all items."""
RIVAL_RATE = 1e-3
"""Learning rate of rivals as published, and of rivals that are not tuned."""
SASREC_SIZES = {"width": 64, "backbone": {"ffn_width": 64}}
"""Sizes of the methods `sasrec-items`, `sasrec-history` and `sasrec-request`."""
FIXED = {
    "seed": "use --seeds",
    "data.dataset": "use --dataset",
    "data.held_out": "leave it out: the study says which event is held out",
    "data.positive_actions": "leave it out: all methods are judged on the same events",
    "training.device": "use --device",
    "training.num_threads": "use --jobs",
}
"""Settings that the user may not change here → what the user can do instead."""


@dataclasses.dataclass(frozen=True)
class MethodContext:
    """The dataset and the mode in which a method runs. The sizes of the method may depend on both."""

    bench: Bench
    facts: DatasetFacts
    prepared: str
    quick: bool = False

    @property
    def max_length(self) -> int:
        """A method reads at most this many events of a history."""
        return min(self.bench.max_length, QUICK_LENGTH) if self.quick else self.bench.max_length

    @property
    def is_large(self) -> bool:
        return self.facts.num_items > LARGE_CATALOGUE

    @property
    def drawn_items(self) -> int:
        """Number of items that each step draws for negatives: all items, or fewer if the catalogue is large."""
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
    is_published: bool = False
    """If true, the method has published settings, and none of them is tuned."""
    build: Callable[[MethodContext], RunConfig] | None = None
    """Builds the config of the run; None if the method fits nothing."""

    @property
    def reads(self) -> str:
        return ", ".join(INPUTS[self.inputs])

    @property
    def family(self) -> str:
        """The name without the inputs. Methods of one family share their settings (tuned.py)."""
        return self.name.removesuffix(f"-{self.inputs}")

    def tuned(self, dataset: str) -> Tuned:
        """Returns the tries of the method on a dataset."""
        return NOT_TUNED if self.is_published else TUNED.get((self.family, dataset), NOT_TUNED)

    def reads_no_more_than(self, other: Method) -> bool:
        """Returns whether the other method reads everything that this method reads."""
        return set(INPUTS[self.inputs]) <= set(INPUTS[other.inputs])


def find_method(name: str) -> Method:
    """Returns the method with this name. An unknown name raises UsageError, which suggests the closest name."""
    if name not in METHODS:
        raise UsageError(
            f"--methods {name} does not exist",
            allowed=f"allowed: {', '.join(METHODS)}",
            fix=did_you_mean(name, METHODS),
        )
    return METHODS[name]


def config_of(
    method: Method, place: MethodContext, seed: int, overrides: Sequence[str] = (), tried: Sequence[str] = ()
) -> RunConfig:
    """Returns the config of a method's run. The override `a.b=c` is for all methods, `METHOD:a.b=c` for one method.

    The settings of tuned.py are applied first (not with --quick), then `tried`, then the overrides. Later settings win.
    """
    if method.build is None:
        raise UsageError(f"{method.name} fits nothing and has no settings")
    config = dataclasses.replace(method.build(place), seed=seed)
    settings = [*(() if place.quick else method.tuned(place.bench.name).settings), *tried]
    if settings:
        config = apply_overrides(config, settings)
        every = checkpoint_every(config.training.steps, place)
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, checkpoint_every=every))
    return apply_overrides(config, overrides_of(method.name, overrides))


def overrides_of(name: str, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that are for the method `name`, each as `a.b=c`."""
    parts = [split_override(override) for override in overrides]
    return [setting for of, setting in parts if of in ("", name)]


def split_override(override: str) -> tuple[str, str]:
    """Splits an override into (method, `a.b=c`). The method is empty if the override is for every method."""
    name, separator, setting = override.partition(":")
    return (name, setting) if separator and "=" not in name else ("", override)


def check_overrides(overrides: Sequence[str], names: Sequence[str]) -> None:
    """Raises UsageError for an override that does nothing or is not allowed. `names` are the methods that run."""
    for override in overrides:
        name, setting = split_override(override)
        if name and name not in names:
            close = did_you_mean(name, names) or did_you_mean(name, METHODS)
            raise UsageError(
                f"--set {override} names {name}, which is not run",
                allowed=f"methods that are run: {', '.join(names) or 'none with settings'}",
                fix=f"add it to --methods: {name}" if name in METHODS else close,
            )
        key = setting.partition("=")[0].strip()
        for fixed, instead in FIXED.items():
            if key == fixed or fixed.startswith(f"{key}."):
                raise UsageError(f"--set {override} is refused: {fixed} cannot be set here", fix=instead)
        if not names:
            raise UsageError(f"--set {override} is refused: no method that is run has settings")


# ---- sizes of a run ----


def newest_steps(place: MethodContext, epochs: int) -> tuple[int, int]:
    """Returns (tokens per step, number of steps) for `epochs` passes over the newest events of all users.

    A step holds about USERS_PER_STEP users, or QUICK_USERS with --quick and a small catalogue.
    """
    facts = place.facts
    # With a large catalogue every step updates a large table, so a quick run uses few large steps.
    few = place.quick and not place.is_large
    users = min(QUICK_USERS if few else USERS_PER_STEP, max(1, facts.num_users // 4))
    tokens = facts.newest_tokens(place.max_length) * users / max(1, facts.num_users)
    steps = max(1, round((QUICK_EPOCHS if place.quick else epochs) * facts.num_users / users))
    # A step plan leaves room for the longest segment in every step, so tokens_per_step includes this room.
    return max(2 * place.max_length, round(tokens) + place.max_length), steps


def checkpoint_every(steps: int, place: MethodContext) -> int:
    """Returns the number of steps between checkpoints, so that a run has about 12 checkpoints, or 4 with --quick."""
    return -(-steps // (4 if place.quick else 12))


def _run(
    place: MethodContext,
    name: str,
    model: Any,
    *,
    steps: int,
    optimizer: OptimizerConfig,
    tokens_per_step: int,
    max_length: int = 0,
    segments: str = "newest",
) -> RunConfig:
    """Returns a run of `steps` steps. Each step draws items that the model may use as negatives."""
    return RunConfig(
        name=name,
        data=DataConfig(
            dataset=place.prepared,
            window_buckets=64,
            max_length=max_length or place.max_length,
            segments=segments,
            tokens_per_step=tokens_per_step,
            uniform_negatives=place.drawn_items,
        ),
        model=model,
        optimizer=optimizer,
        training=TrainingConfig(
            steps=steps,
            checkpoint_every=checkpoint_every(steps, place),
            precision="auto",
            compile="off" if place.quick else "auto",
        ),
    )


# ---- SASRec and HSTU ----


def _sequential(
    place: MethodContext, name: str, model: SequentialConfig, epochs: int, *, published: bool = False
) -> RunConfig:
    """Returns a run of a rival over the newest events of each user."""
    tokens, steps = newest_steps(place, epochs)
    optimizer = OptimizerConfig(
        dense_learning_rate=QUICK_RATE if place.quick else RIVAL_RATE,
        weight_decay=0.0,
        warmup_steps=0 if published else min(200, steps // 20),
        final_share=1.0 if published else 0.1,
        # The published figures were made without gradient clipping.
        clip_norm=1e9 if published else 1.0,
    )
    return _run(place, name, model, steps=steps, optimizer=optimizer, tokens_per_step=tokens)


def _as_published(name: str, make: Callable[..., SequentialConfig], place: MethodContext) -> RunConfig:
    """Returns a run with sizes, loss and learning rate as published."""
    model = make(place.facts.num_rows, max_history=place.max_length)
    return _sequential(place, name, model, PUBLISHED_EPOCHS, published=True)


def _rival_settings(place: MethodContext, inputs: str) -> dict[str, Any]:
    """Returns the settings of a rival that reads `inputs`. The softmax is exact unless the catalogue is large."""
    return {
        "loss": {"kind": "mixed" if place.is_large else "full"},
        "use_actions": "actions" in INPUTS[inputs],
        "use_time_gap": "times" in INPUTS[inputs],
        "use_request_time": "request's time" in INPUTS[inputs],
    }


def _rival(
    name: str, inputs: str, make: Callable[..., SequentialConfig], sizes: dict[str, Any], place: MethodContext
) -> RunConfig:
    """Returns a run of a published architecture that reads `inputs`. `sizes` replaces some published sizes."""
    settings = _rival_settings(place, inputs) | sizes
    model = make(place.facts.num_rows, max_history=place.max_length, **settings)
    return _sequential(place, name, model, LARGE_EPOCHS if place.is_large else EPOCHS)


def _rival_of_our_size(
    name: str, inputs: str, make: Callable[..., SequentialConfig], kind: str, place: MethodContext
) -> RunConfig:
    """Returns a run of a rival with the width, depth, heads and data of our PinFM, to compare designs, not sizes.

    The kind `fair` also has the loss of our PinFM; the kind `wide` does not.
    """
    recipe = _recipe(place)
    ours = recipe.model
    # Only SASRec has a feed-forward network. The head width 0 divides HSTU's width evenly among its heads.
    special = {"ffn_width": ours.backbone.mlp_ratio * ours.width} if make is sasrec else {"head_width": 0}
    sizes = {"num_layers": ours.backbone.num_layers, "num_heads": ours.backbone.num_heads}
    settings = _rival_settings(place, inputs)
    if kind == "fair":
        settings["loss"] = {"kind": "contrastive"} | dataclasses.asdict(ours.loss)
    model = make(
        place.facts.num_rows,
        max_history=min(ours.max_history, place.max_length),
        width=ours.width,
        backbone=sizes | special,
        dropout=ours.dropout,
        request_vector="input",
        **settings,
    )
    rate = QUICK_RATE if place.quick else RIVAL_RATE
    return _like(recipe, place, name, model, dataclasses.replace(recipe.optimizer, dense_learning_rate=rate))


# ---- PinFM ----


def _recipe(place: MethodContext) -> RunConfig:
    """Returns the recipe that we ship for the dataset, or a small one with --quick."""
    return _quick_pinfm(place) if place.quick else find_recipe(place.bench.name)


def _pinfm(name: str, inputs: str, place: MethodContext) -> RunConfig:
    """Returns the shipped recipe, changed so that it reads `inputs`."""
    recipe = _recipe(place)
    max_history = min(recipe.model.max_history, place.max_length)
    model = dataclasses.replace(recipe.model, request_time=inputs == "request", max_history=max_history)
    return _like(recipe, place, name, model, recipe.optimizer)


def _pinfm_as_published(name: str, inputs: str, place: MethodContext) -> RunConfig:
    """Returns the published configuration, in the size of the shipped recipe."""
    return as_published(_pinfm(name, inputs, place))


def _quick_pinfm(place: MethodContext) -> RunConfig:
    tokens, steps = newest_steps(place, QUICK_EPOCHS)
    model = PinFMConfig(
        tables=TableConfig(num_hashes=4, num_rows=1 << (place.facts.num_items - 1).bit_length()),
        backbone=BackboneConfig(positions="rotary"),
        loss=LossConfig(in_batch_negatives=place.is_large),
        max_history=place.max_length,
        dropout=0.2,
    )
    optimizer = OptimizerConfig(
        dense_learning_rate=QUICK_RATE, table_learning_rate=0.3, warmup_steps=max(1, steps // 20)
    )
    return _run(place, "quick", model, steps=steps, optimizer=optimizer, tokens_per_step=tokens)


def _like(recipe: RunConfig, place: MethodContext, name: str, model: Any, optimizer: OptimizerConfig) -> RunConfig:
    """Returns a run of `model` with the data and the number of steps of a recipe."""
    return _run(
        place,
        name,
        model,
        steps=recipe.training.steps,
        optimizer=optimizer,
        tokens_per_step=recipe.data.tokens_per_step,
        max_length=min(recipe.data.max_length, place.max_length),
        segments=recipe.data.segments,
    )


METHODS = {
    method.name: method
    for method in (
        Method(name="popularity", title="popularity", inputs="items"),
        Method(name="item-to-item", title="item-to-item, cosine", inputs="items"),
        Method(name="recently-seen", title="recently seen items", inputs="items"),
        *(
            Method(
                name=name,
                title=f"{title}, as published",
                inputs=inputs,
                is_published=True,
                build=partial(_as_published, name, make),
            )
            for name, title, inputs, make in (
                ("sasrec", "SASRec, sampled softmax", "items", sasrec),
                ("hstu", "HSTU", "times", hstu),
                ("hstu-large", "HSTU-large", "times", hstu_large),
            )
        ),
        *(
            Method(
                name=f"{name}-{inputs}",
                title=title,
                inputs=inputs,
                build=partial(_rival, f"{name}-{inputs}", inputs, make, sizes),
            )
            for name, title, make, sizes, all_inputs in (
                ("sasrec", "SASRec of width 64", sasrec, SASREC_SIZES, ("items", "history", "request")),
                ("hstu-large", "HSTU-large", hstu_large, {}, ("history", "request")),
            )
            for inputs in all_inputs
        ),
        *(
            Method(
                name=f"{name}-{kind}-{inputs}",
                title=f"{title} {words}",
                inputs=inputs,
                build=partial(_rival_of_our_size, f"{name}-{kind}-{inputs}", inputs, make, kind),
            )
            for kind, words in (("wide", "of PinFM's size"), ("fair", "with PinFM's size and loss"))
            for name, title, make in (("sasrec", "SASRec", sasrec), ("hstu", "HSTU", hstu))
            for inputs in ("history", "request")
        ),
        *(
            Method(
                name=f"{name}-{inputs}",
                title=title,
                inputs=inputs,
                is_ours=True,
                build=partial(build, f"{name}-{inputs}", inputs),
            )
            for name, title, build in (
                ("pinfm-published", "PinFM as published", _pinfm_as_published),
                ("pinfm", "PinFM, ours", _pinfm),
            )
            for inputs in ("history", "request")
        ),
    )
}
