"""Split by time: what training reads, where the instants come from, and what a wrong instant says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core.errors import ConfigError, DataError
from tackboard.data.config import Part
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.source import SequenceSource
from tackboard.data.time_split import HOUR_MS, parse_instant, resolve_split, shown_instant
from tackboard.events.dataset import open_dataset
from tackboard.features.standard import standard_features

HASHING = HashConfig(num_hashes=2, num_rows=64)
START_MS = 1_700_000_000_000
CUT_MS = START_MS + 60 * HOUR_MS


def log(seed: int, *, seed_after: int | None = None) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Events of 30 users in 100 hours, and when they were received: some late, some after the cut.

    What happened or was received at or after the cut depends on `seed_after` only, and has names of its own.
    """
    draws, later = np.random.default_rng(seed), np.random.default_rng(seed if seed_after is None else seed_after)
    events, received = [], []
    for user in range(30):
        for hour in range(int(draws.integers(0, 5)), 100, 5 + user % 7):
            time = START_MS + hour * HOUR_MS
            late = int(draws.random() < 0.15) * 12 * HOUR_MS
            item, action = int(draws.integers(0, 20)), "save" if draws.random() < 0.3 else "click"
            surface = "home"
            if max(time, time + late) >= CUT_MS:
                item, action, surface = int(later.integers(0, 40)), f"new-{later.integers(0, 3)}", "new"
            events.append((user, item, action, surface, time))
            received.append(time + late)
    return events, received


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    events, received = log(1)
    return make_dataset(tmp_path, events, received_ms=received)


def config(dataset: Path, **settings: Any) -> DataConfig:
    cut = shown_instant(CUT_MS)
    defaults: dict[str, Any] = {"split": "time", "cut": cut, "max_length": 4, "tokens_per_step": 32}
    return DataConfig(dataset=str(dataset), **(defaults | settings))


def opened(data: DataConfig) -> SequenceSource:
    return data.open(standard_features)


def batches(data: DataConfig, part: Part = "train") -> list[SequenceBatch]:
    steps = data.steps(opened(data), HASHING, seed=3, part=part)
    assert isinstance(steps, TrainingSteps)
    return [steps[step] for step in range(steps.plan.steps_per_epoch)]


