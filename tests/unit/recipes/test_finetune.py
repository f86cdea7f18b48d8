"""The recipes that fine-tune a ranker: each differs where its name says, and each can start from a run of `demo`."""

from __future__ import annotations

import dataclasses

import pytest

from tackboard.core.vocabulary import Vocabulary
from tackboard.models.interface import build_model
from tackboard.recipes.demo import demo
from tackboard.recipes.finetune import PINFM, RECIPES, VARIANTS, finetune
from tackboard.recipes.registry import find_recipe
from tackboard.train.config import RunConfig

VOCABULARY = Vocabulary(actions=("click", "save", "share", "hide"), surfaces=("home", "related", "search"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_the_parameters_of_the_pretrained_model(variant: str) -> None:
    config = find_recipe(f"finetune-{variant}")
    assert config.name == f"finetune-{variant}" and config.data.max_history == config.model.max_history
    shapes = {name: tuple(value.shape) for name, value in build_model(config.model, VOCABULARY).state_dict().items()}
    assert config.start.needs_run == (variant != "none")
    inside = {name.removeprefix(PINFM): shape for name, shape in shapes.items() if name.startswith(PINFM)}
    pretrained = build_model(demo().model, VOCABULARY).state_dict()
    assert inside == ({} if variant == "none" else {name: tuple(value.shape) for name, value in pretrained.items()})


def test_variants_differ_and_share_the_rest() -> None:
    configs = [recipe() for recipe in RECIPES.values()]
    assert len({str((config.model, config.optimizer)) for config in configs}) == len(configs)
    for config in configs:
        assert config.model.recent == configs[0].model.recent and config.model.features == configs[0].model.features
        assert config.model.head == configs[0].model.head and config.training == configs[0].training


def test_extra_losses_are_those_that_the_documentation_names() -> None:
    for variant, recipe in RECIPES.items():
        model = recipe().model
        expected = {
            "outputs": 1.0 if model.fusion.kind == "early" else 0.0,
            "alignment": 0.1 if model.fusion.content else 0.0,
            "next_token": 0.0,
            "agreement": 0.0,
        }
        if variant == "finetune-losses":
            expected |= {"next_token": 0.1, "outputs": 1.0, "agreement": 1.0}
        assert dataclasses.asdict(model.extra_loss) == expected, variant


@pytest.mark.parametrize("pretrained", ["demo", "ml-1m", "kakao-brunch", "deskdrop"])
def test_the_next_token_loss_learns_from_the_actions_of_pretraining(pretrained: str) -> None:
    base = find_recipe(pretrained)
    config = finetune("losses", base)
    assert config.data.positive_actions == base.data.positive_actions
    assert config.model.loss == dataclasses.replace(base.model.loss, in_batch_negatives=True)


def test_another_pretrained_model_may_be_inside() -> None:
    base = demo()
    model = type(base.model)(width=32, max_history=20)
    wide = RunConfig(name="wide", data=dataclasses.replace(base.data, max_length=20), model=model)
    config = finetune("content-token", wide)
    assert config.model.width == 32 and config.model.max_history == 18 == config.data.max_history
