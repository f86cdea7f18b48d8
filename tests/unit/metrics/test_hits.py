"""HIT@k against a plain loop over requests, and what ties and NaN do."""

from __future__ import annotations

import numpy as np
import pytest

from tackboard.metrics.hits import RequestHits, best_places

RANDOM = np.random.default_rng(5)
Request = tuple[list[float], list[int]]


def plain_hits(k: int, asked: list[Request]) -> tuple[int, int]:
    """(requests with a wanted candidate, those of them with one among the first k), each request sorted by itself."""
    num_requests = num_hits = 0
    for scores, wanted in asked:
        ranked = sorted(zip([np.inf if np.isnan(score) else -score for score in scores], wanted, strict=True))
        num_requests += 1 in wanted
        num_hits += any(is_wanted for _, is_wanted in ranked[:k])
    return num_requests, num_hits


def hits_of(asked: list[Request], k: int = 3) -> RequestHits:
    hits = RequestHits(k)
    scores = np.array([score for scores, _ in asked for score in scores])
    wanted = np.array([value == 1 for _, wanted in asked for value in wanted])
    hits.update(scores, np.repeat(np.arange(len(asked)), [len(scores) for scores, _ in asked]), wanted)
    return hits


@pytest.mark.parametrize(
    ("scores", "wanted", "is_hit"),
    [
        ([4.0, 3.0, 2.0, 1.0], [0, 0, 1, 0], 1),
        ([4.0, 3.0, 2.0, 1.0], [0, 0, 0, 1], 0),
        ([1.0, 1.0, 1.0, 1.0], [1, 0, 0, 0], 0),  # three others are as high: ties count against the model
        ([1.0, 1.0, 1.0], [1, 0, 0], 1),
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 0, 0], 1),  # whichever two of four come after the others, one is third
        ([np.nan, -5.0, -6.0, -7.0], [1, 0, 0, 0], 0),
        ([np.nan] * 4, [1, 0, 0, 0], 0),
        ([np.nan, 1.0], [1, 0], 1),
        ([0.5], [1], 1),
    ],
)
def test_one_request(scores: list[float], wanted: list[int], is_hit: int) -> None:
    hits = hits_of([(scores, wanted)])
    assert (hits.num_requests, hits.num_hits) == (1, is_hit) == plain_hits(3, [(scores, wanted)])


@pytest.mark.parametrize("k", [1, 3])
def test_many_requests_are_as_in_a_loop_and_in_any_order_and_parts(k: int) -> None:
    sizes = RANDOM.integers(1, 9, 200)
    asked: list[Request] = []
    for size in sizes:
        scores = RANDOM.integers(0, 5, size).astype(float)
        scores[RANDOM.random(size) < 0.1] = np.nan
        asked.append((scores.tolist(), (RANDOM.random(size) < 0.3).astype(int).tolist()))
    whole = hits_of(asked, k)
    assert (whole.num_requests, whole.num_hits) == plain_hits(k, asked)
    assert 0 < whole.num_hits < whole.num_requests < len(asked)
    parts = hits_of(asked[:70], k)
    parts.merge(hits_of(asked[70:], k))
    assert parts == whole and parts.result() == whole.num_hits / whole.num_requests
    scores = np.array([score for scores, _ in asked for score in scores])
    wanted = np.array([value == 1 for _, wanted in asked for value in wanted])
    requests = np.repeat(RANDOM.permutation(200), sizes)
    order = RANDOM.permutation(len(scores))
    mixed = RequestHits(k)
    mixed.update(scores[order], requests[order], wanted[order])
    assert mixed == whole


def test_nothing_wanted_is_not_a_number() -> None:
    assert np.isnan(hits_of([([1.0, 2.0], [0, 0])]).result())
    assert np.isnan(RequestHits(3).result())


def test_places_name_their_requests() -> None:
    requests, places = best_places(
        np.array([3.0, 2.0, 1.0, 9.0, 5.0]), np.array([8, 8, 8, 2, 4]), np.array([False, True, True, True, False])
    )
    assert (requests.tolist(), places.tolist()) == ([2, 8], [0, 1])
