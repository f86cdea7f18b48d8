"""`--help` answers at once: it imports neither torch nor Arrow nor Polars, nor anything else that is heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "pyarrow", "polars", "pandas", "numpy", "uvicorn", "tritonclient", "safetensors"}
MAX_SECONDS = 1.0
PROGRAM = """
import json, sys, time
started = time.process_time()
from tackboard.cli.main import run
try:
    run()
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code, "seconds": time.process_time() - started, "modules": sorted(sys.modules)}))
"""


def help_of(arguments: list[str]) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    "arguments", [[], ["train"], ["data", "synth"], ["features", "check"], ["serve"], ["doctor"]], ids=" ".join
)
def test_help_is_light(arguments: list[str]) -> None:
    answer = help_of(arguments)
    assert answer["code"] in (0, None)
    assert HEAVY.isdisjoint(answer["modules"])  # type: ignore[arg-type]
    # CPU time, because the machine may be busy with other tests.
    assert float(answer["seconds"]) < MAX_SECONDS  # type: ignore[arg-type]
