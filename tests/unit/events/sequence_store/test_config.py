from __future__ import annotations

from typing import Any

import pytest

from tackboard.core.errors import CorruptFileError, UsageError
from tackboard.events.sequence_store.config import StoreConfig


def test_settings_come_back() -> None:
    config = StoreConfig(fields={"request": "string", "dwell": "float"}, max_events=10)
    assert StoreConfig.from_json(config.to_json()) == config
    assert list(config.columns) == ["item_id", "action", "surface", "time_ms", "received_ms", "request", "dwell"]
    assert config.recent_limit == 10
    with pytest.raises(CorruptFileError):
        StoreConfig.from_json('{"max_evnts": 3}')


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fields": {"Dwell": "int"}}, "a field is named 'Dwell'"),
        ({"fields": {"time_ms": "int"}}, "a field is named 'time_ms'"),
        ({"fields": {"dwell": "double"}}, "allowed: int, float, bool, string"),
        ({"fields": {f"f{number}": "int" for number in range(61)}}, "61 fields"),
        ({"max_events": 0}, "max_events is 0"),
        ({"chunk_events": -1}, "chunk_events is -1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        StoreConfig(**settings)


def test_fields_are_looked_up() -> None:
    config = StoreConfig(fields={"dwell": "float"})
    assert config.require(["dwell", "item_id", "dwell"]) == ["dwell", "item_id"]
    with pytest.raises(UsageError, match="did you mean dwell"):
        config.require(["dwel"])
