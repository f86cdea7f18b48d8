"""Numbered batches: what a step holds never depends on how many workers prepare it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core.errors import ConfigError, DataError
from tackboard.data.loader import DataConfig, ItemFrequencies, TrainingSteps, ends_of_history, stored_batch
from tackboard.data.sequences import Sequences, load_sequences
from tackboard.events.vocabulary import Vocabulary
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Events, Request
from tackboard.features.standard import features_for_model

HASHING = HashConfig(num_hashes=2, num_rows=16)


events, request = Events(), Request()


def timed_features(vocabulary: Vocabulary) -> FeatureSet:
    """All standard columns, and two features of the request."""
    own = FeatureSet("own", minute=request.time.minute_of_day("UTC"), num_before=events.count())
    return features_for_model(("history", "minute", "num_before"), vocabulary, 8, own)


@pytest.fixture(scope="module")
def all_columns(tiny_dataset: Path) -> Sequences:
    return load_sequences(tiny_dataset, ("click", "save"), features=timed_features)


@pytest.fixture
def steps(all_columns: Sequences) -> TrainingSteps:
    config = DataConfig(dataset=str(all_columns.path), max_length=8, tokens_per_step=40)
    return TrainingSteps(all_columns, config, HASHING, seed=3)


def as_lists(batch: SequenceBatch) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return {name: plain(part) for name, part in value.items()} if isinstance(value, dict) else value.tolist()

    return {name: plain(getattr(batch, name)) for name in batch.__dataclass_fields__}


def test_an_epoch_holds_each_training_event_once(steps: TrainingSteps, all_columns: Sequences) -> None:
    seen = []
    for step in range(steps.plan.steps_per_epoch):
        batch = steps[step]
        assert batch.num_events <= 40
        users = torch.repeat_interleave(batch.users, batch.lengths())
        seen += list(zip(users.tolist(), batch.times_ms.tolist(), batch.item_ids[batch.items].tolist(), strict=True))
    data = all_columns
    users_of_events = np.repeat(data.user_ids, np.diff(data.offsets))
    before_target = np.arange(len(data.item_ids)) < np.repeat(data.train_ends, np.diff(data.offsets))
    expected = zip(
        users_of_events[before_target].tolist(),
        data.events.times[before_target].tolist(),
        data.item_ids[before_target].tolist(),
        strict=True,
    )
    assert sorted(seen) == sorted(expected)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # Python 3.12 says so of every fork
def test_workers_change_nothing(steps: TrainingSteps) -> None:
    numbers = [5, 0, 17, 3]
    alone = [(number, as_lists(batch)) for number, batch in steps.iterate(numbers, num_workers=0)]
    shared = [(number, as_lists(batch)) for number, batch in steps.iterate(numbers, num_workers=2)]
    assert [number for number, _ in alone] == numbers
    assert alone == shared == [(number, as_lists(steps[number])) for number in numbers]


def test_a_loss_gets_the_request_of_every_event_and_a_ranking_the_one_after_the_history(
    steps: TrainingSteps, all_columns: Sequences
) -> None:
    data = all_columns
    place = {(int(user), int(time)): event for user, time, event in _user_time_event(data)}
    batch = steps[1]
    users = torch.repeat_interleave(batch.users, batch.lengths()).tolist()
    events = [place[user, time] for user, time in zip(users, batch.times_ms.tolist(), strict=True)]
    assert {name: len(tensor) for name, tensor in batch.request.items()} == dict.fromkeys(
        ("minute", "num_before"), batch.num_events
    )
    starts = np.repeat(data.offsets[:-1], np.diff(data.offsets))
    assert batch.request["num_before"].tolist() == (np.array(events) - starts[events]).tolist()
    assert batch.request["minute"].tolist() == [time // 60_000 % 1440 for time in batch.times_ms.tolist()]

    chosen = np.array([3, 0])
    lengths = data.train_ends[chosen] - data.offsets[:-1][chosen]
    ranking = stored_batch(data, chosen, data.offsets[:-1][chosen], lengths, HASHING)
    assert ranking.num_events == lengths.sum() > 4
    assert ranking.request["num_before"].tolist() == lengths.tolist()
    times = data.events.times[data.targets[chosen]]
    assert ranking.request["minute"].tolist() == (times // 60_000 % 1440).tolist()


def _user_time_event(data: Sequences) -> list[tuple[int, int, int]]:
    users = np.repeat(data.user_ids, np.diff(data.offsets)).tolist()
    return list(zip(users, data.events.times.tolist(), range(len(users)), strict=True))


def test_the_request_after_a_history_without_a_target_is_that_of_its_last_event(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    log = [(1, 5, "hide", "home", 10), (1, 6, "hide", "home", 20), (2, 5, "click", "home", 30)]
    data = load_sequences(make_dataset(tmp_path, log), ("click",))
    assert data.targets.tolist() == [-1, 2]
    assert ends_of_history(data, np.array([0, 1])).tolist() == [1, 2]


def test_steps_can_be_sent_to_another_process(steps: TrainingSteps) -> None:
    assert as_lists(pickle.loads(pickle.dumps(steps))[4]) == as_lists(steps[4])


def test_a_step_that_holds_no_segment_is_an_empty_batch(steps: TrainingSteps) -> None:
    """Uneven lengths may leave a step of the plan empty; the trainer goes past it."""
    steps.plan.segments_of = lambda step: np.zeros(0, dtype=np.int64)  # type: ignore[method-assign]
    batch = steps[0]
    assert (batch.num_rows, batch.num_events) == (0, 0)


def test_shares_are_of_positive_training_events_only(all_columns: Sequences, steps: TrainingSteps) -> None:
    data = all_columns
    training = np.arange(len(data.item_ids)) < np.repeat(data.train_ends, np.diff(data.offsets))
    positives = data.item_ids[training & data.is_positive]
    expected = [np.log(max(0.5, (positives == item).sum()) / len(positives)) for item in data.catalogue]
    assert steps.frequencies.log_share(data.catalogue) == pytest.approx(expected, abs=1e-6)


def test_log_share_by_hand() -> None:
    frequencies = ItemFrequencies(np.array([5, 5, 9, 5]))
    shares = frequencies.log_share(np.array([9, 5, 7, 100, -3]))
    assert np.exp(shares) == pytest.approx([0.25, 0.75, 0.125, 0.125, 0.125])
    assert shares.dtype == np.float32
    assert np.isfinite(ItemFrequencies(np.zeros(0, dtype=np.int64)).log_share(np.array([1]))).all()


def test_nothing_to_train_on_is_an_error(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    single = make_dataset(tmp_path, [(1, 5, "click", "home", 1), (2, 6, "click", "home", 2)], name="single")
    config = DataConfig(dataset=str(single))
    with pytest.raises(DataError, match="no event to train on"):
        TrainingSteps(load_sequences(single), config, HASHING, seed=0)


def test_nothing_to_predict_is_an_error(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Every positive is held out: without this the trainer would look for a step forever."""
    events = [(user, 5, action, "home", time) for user in (1, 2) for time, action in enumerate(["hide", "click"])]
    dataset = make_dataset(tmp_path, events, name="hidden")
    with pytest.raises(DataError, match="no positive event to train on"):
        TrainingSteps(load_sequences(dataset, ("click",)), DataConfig(dataset=str(dataset)), HASHING, seed=0)


@pytest.mark.parametrize("wrong", [{"max_length": 1}, {"tokens_per_step": 0}, {"num_workers": -1}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(DataConfig(dataset="x"), **wrong)
