from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tackboard.events.sequence_store import create_store, open_store


def test_old_events_go(tackboard: Callable[..., Any], tmp_path: Path) -> None:
    path, now = tmp_path / "s.db", time.time_ns() // 1_000_000
    with create_store(path) as store:
        days = [20, 11, 9, 0]
        store.append(
            1, [{"item_id": d, "action": "a", "surface": "s", "time_ms": now - d * 86_400_000 + 60_000} for d in days]
        )
    assert tackboard("sequences", "retain", path, "--days", "10", "--json").json()["num_dropped"] == 2
    with open_store(path) as store:
        assert store.read(1, ["item_id"]).columns["item_id"].values.tolist() == [9, 0]
    assert tackboard("sequences", "retain", path, "--days", "10").out == "dropped 0\n"
    for wrong in ("0", "inf", "nan"):
        assert tackboard("sequences", "retain", path, "--days", wrong).code == 2