def predicted(data: DataConfig, part: Part = "train") -> Counter[tuple[int, int]]:
    """(user, time) of every event that an epoch predicts."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches(data, part):
        users = torch.repeat_interleave(batch.users, batch.lengths())
        assert batch.is_positive is not None
        chosen = batch.is_positive
        found.update(zip(users[chosen].tolist(), batch.times_ms[chosen].tolist(), strict=True))
    return found


def own_training_events(dataset: Path, until_ms: int) -> Counter[tuple[int, int]]:
    """The same for all events that training may read, by a plain loop over the users."""
    table = open_dataset(dataset).read_events(["user_id", "time_ms", "received_ms"])
    found: Counter[tuple[int, int]] = Counter()
    over: set[int] = set()
    for row in table.to_pylist():
        if max(row["time_ms"], row["received_ms"]) >= until_ms:
            over.add(row["user_id"])
        if row["user_id"] not in over:
            found[row["user_id"], row["time_ms"]] += 1
    return found


def test_training_predicts_what_happened_and_was_received_before_the_cut(dataset: Path) -> None:
    expected = own_training_events(dataset, CUT_MS)
    assert predicted(config(dataset)) == expected
    # Some events before the cut were received after it; they are not trained on, and neither is what follows them.
    everything = open_dataset(dataset).read_events(["time_ms"])["time_ms"].to_numpy()
    assert 50 < len(expected) < (everything < CUT_MS).sum()


def test_a_slice_is_predicted_in_validation_only(dataset: Path) -> None:
    data = config(dataset, validation_hours=15.0)
    until = own_training_events(dataset, CUT_MS - 15 * HOUR_MS)
    assert predicted(data) == until
    in_slice = predicted(data, "validation")
    assert in_slice and in_slice == own_training_events(dataset, CUT_MS) - until
    # The events before the slice are context.
    assert sum(batch.num_events for batch in batches(data, "validation")) > in_slice.total()


def test_predict_from_goes_on_where_another_run_ended(dataset: Path) -> None:
    first = predicted(config(dataset, cut=shown_instant(CUT_MS - 20 * HOUR_MS)))
    second = config(dataset, predict_from=shown_instant(CUT_MS - 20 * HOUR_MS))
    assert predicted(second) == own_training_events(dataset, CUT_MS) - first
    alone = dataclasses.replace(second, split="last", cut="")
    assert predicted(alone) and min(time for _, time in predicted(alone)) > START_MS + 20 * HOUR_MS


def test_validation_users_are_cut_too(dataset: Path) -> None:
    data = config(dataset, validation_share=0.3)
    train, judged = predicted(data), predicted(data, "validation")
    assert train + judged == own_training_events(dataset, CUT_MS)
    assert judged and not {user for user, _ in train} & {user for user, _ in judged}


@pytest.mark.parametrize("settings", [{}, {"uniform_negatives": 8}, {"uniform_negatives": 1000}], ids=str)
def test_nothing_after_the_cut_changes_a_batch(
    tmp_path: Path, make_dataset: Callable[..., Path], settings: dict[str, int]
) -> None:
    sources, steps = [], []
    for seed_after in (10, 11):
        events, received = log(1, seed_after=seed_after)
        data = config(make_dataset(tmp_path / str(seed_after), events, received_ms=received), **settings)
        sources.append(opened(data))
        steps.append(batches(data))
    first, second = sources
    assert first.vocabulary == second.vocabulary and first.vocabulary.surfaces == ("home",)
    assert first.known_items.tolist() == second.known_items.tolist() != first.catalogue.tolist()
    assert len(steps[0]) == len(steps[1]) > 3
    for one, other in zip(*steps, strict=True):
        for name in ("items", "item_ids", "item_rows", "item_log_q", "actions", "surfaces", "times_ms", "sampled"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), name


def test_known_names_are_counted_once(dataset: Path) -> None:
    made, read = opened(config(dataset)), opened(config(dataset))
    assert made.counters.num_rows and not read.counters.num_rows
    assert made.known.items.tolist() == read.known.items.tolist()
    assert read.known.items.sum() == own_training_events(dataset, CUT_MS).total()
    other = opened(config(dataset, cut=shown_instant(CUT_MS - 30 * HOUR_MS)))
    assert other.counters.num_rows and other.known.items.sum() < read.known.items.sum()


def test_a_share_is_counted_in_events(dataset: Path) -> None:
    times = np.sort(open_dataset(dataset).read_events(["time_ms"])["time_ms"].to_numpy())
    split = resolve_split(open_dataset(dataset), "0.75", 0.0)
    assert split.cut_ms == split.until_ms == times[int(0.75 * len(times))]
    assert not split.has_slice
    assert resolve_split(open_dataset(dataset), "", 2.0).cut_ms == times[int(0.9 * len(times))]
    source = opened(config(dataset, cut=".75"))
    assert source.lineage()["cut_ms"] == split.cut_ms
    assert config(dataset, cut=".75").at(source.lineage()).cut == shown_instant(split.cut_ms)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-05-01", 1_714_521_600_000),
        ("2024-05-01T02:00+02:00", 1_714_521_600_000),
        ("2024-05-01T00:00:00.250Z", 1_714_521_600_250),
    ],
)
def test_instants_are_utc_unless_they_say_more(text: str, expected: int) -> None:
    assert parse_instant(text, "data.cut") == expected
    assert parse_instant(shown_instant(expected), "data.cut") == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cut": "2001-01-01"}, "leaves no event before it"),
        ({"cut": shown_instant(START_MS)}, "leaves no event before it"),
        ({"cut": "2031-01-01"}, "leaves no event after it"),
        ({"cut": "1"}, "leaves no event after it"),
        ({"cut": "0"}, "leaves no event before it"),
        ({"cut": "yesterday"}, "is not an instant"),
        ({"cut": "1.5"}, "is not an instant"),
        ({"validation_hours": 1000.0}, "leaves no event to train on"),
        ({"validation_hours": -1.0}, "data.validation_hours"),
        ({"split": "first", "cut": ""}, "data.split"),
        ({"split": "last"}, "data.split is last"),
        ({"validation_hours": 3.0, "validation_share": 0.1}, "are both given"),
        ({"predict_from": "soon"}, "data.predict_from=soon is not an instant"),
    ],
    ids=str,
)
def test_a_wrong_split_says_what_is_allowed(dataset: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(config(dataset, **settings))


def test_nothing_to_predict_is_an_error(dataset: Path) -> None:
    after = config(dataset, predict_from=shown_instant(CUT_MS + HOUR_MS))
    with pytest.raises(DataError, match="no event for training"):
        batches(after)
    source = opened(config(dataset, validation_hours=0.001))
    with pytest.raises(DataError, match="no event for validation"):
        after.steps(source, HASHING, seed=3, part="validation")


def test_a_user_may_be_on_one_side_only(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    events = [(1, item, "click", "home", START_MS + item) for item in range(5)]
    events += [(2, 30 + item, "click", "home", CUT_MS + item) for item in range(5)]
    source = opened(config(make_dataset(tmp_path, events)))
    assert source.known.items.tolist() == [1] * 5 + [0] * 5
    sequences = source.read()
    assert (sequences.train_ends - sequences.offsets[:-1]).tolist() == [5, 0]
