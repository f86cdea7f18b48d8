"""Settings of training in several processes."""

from __future__ import annotations

from typing import Any

import pytest

from tackboard.core.errors import ConfigError
from tackboard.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    "setting",
    [{"sharding": "grid"}, {"forward_precision": "fp64"}, {"backward_precision": "int4"}, {"timeout_s": 0.5}],
)
def test_values_that_are_not_allowed(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.{next(iter(setting))} = .* is not allowed"):
        ParallelConfig(**setting)
