from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sequence_model import SMALL, event

from tackboard.core.errors import DataError
from tackboard.events.sequence_store.batch import (
    by_user,
    check_columns,
    columns_from_arrow,
    columns_of,
    local_names,
    now_ms,
    with_codes,
)
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.values import Values

PLAIN = StoreConfig(fields={"dwell": "float"})


def table(**changed: Any) -> pa.Table:
    columns = {
        "item_id": pa.array([1, 2]),
        "action": pa.array(["click", "save"]).dictionary_encode(),
        "surface": pa.array(["home", "home"]).dictionary_encode(),
        "time_ms": pa.array([5, 6]),
        "received_ms": pa.array([7, 8]),
        "dwell": pa.array([None, 0.5]),
    }
    return pa.table({**columns, **changed})


def test_plain_events_become_columns() -> None:
    columns = columns_of([event(1, 9, dwell=2), event(2, action="save", query="q")], SMALL)
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "item_id": [9, 1],
        "action": ["click", "save"],
        "surface": ["home", "home"],
        "time_ms": [1, 2],
        "received_ms": [1, 2],
        "request": [None, None],
        "position": [None, None],
        "dwell": [2.0, None],
        "is_paid": [None, None],
        "query": [None, "q"],
    }


def test_an_event_without_received_ms_was_received_now() -> None:
    before = now_ms()
    columns = columns_of([{"item_id": 1, "action": "a", "surface": "s", "time_ms": 1}], PLAIN)
    assert before <= columns["received_ms"].values[0] <= now_ms()
    assert columns["dwell"].to_pylist() == [None]


def test_arrow_and_plain_events_agree() -> None:
    plain = columns_of(
        [
            {"item_id": 1, "action": "click", "surface": "home", "time_ms": 5, "received_ms": 7},
            {"item_id": 2, "action": "save", "surface": "home", "time_ms": 6, "received_ms": 8, "dwell": 0.5},
        ],
        PLAIN,
    )
    found = columns_from_arrow(table(more=pa.array([1, 2])), PLAIN)
    assert {n: c.to_pylist() for n, c in found.items()} == {n: c.to_pylist() for n, c in plain.items()}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dwell": pa.array([1, 2])}, "dwell is int64"),
        ({"item_id": pa.array([1, None])}, "1 events have no item_id"),
        ({"time_ms": pa.array([1, -2])}, "event 1 has time_ms -2"),
        ({"action": pa.array([1, 2])}, "action is int64"),
    ],
)
def test_wrong_tables_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        columns_from_arrow(table(**changed), PLAIN)
    with pytest.raises(DataError, match="no column dwell"):
        columns_from_arrow(table().drop_columns(["dwell"]), PLAIN)


def test_columns_of_a_caller_are_checked() -> None:
    columns = columns_from_arrow(table(), PLAIN)
    assert list(check_columns({**columns, "more": columns["dwell"]}, 2, PLAIN)) == list(PLAIN.columns)
    with pytest.raises(DataError, match="allowed: 3 of int64"):
        check_columns(columns, 3, PLAIN)
    with pytest.raises(DataError, match="do not have the column dwell"):
        check_columns({name: columns[name] for name in columns if name != "dwell"}, 2, PLAIN)
    with pytest.raises(DataError, match="values of int32"):
        check_columns({**columns, "item_id": Values(np.zeros(2, np.int32))}, 2, PLAIN)
    with pytest.raises(DataError, match="a dictionary for strings"):
        check_columns({**columns, "action": Values(np.zeros(2, np.int64))}, 2, PLAIN)
    with pytest.raises(DataError, match="1 events have no time_ms"):
        check_columns({**columns, "time_ms": Values(np.zeros(2, np.int64), np.array([True, False]))}, 2, PLAIN)


def test_events_are_grouped_by_user_in_their_order() -> None:
    groups = by_user(np.array([5, 3, 5, -1, 3, 5]))
    assert [(user, places.tolist()) for user, places in groups] == [(-1, [3]), (3, [1, 4]), (5, [0, 2, 5])]
    assert by_user(np.zeros(0, dtype=np.int64)) == []


def test_names_get_the_codes_of_the_store() -> None:
    columns = columns_from_arrow(table(), PLAIN)
    assert local_names(columns, "action") == ["click", "save"]
    coded = with_codes(columns, {"action": {"save": 7, "click": 4}, "surface": {"home": 1}})
    assert coded["action"].values.tolist() == [4, 7] and coded["surface"].values.tolist() == [1, 1]
