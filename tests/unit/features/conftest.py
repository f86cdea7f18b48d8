"""A small dataset with everything that features can read: fields, contexts, attributes of users and items."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core.keyed_random import uniform
from tackboard.events.dataset import write_dataset

HOUR_MS = 3_600_000


def write_rich_dataset(root: Path, *, num_users: int = 9, name: str = "rich", **changes: Any) -> Path:
    """root/name: users with 3 to 14 events over 12 items; `changes` replace columns of the events (None: leave out)."""
    owners = np.repeat(np.arange(num_users), 3 + np.arange(num_users) % 12)
    draw = uniform(5, np.arange(len(owners))[:, None], np.arange(5))
    times = (draw[:, 0] * 40 * HOUR_MS).astype(np.int64)
    contexts = [
        None if chance < 0.2 else json.dumps({"device": "phone" if chance < 0.6 else "caf\u00e9", "slot": row % 4})
        for row, chance in enumerate(draw[:, 1])
    ]
    columns = {
        "user": pa.array(owners),
        "item": pa.array([f"i{int(value * 12)}" for value in draw[:, 2]]).dictionary_encode(),
        "action": pa.array(["click" if value < 0.6 else "hide" for value in draw[:, 3]]).dictionary_encode(),
        "surface": pa.array(["home"] * len(owners)).dictionary_encode(),
        "time_ms": pa.array(times),
        "received_ms": pa.array(times + (draw[:, 4] * HOUR_MS).astype(np.int64)),
        "order": pa.array(np.arange(len(owners))),
        "context": pa.array(contexts, pa.string()),
        "dwell_ms": pa.array([None if value < 0.3 else int(value * 9000) for value in draw[:, 4]], pa.int64()),
        "query": pa.array(_queries(len(owners))),
    }
    columns |= changes
    items = pa.table(
        {
            "item": pa.array([f"i{number}" for number in range(0, 12, 2)]),
            "price": pa.array([1.5, None, 0.0, 9.25, 3.0, 2.0]),
            "look": pa.array([[1.0, 0.5], None, [0.0, 0.0], [2.0, -1.0], [0.5, 0.5], [1.0, 1.0]]),
            "tags": pa.array([[1, 2], None, [], [3], [2], [9, 8, 7]], pa.list_(pa.int64())),
        }
    )
    users = pa.table({"user": pa.array([0, 1, 2]), "country": pa.array(["de", "fr", None])})
    table = pa.table({key: value for key, value in columns.items() if value is not None})
    write_dataset(root, name, table, item_attributes=items, user_attributes=users)
    return root / name


def _queries(num_rows: int) -> list[str | None]:
    return [(None, "a", "\u00e9", "e\u0301")[row % 4] for row in range(num_rows)]


@pytest.fixture
def rich_dataset(tmp_path: Path) -> Path:
    """datasets/rich, for one test alone."""
    return write_rich_dataset(tmp_path / "datasets")


@pytest.fixture(scope="session")
def make_rich_dataset() -> Callable[..., Path]:
    """`make_rich_dataset(root, dwell_ms=pa.array(…))` writes the dataset with other columns."""
    return write_rich_dataset
