"""Folding: what depends on one entity alone is computed once over its table, and no bit changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core.errors import DataError
from tackboard.features.column import Column, differing_rows
from tackboard.features.entity_tables import EntityTable
from tackboard.features.execution import Program
from tackboard.features.feature_set import FeatureSet
from tackboard.features.folding import FoldedTable, IdIndex, fold
from tackboard.features.frame import Frame
from tackboard.features.language import Float, Int, Item, Request, String, Time, User, Vector, cross
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.plan import Plan
from tackboard.features.types import BOOL, FLOAT, ID, INT, STRING, TIME, FeatureType
from tackboard.features.views import no_events

item = Item(price=Float(minimum=0), brand=String(), views=Int(default=7), born=Time())
user = User(country=String())
request = Request()
FEATURES = FeatureSet(
    "folded",
    log_price=item.price.fill_missing(1.5).log1p(),
    brand=item.brand.strip().lower().fill_missing("none").hash_id(),
    views=item.views + 1,
    age_s=request.time.seconds_since(item.born),
    is_dear=(item.price > 10.0).fill_missing(False) & (item.id.bucket_hash(2) == 0),
    home=cross(user.country.fill_missing(""), item.brand.fill_missing("")),
    length=user.country.length(),
)
ITEMS = {
    "price": Column.of(FLOAT, [3.0, None, float("inf"), 12.25]),
    "brand": Column.of(STRING, [" Ä", "b", None, "Ä"]),
    "views": Column.of(INT, [None, 2, 3, 2**63 - 1]),
    "born": Column.of(TIME, [0, None, 5000, -1]),
}
IDS = np.array([-4, 10, 11, 2**62])
ASKED = np.array([11, 99, -4, 2**62, 10, 11, -5])
NOW_MS = 1_700_000_000_000


def items_of() -> EntityTable:
    return EntityTable(IDS, ITEMS)


def unfolded(plan: Plan) -> dict[str, Column]:
    """The features row by row, from attributes looked up first."""
    read = items_of().lookup(ASKED, None)
    defaults = {"views": 7}
    columns = {("item", name): read(name, defaults.get(name)) for name in ITEMS}
    columns["item", "id"] = Column.of(ID, ASKED.tolist())
    columns["user", "country"] = Column.of(STRING, ["de"])
    columns["request", "time"] = Column.of(TIME, [NOW_MS])
    frame = Frame(
        num_requests=1,
        num_candidates=len(ASKED),
        request_of=None,
        request_ms=np.array([NOW_MS]),
        event_times=np.zeros(0, dtype=np.int64),
        visible=no_events(1),
        columns=columns,
    )
    return Program(plan).run(frame)


def test_folding_changes_no_bit_for_known_and_unknown_ids() -> None:
    executor = OnlineExecutor(FEATURES.plan, items=items_of())
    folded = executor.compute(item_ids=ASKED, request_ms=NOW_MS, user={"country": Column.of(STRING, ["de"])})
    expected = unfolded(FEATURES.plan)
    assert folded.keys() == expected.keys()
    for name, column in expected.items():
        assert not len(differing_rows(folded[name], column)), name
    assert folded["log_price"].to_pylist()[1] == np.log1p(1.5)  # an unknown id reads the filled value
    assert folded["views"].to_pylist()[1] == 8  # and the declared default
    assert folded["age_s"].to_pylist()[1] is None


def test_what_is_left_reads_only_what_was_computed() -> None:
    plan, table = fold(FEATURES.plan, "item", items_of())
    read = {(node.params["entity"], node.params["column"]) for _, node in plan.sources()}
    assert {entity for entity, _ in read} == {"item", "user", "request"}
    assert {column for entity, column in read if entity == "item"} == {"id", *table.columns}
    assert all("@" in name for name in table.columns)
    ops = {node.op for node in plan.nodes}
    assert not ops & {"log1p", "strip", "lower", "add"}  # of items alone: done
    assert {"seconds_since", "cross", "bucket_hash", "length"} <= ops  # these need a request, a user or the id itself
    assert all(len(column) == len(IDS) + 1 for column in table.columns.values())


def test_users_fold_as_well_and_nothing_to_fold_leaves_the_plan() -> None:
    users = EntityTable(np.array([1, 2]), {"country": Column.of(STRING, ["de", None])})
    plan, table = fold(FEATURES.plan, "user", users)
    assert "length" not in {node.op for node in plan.nodes}
    assert len(next(iter(table.columns.values()))) == 3
    only_time = FeatureSet("t", hour=request.time.hour("UTC"))
    assert fold(only_time.plan, "item", items_of())[0] is only_time.plan


def test_a_value_out_of_range_names_the_feature_that_reads_it() -> None:
    one = {name: column.take(np.array([0])) for name, column in ITEMS.items()}
    table = EntityTable(np.array([1]), one | {"price": Column.of(FLOAT, [-1.0])})
    with pytest.raises(DataError, match=r"feature log_price and 1 more \(test_folding\.py:\d+\): item\.price is -1\.0"):
        OnlineExecutor(FEATURES.plan, items=table)


def test_an_empty_table_knows_nobody() -> None:
    nobody = np.zeros(0, dtype=np.int64)
    empty = EntityTable(nobody, {name: column.take(nobody) for name, column in ITEMS.items()})
    found = OnlineExecutor(FEATURES.plan, items=empty).compute(
        item_ids=ASKED, request_ms=NOW_MS, user={"country": Column.of(STRING, [None])}
    )
    assert found["views"].to_pylist() == [8] * len(ASKED)
    assert found["age_s"].to_pylist() == [None] * len(ASKED)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_ids_are_found_where_they_stand(known: list[int], others: list[int]) -> None:
    known.sort()
    asked = [*others, *known, 0, *range(40)]
    expected = [known.index(one) if one in known else len(known) for one in asked]
    assert IdIndex(np.array(known, dtype=np.int64)).places(np.array(asked, dtype=np.int64)).tolist() == expected


def test_ids_that_share_a_slot_are_found_too() -> None:
    ids = np.sort(np.random.default_rng(1).integers(-(2**62), 2**62, 5000))
    assert IdIndex(ids).places(ids[::-1]).tolist() == list(range(4999, -1, -1))


@pytest.mark.parametrize("valid_from", [None, np.array([0, 0, 5, 7])])
def test_a_request_reads_the_rows_that_a_lookup_gives(valid_from: np.ndarray | None) -> None:
    ids = np.array([1, 2, 2, 3]) if valid_from is not None else np.array([1, 2, 3, 4])
    columns = {
        "float": Column.of(FLOAT, [-0.0, None, float("nan"), 1.5, None]),
        "id": Column.of(ID, [1, 2, 3, -4, 5]),
        "bool": Column.of(BOOL, [True, None, False, True, None]),
        "string": Column.of(STRING, ["a", None, "", "a", None]),
        "vector": Column.of(FeatureType("vector", width=2, nullable=True), [[1, 2], None, [3, 4], [5, 6], None]),
        "list": Column.of(INT.in_list().with_nullable(True), [[1], [], None, [2, 3], None]),
    }
    table = FoldedTable(EntityTable(ids, {}, valid_from), columns)
    asked = np.array([3, 9, 1, 2, 2])
    one_by_one, at_once = table.lookup(asked, np.full(5, 6)), table.for_requests().read(asked, 6)
    assert at_once.keys() == columns.keys()
    for name, column in at_once.items():
        assert not len(differing_rows(column, one_by_one(name, None))), name
        assert column.values.flags.c_contiguous


def test_parts_of_an_item_are_computed_beforehand_whichever_tables_there_are() -> None:
    thing, person = Item(taste=Vector(2), brand=String()), User(taste=Vector(2), country=String())
    plan = FeatureSet(
        "parts",
        left=person.taste.cosine(thing.taste),
        right=thing.taste.cosine(person.taste),
        crossed=cross(person.country, thing.brand, "x"),
        brand=thing.brand.hash_id(),
    ).plan
    vector = FeatureType("vector", width=2, nullable=True)
    tastes = Column.of(vector, [[1.5, -2.0], [0.0, 0.0], None, [float("inf"), 1.0]])
    items = EntityTable(np.arange(4), {"taste": tastes, "brand": Column.of(STRING, ["a", None, "b", "a"])})
    users = EntityTable(np.arange(4), {"taste": tastes, "country": Column.of(STRING, ["de", "", None, "x"])})
    asked = np.array([3, 2, 1, 0, 7])
    ops = [node.op for node in fold(plan, "item", items)[0].nodes]
    assert "dot" not in ops
    assert ops.count("hash_id") == 2  # of the user's country and of the constant
    for user_id in range(5):
        given = {"user_id": user_id, "item_ids": asked}
        of_user, of_items = users.lookup(np.array([user_id]), None), items.lookup(asked, None)
        as_user = {name: of_user(name, None) for name in users.columns}
        as_items = {name: of_items(name, None) for name in items.columns}
        expected = OnlineExecutor(plan).compute(**given, user=as_user, item=as_items)
        for found in (
            OnlineExecutor(plan, items=items).compute(**given, user=as_user),
            OnlineExecutor(plan, users=users).compute(**given, item=as_items),
            OnlineExecutor(plan, users=users, items=items).compute(**given),
        ):
            for name, column in expected.items():
                assert not len(differing_rows(found[name], column)), name


def test_a_second_table_of_the_same_items_is_folded_too() -> None:
    counts = EntityTable(
        np.array([-4, 10, 10]), {"reads": Column.of(INT, [4, 1, 2])}, valid_from=np.array([0, NOW_MS, NOW_MS + 1])
    )
    own = Item(price=Float(), reads=Int())
    # Both tables are folded for the same feature, and at the same place in the plan.
    features = FeatureSet("two", rate=own.reads.fill_missing(0).log1p() * own.price.fill_missing(2.0).log1p())
    items = EntityTable(IDS, {"price": Column.of(FLOAT, [3.0, None, 7.0, 12.25])}, also=counts)
    executor = OnlineExecutor(features.plan, items=items)
    for later_ms, reads_of_10 in ((-1, 0), (0, 1), (5, 2)):
        found = executor.compute(item_ids=ASKED, request_ms=NOW_MS + later_ms)["rate"].to_pylist()
        reads, prices = [0, 0, 4, 0, reads_of_10, 0, 0], [7.0, 2.0, 3.0, 12.25, 2.0, 2.0, 2.0]
        expected = [np.log1p(count) * np.log1p(price) for count, price in zip(reads, prices, strict=True)]
        assert found == pytest.approx(expected, rel=1e-15)
