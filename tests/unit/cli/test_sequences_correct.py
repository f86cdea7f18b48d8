from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.events.sequence_store import create_store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "s.db"
    with create_store(path) as opened:
        opened.append(1, [{"item_id": 1, "action": "odd", "surface": "s", "time_ms": 1, "received_ms": 1}])
    return path


def test_compare_then_correct(tackboard: Callable[..., Any], store: Path, tiny_dataset: Path) -> None:
    compared = tackboard("sequences", "correct", store, "--data", tiny_dataset, "--compare", "--json").json()
    assert compared["is_changed"] is False
    assert compared["actions"]["odd"] == {"missing": 0, "extra": 1, "different": 0}
    with open_store(store) as opened:
        assert opened.user_ids().tolist() == [1]
    answer = tackboard("sequences", "correct", store, "--data", tiny_dataset)
    assert answer.code == 0, answer.err
    assert f"{compared['num_changed_users']} of {compared['num_users']} users were corrected" in answer.out
    assert ["odd", "0", "1", "0"] in [line.split() for line in answer.out.splitlines()]
    again = tackboard("sequences", "correct", store, "--data", tiny_dataset, "--compare")
    assert again.out.startswith("0 of ") and len(again.out.splitlines()) == 1


def test_no_dataset(tackboard: Callable[..., Any], store: Path, tmp_path: Path) -> None:
    answer = tackboard("sequences", "correct", store, "--data", tmp_path / "nothing")
    assert answer.code == 3 and "holds no dataset" in answer.err
