"""Numbered batches: what a step holds never depends on how many workers prepare it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.loader import DataConfig, TrainingSteps, Window, ends_of_history, stored_batch
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource, load_sequences, open_sequences
from tackboard.features.column import Column
from tackboard.features.expressions import sequence
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Events, Request
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import features_for_model
from tackboard.features.types import TIME

HASHING = HashConfig(num_hashes=2, num_rows=16)


events, request = Events(), Request()


def timed_features(vocabulary: Vocabulary) -> FeatureSet:
    """All standard columns, and two features of the request."""
    own = FeatureSet("own", minute=request.time.minute_of_day("UTC"), num_before=events.count())
    return features_for_model(("history", "minute", "num_before"), vocabulary, 8, own)


CONFIG = DataConfig(dataset="tiny", max_length=8, tokens_per_step=40, window_buckets=2)


@pytest.fixture(scope="module")
def source(bucketed_dataset: Path) -> SequenceSource:
    found = open_sequences(bucketed_dataset, ("click", "save"), features=timed_features)
    assert found.num_buckets >= 6
    return found


@pytest.fixture(scope="module")
def all_columns(source: SequenceSource) -> Sequences:
    return source.read()


@pytest.fixture
def steps(source: SequenceSource) -> TrainingSteps:
    return TrainingSteps(source, CONFIG, HASHING, seed=3)


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
    window = steps.load_window(0, 0)
    assert isinstance(window, Window)
    window._bounds = np.array([0, 2, 2])
    batch = window.batch(1)
    assert (batch.num_rows, batch.num_events, len(batch.item_ids)) == (0, 0, 0)
    assert window.batch(0).num_rows == 2


def test_a_batch_owns_its_memory(steps: TrainingSteps) -> None:
    """A view would keep the whole window in memory."""
    batch = steps[1]
    tensors = [batch.users, batch.items, batch.is_positive, batch.item_rows, *batch.columns.values()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def users_and_times(batch: SequenceBatch) -> list[tuple[int, int]]:
    users = torch.repeat_interleave(batch.users, batch.lengths()).tolist()
    return list(zip(users, batch.times_ms.tolist(), strict=True))


def test_a_batch_is_what_one_made_of_the_whole_dataset_would_be(steps: TrainingSteps, all_columns: Sequences) -> None:
    """The slow twin knows nothing of windows: it finds the step's runs of events in the dataset as a whole."""
    data = all_columns
    place = {(user, time): event for user, time, event in _user_time_event(data)}
    user_at = {int(user): position for position, user in enumerate(data.user_ids)}
    for step in range(steps.plan.first_step(3)):
        batch = steps[step]
        events = np.array([place[pair] for pair in users_and_times(batch)])
        starts = events[batch.offsets[:-1].numpy()]
        users = np.array([user_at[int(user)] for user in batch.users])
        twin = stored_batch(data, users, starts, batch.lengths().numpy(), HASHING, steps.index.frequencies)
        assert as_lists(twin) == as_lists(batch)
    assert steps.plan.num_windows > 2


def item_features(vocabulary: Vocabulary) -> FeatureSet:
    """The history computes something from the items, so the loader cannot carry other numbers in their place."""
    recent = events.newest(8)
    history = sequence(
        item=recent.collect(events.item), time=recent.collect(events.time), own=recent.collect(events.item)
    )
    return features_for_model(("history",), vocabulary, 8, FeatureSet("own", history=history))


@pytest.mark.parametrize("window_buckets", [2, 100])
@pytest.mark.parametrize("features", [timed_features, item_features])
def test_batches_are_the_same_with_and_without_stored_positions(
    bucketed_dataset: Path, monkeypatch: pytest.MonkeyPatch, window_buckets: int, features: Any
) -> None:
    source = open_sequences(bucketed_dataset, ("click", "save"), features=features)
    config = dataclasses.replace(CONFIG, window_buckets=window_buckets)
    fast = TrainingSteps(source, config, HASHING, seed=3)
    carries = features is timed_features
    assert (fast._items_of_catalogue() == (None, None)) is not carries
    monkeypatch.setattr("tackboard.data.loader.item_positions", lambda *_arguments, **_options: None)
    plain = TrainingSteps(source, config, HASHING, seed=3)
    assert plain._items_of_catalogue() == (None, None)
    monkeypatch.setattr("tackboard.data.loader.MOST_TABLE_BYTES", 100)
    large = TrainingSteps(source, config, HASHING, seed=3)
    for step in range(fast.plan.first_step(2)):
        assert as_lists(fast[step]) == as_lists(plain[step]) == as_lists(large[step])
    if not carries:
        assert fast[0].columns["own"].tolist() == fast[0].item_ids[fast[0].items].tolist()


