"""Stochastic rounding equals a slow twin in exact fractions, is right on average, and is a function of its key."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.core.errors import DataError
from tackboard.ops.stochastic_rounding import random_bits, rounding_key, stochastic_round

HALVES = [torch.float16, torch.bfloat16]
SEED, STEP, TABLE = 5, 12, -77
KEY = rounding_key(SEED, STEP, TABLE)


def finite_values(dtype: torch.dtype) -> list[float]:
    """All numbers of a format that are 0 or above and finite, rising."""
    patterns = torch.arange(0x7C00 if dtype == torch.float16 else 0x7F80, dtype=torch.int16)
    return [float(value) for value in patterns.view(dtype).float()]


GRIDS = {dtype: finite_values(dtype) for dtype in HALVES}
LARGEST = {dtype: grid[-1] for dtype, grid in GRIDS.items()}


def keyed(rows: NDArray[Any], num_columns: int) -> NDArray[np.uint64]:
    return keyed_random.bits(SEED, STEP, TABLE, rows[:, None], np.arange(num_columns))


def round_one(value: float, dtype: torch.dtype, random: int) -> float:
    """The twin: looks both neighbours up and compares exact fractions."""
    if not math.isfinite(value):
        return value
    grid, size = GRIDS[dtype], abs(value)
    if size >= grid[-1]:
        return math.copysign(grid[-1], value)
    above = bisect.bisect_right(grid, size)
    low, high = Fraction(grid[above - 1]), Fraction(grid[above])
    share = (Fraction(size) - low) / (high - low)
    # Up where the random number in [0, 1), counted from its upper end, is below the share.
    up = Fraction(2**62 - random % 2**62, 2**62) <= share
    return math.copysign(float(high if up else low), value)


def same(found: torch.Tensor, expected: list[list[float]]) -> bool:
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(found.shape).to(found.dtype)
    return torch.equal(torch.isnan(found), torch.isnan(wanted)) and torch.equal(
        found.view(torch.int16)[~found.isnan()], wanted.view(torch.int16)[~wanted.isnan()]
    )


def any_floats() -> st.SearchStrategy[float]:
    """Of any bit pattern, near the edges of both formats, and of the size of table rows."""
    edges = [0.0, -0.0, 65504.0, 65505.0, 65519.9, 65520.0, 1e6, 3.3e38, 3.4e38, 2.0**-14, 2.0**-24, 2.0**-25, 1e-38]
    return st.one_of(
        st.floats(width=32, allow_subnormal=True),
        st.sampled_from([sign * float(np.float32(edge)) for edge in edges for sign in (1, -1)]),
        st.floats(-0.5, 0.5, width=32),
        st.floats(-(2.0**-12), 2.0**-12, width=32),
    )


@pytest.mark.parametrize("dtype", HALVES)
@given(data=st.data())
@settings(max_examples=150)
def test_it_equals_the_twin_bit_for_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 5))
    values = data.draw(st.lists(st.lists(any_floats(), min_size=columns, max_size=columns), max_size=6))
    rows = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=len(values), max_size=len(values))), np.int64)
    table = torch.tensor(values, dtype=torch.float32).reshape(-1, columns)
    random = keyed(rows, columns) if len(values) else np.zeros((0, columns), np.uint64)
    expected = [
        [round_one(value, dtype, int(draw)) for value, draw in zip(*pair, strict=True)]
        for pair in zip(table.tolist(), random, strict=True)
    ]
    found = stochastic_round(table, dtype, torch.from_numpy(rows), KEY)
    assert found.dtype == dtype
    assert same(found, expected)


def test_the_bits_are_those_of_the_projects_keyed_random_numbers() -> None:
    rows = np.array([0, 1, 2**31, 640_000_000, 2**62], dtype=np.int64)
    found = random_bits(KEY, torch.from_numpy(rows), 7)
    assert np.array_equal(found.numpy().view(np.uint64), keyed(rows, 7))
    assert rounding_key(-(2**63), 3) != rounding_key(2**63 - 1, 3)
    keys = {rounding_key(seed, step, table) for seed in range(5) for step in range(5) for table in range(5)}
    assert len(keys) == 125


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_the_format_stay_as_they_are(dtype: torch.dtype) -> None:
    grid = torch.tensor(GRIDS[dtype], dtype=torch.float32)
    exact = torch.cat([grid, -grid]).view(-1, 1)
    for step in range(3):
        found = stochastic_round(exact, dtype, torch.arange(len(exact)), rounding_key(SEED, step))
        assert torch.equal(found.view(torch.int16), exact.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_overflow_saturates_and_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    largest = LARGEST[dtype]
    values = torch.tensor([[3.4e38, -3.4e38, math.inf, -math.inf, math.nan, -math.nan]]).repeat(50, 1)
    found = stochastic_round(values, dtype, torch.arange(50), KEY).float()
    assert found[:, :4].unique(dim=0).tolist() == [[largest, -largest, math.inf, -math.inf]]
    assert bool(found[:, 4:].isnan().all())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 0.1),
        (torch.float16, -1.0003),
        (torch.float16, 3.1e-8),  # between 0 and the smallest subnormal number
        (torch.float16, 1.23e-5),
        (torch.bfloat16, 0.1),
        (torch.bfloat16, -257.3),
        (torch.bfloat16, 3e-39),
    ],
)
def test_it_is_right_on_average(dtype: torch.dtype, value: float) -> None:
    count = 100_000
    exact = float(np.float32(value))
    found = stochastic_round(torch.full((count // 10, 10), value), dtype, torch.arange(count // 10), KEY).double()
    above = bisect.bisect_right(GRIDS[dtype], abs(exact))
    low, high = GRIDS[dtype][above - 1], GRIDS[dtype][above]
    assert sorted(float(number) for number in found.abs().unique()) == [low, high]
    share = (abs(exact) - low) / (high - low)
    error = 5 * (high - low) * math.sqrt(share * (1 - share) / count)
    assert abs(float(found.mean()) - exact) < error


@pytest.mark.parametrize("dtype", HALVES)
def test_small_steps_add_up_where_rounding_to_nearest_loses_them(dtype: torch.dtype) -> None:
    start, step, num_steps = 1.0, 1e-4, 1000
    nearest, table = torch.full((64, 8), start, dtype=dtype), torch.full((64, 8), start, dtype=dtype)
    for number in range(num_steps):
        nearest = (nearest.float() + step).to(dtype)
        table = stochastic_round(table.float() + step, dtype, torch.arange(64), rounding_key(0, number))
    assert float(nearest.float().mean()) == start
    assert float(table.float().mean()) == pytest.approx(start + num_steps * step, abs=0.005)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_is_rounded_the_same_in_any_company(dtype: torch.dtype) -> None:
    values, rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), torch.arange(50) * 977
    whole = stochastic_round(values, dtype, rows, KEY)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(stochastic_round(values[order], dtype, rows[order], KEY), whole[order])
    for row in (0, 17, 49):
        assert torch.equal(stochastic_round(values[row : row + 1], dtype, rows[row : row + 1], KEY)[0], whole[row])
    assert torch.equal(stochastic_round(values.T.contiguous().T, dtype, rows, KEY), whole)
    assert torch.equal(stochastic_round(values[:, :3], dtype, rows, KEY), whole[:, :3])
    assert not torch.equal(stochastic_round(values, dtype, rows, rounding_key(SEED, STEP + 1, TABLE)), whole)
    assert not torch.equal(stochastic_round(values, dtype, rows + 1, KEY), whole)


def test_draws_of_neighbouring_keys_are_unrelated() -> None:
    """Neighbouring rows, columns, steps and tables: the top bits agree as often as chance has it."""
    rows = torch.arange(2000)
    draws = {
        (step, table): random_bits(rounding_key(0, step, table), rows, 8) < 0 for step in (0, 1) for table in (0, 1)
    }
    here = draws[0, 0]
    for other in (draws[0, 1], draws[1, 0], draws[1, 1], here.roll(1, 0), here.roll(1, 1)):
        assert abs(float((here == other).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(16_000)


@pytest.mark.parametrize(
    ("values", "dtype", "rows"),
    [
        (torch.zeros(2, 3), torch.float32, torch.arange(2)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.float16, torch.arange(2)),
        (torch.zeros(2, 3), torch.float16, torch.arange(3)),
        (torch.zeros(2), torch.float16, torch.arange(2)),
    ],
)
def test_what_cannot_be_rounded_is_refused(values: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor) -> None:
    with pytest.raises(DataError, match="allowed"):
        stochastic_round(values, dtype, rows, KEY)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gpu_gives_the_same_bits(dtype: torch.dtype) -> None:
    patterns = torch.randint(-(2**31), 2**31, (4000, 32), generator=torch.Generator().manual_seed(0))
    values, rows = patterns.to(torch.int32).view(torch.float32), torch.arange(4000) * 160_001
    values = torch.cat([values, torch.randn(4000, 32) * 0.1])
    rows = torch.cat([rows, rows + 1])
    expected = stochastic_round(values, dtype, rows, KEY)
    found = stochastic_round(values.cuda(), dtype, rows.cuda(), KEY).cpu()
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
