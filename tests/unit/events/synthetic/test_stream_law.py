"""The law of a stream: the same events as a plain loop, frequencies and forecasts as exact as it says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tackboard.core import keyed_random
from tackboard.core.errors import ConfigError
from tackboard.core.hashing import mix64
from tackboard.events.synthetic import stream_law
from tackboard.events.synthetic.stream_law import StreamLaw, StreamLawConfig
from tackboard.features.column import offsets_of

SMALL = StreamLawConfig(num_items=600, num_topics=6, mean_events=12, max_events=40, num_users=1000, stay=0.7)


def plain_events(config: StreamLawConfig, user: int, num_events: int) -> list[tuple[int, int]]:
    """(topic of the user, number of the item) of each event, one after another."""
    state = int(keyed_random.bits(config.seed, stream_law.USER_STREAM, user)[0])

    def draw(position: int, purpose: int) -> float:
        return int(mix64(np.array([state + position], dtype=np.uint64), purpose)[0] >> np.uint64(11)) * 2.0**-53

    events, topic, num_ranks = [], 0, config.num_items // config.num_topics
    edges = np.arange(num_ranks + 1) + 1.0
    power = 1.0 - config.zipf_exponent
    integral = (edges**power - 1.0) / power if power else np.log(edges)
    for position in range(num_events):
        move = draw(position, stream_law.MOVE)
        if position == 0 or move >= config.stay + config.advance:
            topic = int(draw(position, stream_law.JUMP) * config.num_topics)
        elif move >= config.stay:
            topic = (topic + 1) % config.num_topics
        shown = topic
        if draw(position, stream_law.IS_NOISE) < config.noise:
            shown = int(draw(position, stream_law.NOISE) * config.num_topics)
        rank = int(np.searchsorted(integral, draw(position, stream_law.RANK) * integral[-1], side="right")) - 1
        events.append((topic, rank * config.num_topics + shown))
    return events


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.2])
def test_events_equal_a_plain_loop(exponent: float) -> None:
    config = StreamLawConfig(num_items=600, num_topics=6, zipf_exponent=exponent, mean_events=12, max_events=40)
    law, users = StreamLaw(config), np.array([0, 7, 99_999_999, 100_000_003])
    offsets = offsets_of(np.array([40, 1, 17, 5]))
    items, topics = law.items_of(users, offsets), law.topics_of(users, offsets)
    for user, begin, end in zip(users.tolist(), offsets[:-1], offsets[1:], strict=True):
        plain = plain_events(config, user, end - begin)
        assert topics[begin:end].tolist() == [topic for topic, _ in plain]
        assert law._numbers(items[begin:end]).tolist() == [number for _, number in plain]


def test_a_shorter_history_is_the_beginning_of_the_longer_one_and_users_are_independent() -> None:
    law, users = StreamLaw(SMALL), np.array([3, 4])
    long = law.items_of(users, np.array([0, 30, 60]))
    assert np.array_equal(law.items_of(users[1:], np.array([0, 12])), long[30:42])


def test_ids_are_a_bijection_and_shares_add_up() -> None:
    law, numbers = StreamLaw(SMALL), np.arange(600)
    ids = law._ids(numbers)
    assert np.array_equal(np.sort(ids), numbers) and np.array_equal(law._numbers(ids), numbers)
    assert np.exp(law.log_share(numbers).astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
    large = StreamLaw(StreamLawConfig())
    ends = np.array([0, 1, 199_999_998, 199_999_999])
    assert np.array_equal(large._numbers(large._ids(ends)), ends)


def test_lengths_and_popularity_are_as_the_law_says() -> None:
    law, users = StreamLaw(SMALL), np.arange(20_000)
    lengths = law.num_events(users)
    assert lengths.mean() == pytest.approx(12.0, rel=0.02) and (lengths.min(), lengths.max()) == (1, 40)
    items = law.items_of(users, offsets_of(lengths))
    counts = np.bincount(items, minlength=600)
    expected = np.exp(law.log_share(np.arange(600))) * len(items)
    # Items of a user are not independent, so the spread is wider than that of single draws.
    assert np.abs(counts - expected).max() < 5 * np.sqrt(3 * expected.max())
    assert np.abs(counts[expected > 2000] / expected[expected > 2000] - 1).max() < 0.06


def test_the_forecast_equals_the_filter_with_whole_matrices() -> None:
    law, users = StreamLaw(SMALL), np.array([1, 2, 3])
    offsets = np.array([0, 9, 9, 14])
    items = np.concatenate([law.items_of(users[:1], np.array([0, 9])), law.items_of(users[2:], np.array([0, 5]))])
    found, topics, size = law.next_topics(items, offsets), law.topics_of_items(items), SMALL.num_topics
    jump = (1 - SMALL.stay - SMALL.advance) / size
    moves = SMALL.stay * np.eye(size) + SMALL.advance * np.roll(np.eye(size), 1, axis=1) + jump
    shows = (1 - SMALL.noise) * np.eye(size) + SMALL.noise / size
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        belief = np.full(size, 1 / size)
        for topic in topics[begin:end]:
            belief = belief * shows[:, topic]
            belief = belief / belief.sum() @ moves
        assert np.allclose(found[row], belief @ shows, rtol=1e-12)
    assert np.allclose(found.sum(axis=1), 1.0) and np.allclose(found[1], 1 / size)


def test_forecasts_are_calibrated() -> None:
    law, users = StreamLaw(SMALL), np.arange(6000)
    offsets = np.arange(6001) * 11
    items = law.items_of(users, offsets)
    is_last = np.arange(len(items)) % 11 == 10
    forecast = law.next_topics(items[~is_last], np.arange(6001) * 10)
    came = law.topics_of_items(items[is_last])
    likely = forecast.argmax(axis=1)
    sure = forecast[np.arange(6000), likely]
    assert (likely == came).mean() == pytest.approx(sure.mean(), abs=0.02)
    assert sure.mean() > 2.5 / SMALL.num_topics


def test_a_sample_is_fixed_distinct_and_popular() -> None:
    law = StreamLaw(SMALL)
    sample = law.sample_items(60)
    assert len(np.unique(sample)) == 60 and np.array_equal(sample, np.sort(sample))
    assert np.array_equal(sample, StreamLaw(SMALL).sample_items(60))
    assert set(sample) < set(law.sample_items(100))
    assert np.exp(law.log_share(sample)).sum() > 0.3
    assert np.array_equal(law.sample_items(600), np.arange(600))
    assert not np.array_equal(sample, StreamLaw(StreamLawConfig(num_items=600, num_topics=6, seed=1)).sample_items(60))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_items": 1001},
        {"num_items": 1 << 31},
        {"num_topics": 1},
        {"stay": 0.95, "advance": 0.1},
        {"noise": 1.5},
        {"mean_events": 256},
        {"max_events": 1},
        {"num_users": 0},
        {"zipf_exponent": -1.0},
        {"seed": 1 << 63},
    ],
)
def test_impossible_laws_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"data\.law\."):
        StreamLawConfig(**wrong)  # type: ignore[arg-type]
