"""Frames: which request is behind a row."""

from __future__ import annotations

import numpy as np
import pytest

from tackboard.core.errors import UsageError
from tackboard.features.frame import Frame
from tackboard.features.views import View, visible_before


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


def test_a_row_has_the_time_of_its_request() -> None:
    frame = frame_of([0, 0, 1], moments=[10, 20])
    assert frame.num_events == 4
    assert frame.times_of(frame.visible).tolist() == [10, 20]
    assert frame.times_of(frame.spread_view(frame.visible)).tolist() == [10, 10, 20]


def test_as_many_candidates_as_requests_are_candidates_still() -> None:
    frame = frame_of([1, 1], moments=[10, 20])
    spread = frame.spread_view(frame.visible)
    assert len(spread) == len(frame.visible) == 2
    assert frame.times_of(spread).tolist() == [20, 20]
    for narrower in (
        spread.newest(1),
        spread.keep(np.ones(4, bool)),
        spread.group(np.arange(4), np.array([0, 1]), None),
    ):
        assert frame.times_of(narrower).tolist() == [20, 20]


def test_one_request_has_all_candidates() -> None:
    frame = frame_of(None, requests=1, moments=[10])
    assert frame.candidate_requests().tolist() == [0, 0, 0]
    assert frame.times_of(frame.spread_view(frame.visible)).tolist() == [10, 10, 10]


def test_a_time_that_is_not_known_is_asked_for() -> None:
    frame = frame_of(None, requests=1)
    view: View = frame.visible
    with pytest.raises(UsageError) as error:
        frame.times_of(view)
    assert "depend on the time of the request" in error.value.got and error.value.allowed == "give request_ms"
