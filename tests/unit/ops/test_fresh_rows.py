"""Fresh rows: a function of key, row and column, near a normal distribution, without a trace of its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tackboard.core import keyed_random
from tackboard.core.hashing import mix64
from tackboard.ops import fresh_rows as module
from tackboard.ops.fresh_rows import FreshRows, draw_key
from tackboard.ops.stochastic_rounding import rounding_key

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GOLDEN = [[0.13359065353870392, 0.0706632137298584], [-0.10032447427511215, 0.0585719458758831]]
FRESH = FreshRows(key=-1234567890123456789, std=0.1)


def twin(fresh: FreshRows, row: int, column: int) -> np.float32:
    """One value by NumPy alone, by the words of the module."""
    key, row_64, column_64 = (np.array([value], dtype=np.int64) for value in (fresh.key, row, column))
    with np.errstate(over="ignore"):
        state = mix64(mix64(row_64, 3) + key.view(np.uint64), 3)
        bits = int(mix64(state + mix64(column_64, 4), 4)[0])
    fields = [(bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    return np.float32(sum(fields) - 131_070) * np.float32(fresh.std / np.sqrt((2.0**32 - 1) / 3))


def test_values_are_those_of_the_slow_twin() -> None:
    rows = torch.tensor([0, 1, 77, (1 << 31) + 5, 640_000_000, (1 << 40) + 3])
    values = FRESH.rows(rows, 5)
    assert values.dtype == torch.float32
    for place, row in enumerate(rows.tolist()):
        assert values[place].tolist() == [float(twin(FRESH, row, column)) for column in range(5)]
    # Fixed for ever: a checkpoint stores only the rows that differ from these.
    assert FreshRows(7, 0.1).rows(torch.tensor([0, 3]), 2).tolist() == GOLDEN


def test_a_key_of_seed_and_table_makes_the_bits_of_keyed_random() -> None:
    key = rounding_key(5, 6, 7)
    expected = keyed_random.bits(5, 6, 7, np.arange(4)[:, None], np.arange(3)).view(np.int64)
    assert torch.equal(module.random_bits(key, torch.arange(4), 3), torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_any_part_and_any_block_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.empty(1000, 7, dtype=dtype)
    FRESH.fill(whole)
    assert torch.equal(whole, FRESH.rows(torch.arange(1000), 7).to(dtype)), "halves are rounded to nearest"
    monkeypatch.setitem(module.ELEMENTS_AT_ONCE, "cpu", 50)
    again, shard = torch.empty_like(whole), torch.empty(300, 7, dtype=dtype)
    FRESH.fill(again)
    FRESH.fill(shard, first_row=600)
    assert torch.equal(again, whole) and torch.equal(shard, whole[600:900])
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(FRESH.rows(order, 7, dtype), whole[order])
    wide = torch.empty(4, 120, dtype=dtype)
    FRESH.fill(wide)
    assert torch.equal(wide[:, :7], whole[:4]), "the width changes no column"


def test_the_distribution() -> None:
    values = FRESH.rows(torch.arange(60_000), 32).double() / 0.1
    count = values.numel()
    assert abs(float(values.mean())) < 5 / count**0.5
    assert abs(float(values.var()) - 1) < 5 * (1.7 / count) ** 0.5
    assert abs(float((values**3).mean())) < 5 * (10 / count) ** 0.5
    assert float((values**4).mean()) == pytest.approx(2.7, abs=0.02)
    assert 3 < float(values.abs().max()) < 3.47
    for group in (values.mean(0), values.mean(1)):
        expected = (group.numel() / count) ** 0.5
        assert float(group.std()) == pytest.approx(expected, rel=0.35)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one * other).mean() / (one.std() * other.std())) * one.numel() ** 0.5


def test_neighbours_are_independent() -> None:
    """Correlations of values and of squares, in standard errors: neighbouring rows, columns, keys and sub-tables."""
    values = FRESH.rows(torch.arange(40_000), 16).double()
    others = [
        FreshRows(key, 0.1).rows(torch.arange(40_000), 16).double() for key in (FRESH.key + 1, FRESH.key ^ (1 << 62))
    ]
    pairs = [(values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values[20_000:], values[:20_000])]
    pairs += [(values[1:, 1:], values[:-1, :-1]), *((values, other) for other in others)]
    for one, other in pairs:
        assert abs(correlation(one, other)) < 4.5
        assert abs(correlation(one**2 - (one**2).mean(), other**2 - (other**2).mean())) < 4.5
    assert len(torch.unique(values, dim=0)) == 40_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_differing_rows_are_found_to_the_last_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.empty(500, 6, dtype=dtype)
    FRESH.fill(table, first_row=1000)
    monkeypatch.setitem(module.ELEMENTS_AT_ONCE, "cpu", 100)
    assert FRESH.differing(table, first_row=1000).tolist() == []
    pattern = table.view(torch.int32 if dtype == torch.float32 else torch.int16)
    pattern[3, 5] ^= 1
    table[499, 0] = float("nan")
    pattern[77, 0] = ~pattern[77, 0]
    assert FRESH.differing(table, first_row=1000).tolist() == [3, 77, 499]
    assert len(FRESH.differing(table)) == 500
    assert FRESH.differing(table[:0]).tolist() == []


def test_std_0_gives_0() -> None:
    assert torch.equal(FreshRows(3, 0.0).rows(torch.arange(9), 4), torch.zeros(9, 4))


def test_the_key_is_drawn_from_the_seed() -> None:
    torch.manual_seed(9)
    first = draw_key(), draw_key()
    torch.manual_seed(9)
    with torch.device("meta"):
        assert (draw_key(), draw_key()) == first
    assert first[0] != first[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_bits(dtype: torch.dtype) -> None:
    here, there = torch.empty(3000, 40, dtype=dtype), torch.empty(3000, 40, dtype=dtype, device="cuda")
    first = (1 << 33) + 1
    FRESH.fill(here, first)
    FRESH.fill(there, first)
    assert torch.equal(here, there.cpu())
    assert not len(FRESH.differing(there, first))
