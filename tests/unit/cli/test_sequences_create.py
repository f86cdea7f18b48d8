from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.events.sequence_store import open_store


def test_a_store_with_declared_fields(tackboard: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    answer = tackboard("sequences", "create", path, "--field", "dwell=float", "--field", "request=string")
    assert answer.code == 0, answer.err
    with open_store(path) as store:
        assert store.config.fields == {"dwell": "float", "request": "string"} and store.config.max_events == 16_000
    again = tackboard("sequences", "create", path)
    assert again.code == 2 and "exists already" in again.err


@pytest.mark.parametrize("option", ["dwell", "dwell=double", "time_ms=int"])
def test_wrong_fields(tackboard: Callable[..., Any], tmp_path: Path, option: str) -> None:
    answer = tackboard("sequences", "create", tmp_path / "s.db", "--field", option)
    assert answer.code == 2 and len(answer.err.splitlines()) <= 3
    assert not (tmp_path / "s.db").exists()
