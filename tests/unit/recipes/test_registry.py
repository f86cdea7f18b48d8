"""Finding a recipe: by name, or in a user's file, with a sentence where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tackboard.core.errors import ConfigError, UsageError
from tackboard.recipes.demo import demo
from tackboard.recipes.registry import RECIPES, find_recipe

USER_FILE = """
import dataclasses
from tackboard.recipes.demo import demo

def recipe():
    return dataclasses.replace(demo(), name="mine")

def other():
    return dataclasses.replace(demo(), name="other")

def wrong():
    return {"name": "mine"}

def impossible():
    return dataclasses.replace(demo(), name="no/folder")

constant = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_recipes.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_every_registered_recipe_gives_a_config(name: str) -> None:
    assert find_recipe(name).name == name
    assert find_recipe("demo") == demo()


def test_recipes_of_a_users_file(user_file: Path) -> None:
    assert find_recipe(f"{user_file}:other").name == "other"
    assert find_recipe(str(user_file)).name == "mine"  # the function is called `recipe` where none is named


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dmeo", "did you mean demo"),
        ("{file}:absent", "it defines: recipe, other, wrong"),
        ("{file}:constant", "has no function 'constant'"),
        ("{file}:wrong", "returned dict"),
        ("{folder}/absent.py:recipe", "is not a file"),
    ],
)
def test_what_is_no_recipe_says_what_is(user_file: Path, name: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_recipe(name.format(file=user_file, folder=user_file.parent))
    assert expected in str(caught.value)


def test_a_recipe_with_an_impossible_config_says_which_setting(user_file: Path) -> None:
    with pytest.raises(ConfigError, match="name = 'no/folder'"):
        find_recipe(f"{user_file}:impossible")
