"""Where the hand-written rivals of `tackboard bench features` and `bench loader` are, and how they are started.

The rivals' code is in `benchmarks/rivals/` of a checkout, never in the package; their libraries are in `.rivals/venv`
(`make rivals`). Where either is absent a bench says so in one line and measures Tackboard alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tackboard.core.errors import TackboardError
from tackboard.core.processes import ask, last_json_object

SOURCE = Path(__file__).resolve().parents[2]
ROOT = SOURCE.parent
CODE = ROOT / "benchmarks" / "rivals"
PYTHON = ROOT / ".rivals" / "venv" / "bin" / "python"
NO_CODE = "not here: benchmarks/rivals is part of a checkout, not of the installed package"
NOT_INSTALLED = "not installed: make rivals"


def environment() -> dict[str, str]:
    """Variables of a contender's process: it finds this package, and `rivals` as a package of its own."""
    return {"PYTHONPATH": f"{SOURCE}:{CODE.parent}", "PYTHONWARNINGS": "ignore"}


def versions(python: Path, packages: Sequence[str]) -> dict[str, str] | str:
    """Versions of `packages` in the rivals' environment, or why there is nobody to compare with.

    Raises TackboardError where the environment is there and does not work.
    """
    if not CODE.is_dir():
        return NO_CODE
    if not python.exists():
        return NOT_INSTALLED
    code = f"import importlib.metadata as m, json\nprint(json.dumps({{n: m.version(n) for n in {tuple(packages)!r}}}))"
    done = ask([str(python), "-I", "-c", code])
    if done.code != 0:
        raise TackboardError(
            f"the rivals' environment {python} does not work: {done.reason}", fix="remove .rivals, then: make rivals"
        )
    return last_json_object(done.output)