def test_copies_share_what_a_process_prepares_once(source: SequenceSource) -> None:
    steps = TrainingSteps(source, dataclasses.replace(CONFIG, window_buckets=100), HASHING, seed=3)
    share = copy.copy(steps)
    assert as_lists(share[0]) == as_lists(steps[0])
    assert share._whole is steps._whole
    sent = pickle.loads(pickle.dumps(steps))
    assert as_lists(sent[0]) == as_lists(steps[0])
    assert sent._whole is not steps._whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_world_size_sees_the_same_global_steps(
    source: SequenceSource, steps: TrainingSteps, world_size: int
) -> None:
    ranks = [TrainingSteps(source, CONFIG, HASHING, 3, rank=r, world_size=world_size) for r in range(world_size)]
    for step in range(steps.plan.first_step(2)):
        shares = [rank[step] for rank in ranks]
        together = sorted(pair for share in shares for pair in users_and_times(share))
        assert together == sorted(users_and_times(steps[step]))
        if world_size > 1:
            # A user's segments go to one rank, so loads differ by at most one user's events.
            users = [set(share.users.tolist()) for share in shares]
            assert sum(map(len, users)) == len(set().union(*users))
            loads = [share.num_events for share in shares]
            of_users = Counter(user for user, _ in users_and_times(steps[step]))
            assert max(loads) - min(loads) <= max(of_users.values())
        for share in shares:  # A share is a whole batch: its items are its own, and every event keeps its values.
            assert torch.equal(torch.unique(share.items), torch.arange(len(share.item_ids)))
            known = {pair: row for row, pair in enumerate(users_and_times(steps[step]))}
            rows = [known[pair] for pair in users_and_times(share)]
            whole = steps[step]
            assert share.item_ids[share.items].tolist() == whole.item_ids[whole.items][rows].tolist()
            for name, column in share.request.items():
                assert column.tolist() == whole.request[name][rows].tolist()


def test_an_epoch_decodes_every_event_once(steps: TrainingSteps, source: SequenceSource) -> None:
    rows, num_bytes = source.counters.num_rows, source.counters.num_bytes
    for _ in steps.iterate(range(steps.plan.first_step(1)), num_workers=2):
        pass
    assert source.counters.num_rows - rows == source.dataset.num_events
    assert 0 < source.counters.num_bytes - num_bytes < source.dataset.events_path.stat().st_size


def test_other_windows_are_another_order(source: SequenceSource, steps: TrainingSteps) -> None:
    one = TrainingSteps(source, dataclasses.replace(CONFIG, window_buckets=100), HASHING, seed=3)
    assert one.plan.num_windows == 1
    assert users_and_times(one[0]) != users_and_times(steps[0])


def test_only_the_newest_events_of_a_user_can_be_trained_on(source: SequenceSource, all_columns: Sequences) -> None:
    """Their shares among positives are counted over the same events: the correction must know what batches hold."""
    steps = TrainingSteps(source, dataclasses.replace(CONFIG, segments="newest", max_length=5), HASHING, seed=3)
    data = all_columns
    expected, positives = [], []
    for user, begin, end in zip(data.user_ids, data.offsets[:-1], data.train_ends, strict=True):
        newest = range(max(begin, end - 5), end)
        expected += [(int(user), int(data.events.times[event])) for event in newest]
        positives += [int(data.item_ids[event]) for event in newest if data.is_positive[event]]
    for epoch in range(2):
        numbers = range(steps.plan.first_step(epoch), steps.plan.first_step(epoch + 1))
        assert sorted(pair for step in numbers for pair in users_and_times(steps[step])) == sorted(expected)
    shares = [np.log(max(0.5, positives.count(item)) / len(positives)) for item in data.catalogue.tolist()]
    assert steps.index.frequencies.log_share(data.catalogue) == pytest.approx(shares, abs=1e-6)
    assert steps.plan.total_tokens == len(expected) < TrainingSteps(source, CONFIG, HASHING, 3).plan.total_tokens


