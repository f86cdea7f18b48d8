"""Imports a user's own Python file: a recipe, a model, a set of features. Only files that the user names are run."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tackboard.core.errors import USER_MODULE_PREFIX, TackboardError, UsageError


def load_code(path: Path) -> ModuleType:
    """Imports a user's Python file under a name of its own; the same file is imported once.

    An error of ours that the file provokes (a feature that cannot be, say) comes through as it is.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file", allowed="allowed: path/to/file.py")
    source = str(path.resolve())
    name = f"{USER_MODULE_PREFIX}{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", allowed="allowed: path/to/file.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, TackboardError):
            raise
        raise UsageError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", fix=f"`python {path}` shows the same error"
        ) from error
    return module
