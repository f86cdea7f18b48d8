"""Kept contexts give the scores of contexts that are computed anew, whatever happens to a user's history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tackboard.checkpoint.store import find_checkpoint
from tackboard.core.errors import UsageError
from tackboard.core.rundir import RunDirectory
from tackboard.export.exporter import export_bundle
from tackboard.features.standard import history_stride
from tackboard.models.backbone import BackboneConfig
from tackboard.scoring.context_cache import OUTCOMES, ContextCache, share_extended
from tackboard.scoring.scorer import Scorer
from tackboard.train.config import RunConfig, config_to_json
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("torch_settings")

MAX_HISTORY = 8  # as `make_scorer` has
CANDIDATES = [3, 17, 4, 99]
Event = tuple[int, str, str, int]
Make = Callable[..., Scorer]


@pytest.fixture(scope="module")
def scorer(make_scorer: Make) -> Scorer:
    positions = BackboneConfig(num_layers=2, num_heads=2, positions="rotary", time_bias=8)
    return make_scorer(backbone=positions, request_time=True)


def event(number: int, item: int | None = None) -> Event:
    chosen = (7 * number) % 50 if item is None else item
    return chosen, ["click", "save"][number % 2], ["home", "search"][number % 3 == 0], 60_000 * number**2


class Asking:
    """Asks for scores with a cache, and compares them with the scores without a cache."""

    def __init__(self, scorer: Scorer, max_bytes: int = 1 << 20) -> None:
        self.scorer, self.cache = scorer, ContextCache(scorer, max_bytes)

    def ask(self, events: list[Event], user: int | None = 5, request_ms: int = 10**9) -> str:
        """The outcome of a request, whose scores are compared."""
        names = ("item", "action", "surface", "time_ms")
        history = dict(zip(names, zip(*events, strict=True), strict=True)) if events else {}
        request = self.scorer.reader.read(history, CANDIDATES, user=user, request_ms=request_ms)
        before = self.cache.counts
        features = self.scorer.compute_features(request)
        found = self.cache.score_features(features, request.candidate_items, request.user_id)
        expected: NDArray[np.float32] = self.scorer.score(request)
        assert np.ptp(expected) > 0.01
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        (outcome,) = (name for name, count in self.cache.counts.items() if count > before[name])
        return outcome


def test_a_growing_history_is_extended(scorer: Scorer) -> None:
    asking = Asking(scorer)
    events = [event(number) for number in range(MAX_HISTORY)]
    steps = [(1, "not_kept"), (2, "extended"), (2, "unchanged"), (5, "extended"), (MAX_HISTORY, "extended")]
    for step, (number, outcome) in enumerate(steps):
        assert asking.ask(events[:number], request_ms=10**9 + 10**7 * step) == outcome
    assert asking.cache.counts["extended"] == 3
    assert share_extended(asking.cache.counts) == pytest.approx(4 / 5)
    # A second device of the user knows fewer events. Their context is a part of what is kept, which stays.
    assert asking.ask(events[:3]) == "unchanged"
    assert asking.ask(events) == "unchanged"


def test_moved_windows_and_late_or_corrected_events(scorer: Scorer) -> None:
    asking = Asking(scorer)
    events = [event(number) for number in range(0, 24, 2)]
    assert asking.ask(events[:6]) == "not_kept"
    assert asking.ask([*events[:4], event(7), *events[4:6]]) == "late"
    assert asking.ask([*events[:4], event(7), *events[4:7]]) == "extended"
    other = (events[1][0], "save" if events[1][1] == "click" else "click", *events[1][2:])
    assert asking.ask([events[0], other, *events[2:6]]) == "late"
    assert asking.ask([event(0, item=49), *events[1:6]]) == "moved"
    assert asking.ask(events[:MAX_HISTORY]) == "moved"
    assert asking.ask(events[: MAX_HISTORY + 1]) == "moved", "the window is full, so its first event changes"


def test_anchors_let_long_histories_be_extended(make_scorer: Make) -> None:
    """With anchors among the oldest 6 of 8 events, the first event stays for 3.5 requests on average."""
    counts = {}
    for stride in (1, 6):
        asking = Asking(make_scorer(anchor_stride=stride, backbone=BackboneConfig(num_layers=2, num_heads=2)))
        events = [event(number) for number in range(60)]
        for number in range(MAX_HISTORY, len(events) + 1):
            asking.ask(events[:number] if number % 2 else events[number - MAX_HISTORY : number])
        counts[stride] = {name: count for name, count in asking.cache.counts.items() if count}
    assert counts[1] == {"not_kept": 1, "moved": 52}
    assert counts[6]["extended"] + counts[6]["moved"] == 52
    assert counts[6]["extended"] >= 30


def test_a_trained_ranker_with_anchors_keeps_contexts(ranker_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """From settings to served scores: training, checkpoint, bundle and server draw the same anchors."""
    fusion = ("model.fusion.kind=early", "model.fusion.anchor_stride=4", "model.num_positions=10")
    config = ranker_config("training.steps=2", *fusion)
    run = RunDirectory.create(tmp_path / "runs", "anchored", config_to_json(config))
    Trainer(config, run, open_source(config)).train(quiet=True)
    export_bundle(find_checkpoint(run.path), tmp_path / "bundle", name="anchored", version="1")
    scorer = Scorer.load(tmp_path / "bundle", num_threads=1)
    assert history_stride(scorer.features) == 4
    asking = Asking(scorer)
    names = scorer.signature.actions[0], scorer.signature.surfaces[0]
    events = [(number % 7, *names, 3_600_000 * number) for number in range(40)]
    for number in range(8, 40):
        asking.ask(events[:number], request_ms=events[number - 1][3] + 1000)
    counts = asking.cache.counts
    assert counts["extended"] + counts["moved"] == 31
    assert counts["extended"] > counts["moved"] > 0


def test_requests_without_user_or_history_keep_nothing(scorer: Scorer) -> None:
    asking = Asking(scorer)
    events = [event(1), event(2)]
    assert asking.ask(events, user=None) == "without_user"
    assert asking.ask([]) == "without_history"
    assert len(asking.cache) == asking.cache.num_bytes == 0
    assert asking.ask(events) == "not_kept"
    assert asking.ask([]) == "without_history"
    assert asking.ask(events, user=6) == "not_kept", "users have nothing in common"
    assert asking.ask(events) == "unchanged"
    asking.cache.clear()
    assert len(asking.cache) == asking.cache.num_bytes == sum(asking.cache.counts.values()) == 0
    assert asking.ask(events) == "not_kept"


def test_memory_is_bounded_and_who_asked_last_stays(scorer: Scorer) -> None:
    events = [event(number) for number in range(4)]
    asking = Asking(scorer)
    asking.ask(events)
    of_one = asking.cache.num_bytes
    # 2 layers of keys and values of 4 tokens, their times, and 4 columns and items of 4 events.
    assert of_one == 1024 + 2 * 2 * 4 * 16 * 4 + 4 * 8 + 5 * 4 * 8
    asking = Asking(scorer, max_bytes=3 * of_one)
    for user in (1, 2, 3, 1, 4):
        asking.ask(events, user=user)
        assert asking.cache.num_bytes <= 3 * of_one
    assert [asking.ask(events, user=user) for user in (3, 1, 4, 2)] == [*["unchanged"] * 3, "not_kept"]
    assert asking.ask([event(number) for number in range(8)], user=1) == "extended"
    assert asking.cache.num_bytes <= 3 * of_one
    small = Asking(scorer, max_bytes=of_one - 1)
    assert [small.ask(events), small.ask(events)] == ["not_kept", "not_kept"]
    assert len(small.cache) == small.cache.num_bytes == 0


def test_a_model_without_time_compares_only_what_it_reads(make_scorer: Make) -> None:
    """Times do not reach the model, so an event with another time, at the same place, is the same event."""
    asking = Asking(make_scorer(num_time_buckets=0))
    assert asking.ask([event(1), event(2)]) == "not_kept"
    assert asking.ask([event(1), (*event(2)[:3], 10**8), (*event(3)[:3], 10**8 + 1)]) == "extended"
    assert set(OUTCOMES) == set(asking.cache.counts)


def test_a_model_without_contexts_is_refused(make_scorer: Make) -> None:
    with pytest.raises(UsageError, match=r"(?s)model of bundle small has no contexts.*fusion\.kind=early"):
        ContextCache(make_scorer("late-last"), 1 << 20)
