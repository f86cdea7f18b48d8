"""Describes a model's config as JSON, for a checkpoint or a bundle, and restores the config from the JSON.

The JSON says where the config's class is defined: in this package, or in a file of the user. Decided: code is never
taken from a bundle or a run. A bundle with a user's model loads only if the operator names the file with `--code`. A
run also loads without `--code` if the same user trained it: `train` records the file and its SHA-256 in a folder
outside the run (`core.trusted_code`), and the file must not have changed since.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tackboard.core.config import to_dict
from tackboard.core.errors import DataError, UsageError
from tackboard.core.progress import say
from tackboard.core.trusted_code import check_trusted
from tackboard.core.user_code import load_code, sha256_of_code
from tackboard.models.interface import ModelConfig

OWN_PREFIX = "tackboard.models."


def describe_model(config: ModelConfig) -> dict[str, Any]:
    """Returns a model config as JSON: its class, its values and, for a user's file, the SHA-256 of that file."""
    cls = type(config)
    description = {"config_class": f"{cls.__module__}:{cls.__qualname__}", "config": to_dict(config)}
    if not cls.__module__.startswith(OWN_PREFIX):
        module = sys.modules[cls.__module__]
        source = Path(str(module.__file__))
        description["config_class"] = f"{source.name}:{cls.__qualname__}"
        description["code_file"] = str(source.resolve())
        description["code_sha256"] = sha256_of_code(module)
    return description


def restore_config(description: dict[str, Any], code_file: Path | None = None, *, of_run: bool = False) -> ModelConfig:
    """Returns the config that `describe_model` described.

    A class outside this package is taken from `code_file`, which the operator named. Without `code_file`, the
    description of a run (`of_run`) may name the file, if this user's own training recorded that file and its SHA-256,
    and the file has not changed. In all other cases no code is run, and a UsageError says what to type.
    """
    try:
        place, _, name = str(description["config_class"]).partition(":")
        values = description["config"]
    except (KeyError, TypeError):
        raise DataError("the model description lacks config_class or config") from None
    if place.startswith(OWN_PREFIX):
        try:
            module: ModuleType = importlib.import_module(place)
        except ModuleNotFoundError:
            raise DataError(f"there is no model module {place}", fix="use a newer tackboard") from None
    elif code_file is not None:
        module = load_code(code_file)
        if sha256_of_code(module) != description.get("code_sha256"):
            say(f"warning: {code_file} is not the file that this model was trained with; scores may differ")
    elif of_run and "code_file" in description:
        recorded, sha256 = Path(str(description["code_file"])), str(description.get("code_sha256"))
        check_trusted(recorded, sha256)
        module = load_code(recorded, sha256)
    else:
        raise UsageError(
            f"the code of this model is in a user's file, {place}",
            allowed="code is never taken from a bundle",
            fix=f"name the file: --code {place}",
        )
    cls = getattr(module, name, None)
    is_config = isinstance(cls, type) and issubclass(cls, ModelConfig)
    if code_file is not None and not is_config and not place.startswith(OWN_PREFIX):
        raise UsageError(
            f"{code_file} has no config class {name}, which this model needs",
            allowed=f"the model was trained with a file called {place}",
            fix="name that file: --code FILE",
        )
    if cls is None or not is_config:
        raise DataError(
            f"{place} has no config class {name}",
            allowed="allowed: a frozen dataclass that derives from tackboard.models.interface.ModelConfig",
            fix="use the file this model was trained with",
        )
    return cls.from_stored(values)
