"""The online executor: one request, the user's side once, attributes from tables or from the caller."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.features.column import Column, differing_rows
from tackboard.features.entities import Context, Events, Float, Int, Item, Request, String, User
from tackboard.features.entity_tables import EntityTable
from tackboard.features.expressions import concat, cross, days, milliseconds
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.operators import REGISTRY
from tackboard.features.plan import compile_features
from tackboard.features.types import FLOAT, ID, INT, STRING, TIME

item = Item(price=Float(default=0.5), title=String)
user = User(country=String)
events = Events(dwell_ms=Int)
context = Context(device=String(default="none"))
HISTORY = {
    "time": Column.of(TIME, [0, 5, 9]),
    "item": Column.of(ID, [1, 2, 1]),
    "action": Column.of(STRING, ["click", "save", "click"]),
    "dwell_ms": Column.of(INT, [3, None, 4]),
}
PLAN = compile_features(
    {
        "n": events.where(events.action == "click").count(),
        "same": events.matching(events.item, item.id).count(),
        "young": events.within(milliseconds(5)).sum(events.dwell_ms),
        "price": item.price.log1p(),
        "title": item.title.lower().fill_missing("?"),
        "text": concat(user.country.fill_missing("-"), context.device, item.title.fill_missing("")),
        "key": cross(user.id, item.id, Request().time),
    }
)
USERS = EntityTable(np.array([7]), {"country": Column.of(STRING, ["de"])})
ITEMS = EntityTable(np.array([1, 2]), {"price": Column.of(FLOAT, [1.0, None]), "title": Column.of(STRING, ["A", None])})
IDS = np.array([1, 2, 9])


def lists(found: dict[str, Column]) -> dict[str, list[Any]]:
    return {name: column.to_pylist() for name, column in found.items()}


def brought() -> dict[str, Any]:
    return {
        "user": {"country": Column.of(STRING, ["de"])},
        "item": {"price": Column.of(FLOAT, [1.0, None, None]), "title": Column.of(STRING, ["A", None, None])},
    }


def test_attributes_from_tables_and_from_the_caller_are_the_same() -> None:
    request: dict[str, Any] = {"history": HISTORY, "request_ms": 10, "user_id": 7, "item_ids": IDS}
    request["context"] = {"device": Column.of(STRING, [None])}
    from_tables = OnlineExecutor(PLAN, users=USERS, items=ITEMS).compute(**request)
    from_caller = OnlineExecutor(PLAN).compute(**request, **brought())
    mixed = OnlineExecutor(PLAN, items=ITEMS).compute(**request, user=brought()["user"])
    assert lists(from_tables)["n"] == [2] and lists(from_tables)["same"] == [2, 1, 0]
    assert lists(from_tables)["young"] == [4]
    assert lists(from_tables)["text"] == ["denoneA", "denone", "denone"]
    assert lists(from_tables)["title"] == ["a", "?", "?"]
    assert lists(from_tables)["price"] == [np.log1p(1.0), np.log1p(0.5), np.log1p(0.5)]
    for other in (from_caller, mixed):
        for name, column in from_tables.items():
            assert len(differing_rows(column, other[name])) == 0, name


def test_a_candidate_alone_is_a_candidate_among_thousands() -> None:
    executor = OnlineExecutor(PLAN, users=USERS, items=ITEMS)
    ids = np.random.default_rng(0).integers(0, 12, 3000)
    request: dict[str, Any] = {"history": HISTORY, "request_ms": 10, "user_id": 7}
    request["context"] = {"device": Column.of(STRING, ["phone"])}
    many = executor.compute(item_ids=ids, **request)
    for place in (0, 1, 2999):
        one = executor.compute(item_ids=ids[place : place + 1], **request)
        for name in ("same", "price", "title", "text", "key"):
            assert len(differing_rows(one[name], many[name].take(np.array([place])))) == 0


def test_no_candidates_no_history_unknown_user() -> None:
    executor = OnlineExecutor(PLAN, users=USERS, items=ITEMS)
    empty = {name: column.take(np.zeros(0, dtype=np.int64)) for name, column in HISTORY.items()}
    context_ = {"device": Column.of(STRING, ["phone"])}
    found = lists(executor.compute(history=empty, request_ms=10, user_id=8, context=context_))
    assert found == {"n": [0], "same": [], "young": [0], "price": [], "title": [], "text": [], "key": []}
    one = lists(executor.compute(history=empty, request_ms=10, user_id=8, item_ids=np.array([1]), context=context_))
    assert one["text"] == ["-phoneA"] and one["same"] == [0]


def test_the_users_side_is_computed_once() -> None:
    """However many candidates there are, kernels of the request's level see one row."""
    sizes: list[int] = []
    count = REGISTRY["count"].kernel

    def watched(frame: Any, view: Any) -> Column:
        sizes.append(len(view))
        return count(frame, view)

    object.__setattr__(REGISTRY["count"], "kernel", watched)
    try:
        plan = compile_features({"n": events.count(), "x": events.count() * item.id.bucket_hash(5)})
        found = OnlineExecutor(plan).compute(history=HISTORY, item_ids=np.arange(1000))
    finally:
        object.__setattr__(REGISTRY["count"], "kernel", count)
    assert sizes == [1] and len(found["n"]) == 1 and len(found["x"]) == 1000


