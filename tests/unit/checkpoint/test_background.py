"""One piece of work at a time, and its error in the thread that waits."""

from __future__ import annotations

import threading

import pytest

from tackboard.checkpoint.background import Background


def test_work_goes_on_beside_and_one_at_a_time() -> None:
    background, may_end, done = Background(), threading.Event(), []

    def first() -> None:
        may_end.wait(10)
        done.append(threading.current_thread().name)

    background.start(first)
    assert done == []
    may_end.set()
    background.start(lambda: done.append("second"))  # waits for the first
    background.wait()
    background.wait()
    assert done == ["checkpoint", "second"]


def test_an_error_is_raised_once_where_it_is_waited_for() -> None:
    background, started = Background(), []

    def fail() -> None:
        raise OSError(28, "full")

    background.start(fail)
    with pytest.raises(OSError, match="full"):
        background.start(lambda: started.append(1))
    assert started == []
    background.wait()
    background.start(fail)
    with pytest.raises(OSError, match="full"):
        background.wait()
