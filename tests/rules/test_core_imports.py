"""Training and scoring import with torch, NumPy, pyarrow and safetensors alone; everything else is blocked here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = (
    "typer", "click", "rich", "uvicorn", "httptools", "orjson", "prometheus_client", "tritonclient", "gevent",
    "torchrec", "fbgemm_gpu", "ray", "redis", "triton", "polars", "pandas", "scipy", "matplotlib", "psutil",
)  # fmt: skip
PROGRAM = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

BLOCKED = set(sys.argv[2:])
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not found.name.endswith("_triton"):  # kernels, which only their chooser imports, on a GPU
            importlib.import_module(found.name)
assert BLOCKED.isdisjoint(name.partition(".")[0] for name in sys.modules)
"""


def test_imports_without_optional_packages() -> None:
    names = ",".join(f"tackboard.{name}" for name in ("batch", "data", "models", "ops", "train", "scoring"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, names, *BLOCKED],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "rich", "rich"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "rich is blocked" in done.stderr


def test_a_model_is_imported_without_the_log_and_the_feature_language() -> None:
    program = "import sys, tackboard.models.pinfm; print(*[n for n in sys.modules if n.startswith('tackboard.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    folders = {name.split(".")[1] for name in done.stdout.split()}
    assert folders == {"batch", "core", "models", "ops"}
