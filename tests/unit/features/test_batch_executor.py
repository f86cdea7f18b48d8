"""The batch executor: rows in any order, chunks of any size, the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.features import batch_executor
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column, differing_rows
from tackboard.features.entities import Context, Events, Float, Int, Item, Request, String, User
from tackboard.features.entity_tables import EntityTable, EventTable
from tackboard.features.expressions import Expression, concat, cross, milliseconds, pack, sequence
from tackboard.features.plan import Plan, compile_features
from tackboard.features.types import FLOAT, ID, INT, STRING, TIME

item = Item(price=Float, title=String)
user = User(country=String)
events = Events(value=Float)
context = Context(device=String(default="none"), depth=Int)
recent = events.newest(2)
FEATURES: dict[str, Expression] = {
    "n": events.count(),
    "same": events.matching(events.item, item.id).count(),
    "young": events.matching(events.item, item.id).within(milliseconds(20)).sum(events.value),
    "last": events.last(events.action),
    "top": events.top(events.action, 2),
    "history": sequence(item=recent.collect(events.item), action=recent.collect(events.action)),
    "text": concat(user.country.fill_missing("?"), item.title.fill_missing("?"), context.device),
    "key": cross(user.id, item.id),
    "vector": pack(events.count(), item.price),
    "price": item.price.fill_missing(0.0).log1p(),
    "constant": pack(1, 2),
    "time": Request().time,
}


def tables(num_users: int = 6) -> dict[str, Any]:
    pick = np.random.default_rng(3)
    counts = pick.integers(1, 9, num_users)
    times = np.concatenate([np.sort(pick.integers(0, 100, count)) for count in counts])
    total = len(times)
    actions = Column.of(STRING, [("click", "save", "é", "e\u0301")[number] for number in pick.integers(0, 4, total)])
    return {
        "events": EventTable(
            user_ids=np.arange(num_users) * 10,
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            times=times,
            received=times + pick.choice([0, 0, 30], total),
            columns={
                "item": Column(ID, pick.integers(0, 4, total)),
                "action": actions,
                "value": Column.of(FLOAT, [None if number < 0.2 else float(number) for number in pick.random(total)]),
                "time": Column(TIME, times),
            },
        ),
        "users": EntityTable(np.array([0, 20, 40]), {"country": Column.of(STRING, ["de", None, "fr"])}),
        "items": EntityTable(
            np.array([0, 1, 3]),
            {"price": Column.of(FLOAT, [1.0, None, 3.0]), "title": Column.of(STRING, ["a", "b", None])},
        ),
    }


def some_rows(seed: int, num_requests: int = 40, candidates: tuple[int, ...] = (0, 1, 5)) -> RequestRows:
    pick = np.random.default_rng(seed)
    counts = pick.choice(candidates, num_requests)
    return RequestRows(
        user_ids=pick.choice([0, 10, 20, 30, 50, 99], num_requests),
        request_ms=pick.integers(0, 130, num_requests),
        item_ids=pick.integers(0, 6, int(counts.sum())),
        request_of=np.repeat(np.arange(num_requests), counts),
        context={
            "device": Column.of(STRING, [("phone", None)[number % 2] for number in range(num_requests)]),
            "depth": Column.of(INT, [None] * num_requests),
        },
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_features(FEATURES)


def assert_same(one: dict[str, Column], other: dict[str, Column]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert len(differing_rows(one[name], other[name])) == 0, name


@pytest.mark.parametrize("budget", [(1, 10**9), (10**9, 1), (5, 3), (40, 20)])
def test_chunks_of_any_size_give_the_same(budget: tuple[int, int], plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, rows = BatchExecutor(plan, **tables()), some_rows(1)
    whole = executor.compute(rows)
    assert len(list(executor.chunks(rows))) == 1
    monkeypatch.setattr(batch_executor, "EVENTS_PER_CHUNK", budget[0])
    monkeypatch.setattr(batch_executor, "CANDIDATES_PER_CHUNK", budget[1])
    chunks = list(executor.chunks(rows))
    assert len(chunks) > 3
    seen = np.concatenate([chosen for chosen, _ in chunks if chosen is not None])
    assert sorted(seen.tolist()) == list(range(40)), "every request is in one chunk"
    assert_same(whole, executor.compute(rows))


def test_chunks_keep_to_their_budget_unless_one_request_is_larger(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_executor, "CANDIDATES_PER_CHUNK", 4)
    rows = some_rows(2)
    counts = rows.candidate_counts()
    for chosen, columns in BatchExecutor(plan, **tables()).chunks(rows):
        assert chosen is not None and len(columns["same"]) == counts[chosen].sum()
        assert counts[chosen].sum() <= 4 or (counts[chosen] > 0).sum() == 1 or len(chosen) == 1


def test_order_and_repetition_of_requests_do_not_matter(plan: Plan) -> None:
    executor, rows = BatchExecutor(plan, **tables()), some_rows(4, candidates=(1,))
    whole = executor.compute(rows)
    order = np.random.default_rng(0).integers(0, 40, 90)
    assert rows.item_ids is not None
    mixed = executor.compute(
        RequestRows(
            user_ids=rows.user_ids[order],
            request_ms=rows.request_ms[order],
            item_ids=rows.item_ids[order],
            context={name: column.take(order) for name, column in rows.context.items()},
        )
    )
    assert_same({name: column.take(order) for name, column in whole.items()}, mixed)


def test_no_requests_and_no_candidates(plan: Plan) -> None:
    executor = BatchExecutor(plan, **tables())
    nothing = executor.compute(some_rows(5, num_requests=0))
    assert all(len(column) == 0 for column in nothing.values())
    few = executor.compute(some_rows(6, num_requests=3, candidates=(0,)))
    assert len(few["same"]) == 0 and len(few["n"]) == 3
    none = some_rows(7, num_requests=3, candidates=(0,))
    without = executor.compute(RequestRows(user_ids=none.user_ids, request_ms=none.request_ms, context=none.context))
    assert len(without["same"]) == 0 and len(without["n"]) == 3


def test_a_second_run_gives_the_same_though_tables_were_folded_in_between(plan: Plan) -> None:
    executor, small, large = BatchExecutor(plan, **tables()), some_rows(8, num_requests=1), some_rows(9)
    first = executor.compute(small)
    executor.compute(large)
    assert_same(first, executor.compute(small))


@pytest.mark.parametrize(
    ("item_ids", "request_of"),
    [([1, 2], [1, 0]), ([1, 2], [0]), ([1], [2]), ([1], [-1]), ([1], None), (None, [0])],
)
def test_candidates_fit_their_requests(item_ids: list[int] | None, request_of: list[int] | None) -> None:
    with pytest.raises(UsageError, match="candidates do not fit their requests"):
        RequestRows(
            user_ids=np.array([1, 2]),
            request_ms=np.array([1, 2]),
            item_ids=None if item_ids is None else np.array(item_ids),
            request_of=None if request_of is None else np.array(request_of),
        )


@pytest.mark.parametrize("missing", ["events", "users", "items"])
def test_a_table_that_is_not_there_is_named(missing: str, plan: Plan) -> None:
    with pytest.raises(DataError, match=r"feature \w+.* is not in the data"):
        BatchExecutor(plan, **(tables() | {missing: None})).compute(some_rows(1))


def test_a_column_that_is_not_there_is_named(plan: Plan) -> None:
    for name, column in (("events", "value"), ("items", "price"), ("users", "country")):
        held = tables()
        del held[name].columns[column]
        with pytest.raises(DataError, match=rf"\.{column} is not in the data"):
            BatchExecutor(plan, **held).compute(some_rows(1))
    with pytest.raises(DataError, match="context.device is not in the data"):
        rows = some_rows(1)
        BatchExecutor(plan, **tables()).compute(
            RequestRows(
                user_ids=rows.user_ids, request_ms=rows.request_ms, item_ids=rows.item_ids, request_of=rows.request_of
            )
        )