def test_times_are_asked_for_only_where_they_matter() -> None:
    order_only = OnlineExecutor(compile_features({"last": events.last(events.item)}))
    assert lists(order_only.compute(history={"item": HISTORY["item"]})) == {"last": [1]}
    assert lists(order_only.compute(history={"item": HISTORY["item"].take(np.zeros(0, dtype=np.int64))})) == {
        "last": [None]
    }
    timed = OnlineExecutor(compile_features({"n": events.within(days(1)).sum(events.dwell_ms)}))
    with pytest.raises(UsageError, match="the history has no times"):
        timed.compute(history={"dwell_ms": HISTORY["dwell_ms"]}, request_ms=10)
    with pytest.raises(UsageError, match="depend on the time of the request"):
        timed.compute(history=HISTORY)


def test_versions_of_attributes_need_the_time() -> None:
    versions = EntityTable(np.array([1, 1]), {"title": Column.of(STRING, ["old", "new"])}, np.array([0, 10]))
    executor = OnlineExecutor(compile_features({"title": item.title}), items=versions)
    for moment, title in ((-1, None), (0, "old"), (9, "old"), (10, "new"), (2**63 - 1, "new")):
        assert lists(executor.compute(request_ms=moment, item_ids=np.array([1]))) == {"title": [title]}
    with pytest.raises(UsageError, match="attributes change with time"):
        executor.compute(item_ids=np.array([1]))


@pytest.mark.parametrize(
    ("part", "name"),
    [("user", "user.country"), ("item", "item.price"), ("context", "context.device"), ("history", "events.action")],
)
def test_what_the_request_does_not_bring_is_named(part: str, name: str) -> None:
    request: dict[str, Any] = {"history": HISTORY, "request_ms": 10, "user_id": 7, "item_ids": IDS} | brought()
    request["context"] = {"device": Column.of(STRING, ["phone"])}
    del request[part]
    if part == "history":
        request["history"] = {"time": HISTORY["time"]}
    with pytest.raises(DataError) as error:
        OnlineExecutor(PLAN).compute(**request)
    assert "(test_online_executor.py:" in error.value.got and f"{name} is not in the data" in error.value.got


@pytest.mark.parametrize("rows", [0, 1, 2, 4])
def test_columns_of_another_length_are_refused(rows: int) -> None:
    """One value for three candidates would otherwise be spread over them without a word."""
    executor = OnlineExecutor(compile_features({"a": item.price + 1}))
    with pytest.raises(UsageError) as error:
        executor.compute(item_ids=IDS, item={"price": Column.of(FLOAT, [1.0] * rows)})
    assert error.value.got == f"item.price has {rows} values" and error.value.allowed == "give 3 values"
    with pytest.raises(UsageError, match=r"user.country has 2 values"):
        OnlineExecutor(compile_features({"a": user.country})).compute(user={"country": Column.of(STRING, ["a", "b"])})
    with pytest.raises(UsageError, match=r"event.item has 2 values"):
        OnlineExecutor(compile_features({"a": events.last(events.item)})).compute(
            history={"time": HISTORY["time"], "item": Column.of(ID, [1, 2])}
        )


def test_many_threads_share_one_executor() -> None:
    executor = OnlineExecutor(PLAN, users=USERS, items=ITEMS)

    def ask(number: int) -> dict[str, Column]:
        device = {"device": Column.of(STRING, [f"d{number % 5}"])}
        ids = np.arange(number % 7)
        return executor.compute(history=HISTORY, request_ms=number, user_id=number % 9, item_ids=ids, context=device)

    alone = [ask(number) for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(60)))
    for one, other in zip(alone, together, strict=True):
        assert all(len(differing_rows(one[name], other[name])) == 0 for name in one)
