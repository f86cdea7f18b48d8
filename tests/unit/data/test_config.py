"""Parts of users: each user in one of them, by the id alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import ConfigError
from tackboard.data.config import Part, PartOfUsers
from tackboard.data.loader import DataConfig
from tackboard.data.request_loader import RequestConfig

PARTS: tuple[Part, ...] = ("train", "validation", "test")
USERS = np.arange(-5_000, 5_000)


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.25, 0.75), (0.2, 0.1)])
def test_every_user_is_in_one_part_and_parts_are_as_large_as_said(shares: tuple[float, float]) -> None:
    found = np.stack([PartOfUsers(part, *shares).of(USERS) for part in PARTS])
    assert (found.sum(axis=0) == 1).all()
    expected = (1 - sum(shares), *shares)
    assert np.allclose(found.mean(axis=1), expected, atol=0.02)


def test_the_part_of_a_user_follows_from_the_id_alone() -> None:
    whole = PartOfUsers("validation", 0.3, 0.2).of(USERS)
    assert np.array_equal(PartOfUsers("validation", 0.3, 0.2).of(USERS[::-7]), whole[::-7])
    train, judges = PartOfUsers("train", 0.2).of(USERS), PartOfUsers("validation", 0.1).of(USERS)
    assert not (train & judges).any(), "a larger share adds users"


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (DataConfig, {"validation_share": 1.0}),
        (DataConfig, {"validation_share": -0.1}),
        (DataConfig, {"num_workers": 65}),
        (DataConfig, {"ray_address": "http://x:1"}),
        (RequestConfig, {"validation_share": 0.6, "test_share": 0.5}),
        (RequestConfig, {"max_requests": -1}),
    ],
)
def test_impossible_shares_are_refused(cls: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"data.{list(wrong)[-1]}"):
        cls(dataset="x", **wrong)
