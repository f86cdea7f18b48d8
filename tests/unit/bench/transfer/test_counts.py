"""The numbers that describe an example, against plain loops."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.bench.transfer.counts import DAMPING, NAMES, NEWEST, describe_events, describe_examples
from tackboard.bench.transfer.data import Examples, Task
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.public.publisher import canonical_events


@pytest.fixture(scope="module")
def events() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Users, items, answers and offsets: 30 users of 1 to 20 events on 8 items."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 21, 30)
    users = np.repeat(np.arange(30), lengths)
    offsets = np.append(0, np.cumsum(lengths))
    return users, random.integers(0, 8, len(users)), random.random(len(users)) < 0.4, offsets


def test_numbers_are_those_of_plain_loops(events: tuple[np.ndarray, ...]) -> None:
    users, items, yes, offsets = events
    found = describe_events(users, items, yes, offsets)
    bounds = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    known = [row for begin, end in bounds for row in range(begin, begin + int(0.7 * (end - begin)))]
    mean = float(np.mean([yes[row] for row in known]))

    def share(rows: list[int], damping: float = DAMPING) -> float:
        return (sum(bool(yes[row]) for row in rows) + damping * mean) / (len(rows) + damping)

    of_item = {item: [row for row in known if items[row] == item] for item in range(8)}
    for begin, end in bounds:
        for row in range(begin, end):
            before = list(range(begin, row))
            pair = [one for one in before if items[one] == items[row]]
            excess = sum(float(yes[one]) - share(of_item[int(items[one])]) for one in before)
            expected = (
                np.log1p(len(before)),
                share(before),
                excess / (len(before) + DAMPING),
                share(before[-NEWEST:], 1.0),
                np.log1p(len(of_item[int(items[row])])),
                share(of_item[int(items[row])]),
                np.log1p(len(pair)),
                np.log1p(sum(bool(yes[one]) for one in pair)),
                bool(before) and items[row - 1] == items[row],
                bool(before) and yes[row - 1],
            )
            assert np.allclose(found[row], np.array(expected, dtype=float)), dict(zip(NAMES, expected, strict=True))


def test_no_number_knows_an_answer_that_comes_later(events: tuple[np.ndarray, ...]) -> None:
    """Changing the answers after the first 70% of each user's events changes only what comes after them."""
    users, items, yes, offsets = events
    begin, end = int(offsets[0]), int(offsets[1])
    last = end - 1
    assert last >= begin + int(0.7 * (end - begin))
    changed = yes.copy()
    changed[last] = ~changed[last]
    assert (describe_events(users, items, changed, offsets) == describe_events(users, items, yes, offsets)).all()


def test_examples_find_their_events(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    users, items = np.repeat([3, 1, 2], 6), random.integers(1, 4, 18)
    actions = pa.array(np.where(random.random(18) < 0.5, "like", "view"))
    events = canonical_events(users, items, np.arange(18) // 2 * 1000, action=actions)
    path = write_dataset(tmp_path, "small", events, source={})
    stored = open_dataset(path).read_events(["user_id", "item_id", "action"])
    first = stored["user_id"].to_numpy()[0]
    labels = np.zeros(2, dtype=np.bool_)
    # The second event of this user was at the first one's instant, and is moved by a millisecond.
    times = np.array([open_dataset(path).read_events(["time_ms"])["time_ms"].to_numpy()[0] + add for add in (1, 0)])
    asked = Examples(np.array([first, first]), stored["item_id"].to_numpy()[[1, 0]], labels, times)
    [found] = describe_examples(path, Task("?", ("like",)), asked)
    assert found[:, 0].tolist() == [np.log1p(1), 0.0], "the events before them, in the order that was asked"
