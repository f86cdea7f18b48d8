"""Frames: which request is behind a row."""

from __future__ import annotations

import numpy as np
import pytest

from tackboard.core.errors import UsageError
from tackboard.features.frame import Frame
from tackboard.features.views import visible_before


def frame_of(request_of: list[int] | None, *, requests: int = 2, moments: list[int] | None = None) -> Frame:
    return Frame(
        num_requests=requests,
        num_candidates=3 if request_of is None else len(request_of),
        request_of=None if request_of is None else np.array(request_of, dtype=np.int64),
        request_ms=None if moments is None else np.array(moments, dtype=np.int64),
        event_times=np.arange(4),
        visible=visible_before(np.arange(4), np.array([0, 4]), np.zeros(requests, np.int64), np.full(requests, 9)),
        columns={},
    )


@pytest.mark.parametrize(
    ("request_of", "moments", "times"),
    [([0, 0, 1], [10, 20], [10, 10, 20]), ([1, 1], [10, 20], [20, 20]), (None, [10], [10, 10, 10])],
    ids=["more candidates", "as many as requests", "one request"],
)
def test_a_row_has_the_time_of_its_request(request_of: list[int] | None, moments: list[int], times: list[int]) -> None:
    frame = frame_of(request_of, requests=len(moments), moments=moments)
    spread = frame.spread_view(frame.visible)
    assert frame.num_events == 4
    assert frame.times_of(frame.visible).tolist() == moments
    narrower = (
        spread.newest(1),
        spread.keep(np.ones(4, bool)),
        spread.group(np.arange(4), np.arange(len(times)), None),
    )
    for view in (spread, *narrower):
        assert frame.times_of(view).tolist() == times


def test_a_time_that_is_not_known_is_asked_for() -> None:
    frame = frame_of(None, requests=1)
    with pytest.raises(UsageError, match="depend on the time of the request") as error:
        frame.times_of(frame.visible)
    assert error.value.allowed == "give request_ms"
