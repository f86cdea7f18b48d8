"""Finds a recipe: by its name here, or as `path/to/file.py:function` in a user's file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from tackboard.core.config import suggest
from tackboard.core.errors import UsageError
from tackboard.core.user_code import load_code
from tackboard.train.config import RunConfig

RECIPES = {
    "demo": "tackboard.recipes.demo:demo",
    "demo-ranker": "tackboard.recipes.demo:demo_ranker",
    "ml-1m": "tackboard.recipes.public:ml_1m",
    "kakao-brunch": "tackboard.recipes.public:kakao_brunch",
    "deskdrop": "tackboard.recipes.public:deskdrop",
    **{
        f"ablation-{name}": f"tackboard.recipes.ablations:{name.replace('-', '_')}"
        for name in (
            *("losses-next", "losses-multi", "losses-multi-light", "losses-all"),
            *("rows-256", "rows-1024", "rows-4096", "rows-16384", "rows-plain"),
            *("length-eighth", "length-half", "length-base", "length-double"),
            *(
                "negatives-batch",
                "negatives-batch-corrected",
                "negatives-batch-streaming",
                "negatives-drawn",
                "negatives-mixed",
                "negatives-all",
            ),
            *("own-none", "own-later", "own-all", "own-later-multi"),
            *("positives-saves", "positives-saves-comments", "positives-saves-views", "positives-all"),
        )
    },
}


def find_recipe(name: str) -> RunConfig:
    """The config that the recipe `name` returns."""
    recipe = _function(name)
    config = recipe()
    if not isinstance(config, RunConfig):
        raise UsageError(f"{name} returned {type(config).__name__}", allowed="a recipe returns a RunConfig")
    return config


def _function(name: str) -> Callable[[], Any]:
    if name in RECIPES:
        module, _, function = RECIPES[name].partition(":")
        return getattr(importlib.import_module(module), function)
    if ".py" not in name:
        close = suggest(name, RECIPES)
        shown = [recipe for recipe in RECIPES if not recipe.startswith("ablation-")]
        raise UsageError(
            f"there is no recipe {name!r}",
            allowed=f"allowed: {', '.join(shown)}, ablation-…, or path/to/file.py:recipe",
            fix=f"did you mean {close}?" if close else "",
        )
    path, _, function = name.partition(":")
    module_of_user = load_code(Path(path))
    found = getattr(module_of_user, function or "recipe", None)
    if not callable(found):
        # What the file imports is no recipe of its own.
        functions = [
            key
            for key, value in vars(module_of_user).items()
            if isinstance(value, FunctionType) and value.__module__ == module_of_user.__name__ and key[0] != "_"
        ]
        close = suggest(function or "recipe", functions)
        raise UsageError(
            f"{path} has no function {function or 'recipe'!r}",
            allowed=f"it defines: {', '.join(functions)[:120] or 'no function'}",
            fix=f"did you mean {path}:{close}?" if close else "",
        )
    return found