@pytest.mark.parametrize("segments", ["all", "newest"])
@pytest.mark.parametrize("held_out", [1, 2, 3])
def test_no_batch_holds_anything_from_the_held_out_event_on(
    bucketed_dataset: Path, held_out: int, segments: str
) -> None:
    source = open_sequences(bucketed_dataset, ("click", "save"), features=timed_features, held_out=held_out)
    config = dataclasses.replace(CONFIG, segments=segments, uniform_negatives=3)
    steps, data = TrainingSteps(source, config, HASHING, seed=3), source.read()
    place = {(user, time): event for user, time, event in _user_time_event(data)}
    limits = {}
    for user, begin, end in zip(data.user_ids.tolist(), data.offsets[:-1], data.offsets[1:], strict=True):
        positive = [event for event in range(begin, end) if data.is_positive[event]]
        limits[user] = positive[-held_out] if len(positive) >= held_out else positive[0]
    seen = {pair for step in range(steps.plan.first_step(2)) for pair in users_and_times(steps[step])}
    assert seen
    assert all(place[user, time] < limits[user] for user, time in seen)
    assert not {place[pair] for pair in seen} & set(data.targets.tolist())
    held = [place[pair] for pair in seen if data.is_positive[place[pair]]]
    counted = np.exp(steps.index.frequencies.log_share(data.catalogue)) * len(held)
    if segments == "all":  # Not even as a share: only items of these events count.
        assert counted.round(1).tolist() == [
            max(0.5, int((data.item_ids[held] == item).sum())) for item in data.catalogue
        ]


def since_last_features(vocabulary: Vocabulary) -> FeatureSet:
    return features_for_model(("history", "since_last"), vocabulary, 8)


TIES = [
    # user, item, action, surface, time; two events of one moment, and a user of a single event
    (1, 5, "click", "home", 10_000),
    (1, 6, "click", "home", 10_000),
    (1, 7, "click", "home", 13_500),
    (1, 8, "click", "home", 13_500),
    (2, 5, "click", "home", 7),
    (3, 6, "hide", "home", 0),
    (3, 7, "click", "home", 86_400_000),
    (3, 5, "click", "home", 86_400_001),
]


def test_since_last_is_the_time_from_the_event_before_and_what_a_server_computes(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    """In training, in evaluation and in a request: also where times tie, or where an event was received late."""
    received = [time + (10**9 if row == 1 else 0) for row, (*_, time) in enumerate(TIES)]
    dataset = make_dataset(tmp_path, TIES, received_ms=received)
    source = open_sequences(dataset, features=since_last_features)
    data = source.read()
    plain = []
    for user in data.user_ids.tolist():
        times = [time for owner, *_, time in TIES if owner == user]
        plain += [-1.0, *((later - earlier) / 1000 for earlier, later in itertools.pairwise(times))]
    assert data.request["since_last"].values.tolist() == plain == [-1, 0, 3.5, 0, -1, -1, 86_400, 0.001]

    steps = TrainingSteps(source, dataclasses.replace(CONFIG, max_length=2), HASHING, seed=0)
    place = dict(zip(_user_item(data), range(len(plain)), strict=True))
    found: dict[int, float] = {}
    for step in range(steps.plan.first_step(1)):
        batch = steps[step]
        users = torch.repeat_interleave(batch.users, batch.lengths()).tolist()
        events = [place[key] for key in zip(users, batch.item_ids[batch.items].tolist(), strict=True)]
        found |= dict(zip(events, batch.request["since_last"].tolist(), strict=True))
    assert found == {event: pytest.approx(plain[event]) for event in (0, 1, 2, 5, 6)}

    executor = OnlineExecutor(data.source.features.plan)
    everyone = np.arange(len(data.user_ids))
    lengths = data.train_ends - data.offsets[:-1]
    ranking = stored_batch(data, everyone, data.offsets[:-1], lengths, HASHING)
    for user in everyone:
        run = np.arange(data.offsets[user], data.train_ends[user])
        history = {name: column.take(run) for name, column in data.events.columns.items()}
        history["time"] = Column(TIME, data.events.times[run])
        moment = int(data.events.times[data.targets[user]])
        served = executor.compute(history=history, request_ms=moment)["since_last"].values
        assert ranking.request["since_last"][user] == np.float32(served[0])
    assert ranking.request["since_last"].tolist() == pytest.approx([0.0, -1.0, 0.001])


def test_a_feature_of_ones_own_by_the_name_of_since_last_is_left_alone(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    own = FeatureSet("own", since_last=events.count())
    source = open_sequences(
        make_dataset(tmp_path, TIES), features=lambda v: features_for_model(("history", "since_last"), v, 8, own)
    )
    assert source.read().request["since_last"].values.tolist() == [0, 0, 2, 2, 0, 0, 1, 2]


def _user_item(data: Sequences) -> list[tuple[int, int]]:
    users = np.repeat(data.user_ids, np.diff(data.offsets)).tolist()
    return list(zip(users, data.item_ids.tolist(), strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_length": 1},
        {"tokens_per_step": 0},
        {"num_workers": -1},
        {"window_buckets": 0},
        {"held_out": 0},
        {"segments": "oldest"},
        {"uniform_negatives": -1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(DataConfig(dataset="x"), **wrong)
