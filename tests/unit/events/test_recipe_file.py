from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.errors import UsageError
from tackboard.events.recipe_file import check_recipe_path, recipe_text, write_recipe

STATISTICS = {"num_events": 1234, "num_users": 10, "num_items_listed": 99, "actions": {"see": 0.9, '"buy"': 0.1}}


def test_the_recipe_is_python_that_calls_pretrain_recipe_with_the_sizes() -> None:
    assert call_of(STATISTICS) == {
        "dataset": 'data"sets/x',
        "num_items": 99,
        "num_events": 1234,
        "name": "x",
        "positive_actions": ('"buy"', "see"),
    }
    # One action is still a tuple, and very many mean all.
    assert call_of(STATISTICS | {"actions": {"see": 1.0}})["positive_actions"] == ("see",)
    many = {f"action {number}": 0.01 for number in range(100)}
    assert call_of(STATISTICS | {"actions": many})["positive_actions"] == ()


def call_of(statistics: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which the written recipe calls pretrain_recipe."""
    tree = ast.parse(recipe_text(Path("recipe.py"), 'data"sets/x', "x", statistics))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert function.name == "recipe"
    (call,) = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def test_an_existing_recipe_is_kept_unless_forced_and_other_paths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    write_recipe(path, "x = 1\n")
    with pytest.raises(UsageError, match="--force"):
        check_recipe_path(path, force=False)
    check_recipe_path(path, force=True)
    assert path.read_text() == "x = 1\n"
    with pytest.raises(UsageError, match=r"\.py"):
        check_recipe_path(tmp_path / "recipe.txt", force=False)
    with pytest.raises(UsageError, match="not a folder"):
        check_recipe_path(tmp_path / "no" / "recipe.py", force=False)
