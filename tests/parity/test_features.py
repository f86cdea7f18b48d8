"""Batch executor, online executor and a slow reference agree, bit for bit, on data and features made to break them.

Each world has users, items, events and requests of its own, and a set of about 150 random features. The batch executor
computes all requests at once, whole and in small chunks; the online executor computes them one by one, with attributes
from a table or from the request; `feature_reference` computes them row by row in plain Python.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from feature_reference import interpret, same
from feature_worlds import Grower, World

from tackboard.features import batch_executor
from tackboard.features.batch_executor import BatchExecutor
from tackboard.features.column import Column, differing_rows, join_columns
from tackboard.features.feature_set import FeatureSet
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.operators import ABOUT_EVENTS, REGISTRY
from tackboard.features.plan import CANDIDATE, Plan

PARTS, SETS, WORLDS = 8, 3, 5


def grown_features(seed: int) -> FeatureSet:
    grower = Grower(seed)
    of_events = [name for name, operator in REGISTRY.items() if operator.family in ABOUT_EVENTS]
    for names in (sorted(REGISTRY), of_events, sorted(REGISTRY), of_events):
        grower.random.shuffle(names)
        for name in names:
            if name != "events":
                grower.grow(name)
    assert grower.refused > 100
    return grower.feature_set()


def compute_online(world: World, plan: Plan, seed: int) -> dict[str, Column]:
    """Every request alone; attributes come now from tables, now with the request."""
    with_tables = OnlineExecutor(plan, users=world.entity_table("user", plan), items=world.entity_table("item", plan))
    alone = OnlineExecutor(plan)
    parts = []
    for number, asked in enumerate(world.requests):
        brings = (number + seed) % 2 == 0
        parts.append(
            (alone if brings else with_tables).compute(
                history=world.history(asked),
                request_ms=asked.time,
                user_id=asked.user_id,
                item_ids=np.array(asked.item_ids, dtype=np.int64),
                user=world.attributes("user", [asked.user_id], asked.time) if brings else None,
                item=world.attributes("item", asked.item_ids, asked.time) if brings else None,
                context=world.context_columns([asked]),
            )
        )
    return {name: join_columns([part[name] for part in parts]) for name in plan.features}


def assert_equal(plan: Plan, name: str, what: str, one: Column, other: Column) -> None:
    rows = differing_rows(one, other)
    if len(rows):
        row = int(rows[0])
        left, right = (column.to_pylist()[row] if row < len(column) else "none" for column in (one, other))
        pytest.fail(
            f"{name}, row {row} of {len(one)}: {what}: {left!r} and {right!r}\n{plan.trimmed([name]).explain()}"
        )


def check_world(world: World, plan: Plan, stored: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of candidate rows compared."""
    tables: dict[str, Any] = {
        "events": world.event_table(plan),
        "users": world.entity_table("user", plan),
        "items": world.entity_table("item", plan),
    }
    rows = world.rows()
    executor = BatchExecutor(plan, **tables)
    batch = executor.compute(rows)
    pick = random.Random(seed)
    monkeypatch.setattr(batch_executor, "EVENTS_PER_CHUNK", pick.choice((1, 5, 30)))
    monkeypatch.setattr(batch_executor, "CANDIDATES_PER_CHUNK", pick.choice((1, 10, 1000)))
    chunked = executor.compute(rows)
    monkeypatch.undo()
    online = compute_online(world, stored, seed)
    reference = interpret(plan, world.facts, world.requests)
    for name, index in plan.features.items():
        expected = len(rows.item_ids) if plan.nodes[index].level == CANDIDATE else len(rows.user_ids)
        assert len(batch[name]) == expected
        assert batch[name].type.with_nullable(False) == plan.nodes[index].type.with_nullable(False)
        assert plan.nodes[index].type.nullable or batch[name].mask.all()
        assert_equal(plan, name, "whole and in chunks", batch[name], chunked[name])
        assert_equal(plan, name, "batch and online", batch[name], online[name])
        for row, (got, wanted) in enumerate(zip(batch[name].to_pylist(), reference[name], strict=True)):
            assert same(got, wanted), (
                f"{name}, row {row}: {got!r}, expected {wanted!r}\n{plan.trimmed([name]).explain()}"
            )
    return len(rows.item_ids)


def check_set(seed: int, num_worlds: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """One random set of features over several worlds; returns the number of candidate rows compared."""
    features = grown_features(seed)
    # What a server reads is the file, so the online executor gets what comes back from it.
    stored = FeatureSet.from_json(json.loads(json.dumps(features.to_json())))
    rows = 0
    for number in range(seed * num_worlds, (seed + 1) * num_worlds):
        world = World(number, is_large=number % num_worlds == 0)
        rows += check_world(world, features.plan, stored.plan, number, monkeypatch)
    return rows


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_random_features_agree(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sum(check_set(part * SETS + number, WORLDS, monkeypatch) for number in range(SETS))
    assert rows >= 10_000 / PARTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_many_random_features_agree(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sum(check_set(1000 + part * 40 + number, 8, monkeypatch) for number in range(40))
    assert rows > 20_000
