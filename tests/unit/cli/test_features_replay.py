"""`tackboard features replay`: 0 where nothing differs, 3 and the feature's name where something does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.features.column import Column
from tackboard.features.language import Events, FeatureSet
from tackboard.features.serving_log import FeatureLog
from tackboard.features.types import INT

Program = Callable[..., Any]
KEY = bytes(range(32))
USER = 103
NUM_EVENTS = 8
"""Events of the tiny dataset's user 103."""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "log.key"
    path.write_text(KEY.hex())
    return path


def write_log(folder: Path, counts: list[int]) -> Path:
    events = Events()
    features = FeatureSet("home", num_events=events.count(), num_items=events.distinct(events.item))
    log = FeatureLog(folder, features, KEY)
    for number, count in enumerate(counts):
        values = {"num_events": Column.of(INT, [count]), "num_items": Column.of(INT, [-1 if count else 0])}
        log.offer(user_id=USER, request_ms=0 if count == 0 else 10**12 + number, item_ids=np.arange(2), features=values)
    assert log.close()
    return folder


def write_honest(folder: Path) -> Path:
    """Requests at a time before all events: there is nothing to count."""
    return write_log(folder, [0, 0, 0])


def test_no_difference(tackboard: Program, tmp_path: Path, tiny_dataset: Path, key: Path) -> None:
    log = write_honest(tmp_path / "log")
    answer = tackboard("features", "replay", log, "--data", tiny_dataset, "--key", key, "--json")
    assert answer.code == 0
    assert answer.json()["num_mismatches"] == 0
    assert answer.json()["num_values"] == 6
    answer = tackboard("features", "replay", log, "--data", tiny_dataset, "--key", key, "--limit", "2")
    assert answer.code == 0
    assert "2 requests compared, 4 values, 0 differ" in answer.out


def test_the_feature_that_differs_is_named(tackboard: Program, tmp_path: Path, tiny_dataset: Path, key: Path) -> None:
    log = write_log(tmp_path / "log", [0, NUM_EVENTS, NUM_EVENTS])
    answer = tackboard("features", "replay", log, "--data", tiny_dataset, "--key", key, "--json")
    assert answer.code == 3
    assert answer.err.startswith("error: feature num_items was served otherwise than training computes it: 2 of 3")
    assert answer.json()["features"]["num_events"]["mismatches"]["skew"] == 0
    assert answer.json()["features"]["num_items"]["examples"][0]["served"] == "-1"
    text = tackboard("features", "replay", log, "--data", tiny_dataset, "--key", key, "--examples", "1")
    assert text.code == 3
    assert text.out.count("served -1, recomputed") == 1


def test_all_features_that_differ_are_counted(
    tackboard: Program, tmp_path: Path, tiny_dataset: Path, key: Path
) -> None:
    log = write_log(tmp_path / "log", [99])
    answer = tackboard("features", "replay", log, "--data", tiny_dataset, "--key", key)
    assert answer.code == 3
    assert "1 more features differ" in answer.err


def test_mistakes(tackboard: Program, tmp_path: Path, tiny_dataset: Path, key: Path) -> None:
    log = write_honest(tmp_path / "log")
    for arguments, code, words in (
        ((log, "--data", tiny_dataset), 2, "Missing option '--key'"),
        ((tmp_path / "no", "--data", tiny_dataset, "--key", key), 2, "holds no log of features"),
        ((log, "--data", tmp_path / "no", "--key", key), 3, "holds no dataset"),
        ((log, "--data", tiny_dataset, "--key", tmp_path / "no"), 2, "cannot be read"),
        ((log, "--data", tiny_dataset, "--key", key, "--limit", "0"), 2, "--limit"),
    ):
        answer = tackboard("features", "replay", *arguments)
        assert (answer.code, words in answer.err) == (code, True), answer.err
        assert len(answer.err.splitlines()) <= 3
    key.write_text("00" * 32)
    answer = tackboard("features", "replay", log, "--data", tiny_dataset, "--key", key)
    assert answer.code == 3
    assert "another key" in answer.err
