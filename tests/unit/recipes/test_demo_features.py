"""The demo's features of the request: readable by a model, and defined for a user whom nobody has seen."""

from __future__ import annotations

import numpy as np
import pytest

from tackboard.features.column import Column
from tackboard.features.feature_set import load_features
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.types import ID, STRING, TIME
from tackboard.recipes.demo import demo
from tackboard.recipes.demo_features import features

DAY_MS = 86_400_000


def test_the_recipe_reads_them_by_the_name_of_their_module() -> None:
    config = demo()
    assert load_features(config.data.features) is features
    assert set(config.model.request_features) <= set(features.plan.features)
    assert all(not one.type.nullable and one.level == "request" and one.description for one in features.features())


def test_by_hand() -> None:
    history = {
        "time": Column.of(TIME, [0, 6 * DAY_MS, 7 * DAY_MS]),
        "action": Column.of(STRING, ["save", "save", "click"]),
        "item": Column.of(ID, [1, 2, 3]),
    }
    values = OnlineExecutor(features.plan).compute(history=history, request_ms=7 * DAY_MS + 60_000)
    assert values["recency"].values[0] == pytest.approx(np.log1p(60.0) / 8)
    assert values["actions_1d"].values[0] == np.log1p(1)  # the event before is a day and a minute old
    assert values["saves_7d"].values[0] == np.log1p(1)


def test_a_user_without_events_was_away_for_a_month() -> None:
    none = {"time": Column.of(TIME, []), "action": Column.of(STRING, [])}
    values = OnlineExecutor(features.plan).compute(history=none, request_ms=5)
    assert values["recency"].to_pylist() == [np.log1p(30 * 86_400.0) / 8]
    assert values["actions_1d"].to_pylist() == values["saves_7d"].to_pylist() == [0.0]
