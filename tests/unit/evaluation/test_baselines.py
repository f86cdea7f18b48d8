"""Popularity and item-to-item, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.evaluation import baselines
from tackboard.evaluation.baselines import ItemToItem, Popularity, TrainingEvents
from tackboard.evaluation.judged_events import JudgedEvents


def before_targets(sequences: Sequences, users: list[int]) -> JudgedEvents:
    """What follows the training events of some users: the held-out event, or the end of the history."""
    return JudgedEvents(np.array(users), sequences.train_ends[users])


def item_to_item(sequences: Sequences) -> ItemToItem:
    return ItemToItem(sequences, TrainingEvents.of(sequences))


def test_popularity_counts_positive_training_events(hand_made: Sequences) -> None:
    scores = Popularity(TrainingEvents.of(hand_made)).score(before_targets(hand_made, [0, 2]))
    assert scores.tolist() == [[3, 1, 1, 0], [3, 1, 1, 0]]
    scores[0] = 0  # each row is the caller's own
    assert scores[1].tolist() == [3, 1, 1, 0]


def test_item_to_item_by_hand(hand_made: Sequences) -> None:
    """User 1 read A B A, user 2 read A C. A occurs 3 times, B twice (once by user 5), C and D once.

    A and B meet twice, A and C once; A meets itself, which does not count.
    """
    ab, ac = 2 / math.sqrt(6), 1 / math.sqrt(3)
    scores = item_to_item(hand_made).score(before_targets(hand_made, [0, 1, 2, 3]))
    assert scores[0].tolist() == pytest.approx([0.8 * ab, (1 + 0.64) * ab, (1 + 0.64) * ac, 0])
    assert scores[1].tolist() == pytest.approx([1.0 * ac, 0.8 * ab, 0.8 * ac, 0])
    assert scores[2].tolist() == [0, 0, 0, 0]  # D met nothing
    assert scores[3].tolist() == [0, 0, 0, 0]  # no history


def test_item_to_item_equals_a_plain_loop(tiny_sequences: Sequences) -> None:
    data = tiny_sequences
    num_items = len(data.catalogue)
    pairs, occurrences = np.zeros((num_items, num_items)), np.zeros(num_items)
    histories = []
    for user in range(len(data.user_ids)):
        history = np.searchsorted(data.catalogue, data.item_ids[data.offsets[user] : data.train_ends[user]])
        histories.append(history)
        for place, item in enumerate(history):
            occurrences[item] += 1
            for other in history[place + 1 : place + 1 + baselines.WINDOW]:
                pairs[item, other] += 1
                pairs[other, item] += 1
    strength = pairs / np.sqrt(np.maximum(1, np.outer(occurrences, occurrences)))
    np.fill_diagonal(strength, 0)
    expected = [
        sum(
            (baselines.DECAY**age * strength[item] for age, item in enumerate(history[::-1][: baselines.NUM_RECENT])),
            np.zeros(num_items),
        )
        for history in histories
    ]
    judged = before_targets(data, list(range(len(data.user_ids))))
    assert np.allclose(item_to_item(data).score(judged), np.array(expected), atol=1e-5)


def test_only_the_strongest_neighbours_are_kept(hand_made: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "NUM_NEIGHBOURS", 1)
    scores = item_to_item(hand_made).score(before_targets(hand_made, [1]))  # A C: A keeps B, C keeps A
    assert (scores[0] > 0).tolist() == [True, True, False, False]


def test_users_next_to_each_other_do_not_co_occur(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    log = [(user, item, "click", "home", time) for user, item in ((1, 5), (2, 6)) for time in (1, 2)]
    sequences = load_sequences(make_dataset(tmp_path, log, name="apart"))
    assert not item_to_item(sequences).score(before_targets(sequences, [0, 1])).any()
