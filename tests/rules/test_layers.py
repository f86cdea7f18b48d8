"""The import contract of the architecture holds, and the contract itself is complete."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tackboard"
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
# id: (folders that must keep to it, folders and packages they may not see), built or not
FORBIDDEN = {
    "serving": (
        {"serve", "scoring"},
        {"data", "parallel", "checkpoint", "evaluation", "torchrec", "ray", "polars"},
    ),
    "no-torch": ({"core", "report", "events", "features", "bundle", "registry"}, {"torch"}),
    "no-torchrec": ({"models", "ops", "data", "checkpoint"}, {"torchrec"}),
}
FOLDERS = {
    "cli", "bench", "flow", "recipes", "train", "export", "serve", "scaling", "evaluation", "scoring", "parallel",
    "registry", "checkpoint", "bundle", "data", "models", "ops", "metrics", "batch", "features", "events", "report",
    "core",
}  # fmt: skip


def is_built(name: str) -> bool:
    return (PACKAGE / name / "__init__.py").is_file() or (PACKAGE / f"{name}.py").is_file()


def layer_names() -> list[str]:
    return [name.strip() for layer in CONTRACTS["layers"]["layers"] for name in layer.split("|")]


def test_imports_keep_to_the_contract() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()",
         "--no-cache", "--no-logo"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_layers_are_those_of_the_architecture() -> None:
    assert {name.strip("()") for name in layer_names()} == FOLDERS


def test_parentheses_stand_around_what_is_not_built() -> None:
    assert [name for name in layer_names() if name.startswith("(") == is_built(name.strip("()"))] == []


@pytest.mark.parametrize("contract_id", sorted(FORBIDDEN))
def test_forbidden_contracts_name_every_folder_that_exists(contract_id: str) -> None:
    sources, forbidden = FORBIDDEN[contract_id]
    contract = CONTRACTS[contract_id]
    assert set(contract["source_modules"]) == {f"tackboard.{name}" for name in sources if is_built(name)}
    expected = {f"tackboard.{name}" if name in FOLDERS else name for name in forbidden}
    assert set(contract["forbidden_modules"]) == {
        name for name in expected if not name.startswith("tackboard.") or is_built(name.removeprefix("tackboard."))
    }
