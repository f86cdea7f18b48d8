"""Every module has a test of the same name, and every unit test has a module."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tackboard"
UNIT = ROOT / "tests" / "unit"
WITHOUT_TEST = {"__init__", "__main__"}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.stem not in WITHOUT_TEST)
TESTS = sorted(path.relative_to(UNIT) for path in UNIT.rglob("test_*.py"))


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module_has_a_test(module: Path) -> None:
    assert (UNIT / module.parent / f"test_{module.name}").is_file()


@pytest.mark.parametrize("test", TESTS, ids=str)
def test_unit_test_has_a_module(test: Path) -> None:
    """`test_loader.py` and `test_loader_resume.py` both belong to `loader.py`."""
    folder = ROOT / test.parent if test.parts[0] == "scripts" else PACKAGE / test.parent
    name = test.stem.removeprefix("test_")
    modules = [path.stem for path in folder.glob("*.py")]
    assert any(name == module or name.startswith(module + "_") for module in modules)
