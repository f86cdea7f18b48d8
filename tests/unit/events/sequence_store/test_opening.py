from __future__ import annotations

from pathlib import Path

import pytest

from tackboard.core.errors import UsageError
from tackboard.events import sequence_store
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.opening import create_store, open_store, store_exists


def test_a_store_is_made_once_and_opened_often(place: str) -> None:
    assert not store_exists(place)
    with pytest.raises(UsageError, match="tackboard sequences append"):
        open_store(place)
    with create_store(place, StoreConfig(max_events=9)) as store:
        store.append(1, [{"item_id": 1, "action": "a", "surface": "s", "time_ms": 1}])
    assert store_exists(place)
    with pytest.raises(UsageError, match="already"):
        create_store(place)
    with open_store(place) as store:
        assert store.config.max_events == 9
        assert store.read(1).num_events == 1
        assert store.stats()["num_users"] == 1


def test_other_addresses_are_refused() -> None:
    with pytest.raises(UsageError, match="a store cannot be at mysql://"):
        open_store("mysql://user:secret@host/db")
    with pytest.raises(UsageError, match="synchronous is 'off'"):
        open_store(Path("nothing.db"), synchronous="off")


def test_the_package_offers_what_others_need() -> None:
    assert sequence_store.open_store is open_store
