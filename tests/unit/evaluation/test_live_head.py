"""The live head: its features by plain loops, weights that are found again, and a world in which it must win."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tackboard.data.sequences import Sequences
from tackboard.data.source import open_sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation import live_head
from tackboard.evaluation.judged_events import JudgedEvents, events_between, first_seen
from tackboard.evaluation.live_counts import LiveCounts
from tackboard.evaluation.live_head import OF_MODEL, OF_OWN, WINDOWS_H, LiveFeatures, fit_live_head

START_MS = 1_700_000_000_000
NUM_ITEMS = 12


@pytest.fixture
def sequences(tmp_path: Path, make_dataset: Callable[..., Path]) -> Sequences:
    draws = np.random.default_rng(3)
    log: list[tuple[Any, ...]] = []
    for user in range(40):
        for time in np.sort(draws.integers(0, 400, size=int(draws.integers(3, 25)))):
            newest = min(NUM_ITEMS - 1, int(time) // 35)
            item = max(0, newest - int(draws.geometric(0.5)) + 1)
            log.append((user, 100 + item, "click", "home", START_MS + int(time) * HOUR_MS))
    return open_sequences(make_dataset(tmp_path, log), held_out=0).read()


def known(sequences: Sequences, number: int = 7) -> NDArray[np.bool_]:
    return np.arange(len(sequences.catalogue)) < number


def features_of(sequences: Sequences) -> LiveFeatures:
    return LiveFeatures(sequences, LiveCounts.of(sequences), first_seen(sequences), known(sequences))


def test_features_equal_a_plain_loop(sequences: Sequences) -> None:
    features = features_of(sequences)
    judged = events_between(sequences, START_MS + 200 * HOUR_MS, None)
    times, places = sequences.events.times, np.searchsorted(sequences.catalogue, sequences.item_ids)
    for number in (0, 5, 30, len(judged) - 1):
        one = judged.take(np.array([number]))
        time = int(times[one.events[0]])
        found = dict(zip(features.of_items, features.items_at(time).T, strict=True))
        for item in range(len(sequences.catalogue)):
            own = times[places == item]
            for hours in WINDOWS_H:
                count = ((own < time) & (own >= time - hours * HOUR_MS)).sum()
                kinds = [found[f"counts {hours:g} h, {kind}"][item] for kind in ("known", "unknown")]
                assert kinds == pytest.approx([np.log1p(count), 0] if item < 7 else [0, np.log1p(count)], abs=1e-6)
            age = np.log1p(max(0, time - own.min()) / HOUR_MS)
            assert found["age, known"][item] + found["age, unknown"][item] == pytest.approx(age, abs=1e-5)
        rows, items, values = features.own(one)
        before = np.arange(sequences.offsets[one.users[0]], one.events[0])
        assert (rows == 0).all() and sorted(items.tolist()) == sorted(set(places[before].tolist()))
        for item, value in zip(items, values, strict=True):
            mine = before[places[before] == item]
            hours = (time - times[mine[-1]]) / HOUR_MS
            assert value == pytest.approx([1, np.log1p(len(mine)), np.log1p(hours)], rel=1e-5)


def test_weights_that_made_the_choices_are_found(sequences: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are drawn by a head with given weights, from the features of the log; the fit finds these weights."""
    monkeypatch.setattr(live_head, "PENALTY", 0.0)
    features = features_of(sequences)
    judged = events_between(sequences, START_MS + 100 * HOUR_MS, None)
    judged = JudgedEvents(np.tile(judged.users, 60), np.tile(judged.events, 60))
    judged = judged.take(np.argsort(sequences.events.times[judged.events], kind="stable"))
    names = (*OF_MODEL, *features.of_items, *OF_OWN)
    true = dict.fromkeys(names, 0.0) | {"model": 1.5, "counts 24 h, unknown": 0.8, "age, known": -0.5, "seen": -1.0}
    taste = np.random.default_rng(5).normal(size=(len(sequences.user_ids), len(sequences.catalogue)))

    def score(chosen: JudgedEvents) -> NDArray[np.float32]:
        return taste[chosen.users].astype(np.float32)

    total = live_head.LiveHead(true, 0).scores(features, score)(judged).astype(np.float64)
    appeared = features.appears_ms[None, :] < sequences.events.times[judged.events][:, None]
    noise = np.random.default_rng(6).gumbel(size=total.shape)
    picked = np.where(appeared, total + noise, -np.inf).argmax(axis=1)
    parts = iter(np.split(picked, range(live_head.AT_ONCE, len(picked), live_head.AT_ONCE)))
    with monkeypatch.context() as patch:
        patch.setattr(JudgedEvents, "items", lambda _self, _sequences: next(parts))
        found = fit_live_head(features, score, judged)
    assert found is not None and found.num_events == len(judged) > 5000
    for name in ("model", "counts 24 h, unknown", "age, known", "seen"):
        assert found.weights[name] == pytest.approx(true[name], abs=0.25), name


def test_a_large_catalogue_has_fewer_choices_and_nearly_the_same_weights(
    sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = features_of(sequences)
    judged = events_between(sequences, START_MS + 100 * HOUR_MS, None)

    def score(chosen: JudgedEvents) -> NDArray[np.float32]:
        return np.zeros((len(chosen), len(sequences.catalogue)), dtype=np.float32)

    whole = fit_live_head(features, score, judged)
    monkeypatch.setattr(live_head, "CHOICES", 4)
    monkeypatch.setattr(live_head, "CHOICES_PER_SOURCE", 8)
    part = fit_live_head(features, score, judged)
    assert whole is not None and part is not None
    assert 0.8 * whole.num_events < part.num_events <= whole.num_events
    assert np.sign(part.weights["age, unknown"]) == np.sign(whole.weights["age, unknown"])


def test_without_events_there_is_no_head(sequences: Sequences) -> None:
    features = features_of(sequences)
    nobody = JudgedEvents(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert fit_live_head(features, lambda judged: np.zeros((len(judged), NUM_ITEMS)), nobody) is None
