"""Finds a recipe by its registered name, or by `path/to/file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from tackboard.core.config import did_you_mean
from tackboard.core.errors import UsageError
from tackboard.core.user_code import load_code
from tackboard.recipes import ablations, demo, finetune, public, published
from tackboard.train.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo": demo.demo,
    "demo-ranker": demo.demo_ranker,
    "ml-1m": public.ml_1m,
    "kakao-brunch": public.kakao_brunch,
    "deskdrop": public.deskdrop,
    "published": published.published,
    "published-small": published.published_small,
    **finetune.RECIPES,
    **ablations.RECIPES,
}


def find_recipe(name: str) -> RunConfig:
    """Returns the config of the recipe `name`."""
    config = _function(name)()
    if not isinstance(config, RunConfig):
        raise UsageError(f"{name} returned {type(config).__name__}", allowed="a recipe returns a RunConfig")
    return config


def _function(name: str) -> Callable[[], Any]:
    if name in RECIPES:
        return RECIPES[name]
    if ".py" not in name:
        shown = [recipe for recipe in RECIPES if not recipe.startswith("ablation-")]
        raise UsageError(
            f"there is no recipe {name!r}",
            allowed=f"allowed: {', '.join(shown)}, ablation-…, or path/to/file.py:recipe",
            fix=did_you_mean(name, RECIPES),
        )
    path, _, function = name.partition(":")
    module_of_user = load_code(Path(path))
    found = getattr(module_of_user, function or "recipe", None)
    if not callable(found):
        # Functions that the file only imports are not recipes of this file.
        functions = [
            key
            for key, value in vars(module_of_user).items()
            if isinstance(value, FunctionType) and value.__module__ == module_of_user.__name__ and key[0] != "_"
        ]
        raise UsageError(
            f"{path} has no function {function or 'recipe'!r}",
            allowed=f"it defines: {', '.join(functions)[:120] or 'no function'}",
            fix=did_you_mean(function or "recipe", functions, f"{path}:"),
        )
    return found
