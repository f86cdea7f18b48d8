from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tackboard.events.sequence_store import StoreConfig, create_store


def test_counts_settings_and_durability(tackboard: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with create_store(path, StoreConfig(fields={"dwell": "float"})) as store:
        store.append_many(
            [1, 2, 2], [{"item_id": 1, "action": "a", "surface": "s", "time_ms": n, "received_ms": n} for n in range(3)]
        )
        store.forget(1)
    found = tackboard("sequences", "stats", path, "--json").json()
    assert (found["num_users"], found["num_events"], found["num_forgotten_users"]) == (1, 2, 1)
    assert found["settings"]["max_events"] == 16_000 and found["num_bytes"] > 4096
    lines = [" ".join(line.split()) for line in tackboard("sequences", "stats", path).out.splitlines()]
    assert "fields dwell (float)" in lines and "max_events 16,000" in lines
    assert any("synchronous=full" in line for line in lines)
    assert tackboard("sequences", "stats", tmp_path).code == 2
