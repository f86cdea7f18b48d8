"""Checks that the processes of a run agree: each states its facts. If facts differ, all stop before the first step.

A fact has a name and a value in words, such as the hash of the code. Decided: each setting is a fact of its own, so the
message names the settings that differ. Rank, host and paths are not facts, because they may differ: hosts may mount the
same data at different places. Data is compared by its snapshot, features and code by their hashes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tackboard
from tackboard.core.config import leaves
from tackboard.core.errors import UsageError
from tackboard.parallel.training_world import TrainingWorld, named

SETTING = "setting "
"""The name of a fact about a setting begins with this word."""
LOCAL_SETTINGS = frozenset({"data.dataset", "data.features", "data.num_workers", "start.run", "model.code_file"})
"""Settings that hold a path or belong to one host. The data, the features and the code have facts of their own."""
PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
REMEDIES = {
    "settings": "start every process with the same recipe and the same --set",
    "tackboard's code": "install the same version of tackboard on every host",
    "the data snapshot": "give every process the same snapshot as data.dataset",
    "the world size": "set the same WORLD_SIZE in the environment of every process",
    "the device": "give every process the same kind of device, or set training.device",
}
SAME_PACKAGES = "install the packages of the same lock file on every host: make distributed"
FACTS_SHOWN = 3
PRINT_FIRST_S = 0.5
"""Seconds that the other processes wait, so that process 0 prints its error first. A launcher that sees one process end
ends the others at once."""


def run_facts(world: TrainingWorld, config: Mapping[str, Any], snapshot: str, **more: str) -> dict[str, str]:
    """Returns the facts of this process. `config` is the run's config in JSON; `more` are facts that a caller adds."""
    settings = {name: json.dumps(value) for name, value in leaves(dict(config)).items() if name not in LOCAL_SETTINGS}
    # A run records a model as its class and its config, but `--set` takes model.width, not model.config.width.
    settings = {name.replace("model.config.", "model.", 1): value for name, value in settings.items()}
    return {
        "the world size": str(world.size),
        **{SETTING + name: value for name, value in settings.items()},
        "tackboard's code": code_hash(),
        "the data snapshot": snapshot,
        "the version of python": platform.python_version(),
        **{f"the version of {name}": _version(name) for name in PACKAGES},
        "the device": world.device.type,
        **{name.replace("_", " "): value for name, value in more.items()},
    }


def check_agreement(world: TrainingWorld, facts: Mapping[str, str]) -> None:
    """Raises UsageError in every process, with the same words, if the processes state different facts."""
    differing = differing_facts(world.gather(dict(facts)))
    if not differing:
        return
    told = [f"{name} is {values}" for name, values in differing.items()]
    more = f"; and {len(told) - FACTS_SHOWN} more" if len(told) > FACTS_SHOWN else ""
    kinds = dict.fromkeys("settings" if name.startswith(SETTING) else name for name in differing)
    error = UsageError(
        f"the processes do not agree: {'; '.join(told[:FACTS_SHOWN])}{more}",
        allowed="allowed: the same settings, code, data and versions in all processes",
        fix="; ".join(dict.fromkeys(REMEDIES.get(kind, SAME_PACKAGES) for kind in kinds)),
    )
    error.is_common = True
    if not world.is_first:
        time.sleep(PRINT_FIRST_S)
    raise error


def differing_facts(stated: list[dict[str, str]]) -> dict[str, str]:
    """Returns the facts that differ, by name: `3 in process 0, 4 in processes 1-3`. `stated` holds facts by rank."""
    found = {}
    for name in dict.fromkeys(name for facts in stated for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(stated):
            ranks.setdefault(facts.get(name, "not stated"), []).append(rank)
        if len(ranks) > 1:
            found[name] = ", ".join(f"{_short(value)} in {named(members, None)}" for value, members in ranks.items())
    return found


@functools.cache
def code_hash() -> str:
    """Returns the SHA-256 of the package's Python files and their names."""
    folder, digest = Path(tackboard.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        # A local suffix such as +cpu names the build. It is left out, because the device is a fact of its own.
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _short(value: str) -> str:
    """Returns a value short enough for a message. Hashes differ in their first digits."""
    return value if len(value) <= 40 else f"{value[:12]}…"
