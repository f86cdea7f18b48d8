"""A rival whose batches are ours. Only where the rivals are installed; starting Ray takes its time."""

from collections.abc import Callable

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["window", "local"])
def test_batches_are_ours(loader_differences: Callable[[str, str], list[str]], variant: str) -> None:
    assert loader_differences("ray", variant) == []
