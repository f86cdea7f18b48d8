"""Streaming frequencies: equal to a plain loop, near the truth of a simulated stream, following it when it changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tackboard.core.errors import ConfigError, DataError
from tackboard.core.hashing import row_ids
from tackboard.models.frequencies import StreamingFrequencies


class PlainFrequencies:
    """The twin: one loop over items and hash functions, in Python floats."""

    def __init__(self, num_hashes: int, rate: float) -> None:
        self.num_hashes, self.rate, self.step = num_hashes, rate, 0
        self.slots: dict[tuple[int, int], tuple[int, int, float, float]] = {}

    def observe(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        self.step += 1
        totals: dict[tuple[int, int], int] = {}
        for item, count in zip(rows, counts, strict=True):
            for slot in enumerate(item[: self.num_hashes]):
                if count > 0:
                    totals[slot] = totals.get(slot, 0) + count
        for slot, total in totals.items():
            times, last, interval, mean = self.slots.get(slot, (0, 0, 0.0, 0.0))
            share = max(self.rate, 1 / (times + 1))
            interval = (1 - share) * interval + share * (self.step - last)
            self.slots[slot] = (times + 1, self.step, interval, (1 - share) * mean + share * total)

    def log_expected(self, item: Sequence[int]) -> float:
        estimates = []
        for slot in enumerate(item[: self.num_hashes]):
            times, last, interval, mean = self.slots.get(slot, (0, 0, 0.0, 1.0))
            share = max(self.rate, 1 / (times + 1))
            interval = max(1.0, interval, (1 - share) * interval + share * (self.step - last))
            estimates.append(math.log(mean / interval))
        return min(estimates)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), max_size=25),
    st.integers(1, 3),
    st.sampled_from([0.05, 0.3, 1.0]),
)
@settings(max_examples=60)
def test_it_equals_a_plain_loop(steps: list[list[int]], num_hashes: int, rate: float) -> None:
    """Nine items on five slots per hash function: collisions, repeats, items never seen, steps that see nothing."""
    rows = row_ids(np.arange(9), 3, 5, seed=1)
    found, plain = StreamingFrequencies(num_hashes, 5, rate), PlainFrequencies(num_hashes, rate)
    for counts in steps:
        found.observe(found.seen_slots(torch.from_numpy(rows), torch.tensor(counts)))
        plain.observe(rows.tolist(), counts)
    expected = [plain.log_expected(item) for item in rows.tolist()]
    assert found.log_expected(torch.from_numpy(rows)).tolist() == pytest.approx(expected, abs=1e-4)


def zipf(num_items: int) -> NDArray[np.float64]:
    shares = 1.0 / np.arange(1, num_items + 1)
    return shares / shares.sum()


def stream(
    frequencies: StreamingFrequencies, rows: torch.Tensor, shares: NDArray[np.float64], num_steps: int, seed: int
) -> None:
    """Feeds steps of about 100 positives drawn with these shares."""
    random = np.random.default_rng(seed)
    for _ in range(num_steps):
        counts = random.multinomial(int(random.integers(80, 121)), shares)
        occurred = counts > 0
        frequencies.observe(
            frequencies.seen_slots(rows[torch.from_numpy(occurred)], torch.from_numpy(counts[occurred]))
        )


def test_a_stationary_stream_is_estimated_to_within_a_few_per_cent() -> None:
    """400 items, from 15 occurrences a step to one in 26 steps, on 4 × 300 slots: most slots are shared."""
    shares = zipf(400)
    rows = torch.from_numpy(row_ids(np.arange(400), 4, 300, seed=0))
    frequencies = StreamingFrequencies(4, 300, rate=0.02)
    stream(frequencies, rows, shares, 1500, seed=0)
    alone = StreamingFrequencies(1, 400, rate=0.02)  # one slot per item: what is off here is chance, not collisions
    stream(alone, torch.arange(400)[:, None], shares, 1500, seed=0)
    truth = np.log(100 * shares)
    error = frequencies.log_expected(rows).numpy() - truth
    chance = alone.log_expected(torch.arange(400)[:, None]).numpy() - truth
    assert np.abs(chance).max() < 0.4
    assert abs(chance.mean()) < 0.02
    assert np.exp(-chance).mean() == pytest.approx(1.0, abs=0.02)  # the weight that the loss uses
    assert np.exp(alone.log_expected(torch.arange(400)[:, None]).numpy()).sum() == pytest.approx(100.0, rel=0.03)
    assert np.abs(error[:50]).max() < 0.35
    assert abs(error[:50].mean()) < 0.05
    assert -0.05 < error.mean() < 0.2  # collisions can only add
    one = StreamingFrequencies(1, 300, rate=0.02)
    stream(one, rows, shares, 1500, seed=0)
    assert (
        one.log_expected(rows).numpy() - truth
    ).mean() > 3 * error.mean()  # which is why there are several functions


def test_early_estimates_are_unbiased() -> None:
    """The weight of an item seen for the first time is right on average: its mean interval is."""
    probability, intervals = 0.2, []
    for seed in range(300):
        random, frequencies = np.random.default_rng(seed), StreamingFrequencies(1, 2)
        while not int(frequencies.times_seen[0]):
            frequencies.observe(
                frequencies.seen_slots(torch.tensor([[0], [1]]), torch.tensor([int(random.random() < probability), 1]))
            )
        intervals.append(1 / math.exp(float(frequencies.log_expected(torch.tensor([[0]])))))
    assert np.mean(intervals) == pytest.approx(1 / probability, rel=0.15)


def test_a_change_is_followed() -> None:
    shares, rows = zipf(100), torch.arange(100)[:, None]
    frequencies = StreamingFrequencies(1, 100)
    stream(frequencies, rows, shares, 400, seed=1)
    stream(frequencies, rows, shares[::-1].copy(), 400, seed=2)
    error = frequencies.log_expected(rows).numpy() - np.log(100 * shares[::-1])
    assert np.abs(error[-30:]).max() < 0.5
    assert abs(error.mean()) < 0.1


def test_what_is_no_longer_seen_fades() -> None:
    frequencies, both = StreamingFrequencies(1, 2, rate=0.1), torch.tensor([[0], [1]])
    for _ in range(50):
        frequencies.observe(frequencies.seen_slots(both, torch.tensor([3, 1])))
    assert frequencies.log_expected(both).exp().tolist() == pytest.approx([3.0, 1.0])
    fading = []
    for _ in range(200):
        frequencies.observe(frequencies.seen_slots(torch.tensor([[1]]), torch.tensor([1])))
        fading.append(float(frequencies.log_expected(both)[0].exp()))
    assert fading[0] == pytest.approx(3.0)  # one step away is no news for an item that comes every step
    assert all(later <= earlier for earlier, later in itertools.pairwise(fading))
    assert fading[-1] == pytest.approx(3 / (0.9 + 0.1 * 200))


def test_before_anything_is_known_all_items_are_equal_and_finite() -> None:
    frequencies, rows = StreamingFrequencies(2, 10), torch.from_numpy(row_ids(np.arange(5), 2, 10, seed=0))
    assert frequencies.log_expected(rows).tolist() == [0.0] * 5
    assert frequencies.log_expected(rows[:0]).shape == (0,)
    frequencies.observe(frequencies.seen_slots(rows[:0], torch.zeros(0, dtype=torch.int64)))
    assert torch.isfinite(frequencies.log_expected(rows)).all()
    for _ in range(20):
        frequencies.observe(frequencies.seen_slots(torch.tensor([[9, 9]]), torch.tensor([8])))
    never = torch.tensor([[0, 0]])
    assert float(frequencies.log_expected(never).exp()) == pytest.approx(1 / 21)


def test_a_resumed_stream_ends_in_the_same_bits() -> None:
    rows, shares = torch.from_numpy(row_ids(np.arange(60), 2, 40, seed=0)), zipf(60)
    straight, first = StreamingFrequencies(2, 40), StreamingFrequencies(2, 40)
    for frequencies in (straight, first):
        stream(frequencies, rows, shares, 30, seed=3)
    second = StreamingFrequencies(2, 40)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    assert set(second.state_dict()) == {"step", "last_seen", "interval", "count", "times_seen"}
    for frequencies in (straight, second):
        stream(frequencies, rows, shares, 30, seed=4)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_the_order_of_items_and_further_hash_functions_change_nothing() -> None:
    rows = torch.from_numpy(row_ids(np.arange(60), 4, 20, seed=0))
    counts = torch.arange(60) % 4
    one, other = StreamingFrequencies(2, 20), StreamingFrequencies(2, 20)
    before = torch.get_rng_state()
    for _ in range(3):
        one.observe(one.seen_slots(rows, counts))
        other.observe(other.seen_slots(rows.flip(0)[:, :2], counts.flip(0)))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)
    assert not one.log_expected(rows).requires_grad


def test_wrong_input_is_refused() -> None:
    for wrong in ({"num_hashes": 0}, {"num_rows": 0}, {"rate": 0.0}, {"rate": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            StreamingFrequencies(**({"num_hashes": 2, "num_rows": 4} | wrong))
    frequencies = StreamingFrequencies(2, 4)
    with pytest.raises(DataError, match="2 or more"):
        frequencies.observe(
            frequencies.seen_slots(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
        )
    for counts in (torch.ones(2, dtype=torch.int64), torch.ones(3)):
        with pytest.raises(DataError, match="one whole number per item"):
            frequencies.observe(frequencies.seen_slots(torch.zeros(3, 2, dtype=torch.int64), counts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_the_gpu_estimates_the_same() -> None:
    rows, shares = torch.from_numpy(row_ids(np.arange(60), 2, 40, seed=0)), zipf(60)
    here, there = StreamingFrequencies(2, 40), StreamingFrequencies(2, 40).cuda()
    random = np.random.default_rng(0)
    for _ in range(30):
        counts = torch.from_numpy(random.multinomial(50, shares))
        here.observe(here.seen_slots(rows, counts))
        there.observe(there.seen_slots(rows.cuda(), counts.cuda()))
    torch.testing.assert_close(there.log_expected(rows.cuda()).cpu(), here.log_expected(rows))
