"""The parts of a dataset that pretraining and a task read, against plain loops."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.batch import HashConfig
from tackboard.bench.transfer.data import (
    PRETRAINED_SHARE,
    Examples,
    Task,
    additive_means,
    rising,
    share_of,
    task_dataset,
    times_met,
    user_offsets,
    write_beginning,
    write_task,
)
from tackboard.data.config import Part
from tackboard.data.request_layout import read_requests
from tackboard.data.request_loader import RequestConfig, RequestSteps
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.public.publisher import canonical_events

YES = ("rating_4", "rating_5")
TASK = Task("will it be 4 or 5?", YES)
HASHING = HashConfig(num_hashes=2, num_rows=64)
COLUMNS = ["user_id", "item_id", "time_ms", "action"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 users of 1 to 60 events on 25 items, five in each second, and an item that nobody met."""
    random = np.random.default_rng(5)
    lengths = random.integers(1, 60, 40)
    users = np.repeat(np.arange(1, 41), lengths)
    times = np.arange(len(users)) // 5 * 1000
    ratings = pa.array([f"rating_{stars}" for stars in random.integers(1, 6, len(users))])
    events = canonical_events(users, random.integers(1, 26, len(users)), times, action=ratings)
    items = pa.table({"item": np.arange(1, 27)})
    root = tmp_path_factory.mktemp("datasets")
    path = write_dataset(root, "made-up", events, item_attributes=items, source={"last_tied_share": 0.0})
    for part in ("train", "judge"):
        write_task(path, TASK, part)
    return path


@pytest.fixture(scope="module")
def data(dataset: Path) -> RequestConfig:
    return RequestConfig(
        dataset=str(task_dataset(dataset, "train")),
        judged_on=str(task_dataset(dataset, "judge")),
        validation_share=0.25,
        test_share=0.75,
        max_history=16,
        tokens_per_step=100_000,
    )


def steps_of(data: RequestConfig, part: Part = "train", seed: int = 0, count: int = 0) -> RequestSteps:
    return dataclasses.replace(data, max_requests=count).steps(data.open(None), HASHING, seed, part=part)


def test_a_beginning_has_the_first_events_of_each_user_and_the_whole_catalogue(dataset: Path, tmp_path: Path) -> None:
    offsets = user_offsets(dataset)
    ends = share_of(offsets, PRETRAINED_SHARE)
    path = write_beginning(dataset, ends, tmp_path / "beginning")
    whole, part = (open_dataset(one).read_events(COLUMNS) for one in (dataset, path))
    kept = np.concatenate([np.arange(offsets[user], offsets[user] + ends[user]) for user in range(len(ends))])
    for name in COLUMNS:
        assert part[name].to_pylist() == whole[name].take(pa.array(kept)).to_pylist()
    assert open_dataset(path).num_items == 26
    assert open_dataset(path).manifest["source"]["last_tied_share"] == 0.0
    before = path.stat().st_mtime_ns
    assert write_beginning(dataset, ends * 0, path).stat().st_mtime_ns == before, "what is there is left alone"
    assert [one.name for one in tmp_path.iterdir()] == ["beginning"]


def test_parts_follow_each_other_in_every_user(dataset: Path, data: RequestConfig) -> None:
    """Each event is pretrained on, trained with or judged by, by its number among the user's."""
    whole, offsets = open_dataset(dataset).read_events(COLUMNS), user_offsets(dataset)
    pretrained = share_of(offsets, PRETRAINED_SHARE)
    numbers: dict[str, set[tuple[int, int]]] = {}
    for part in ("train", "judge"):
        path = task_dataset(dataset, part)
        events, requests = open_dataset(path).read_events(COLUMNS), read_requests(open_dataset(path))
        for name in ("user_id", "item_id", "action"):
            assert events[name].to_pylist() == whole[name].to_pylist(), "all events, in the order of the file"
        found = dict(zip(zip(events["user_id"].to_pylist(), events["time_ms"].to_pylist(), strict=True),
                         range(events.num_rows), strict=True))  # fmt: skip
        assert len(found) == events.num_rows, "no two of a user at the same moment"
        numbers[part] = set()
        for row in requests.to_pylist():
            event = found[row["user_id"], row["time_ms"]]
            assert row["item_id"] == [whole["item_id"][event].as_py()]
            assert row["label_yes"] == [whole["action"][event].as_py() in YES]
            user = int(np.searchsorted(offsets, event, side="right")) - 1
            numbers[part].add((user, event - int(offsets[user])))
    for user, size in enumerate(np.diff(offsets).tolist()):
        for number in range(size):
            is_in = (number < int(pretrained[user])) + 2 * ((user, number) in numbers["train"])
            is_in += 4 * ((user, number) in numbers["judge"])
            expected = 1 if number < int(size * 0.7) else 2 if number < int(size * 0.85) else 4
            # An event without history, which only a user of one or two events can have here, is no example.
            assert is_in == (expected if number or expected == 1 else 0)
    validation, test = (Examples.of(steps_of(data, part)) for part in ("validation", "test"))
    assert not set(validation.users.tolist()) & set(test.users.tolist())
    assert len(validation) + len(test) == len(numbers["judge"])
    assert len(Examples.of(steps_of(data))) == len(numbers["train"]), "every user trains"


