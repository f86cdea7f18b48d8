"""A rival whose batches are ours, in Arrow and in torch format. Only where the rivals are installed."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("variant", ["arrow", "torch"])
def test_batches_are_ours(loader_differences: Callable[[str, str], list[str]], variant: str) -> None:
    assert loader_differences("hugging_face", variant) == []
