"""Finds the rivals (other tools) of `bench features` and `bench loader`, and the Python interpreter that runs them.

The code of the rivals is in `benchmarks/rivals/` of a checkout, never in the package. `make rivals` installs the
libraries that the rivals need in `.rivals/venv`. If the code or the libraries are missing, a bench prints one line and
measures Tackboard alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tackboard.core.errors import TackboardError
from tackboard.core.processes import ask, last_json_object
from tackboard.core.progress import say

SOURCE = Path(__file__).resolve().parents[2]
ROOT = SOURCE.parent
CODE = ROOT / "benchmarks" / "rivals"
PYTHON = ROOT / ".rivals" / "venv" / "bin" / "python"
NO_CODE = "missing: benchmarks/rivals is part of a checkout, not of the installed package"
NOT_INSTALLED = "not installed: make rivals"


def environment() -> dict[str, str]:
    """Returns environment variables with which a process can import this package and the package `rivals`."""
    return {"PYTHONPATH": f"{SOURCE}:{CODE.parent}", "PYTHONWARNINGS": "ignore"}


def versions(python: Path, packages: Sequence[str]) -> dict[str, str] | str:
    """Returns the versions of `packages` in the rivals' environment, or the reason why only Tackboard is measured.

    Raises TackboardError if the environment exists but does not work.
    """
    if not CODE.is_dir() or not python.exists():
        reason = NOT_INSTALLED if CODE.is_dir() else NO_CODE
        say(f"only our own figures are measured: the rivals are {reason}")
        return reason
    code = f"import importlib.metadata as m, json\nprint(json.dumps({{n: m.version(n) for n in {tuple(packages)!r}}}))"
    done = ask([str(python), "-I", "-c", code])
    if done.code != 0:
        raise TackboardError(
            f"the rivals' environment {python} does not work: {done.reason}", fix="remove .rivals, then: make rivals"
        )
    return last_json_object(done.output)