def test_a_history_is_every_earlier_event_in_the_order_of_the_file(dataset: Path, data: RequestConfig) -> None:
    events = open_dataset(task_dataset(dataset, "train")).read_events(COLUMNS)
    users, items, times = (events[name].to_numpy() for name in ("user_id", "item_id", "time_ms"))
    steps = steps_of(data)
    assert steps.plan.steps_per_epoch == 1
    batch = steps[0]
    offsets = batch.histories.offsets.tolist()
    for row, (user, time) in enumerate(zip(batch.histories.users.tolist(), batch.request_ms.tolist(), strict=True)):
        before = items[(users == user) & (times < time)]
        found = batch.histories.item_ids[batch.histories.items[offsets[row] : offsets[row + 1]]]
        assert len(before) and found.tolist() == before[-16:].tolist()


def test_times_are_raised_no_further_than_needed() -> None:
    times = np.array([5, 5, 5, 6, 100, 100, 3, 3])
    assert rising(times, np.array([0, 6, 8])).tolist() == [5, 6, 7, 8, 100, 101, 3, 4]


def test_a_smaller_draw_is_part_of_a_larger_one(data: RequestConfig) -> None:
    def drawn(count: int, seed: int) -> set[tuple[int, int]]:
        steps = steps_of(data, seed=seed, count=count)
        table = steps.source.read_requests(np.arange(steps.source.num_buckets))
        chosen = steps.chosen(table)
        return set(zip(table.user_ids[chosen].tolist(), table.times[chosen].tolist(), strict=True))

    small, large, every = drawn(10, 3), drawn(30, 3), drawn(0, 3)
    assert len(small) == 10 and len(large) == 30 and small < large < every
    assert drawn(10, 4) != small
    assert drawn(10**6, 3) == every


@pytest.mark.parametrize("with_users", [False, True])
def test_additive_means(data: RequestConfig, with_users: bool) -> None:
    known, asked = Examples.of(steps_of(data, count=50)), Examples.of(steps_of(data, "test"))
    found = additive_means(known, asked, with_users=with_users, damping=3.0)
    mean = known.labels.mean()

    def of_item(item: int) -> float:
        mine = known.labels[known.items == item]
        return float((mine - mean).sum() / (len(mine) + 3.0))

    def of_user(user: int) -> float:
        mine = np.flatnonzero(known.users == user)
        rest = [known.labels[one] - mean - of_item(known.items[one]) for one in mine]
        return sum(rest) / (len(mine) + 3.0)

    expected = [
        mean + of_item(item) + (of_user(user) if with_users else 0.0)
        for item, user in zip(asked.items, asked.users, strict=True)
    ]
    assert np.allclose(found, expected)


def test_means_of_nothing_are_even_odds(data: RequestConfig) -> None:
    nothing = Examples(*(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.bool_, np.int64)))
    found = additive_means(nothing, Examples.of(steps_of(data, "test")), with_users=True)
    assert (found == 0.5).all()


def test_without_repeats_no_item_was_met_before(dataset: Path) -> None:
    write_task(dataset, dataclasses.replace(TASK, only_new=True), "judge")
    examples = open_dataset(task_dataset(dataset, "judge", only_new=True))
    events = examples.read_events(COLUMNS)
    found = {(row["user_id"], row["time_ms"], row["item_id"][0]) for row in read_requests(examples).to_pylist()}
    every = {
        (row["user_id"], row["time_ms"], row["item_id"][0])
        for row in read_requests(open_dataset(task_dataset(dataset, "judge"))).to_pylist()
    }
    met: set[tuple[int, int]] = set()
    new = set()
    for row in events.to_pylist():
        if (row["user_id"], row["item_id"]) not in met:
            new.add((row["user_id"], row["time_ms"], row["item_id"]))
        met.add((row["user_id"], row["item_id"]))
    assert 0 < len(found) < len(every) and found == every & new


def test_times_met() -> None:
    users, items = np.array([7, 7, 7, 7, 3, 3, 3]), np.array([5, 6, 5, 5, 5, 6, 6])
    assert times_met(users, items).tolist() == [0, 0, 1, 2, 0, 0, 1]
