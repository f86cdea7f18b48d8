"""Hand-written: its values are ours, in a batch and for one request. Only where the rivals are installed."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("part", ["batch", "online", "unprepared"])
def test_values_are_ours(same_as_ours: Callable[[str, str], None], part: str) -> None:
    same_as_ours("numpy", part)
