"""The baselines, by hand and by plain loops: what they are fitted on, and what they see after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.data.config import PartOfUsers
from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation import baselines
from tackboard.evaluation.baselines import (
    ItemToItem,
    Popularity,
    RecentlySeen,
    RecentPopularity,
    TrainingEvents,
    all_baselines,
)
from tackboard.evaluation.judged_events import JudgedEvents, first_seen, judged_events
from tackboard.evaluation.live_counts import LiveCounts


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


ByTime = Callable[..., Sequences]


def known_at(sequences: Sequences, event: int) -> int:
    return int(max(sequences.events.times[event], sequences.events.received[event]))


def trained_events(sequences: Sequences, part: PartOfUsers | None = None) -> list[int]:
    """The events that training reads, by a plain loop: of each user, those before the first that came too late."""
    split = sequences.source.time_split
    assert split is not None
    found = []
    for user, (begin, end) in enumerate(zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)):
        if part is not None and not part.of(sequences.user_ids[[user]])[0]:
            continue
        for event in range(begin, end):
            if known_at(sequences, event) >= split.until_ms:
                break
            found.append(event)
    return found


@pytest.mark.parametrize("slice_hours", [0.0, 12.0])
@pytest.mark.parametrize("part", [None, PartOfUsers("train", 0.4)])
def test_training_events_end_at_the_cut(by_time: ByTime, slice_hours: float, part: PartOfUsers | None) -> None:
    """Users of data.validation_share are left out, because the model was not trained on them."""
    sequences = by_time(1, slice_hours=slice_hours)
    training, expected = TrainingEvents.of(sequences, part), trained_events(sequences, part)
    assert sequences.catalogue[training.items].tolist() == sequences.item_ids[expected].tolist()
    assert training.times.tolist() == [known_at(sequences, event) for event in expected]
    assert training.is_positive.tolist() == sequences.is_positive[expected].tolist()
    owners = [int(np.flatnonzero(sequences.offsets <= event)[-1]) for event in expected]
    assert training.users.tolist() == owners
    assert len(expected) > 50
    counts = [
        sum(sequences.item_ids[event] == item and bool(sequences.is_positive[event]) for event in expected)
        for item in sequences.catalogue
    ]
    judged = judged_events(sequences, "first")
    assert (Popularity(training).score(judged) == np.array(counts)).all()


def test_training_events_of_another_dataset_are_those_of_the_ranked_items(by_time: ByTime) -> None:
    """Items that the judged dataset lacks are left out; items that training lacks have no count."""
    trained = by_time(1)
    catalogue = np.array([2, 3, 77])
    training = TrainingEvents.of(trained, None, catalogue)
    everything = dict(zip(trained.catalogue.tolist(), TrainingEvents.of(trained).counts().tolist(), strict=True))
    assert training.counts().tolist() == [everything[2], everything[3], 0]
    assert set(training.items.tolist()) == {0, 1}


@pytest.mark.parametrize("hours", [3.0, 1000.0])
def test_live_counts_go_on_and_frozen_counts_stop(by_time: ByTime, hours: float) -> None:
    """A frozen count never sees anything from the cut on. Ties are ordered by popularity in training."""
    sequences = by_time(2)
    assert sequences.source.time_split is not None
    training, cut_ms = TrainingEvents.of(sequences), sequences.source.time_split.cut_ms
    judged = judged_events(sequences, "all")
    judged = judged.take(np.random.default_rng(1).permutation(len(judged)))
    live = RecentPopularity(sequences, LiveCounts.of(sequences), training.counts(), hours).score(judged)
    frozen = RecentPopularity(
        sequences, training.live_counts(), training.counts(), hours, frozen_ms=training.end_ms
    ).score(judged)
    popularity = Popularity(training).score(judged)[0]
    trained = trained_events(sequences)
    last = max(known_at(sequences, event) for event in trained) + 1
    assert training.end_ms == last <= cut_ms
    length = hours * HOUR_MS
    for row, event in enumerate(judged.events):
        time = int(sequences.events.times[event])
        for chosen, instant, scores in ((range(len(sequences.item_ids)), time, live), (trained, last, frozen)):
            counts = np.zeros(len(sequences.catalogue))
            for other in chosen:
                if sequences.is_positive[other] and instant - length <= known_at(sequences, other) < instant:
                    counts[np.searchsorted(sequences.catalogue, sequences.item_ids[other])] += 1
            assert np.floor(scores[row]).tolist() == counts.tolist()
            order = np.lexsort((-popularity, -counts))
            assert (np.diff(scores[row][order]) <= 0).all()
            ties = scores[row] - counts
            assert np.argmax(ties) == np.argmax(popularity) and (ties < 1).all()


def test_recently_seen_scores_the_newest_item_highest(by_time: ByTime) -> None:
    sequences = by_time(3)
    judged = judged_events(sequences, "all")
    scores = RecentlySeen(sequences).score(judged)
    for row, (user, event) in enumerate(zip(judged.users, judged.events, strict=True)):
        newest_first = list(dict.fromkeys(sequences.item_ids[sequences.offsets[user] : event][::-1].tolist()))
        order = np.argsort(-scores[row], kind="stable")[: len(newest_first)]
        assert sequences.catalogue[order].tolist() == newest_first
        assert (scores[row] > 0).sum() == len(newest_first)


@pytest.mark.parametrize("slice_hours", [0.0, 12.0])
@pytest.mark.parametrize("filter_seen", [True, False])
def test_nothing_after_the_cut_changes_a_fitted_baseline(
    by_time: ByTime, slice_hours: float, filter_seen: bool
) -> None:
    """Other events from the cut on: the same popularity, the same neighbours, the same windows, the same frozen count.

    Histories and live counts at the cut are the same, too. Item ids are compared where both logs have them.
    """
    found = []
    for seed_after in (50, 51, 52):
        data = by_time(4, seed_after, slice_hours)
        training = TrainingEvents.of(data)
        fitted = all_baselines(
            data, training, LiveCounts.of(data), filter_seen=filter_seen, appears_ms=first_seen(data)
        )
        assert data.cuts is not None and data.source.time_split is not None
        # These users have events before the cut; their histories end where training ends.
        users = np.flatnonzero(np.isin(data.user_ids, (2, 3, 4, 7, 8, 9)))
        ends = data.cuts.train_ends[users]
        old = np.searchsorted(data.catalogue, np.arange(15))
        scores = {
            name: rival(JudgedEvents(users, np.minimum(ends, data.offsets[1:][users] - 1)))[:, old]
            for name, rival in fitted.rivals.items()
            if name in ("popularity", "recent, frozen")
        }
        scores["item-to-item"] = fitted.rivals["item-to-item"](JudgedEvents(users, ends))[:, old]
        cut_ms = data.source.time_split.cut_ms
        scores["live at the cut"] = LiveCounts.of(data).window(100 * HOUR_MS).at(cut_ms)[old].copy()
        found.append((fitted.window_h, scores, data.item_ids.tolist()))
    first = found[0]
    for other in found[1:]:
        assert other[2] != first[2]
        assert other[0] == first[0] and set(first[0]) == {"recent, live", "recent, frozen"}
        for name, expected in first[1].items():
            assert np.array_equal(other[1][name], expected) and expected.any(), name


def test_the_window_is_not_chosen_on_held_out_events(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Every six hours, users turn to twelve other items, so short windows predict their training events best.

    The held-out event of each user is on an item that many others clicked four days ago. Most events of the last hours
    are held out, so they would choose a long window.
    """
    old, start_ms, draws = 100, 1000 * HOUR_MS, np.random.default_rng(1)
    log: list[tuple[int, int, str, str, int]] = [
        (5000 + user, old, "click", "home", start_ms - 100 * HOUR_MS + place)
        for user in range(40)
        for place in range(20)
    ]
    for hour in range(60):
        for click in range(24):
            user, item = 12 * hour + click % 12, int(draws.integers(12)) + 12 * (hour // 6 % 3)
            log.append((user, item, "click", "home", start_ms + hour * HOUR_MS + click * 60_000))
    # The last training event is later than these.
    held_out_ms = start_ms + 59 * HOUR_MS + 10 * 60_000 + 1
    log += [(user, old, "click", "home", held_out_ms) for user in range(12 * 59)]
    sequences = load_sequences(make_dataset(tmp_path, log), ("click",))
    fitted = all_baselines(sequences, TrainingEvents.of(sequences), LiveCounts.of(sequences), filter_seen=False)
    assert 0 < fitted.window_h["recent, live"] <= 6.0


def test_a_log_without_an_event_to_choose_by_has_a_day(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    log = [(1, 5, "hide", "home", 1), (1, 6, "click", "home", 2)]
    sequences = load_sequences(make_dataset(tmp_path, log), ("click",))
    fitted = all_baselines(sequences, TrainingEvents.of(sequences), LiveCounts.of(sequences), filter_seen=False)
    assert fitted.window_h == {"recent, live": 24.0}
    assert set(fitted.rivals) == {"popularity", "item-to-item", "recently seen", "recent, live"}
