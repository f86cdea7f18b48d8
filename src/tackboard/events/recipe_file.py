"""This module makes the recipe that `init` writes, a short Python file with the path and the size of a dataset.

The file also has the settings that the log suggests. A comment above each setting gives the reason.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tackboard.core.errors import UsageError
from tackboard.core.files import write_text_atomic
from tackboard.events.checks.advice import Advice

_TEMPLATE = '''\
"""Pretrains on {name}: {num_events:,} events of {num_users:,} users on {num_items:,} items.

    tackboard train {file}:recipe

Any setting can be changed here or on the command line with --set; `tackboard train --help` says how.
"""

from tackboard.recipes.pretrain import pretrain_recipe
from tackboard.train.config import RunConfig


def recipe() -> RunConfig:
    # num_items decides the size of the embedding tables, and num_events decides the number of steps.
    return pretrain_recipe(
        dataset={dataset},
        num_items={num_items},
        num_events={num_events},
        name={quoted_name},
        # The actions that the model learns to predict. Leave out actions that show dislike, such as a hide.
        positive_actions={positive_actions},
        # The values below were chosen from the log.
{choices}
    )
'''
MAX_NAMED_ACTIONS = 20
"""If a log has more actions than this, the recipe does not list them and says `()`, which means all actions."""
LINE_LENGTH = 118


def recipe_text(path: Path, dataset: str, name: str, statistics: Mapping[str, Any], advice: Advice) -> str:
    """Returns the text of a recipe that will be written to `path`. `dataset` is the folder that holds `latest`."""
    actions = sorted(statistics["actions"])
    named = "".join(f"{json.dumps(action, ensure_ascii=False)}, " for action in actions)
    return _TEMPLATE.format(
        file=path.as_posix(),
        dataset=json.dumps(dataset),
        quoted_name=json.dumps(name),
        positive_actions=f"({named.rstrip()})" if len(actions) <= MAX_NAMED_ACTIONS else "()",
        name=name,
        num_events=statistics["num_events"],
        num_users=statistics["num_users"],
        num_items=statistics["num_items_listed"],
        choices=textwrap.indent(_choices(advice), " " * 8),
    )


def _choices(advice: Advice) -> str:
    """Returns the arguments of the recipe that were chosen from the log, each below the reason for its value."""
    lines = [*_comment(advice.filter_seen.reason), f"filter_seen={advice.filter_seen.value},"]
    lines += [*_comment(advice.split.reason), f'split="{advice.split.value}",']
    lines += [f'cut="{advice.cut}",'] if advice.cut else []
    lines += [*_comment(advice.uniform_negatives.reason), f"uniform_negatives={advice.uniform_negatives.value},"]
    lines += _comment(advice.retraining)
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_LENGTH - 8, initial_indent="# ", subsequent_indent="# ")


def check_recipe_path(path: Path, *, force: bool) -> None:
    """Raises UsageError if no recipe can be written to `path`. Call this before any work is done."""
    if path.suffix != ".py":
        raise UsageError(f"--recipe {path} is not a Python file", allowed="allowed: a path that ends in .py")
    if not path.parent.is_dir():
        raise UsageError(f"--recipe {path}: {path.parent} is not a folder", fix="make the folder first")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already", fix="choose another --recipe PATH, or add --force to replace it")


def write_recipe(path: Path, text: str) -> None:
    """Writes the recipe atomically."""
    write_text_atomic(path, text)
