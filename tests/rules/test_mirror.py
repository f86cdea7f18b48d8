"""Every module has a test of the same name, and every unit test has a module."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tackboard"
UNIT = ROOT / "tests" / "unit"
WITHOUT_TEST = {"__init__", "__main__"}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.stem not in WITHOUT_TEST)
TESTS = sorted(path.relative_to(UNIT) for path in UNIT.rglob("test_*.py"))


def has_a_module(test: Path) -> bool:
    """`test_loader.py` and `test_loader_resume.py` both belong to `loader.py`."""
    folder = ROOT / test.parent if test.parts[0] == "scripts" else PACKAGE / test.parent
    name = test.stem.removeprefix("test_")
    return any(name == path.stem or name.startswith(path.stem + "_") for path in folder.glob("*.py"))


def test_modules_have_tests_and_tests_have_modules() -> None:
    without_test = [module for module in MODULES if not (UNIT / module.parent / f"test_{module.name}").is_file()]
    assert not without_test, "no unit test: " + ", ".join(map(str, without_test))
    without_module = [test for test in TESTS if not has_a_module(test)]
    assert not without_module, "no module: " + ", ".join(map(str, without_module))
