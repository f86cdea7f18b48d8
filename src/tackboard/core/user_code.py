"""Imports a user's own Python file, which defines a recipe, a model or a set of features.

The bytes of a file are read once, then hashed, compiled and run. Cached bytecode is neither read nor written. So a
checked hash is always the hash of the code that runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tackboard.core.errors import USER_MODULE_PREFIX, TackboardError, UsageError, line_of_user_code, one_line


def load_code(path: Path, sha256: str | None = None) -> ModuleType:
    """Imports a user's Python file under a unique name. A file is imported again only if its content has changed.

    If the SHA-256 of the file is not `sha256`, UsageError is raised and the file is not run. A TackboardError that the
    file causes (such as an impossible feature) is raised unchanged. Any other error, and `sys.exit`, becomes a
    UsageError that names the line, if the line is known.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file", allowed="allowed: path/to/file.py")
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file", allowed="allowed: path/to/file.py")
    source = str(path.resolve())
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise UsageError(
            f"{path} is not the file that this model was trained with",
            allowed="its SHA-256 differs from the recorded one, so it was not run",
            fix=f"if you changed the file on purpose, name it: --code {path}",
        )
    name = f"{USER_MODULE_PREFIX}{hashlib.sha256(f'{source} {digest}'.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__[_DIGEST] = digest
    sys.modules[name] = module
    try:
        exec(compile(content, source, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - intended
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, TackboardError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _with_line(error, path, source) from error
    return module


def sha256_of_code(module: ModuleType) -> str:
    """Returns the SHA-256 of a module's code. If Python itself imported the module, its file is hashed now."""
    return module.__dict__.get(_DIGEST) or hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()


_DIGEST = "__tackboard_sha256__"


def _with_line(error: BaseException, path: Path, source: str) -> UsageError:
    """Returns a UsageError for an error in user code. The message shows the line, and the path that the user gave."""
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
