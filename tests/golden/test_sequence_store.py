"""A sequence store of each past format version is read today, and can be written to.

sequences-v1.db holds thirty events of two users, some in the buffer, some late, and one user who was forgotten.
"""

from __future__ import annotations

import shutil
from pathlib import Path

GOLDEN = Path(__file__).parent
START_MS = 1_700_000_000_000


def test_sequence_store_version_1(tmp_path: Path) -> None:
    from tackboard.events.sequence_store import open_store

    path = tmp_path / "sequences.db"
    shutil.copy(GOLDEN / "sequences-v1.db", path)
    with open_store(path) as store:
        assert store.config.fields == {"request": "string", "position": "int", "dwell": "float", "is_paid": "bool"}
        for user in (1, 2):
            numbers = sorted(range(user - 1, 30, 2), key=lambda n: n * 37 % 30)
            assert store.read(user).rows() == [
                {
                    "item_id": n * 10**15,
                    "action": ["view", "save", "hide"][n % 3],
                    "surface": "home",
                    "time_ms": START_MS + (n * 37 % 30) * 60_000,
                    "received_ms": START_MS + n * 60_000 + 5,
                    "request": None if n % 5 == 0 else f"r{n // 3}",
                    "position": None if n % 4 == 0 else n % 7,
                    "dwell": n / 4,
                    "is_paid": n % 6 == 0,
                }
                for n in numbers
            ]
        event = {"item_id": 1, "action": "view", "surface": "home", "time_ms": START_MS, "received_ms": START_MS}
        assert store.append(3, [event]).num_forgotten == 1, "who was forgotten stays forgotten"
        assert store.append(1, [event]).num_events == 1
