from __future__ import annotations

from collections.abc import Callable

import pytest

from tackboard.core.errors import DataError
from tackboard.events.dataset import Dataset
from tackboard.events.public.deskdrop import DESKDROP

HEADER = "timestamp,eventType,contentId,personId,sessionId,userAgent,userRegion,userCountry\n"
ROWS = (
    "1470000123,VIEW,-1234567890123456789,-9000000000000000001,1111111111111111111,,,\n"
    '1470000123,COMMENT CREATED,5,-9000000000000000001,7,"Mozilla/5.0 (X11, like Gecko)",NY,US\n'
)


def test_actions_times_and_fields(import_tiny: Callable[..., Dataset]) -> None:
    dataset = import_tiny(DESKDROP, {"users_interactions.csv": HEADER + ROWS}, (1, 2, 2))
    assert dataset.fields == {"session": "int", "user_agent": "string", "region": "string", "country": "string"}
    names = ["user", "item", "action", "time_ms", "session", "user_agent", "country"]
    rows = [tuple(row.values()) for row in dataset.read_events(names).to_pylist()]
    user, time_ms = -9000000000000000001, 1_470_000_123_000
    assert rows == [
        (user, -1234567890123456789, "view", time_ms, 1111111111111111111, None, None),
        (user, 5, "comment_created", time_ms, 7, "Mozilla/5.0 (X11, like Gecko)", "US"),
    ]


def test_another_csv_is_refused(import_tiny: Callable[..., Dataset]) -> None:
    with pytest.raises(DataError, match="not deskdrop as published"):
        import_tiny(DESKDROP, {"users_interactions.csv": HEADER.replace("personId", "person") + ROWS}, (1, 2, 2))
