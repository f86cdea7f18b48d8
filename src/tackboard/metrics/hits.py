"""Computes HIT@k of requests: the share of requests with a wanted candidate among the k highest scores.

The input is the score of each candidate, the candidate's request, and whether the candidate is wanted. Usually a
candidate is wanted if its label is 1. Only requests with a wanted candidate count. Decided: ties count against the
model, and NaN is the lowest score, so a model whose scores are all equal gains nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass
class RequestHits:
    """HIT@k over all requests that calls of `update` added."""

    k: int
    num_requests: int = 0
    num_hits: int = 0

    def update(self, scores: NDArray[np.floating], requests: NDArray[np.int64], is_wanted: NDArray[np.bool_]) -> None:
        """Adds requests; one call must hold all candidates of its requests (see `best_places`)."""
        _, places = best_places(scores, requests, is_wanted)
        self.num_requests += len(places)
        self.num_hits += int((places < self.k).sum())

    def merge(self, other: RequestHits) -> None:
        """Adds the requests of `other`. Both must have the same `k`, and no request may be in both."""
        self.num_requests += other.num_requests
        self.num_hits += other.num_hits

    def result(self) -> float:
        """Returns HIT@k, or NaN if no request has a wanted candidate."""
        return self.num_hits / self.num_requests if self.num_requests else float("nan")


def best_places(
    scores: NDArray[np.floating], requests: NDArray[np.int64], is_wanted: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the requests that have a wanted candidate, ascending, and the 0-based place of the best such candidate.

    The arguments have one value per candidate. Among equal scores, candidates that are not wanted come first.
    """
    values = np.asarray(scores, dtype=np.float64)
    order = np.lexsort((is_wanted, -np.where(np.isnan(values), -np.inf, values), requests))
    ordered = requests[order]
    starts = np.searchsorted(ordered, ordered)
    places = np.arange(len(order)) - starts
    wanted = is_wanted[order]
    found, first = np.unique(ordered[wanted], return_index=True)
    return found, places[wanted][first]
