from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from sequence_model import SMALL, Model, event

from tackboard.core.errors import DataError, UsageError
from tackboard.events.sequence_store.config import StoreConfig
from tackboard.events.sequence_store.engine import Appended
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.opening import open_store


def random_event(draw: random.Random, clock: int) -> dict[str, Any]:
    """An event around `clock`: mostly now, sometimes late, often like another in part."""
    time_ms = max(0, clock - draw.choice([0, 0, 0, 1, 3, 40, 200]))
    return event(
        time_ms,
        draw.randrange(3),
        received_ms=clock + draw.randrange(20),
        action=draw.choice(["click", "save", "häh"]),
        request=draw.choice([None, 7, -(2**63)]),
        dwell=draw.choice([None, 0.5, -0.0]),
        is_paid=draw.choice([None, True, False]),
        query=draw.choice([None, "", "rote Schuhe", "x" * 300]),
    )


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=[pytest.mark.slow]) for n in range(2, 30))])
def test_any_course_of_events_equals_the_plain_model(make_store: Any, seed: int) -> None:
    draw = random.Random(seed)
    store, model = make_store(), Model(SMALL.max_events)
    users, clock, sent = [3, -9, 2**62], 0, []
    for _ in range(60):
        clock += draw.choice([0, 1, 5])
        batch = [(draw.choice(users), random_event(draw, clock)) for _ in range(draw.choice([1, 1, 1, 2, 5, 30]))]
        if sent and draw.random() < 0.3:
            batch += draw.sample(sent, min(3, len(sent)))  # delivered twice
        sent += batch
        # What fell out at the cap and comes again is old; the model must not mistake it for new.
        batch = [(u, e) for u, e in batch if len(model.read(u)) < 50 or e["time_ms"] > model.read(u)[0]["time_ms"]]
        if not batch:
            continue
        answer = store.append_many([user for user, _ in batch], [one for _, one in batch])
        num_duplicates = sum(model.append(user, [e for u, e in batch if u == user]) for user in users)
        assert answer == Appended(len(batch) - num_duplicates, num_duplicates)
        user = draw.choice(users)
        assert store.read(user).rows() == model.read(user)
        query: dict[str, Any] = {
            "last": draw.choice([None, 1, 4, 13, 100]),
            "since_ms": draw.choice([None, clock - 30]),
            "until_ms": draw.choice([None, clock - 5]),
            "received_before_ms": draw.choice([None, clock, clock - 20]),
        }
        assert store.read(user, **query).rows() == model.read(user, **query)
        some = store.read(user, ["query", "item_id"], **query).rows()
        assert some == [{"query": e["query"], "item_id": e["item_id"]} for e in model.read(user, **query)]
    together = store.read_many([*users, 4444, users[0]], last=20)
    for row, user in enumerate([*users, 4444, users[0]]):
        first, end = together.offsets[row : row + 2]
        assert together.rows()[first:end] == model.read(user, last=20)
    assert store.user_ids().tolist() == sorted(model.users)


def test_out_of_order_events_land_in_order_and_ties_keep_their_arrival(store: SequenceStore) -> None:
    for number, time_ms in enumerate([50, 20, 50, 90, 20, 50, 70, 10, 20, 90]):
        store.append(1, [event(time_ms, number)])
    found = store.read(1, ["time_ms", "item_id"]).columns
    assert found["time_ms"].values.tolist() == [10, 20, 20, 20, 50, 50, 50, 70, 90, 90]
    assert found["item_id"].values.tolist() == [7, 1, 4, 8, 0, 2, 5, 6, 3, 9]


def test_a_duplicate_is_dropped_whenever_it_was_received(store: SequenceStore) -> None:
    events = [event(number, number) for number in range(30)]
    assert store.append(1, events) == Appended(30)
    again = [{**one, "received_ms": 9999} for one in events]
    assert store.append(1, again) == Appended(0, 30)
    assert store.append(1, [again[3], event(3, 99), event(3, 99)]) == Appended(1, 2)
    assert store.read(1).columns["received_ms"].values.max() == 29


def test_the_cap_keeps_the_newest(store: SequenceStore) -> None:
    for start in range(0, 200, 5):
        store.append(1, [event(time_ms, time_ms) for time_ms in range(start, start + 5)])
        held = store.read(1, ["time_ms"]).columns["time_ms"].values
        assert held.tolist() == list(range(max(0, start - 45), start + 5))
    assert store.stats()["num_events"] == 50
    assert store.read(1, ["time_ms"], until_ms=151).columns["time_ms"].values.tolist() == [150]


def test_the_cap_is_a_setting_and_16000_by_default(make_store: Any) -> None:
    store = make_store(StoreConfig())
    assert store.config.max_events == 16_000
    total = 17_500
    ids = np.arange(total)
    from tackboard.events.sequence_store.values import Values, object_array

    name = Values(np.zeros(total, dtype=np.int64), None, object_array(["view"]))
    store.append(
        1, {"item_id": Values(ids), "action": name, "surface": name, "time_ms": Values(ids), "received_ms": Values(ids)}
    )
    assert store.read(1, ["item_id"]).columns["item_id"].values.tolist() == list(range(1500, total))


def test_what_a_request_could_have_seen(store: SequenceStore) -> None:
    # Received in another order than they happened: a request sees what had been received strictly before it.
    store.append(1, [event(number, number, received_ms=1000 + (number * 7) % 40) for number in range(40)])
    for moment in (1000, 1001, 1013, 1040):
        items = store.read(1, ["item_id"], received_before_ms=moment).columns["item_id"].values.tolist()
        assert items == [number for number in range(40) if 1000 + (number * 7) % 40 < moment]
        newest = store.read(1, ["item_id"], received_before_ms=moment, last=3).columns["item_id"].values.tolist()
        assert newest == items[-3:]


