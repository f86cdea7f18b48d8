"""The parts of a dataset that pretraining and a task read, against plain loops."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.batch import HashConfig
from tackboard.bench.transfer_data import (
    PRETRAINED_SHARE,
    TASKS,
    Examples,
    Runs,
    additive_means,
    before_judging,
    cut_runs,
    facts_of,
    sample,
    share_of,
    split_examples,
    user_offsets,
    write_beginning,
)
from tackboard.data.sequences import Sequences
from tackboard.data.source import open_sequences
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.public import listing
from tackboard.events.public.publisher import canonical_events

YES = ("rating_4", "rating_5")
RANDOM = np.random.default_rng(5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 users of 1 to 60 events on 25 items, and an item that nobody met."""
    lengths = RANDOM.integers(1, 60, 40)
    users = np.repeat(np.arange(1, 41), lengths)
    times = np.arange(len(users)) * 1000
    ratings = pa.array([f"rating_{stars}" for stars in RANDOM.integers(1, 6, len(users))])
    events = canonical_events(users, RANDOM.integers(1, 26, len(users)), times, action=ratings)
    items = pa.table({"item": np.arange(1, 27)})
    root = tmp_path_factory.mktemp("datasets")
    return write_dataset(root, "made-up", events, item_attributes=items, source={"last_tied_share": 0.0})


@pytest.fixture(scope="module")
def sequences(dataset: Path) -> Sequences:
    return open_sequences(dataset, YES, held_out=0).read()


def test_a_beginning_has_the_first_events_of_each_user_and_the_whole_catalogue(dataset: Path, tmp_path: Path) -> None:
    offsets = user_offsets(dataset)
    ends = share_of(offsets, PRETRAINED_SHARE)
    path = write_beginning(dataset, ends, tmp_path / "beginning")
    whole, part = (
        open_dataset(one).read_events(["user_id", "item_id", "time_ms", "action"]) for one in (dataset, path)
    )
    kept = np.concatenate([np.arange(offsets[user], offsets[user] + ends[user]) for user in range(len(ends))])
    for name in ("user_id", "item_id", "time_ms", "action"):
        assert part[name].to_pylist() == whole[name].take(pa.array(kept)).to_pylist()
    assert open_dataset(path).num_items == 26
    assert open_dataset(path).manifest["source"]["last_tied_share"] == 0.0
    before = path.stat().st_mtime_ns
    assert write_beginning(dataset, ends * 0, path).stat().st_mtime_ns == before, "what is there is left alone"
    assert [one.name for one in tmp_path.iterdir()] == ["beginning"]


def test_parts_follow_each_other_in_every_user(sequences: Sequences) -> None:
    split = split_examples(sequences)
    trained = set(split.train.events.tolist())
    judged = {*split.validation.events.tolist(), *split.test.events.tolist()}
    assert not set(split.validation.users.tolist()) & set(split.test.users.tolist())
    pretrained = share_of(sequences.offsets, PRETRAINED_SHARE)
    for user, begin in enumerate(sequences.offsets[:-1].tolist()):
        size = int(sequences.offsets[user + 1]) - begin
        for event in range(begin, begin + size):
            part = (event - begin < int(pretrained[user])) + 2 * (event in trained) + 4 * (event in judged)
            expected = 1 if event - begin < int(size * 0.7) else 2 if event - begin < int(size * 0.85) else 4
            # An event without history, which only a user of one or two events can have here, is no example.
            assert part == (expected if event > begin or expected == 1 else 0)
    assert (split.test.labels == sequences.is_positive[split.test.events]).all()
    facts = facts_of(split)
    assert facts["num_train"] == len(trained)
    assert facts["num_validation"] + facts["num_test"] == len(judged)
    assert set(before_judging(sequences).events) == set(range(len(sequences.item_ids))) - judged - _first_events(
        sequences
    )


def _first_events(sequences: Sequences) -> set[int]:
    """First events of users with so few that none comes before those that are judged."""
    sizes = np.diff(sequences.offsets)
    return set(sequences.offsets[:-1][(sizes * 0.85).astype(int) == 0].tolist())


