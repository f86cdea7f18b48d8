"""Names that a package promises exist, and no module is called by a name that says nothing."""

from __future__ import annotations

import importlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "tackboard"
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc", "tools"}
PACKAGES = sorted(
    ".".join(("tackboard", *path.parent.relative_to(PACKAGE).parts)) for path in PACKAGE.rglob("__init__.py")
)


def test_promised_names_exist() -> None:
    for name in PACKAGES:
        module = importlib.import_module(name)
        promised = getattr(module, "__all__", [])
        assert len(set(promised)) == len(promised), name
        missing = [attribute for attribute in promised if not hasattr(module, attribute)]
        assert not missing, f"{name} lacks {missing}"


def test_module_names_say_something() -> None:
    named = {path for path in PACKAGE.rglob("*") if path.suffix in ("", ".py") and path.stem in EMPTY_NAMES}
    assert not named
