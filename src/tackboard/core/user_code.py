"""Imports a user's own Python file: a recipe, a model, a set of features. Only files that the user names are run."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tackboard.core.errors import USER_MODULE_PREFIX, TackboardError, UsageError, line_of_user_code, one_line


def load_code(path: Path) -> ModuleType:
    """Imports a user's Python file under a name of its own; the same file is imported once.

    An error of ours that the file provokes (a feature that cannot be, say) comes through as it is. Any other, and
    `sys.exit` too, is a UsageError with the file's line.
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
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, TackboardError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _with_line(error, path, source) from error
    return module


def _with_line(error: BaseException, path: Path, source: str) -> UsageError:
    """An error of the user's code, with the line it came from and the file as the user named it."""
    what = f"{type(error).__name__}: {one_line(str(error))[:300]}"
    fix = f"`python {path}` shows the same error"
    place = line_of_user_code(error)
    if isinstance(error, SyntaxError) and error.filename:
        place, what = f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}"
    if place is None:
        return UsageError(f"{path} cannot be imported: {what}", fix=fix)
    if isinstance(error, SystemExit):
        fix = "the file is imported, so it must not end the program"
    return UsageError(f"{place.replace(source, str(path))} raised {what}", fix=fix)
