from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def test_an_old_store_gets_its_checksums_once(tackboard: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "users.db"
    shutil.copy(GOLDEN / "sequences-v1.db", path)
    answer = tackboard("sequences", "retain", path, "--days", "9")
    assert answer.code == 2 and f"tackboard sequences migrate {path}" in answer.err
    assert "has no checksums" in tackboard("verify", path).out
    answer = tackboard("sequences", "migrate", path)
    assert answer.code == 0 and "format version 2 now: 2 users, 30 events" in answer.out
    assert tackboard("sequences", "migrate", path, "--json").json() == {"store": str(path), "is_changed": False}
    assert "nothing was changed" in tackboard("sequences", "migrate", path).out
    assert tackboard("verify", path).out == f"{path}: sequence store intact, 2 users, 30 events\n"
