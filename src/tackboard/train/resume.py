"""Which run to take up again, and whether its settings are still the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tackboard.checkpoint.store import Checkpoint
from tackboard.checkpoint.trained import read_state
from tackboard.core.files import remove_leftovers
from tackboard.core.rundir import RunDirectory
from tackboard.data.source import snapshot_path

FREE_SETTINGS = frozenset(
    {"data.num_workers", "data.ray_address", "training.log_every", "training.checkpoint_every", "training.num_threads"}
)
"""Settings that change how a run works but not what it computes; threads change only how sums are rounded."""


ADDED_SETTINGS: dict[str, Any] = {
    "data.held_out": 1,
    "data.segments": "all",
    "data.uniform_negatives": 0,
    "data.window_buckets": 16,
    "model.config.backbone": "gpt",
    "model.config.future_token_anchor": 32,
    "model.config.future_token_weight": 0.0,
    "model.config.future_token_window": 8,
    "model.config.hashing.method": "mix",
    "model.config.in_batch_negatives": True,
    "model.config.later_negatives": False,
    "model.config.maps": "mlp",
    "model.config.multi_token_share": 0.25,
    "model.config.multi_token_weight": 0.0,
    "model.config.multi_token_window": 8,
    "model.config.positions": "learned",
    "model.config.request_time": False,
    "model.config.streaming_frequencies": False,
    "model.config.table_storage": "fp32",
    "model.config.time_bias": 0,
    "optimizer.schedule_steps": 0,
    "training.compile": "off",
    "training.precision": "fp32",
}
"""Settings that runs of older versions do not record, and what they did."""


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the settings that differ and decide a run's result, as `--set` takes them."""
    old, new = ADDED_SETTINGS | _leaves(before), ADDED_SETTINGS | _leaves(now)
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - FREE_SETTINGS
    # A run records a model as its class and its config; nobody sets model.config.width.
    return sorted(key.replace("model.config.", "model.", 1) for key in changed)


def find_unfinished(runs: Path, config: dict[str, Any]) -> tuple[RunDirectory | None, str]:
    """The newest unfinished run under `runs` with this config, or None, and a sentence that says what was found."""
    remove_leftovers(runs)
    passed_over = ""
    # A digit first: a run that was killed while it was created is a folder with a dot.
    for path in sorted(runs.glob(f"[0-9]*_{config['name']}_*"), reverse=True):
        if not (path / "config.json").is_file():
            continue
        run = RunDirectory.open(path)
        if run.status == "done":
            continue
        changed = changed_settings(run.config, config)
        if not changed:
            return run, f"resuming {run.path}"
        passed_over = passed_over or f" ({path} is unfinished, but with another {', '.join(changed)[:120]})"
    return None, f"nothing to resume in {runs} with these settings{passed_over}: a new run"


def snapshot_of(checkpoint: Checkpoint) -> Path:
    """The dataset snapshot that a checkpoint's run was started on; its dataset may have newer ones by now."""
    return snapshot_path(read_state(checkpoint.path)["lineage"])


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf
        for name, entry in value.items()
        for key, leaf in _leaves(entry, f"{path}.{name}" if path else name).items()
    }
