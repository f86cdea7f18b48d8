"""Rules that read the code and the documentation belong to `make check`; commands of the documentation are tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.name.startswith("test_commands_of_a_page_run"):
            item.add_marker("rule")
