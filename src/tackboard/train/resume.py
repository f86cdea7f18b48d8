"""Finds the run to resume, and compares its settings with the present settings."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tackboard.checkpoint.store import Checkpoint, CheckpointStore, load_checkpoint
from tackboard.core.config import leaves, to_dict
from tackboard.core.errors import ConfigError
from tackboard.core.files import remove_leftovers
from tackboard.core.rundir import RunDirectory
from tackboard.parallel.training_world import TrainingWorld
from tackboard.train.config import RunConfig, config_to_json, with_model
from tackboard.train.continuation import with_instant

FREE_SETTINGS = frozenset(
    {"data.num_workers", "data.ray_address", "training.log_every", "training.checkpoint_every", "training.num_threads"}
)
"""Settings that do not change the result of a run; the number of threads changes only the rounding of sums."""


def changed_settings(before: dict[str, Any], now: RunConfig) -> list[str]:
    """Returns the names, as `--set` takes them, of settings that differ and decide a run's result.

    `before` is the recorded config of a run, perhaps of an older version. It is read by today's classes, which put
    moved settings in their new place and give missing settings their defaults. The defaults are right, because older
    versions behaved as today's defaults do.
    """
    wanted = config_to_json(now)
    # A config that today's classes cannot read is compared as it was recorded.
    with contextlib.suppress(ConfigError, KeyError, TypeError, ValueError):
        before = _in_todays_words(before, wanted, now)
    old, new = leaves(before), leaves(wanted)
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - FREE_SETTINGS
    # A run records a model as its class and its config, but `--set` takes model.width, not model.config.width.
    return sorted(key.replace("model.config.", "model.", 1) for key in changed)


def _in_todays_words(before: dict[str, Any], wanted: dict[str, Any], now: RunConfig) -> dict[str, Any]:
    """Returns `before` as today's version would record it. The model's class comes from `now`, so no code is loaded."""
    described = before["model"]
    if described["config_class"] != wanted["model"]["config_class"]:
        return before
    model = type(now.model).from_stored(described["config"])
    return config_to_json(with_model(before, model)) | {"model": described | {"config": to_dict(model)}}


def newest_checkpoint(
    store: CheckpointStore, world: TrainingWorld, known: Checkpoint | None = None
) -> Checkpoint | None:
    """Returns the newest intact checkpoint, the same in every process of `world`; None if there is none.

    `known` is an earlier result. It is not verified again if it is still the newest.
    """
    checkpoint = store.find_latest(known) if world.is_first else None
    path = world.from_first(checkpoint and checkpoint.path)
    if world.is_first or path is None:
        return checkpoint
    return known if known is not None and known.path == path else load_checkpoint(path)


def find_unfinished(runs: Path, config: RunConfig) -> tuple[RunDirectory | None, str]:
    """Returns (the newest unfinished run under `runs` with this config, or None; a sentence about the search).

    If `config` goes on with another run, the search ends at the newest finished run with these settings, because older
    unfinished runs belong to nights that are over.
    """
    remove_leftovers(runs)
    passed_over = ""
    # A run's name begins with a digit. If the run was killed while its folder was made, the name begins with a dot.
    for path in sorted(runs.glob(f"[0-9]*_{config.name}_*"), reverse=True):
        if not (path / "config.json").is_file():
            continue
        run = RunDirectory.open(path)
        is_done = run.status == "done"
        if is_done and not config.start.is_continued:
            continue
        changed = changed_settings(run.config, with_instant(config, run.config))
        if is_done and not changed:
            break
        if is_done:
            continue
        if not changed:
            return run, f"resuming {run.path}"
        passed_over = passed_over or f" ({path} is unfinished, but differs in {', '.join(changed)[:120]})"
    return None, f"nothing to resume in {runs} with these settings{passed_over}: starting a new run"