def test_a_smaller_sample_is_part_of_a_larger_one(sequences: Sequences) -> None:
    train = split_examples(sequences).train
    small, large = sample(train, 10, 3), sample(train, 30, 3)
    assert len(small) == 10 and set(small.events) < set(large.events) < set(train.events)
    assert (np.diff(large.events) > 0).all()
    assert (large.labels == sequences.is_positive[large.events]).all()
    assert set(sample(train, 10, 4).events) != set(small.events)
    assert sample(train, 0, 3) is train and sample(train, 10**6, 3) is train


@pytest.mark.parametrize("max_history", [2, 8, 16])
def test_runs_hold_every_example_with_enough_before_it(sequences: Sequences, max_history: int) -> None:
    examples = sample(split_examples(sequences).train, 60, 1)
    users, starts, bounds = cut_runs(sequences.offsets, examples, max_history)
    assert bounds[0] == 0 and bounds[-1] == len(examples) and (np.diff(bounds) > 0).all()
    for run, (user, start) in enumerate(zip(users, starts, strict=True)):
        events = examples.events[bounds[run] : bounds[run + 1]]
        assert (examples.users[bounds[run] : bounds[run + 1]] == user).all()
        assert start >= sequences.offsets[user] and events[-1] + 1 - start <= max_history
        assert (events - start >= np.minimum(max_history // 2, events - sequences.offsets[user])).all()


def test_a_batch_names_each_example_among_its_events(sequences: Sequences) -> None:
    examples = sample(split_examples(sequences).train, 60, 1)
    runs = Runs(sequences, examples, HashConfig(num_hashes=2, num_rows=64), max_history=16)
    chosen = np.array([4, 0, len(runs) - 1])
    batch = runs.batch(chosen)
    expected = np.concatenate([np.arange(runs.bounds[run], runs.bounds[run + 1]) for run in chosen])
    item_ids = batch.histories.item_ids[batch.histories.items[batch.events]].numpy()
    assert (item_ids == sequences.item_ids[examples.events[expected]]).all()
    assert (batch.labels.numpy() == examples.labels[expected]).all()
    assert batch.histories.lengths().max() <= 16
    in_order = np.concatenate([runs.batch(one).labels.numpy() for one in runs.in_order(7)])
    assert (in_order == examples.labels).all()
    shuffled = runs.shuffled(7, 0, 1, 2)
    assert sorted(np.concatenate(shuffled)) == list(range(len(runs)))
    assert [one.tolist() for one in shuffled] != [one.tolist() for one in runs.in_order(7)]


@pytest.mark.parametrize("with_users", [False, True])
def test_additive_means(sequences: Sequences, with_users: bool) -> None:
    split = split_examples(sequences)
    known = sample(split.train, 50, 0)
    found = additive_means(known, sequences.item_ids, split.test, with_users=with_users, damping=3.0)
    mean = known.labels.mean()

    def of_item(item: int) -> float:
        mine = known.labels[sequences.item_ids[known.events] == item]
        return float((mine - mean).sum() / (len(mine) + 3.0))

    def of_user(user: int) -> float:
        mine = np.flatnonzero(known.users == user)
        rest = [known.labels[one] - mean - of_item(sequences.item_ids[known.events[one]]) for one in mine]
        return sum(rest) / (len(mine) + 3.0)

    expected = [
        mean + of_item(sequences.item_ids[event]) + (of_user(user) if with_users else 0.0)
        for event, user in zip(split.test.events, split.test.users, strict=True)
    ]
    assert np.allclose(found, expected)


def test_means_of_nothing_are_even_odds(sequences: Sequences) -> None:
    nothing = Examples(*(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.bool_)))
    found = additive_means(nothing, sequences.item_ids, split_examples(sequences).test, with_users=True)
    assert (found == 0.5).all()


def test_tasks_are_on_public_datasets() -> None:
    assert set(TASKS) <= set(listing.DATASETS)
