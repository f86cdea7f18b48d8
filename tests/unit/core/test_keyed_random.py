"""Numbers that depend on their key alone: the same in any order, any process, any version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.keyed_random import bits, normal, permutation, uniform

int64s = st.integers(-(2**63), 2**63 - 1)


def test_golden_values_never_change() -> None:
    """Changing one breaks every synthetic world and every resumed run."""
    assert [int(bits(0)[0]), int(bits(-5, -1)[0])] == [5197578548964807871, 14436655370572367988]
    assert uniform(1, np.arange(3)) == pytest.approx([0.30923989, 0.15618804, 0.20229617], abs=1e-8)
    assert normal(1, np.arange(3)) == pytest.approx([-0.58210167, -0.21183132, 0.06833384], abs=1e-8)
    assert permutation(8, 3, 11, 0).tolist() == [3, 7, 4, 2, 0, 6, 5, 1]


@given(int64s, int64s, st.lists(int64s, min_size=1, max_size=8))
@settings(max_examples=50)
def test_a_value_depends_on_its_key_and_not_on_its_company(seed: int, first: int, second: list[int]) -> None:
    together = uniform(seed, first, np.array(second))
    apart = [uniform(seed, first, key)[0] for key in second]
    assert together.tolist() == apart
    assert uniform(seed, first, np.array(second[::-1])).tolist() == apart[::-1]
    assert ((together >= 0) & (together < 1)).all()


def test_keys_broadcast_and_their_order_matters() -> None:
    grid = uniform(9, np.arange(3)[:, None], np.arange(4))
    assert grid.shape == (3, 4)
    assert grid[2, 1] == uniform(9, 2, 1)[0] != uniform(9, 1, 2)[0]
    assert len(np.unique(grid)) == 12
    assert uniform(9, 1)[0] != uniform(9, 1, 0)[0]  # one key more is another number


def test_uniforms_are_uniform_and_neighbouring_keys_unrelated() -> None:
    values = uniform(5, np.arange(100_000))
    counts = np.bincount((values * 50).astype(int), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 90  # 49 degrees of freedom
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(values, uniform(6, np.arange(100_000)))[0, 1]) < 0.02


def test_normals_have_their_moments_and_are_always_finite() -> None:
    values = normal(5, np.arange(100_000))
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert abs((np.abs(values) < 1).mean() - 0.6827) < 0.01


@given(st.integers(0, 200), int64s, st.integers(0, 50))
@settings(max_examples=50)
def test_permutation_is_one_and_repeats(count: int, seed: int, epoch: int) -> None:
    order = permutation(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == permutation(count, seed, epoch).tolist()
    if count > 20:
        assert order.tolist() != permutation(count, seed, epoch + 1).tolist()
