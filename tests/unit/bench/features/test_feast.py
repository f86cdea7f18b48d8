"""Feast's on-demand views: their values are ours, in every variant. Only where the rivals are installed."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("part", ["online", "unprepared"])
@pytest.mark.parametrize("variant", ["feast_python", "feast_pandas", "feast_store"])
def test_values_are_ours(same_as_ours: Callable[[str, str], None], variant: str, part: str) -> None:
    same_as_ours(variant, part)
