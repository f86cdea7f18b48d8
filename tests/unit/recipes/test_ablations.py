"""Each recipe of an ablation changes what it says and nothing else."""

import dataclasses
from typing import Any

import pytest

from tackboard.core.config import to_dict
from tackboard.recipes.ablations import LADDER, SAVES, as_published, deskdrop_base, ml_1m_base
from tackboard.recipes.public import deskdrop, kakao_brunch, ml_1m
from tackboard.recipes.registry import RECIPES, find_recipe
from tackboard.train.config import RunConfig, config_from_json, config_to_json

LADDERS = {"ladder": ml_1m, "reads": kakao_brunch}
NAMES = [name for name in RECIPES if name.startswith("ablation-")]
SMALL = [name for name in NAMES if name.split("-")[1] not in LADDERS]
ALLOWED = {
    "losses": ("model.loss.multi_token_", "model.loss.future_token_"),
    "rows": ("model.tables.",),
    "length": ("training.steps", "training.checkpoint_every", "optimizer.warmup_steps"),
    "negatives": (
        "model.loss.in_batch_negatives",
        "model.loss.correct_popularity",
        "model.loss.streaming_frequencies",
        "data.uniform_negatives",
    ),
    "own": ("model.loss.mask_same_user", "model.loss.later_negatives", "model.loss.multi_token_"),
    "positives": ("data.positive_actions",),
}


def changed(one: dict[str, Any], other: dict[str, Any], path: str = "") -> list[str]:
    """Settings that differ, as `a.b`."""
    found = []
    for key in one:
        if isinstance(one[key], dict):
            found += changed(one[key], other[key], f"{path}{key}.")
        elif one[key] != other[key]:
            found.append(f"{path}{key}")
    return found


def settings(config: RunConfig) -> dict[str, Any]:
    return to_dict(dataclasses.replace(config, name="x"))


@pytest.mark.parametrize("name", SMALL)
def test_it_changes_one_thing(name: str) -> None:
    config = find_recipe(name)
    question = name.split("-")[1]
    base = deskdrop_base("base", ()) if question == "positives" else ml_1m_base("base")
    assert config.name == name
    assert all(one.startswith(ALLOWED[question]) for one in changed(settings(config), settings(base)))
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize("question", LADDERS)
def test_a_ladder_goes_from_the_publication_to_the_recipe_one_difference_at_a_time(question: str) -> None:
    names = [name for name in NAMES if name.split("-")[1] == question]
    rungs = [find_recipe(name) for name in names]
    recipe = LADDERS[question]()
    own = ["model.request_time", "training.checkpoint_every"]
    assert changed(settings(rungs[-1]), settings(recipe)) == own, "the last one is the recipe"
    assert rungs[0] == dataclasses.replace(as_published(rungs[-1]), name=names[0]), "the first is as published"
    for name, before, after in zip(names[1:], rungs, rungs[1:], strict=False):
        words = {setting.partition("=")[0] for setting in LADDER[name.split("-")[2]]}
        differences = set(changed(settings(before), settings(after)))
        assert differences and differences <= words | {"model.loss.future_token_anchor"}
        assert config_from_json(config_to_json(after)) == after
    loss = rungs[0].model.loss
    assert (loss.multi_token_weight, loss.future_token_weight, loss.future_token_anchor) == (1.0, 1.0, 100)
    assert rungs[0].data.max_length > loss.future_token_anchor, "every loss has something to predict"


def test_recipes_of_a_question_differ() -> None:
    for question in ALLOWED:
        configs = [settings(find_recipe(name)) for name in NAMES if name.split("-")[1] == question]
        assert len(configs) >= 4
        assert all(one != other for place, one in enumerate(configs) for other in configs[:place])


def test_the_base_is_the_datasets_recipe_made_small() -> None:
    small = ("model.width", "model.backbone.num_layers", "model.request_time", "training.steps",
             "training.checkpoint_every")  # fmt: skip
    published = ("model.backbone.kind", "model.backbone.positions", "model.loss.later_negatives")
    next_alone = ("model.loss.multi_token_weight", "model.loss.multi_token_window")
    fit = ("model.maps", "model.tables.dim", "model.dropout")
    assert set(changed(settings(ml_1m_base("base")), settings(ml_1m()))) <= {*small, *published, *next_alone, *fit}
    assert set(changed(settings(deskdrop_base("base", ())), settings(deskdrop()))) <= set(small)
    for config in (ml_1m_base("base"), deskdrop_base("base", ())):
        assert not config.model.request_time
        assert config.training.checkpoint_every == config.training.steps, "judged at the end of its schedule"


def test_losses_add_up() -> None:
    weights = [
        (config.model.loss.multi_token_weight, config.model.loss.future_token_weight)
        for config in map(find_recipe, ("ablation-losses-next", "ablation-losses-multi", "ablation-losses-all"))
    ]
    assert weights == [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]


def test_negatives_exist_in_every_recipe() -> None:
    for name in NAMES:
        config = find_recipe(name)
        assert config.model.loss.in_batch_negatives or config.data.uniform_negatives
    assert find_recipe("ablation-negatives-all").data.uniform_negatives >= ml_1m().data.uniform_negatives


def test_saves_are_positives_everywhere() -> None:
    for name in NAMES:
        actions = find_recipe(name).data.positive_actions
        assert not actions or set(SAVES) <= set(actions)