def test_unknown_users_have_no_events(store: SequenceStore) -> None:
    found = store.read_many([5, 6])
    assert found.offsets.tolist() == [0, 0, 0]
    assert found.rows() == []
    assert store.read_many([]).num_events == 0
    assert store.forget(5) == 0


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([event(-5)], "event 1 has time_ms -5"),
        ([event(1), event(1, received_ms=-1)], "event 2 has received_ms -1"),
        ([{"item_id": 1, "surface": "a", "time_ms": 1}], "event 1 has no action"),
        ([event(1, action="")], "empty action"),
        ([event(1, dwell="long")], "dwell 'long' of type str"),
        ([event(1, position=1.5)], "position '1.5' of type float"),
        ([event(1, is_paid=1)], "is_paid '1' of type int"),
        ([event(True)], "time_ms 'True' of type bool"),
        ([event(2**63)], "time_ms"),
        ([{**event(1), "dwel": 1.0}], "has a field 'dwel'"),
    ],
)
def test_wrong_events_are_refused_whole(store: SequenceStore, events: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(DataError, match=says):
        store.append(77_001, [event(0), *events])
    assert store.read(77_001).num_events == 0


def test_errors_never_name_the_user(store: SequenceStore) -> None:
    for call in (
        lambda: store.append(77_001, [event(-1)]),
        lambda: store.read(77_001, ["nothing"]),
        lambda: store.append("anna", [event(1)]),  # type: ignore[arg-type]
        lambda: store.append(2**63 + 77_001, [event(1)]),
    ):
        with pytest.raises((DataError, UsageError)) as caught:
            call()
        assert "77" not in str(caught.value) and "anna" not in str(caught.value)


def test_wrong_questions_are_refused(store: SequenceStore) -> None:
    with pytest.raises(UsageError, match="did you mean item_id"):
        store.read(1, ["item_idd"])
    with pytest.raises(UsageError, match="the last 0 events"):
        store.read(1, last=0)
    with pytest.raises(UsageError, match="no fields"):
        store.read(1, [])
    with pytest.raises(UsageError, match="1 user ids"):
        store.append_many([1], [event(1), event(2)])
    with pytest.raises(UsageError, match="retention is -1"):
        store.retain(-1)


def test_a_forgotten_user_is_gone_and_stays_gone(store: SequenceStore) -> None:
    events = [event(number, number) for number in range(30)]
    store.append(1, events)
    store.append(2, events)
    assert store.forget(1) == 30
    assert store.read(1).num_events == 0
    assert store.user_ids().tolist() == [2]
    # Old events, however they come: refused. The other user is untouched.
    assert store.append(1, events) == Appended(0, 0, 30)
    assert store.append_many([1, 2], [event(5, 5), event(99, 99)]) == Appended(1, 0, 1)
    assert store.append(1, [event(100), {**event(101), "received_ms": 2**60}]) == Appended(1, 0, 1)
    assert store.append(1, [{**event(102), "received_ms": None}]) == Appended(1)
    assert store.read(1, ["time_ms"]).columns["time_ms"].values.tolist() == [101, 102]
    assert store.stats()["num_forgotten_users"] == 1


def test_retention_in_days(store: SequenceStore) -> None:
    day = 24 * 3600 * 1000
    for user in range(5):
        store.append(user, [event(day * number // 2, number) for number in range(40)])
    store.append(9, [event(0)])
    assert store.retain(10, now=20 * day) == 5 * 20 + 1
    assert store.user_ids().tolist() == list(range(5))
    for user in range(5):
        assert store.read(user, ["item_id"]).columns["item_id"].values.tolist() == list(range(20, 40))
    assert store.retain(10, now=20 * day) == 0
    assert store.append(3, [event(day * 20, 40)]) == Appended(1, 0)


def test_another_process_sees_it(store: SequenceStore, place: str) -> None:
    store.append(1, [event(1, action="save")])
    with open_store(place) as other:
        assert other.read(1).rows() == [event(1, action="save")]
        other.append(1, [event(2, action="hide", query="später")])
        assert other.config == store.config
    assert store.read(1).rows() == [event(1, action="save"), event(2, action="hide", query="später")]


def test_a_read_becomes_a_history_of_the_feature_layer_without_a_copy(store: SequenceStore) -> None:
    from tackboard.features.column import Column, sequence_column
    from tackboard.features.entity_tables import EventTable
    from tackboard.features.types import ID, STRING, TIME

    for user in (1, 2):
        store.append(user, [event(n, n, action="save" if n % 2 else "click") for n in range(user * 10)])
    found = store.read_many([1, 2], ["item_id", "action", "time_ms", "received_ms"], last=12)
    types = {"item_id": ID, "action": STRING, "time_ms": TIME}
    scalars = {
        name: Column(type_, found.columns[name].values, dictionary=found.columns[name].dictionary)
        for name, type_ in types.items()
    }
    history = sequence_column(np.diff(found.offsets), **scalars)
    assert history.fields is not None and history.fields["item_id"].values is found.columns["item_id"].values
    assert history.to_pylist()[1]["action"] == ["click", "save"] * 6
    table = EventTable(
        user_ids=found.user_ids,
        offsets=found.offsets,
        times=found.columns["time_ms"].values,
        received=found.columns["received_ms"].values,
        columns={"item": scalars["item_id"], "action": scalars["action"]},
    )
    assert table.owners_of(np.array([2, 7, 1])).tolist() == [1, -1, 0]
