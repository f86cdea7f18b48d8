from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tackboard.core.errors import UsageError
from tackboard.events.checks.advice import Advice, Choice
from tackboard.events.recipe_file import check_recipe_path, recipe_text, write_recipe

STATISTICS = {"num_events": 1234, "num_users": 10, "num_items_listed": 99, "actions": {"see": 0.9, '"buy"': 0.1}}
ADVICE = Advice(
    filter_seen=Choice(value=True, reason="Repeats are rare. " * 20),
    split=Choice(value="time", reason="Items come and go."),
    cut="0.9",
    uniform_negatives=Choice(value=0, reason="They do not pay."),
    retraining="Retrain every night.",
)


def test_the_recipe_is_python_that_calls_pretrain_recipe_with_the_sizes() -> None:
    assert call_of(STATISTICS) == {
        "dataset": 'data"sets/x',
        "num_items": 99,
        "num_events": 1234,
        "name": "x",
        "positive_actions": ('"buy"', "see"),
        "filter_seen": True,
        "split": "time",
        "cut": "0.9",
        "uniform_negatives": 0,
    }
    # One action is still a tuple, and very many mean all.
    assert call_of(STATISTICS | {"actions": {"see": 1.0}})["positive_actions"] == ("see",)
    many = {f"action {number}": 0.01 for number in range(100)}
    assert call_of(STATISTICS | {"actions": many})["positive_actions"] == ()


def test_the_reason_for_a_choice_is_a_comment_above_it() -> None:
    text = recipe_text(Path("recipe.py"), "datasets/x", "x", STATISTICS, ADVICE)
    assert max(map(len, text.splitlines())) <= 118
    lines = [line.strip() for line in text.splitlines()]
    begin, end = lines.index("# The values below were chosen from the log."), lines.index(")")
    comments = " ".join(line.removeprefix("# ") for line in lines[begin + 1 : lines.index("filter_seen=True,")])
    assert comments == ADVICE.filter_seen.reason.strip()
    assert lines[lines.index("filter_seen=True,") + 1 : end] == [
        "# Items come and go.",
        'split="time",',
        'cut="0.9",',
        "# They do not pay.",
        "uniform_negatives=0,",
        "# Retrain every night.",
    ]
    stable = dataclasses.replace(ADVICE, split=Choice(value="last", reason="Nothing changes."), cut="", retraining="")
    text = recipe_text(Path("recipe.py"), "datasets/x", "x", STATISTICS, stable)
    assert 'split="last",\n' in text and "cut=" not in text and "Retrain" not in text


def call_of(statistics: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which the written recipe calls pretrain_recipe."""
    tree = ast.parse(recipe_text(Path("recipe.py"), 'data"sets/x', "x", statistics, ADVICE))
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
