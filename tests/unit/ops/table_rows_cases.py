"""Cases of the table kernels against their plain twin; run by test_table_rows_triton.py through triton_runs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tackboard.ops import table_rows_reference as twin
from tackboard.ops import table_rows_triton as kernels
from tackboard.ops.stochastic_rounding import rounding_key, stochastic_round

STORAGES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = STORAGES[1:]
KEY = rounding_key(5, 12, -77)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("num_items", "num_tables", "num_rows", "width"), [(37, 3, 11, 5), (5, 8, 40, 32), (0, 2, 3, 4)]
)
def test_lookup(
    num_items: int, num_tables: int, num_rows: int, width: int, storage: Any, output: Any, device: str
) -> None:
    weight = drawn(num_tables * num_rows, width).to(device, storage)
    rows = torch.randint(-1, num_rows, (num_items, num_tables), generator=torch.Generator().manual_seed(1))
    rows[-1:] = num_rows - 1  # the last row of every sub-table
    first_rows = torch.arange(num_tables) * num_rows
    found, entries = kernels.lookup(weight, rows.to(device), first_rows.to(device), output)
    expected, expected_entries = twin.lookup(weight.cpu(), rows, first_rows, output)
    assert (found.dtype, entries.dtype, found.shape) == (output, torch.int32, expected.shape)
    # The interpreter cuts bits off where a GPU rounds to nearest.
    is_cut = device == "cpu" and output == torch.bfloat16 != storage
    torch.testing.assert_close(found.cpu(), expected, rtol=2**-7 if is_cut else 0, atol=0)
    assert torch.equal(entries.cpu(), expected_entries)


def test_a_row_beyond_the_weight_reads_nan_and_is_not_updated(device: str) -> None:
    weight = drawn(4, 2).to(device)
    rows, first_rows = torch.tensor([[0, 1], [1, 2]], device=device), torch.tensor([0, 2], device=device)
    found, entries = kernels.lookup(weight, rows, first_rows, torch.float32)
    assert found.isnan().tolist() == [[False] * 4, [False, False, True, True]]
    assert entries.tolist() == [0, 3, 1, -1]
    sums, before = torch.zeros(4, device=device), weight.clone()
    update(kernels, weight, sums, torch.tensor([4, 1, 4, 4], device=device), torch.ones(4, 2, device=device))
    assert sums.tolist() == [0, 1, 0, 0]
    assert (weight != before).any(dim=1).tolist() == [False, True, False, False]


def update(
    module: Any, weight: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, **others: Any
) -> None:
    rate, keep = torch.tensor(0.05, device=weight.device), torch.tensor(True, device=weight.device)
    settings = {"learning_rate": rate, "keep": keep, "clip_element": 1.5, "eps": 1e-8, "rounding_key": KEY} | others
    module.row_wise_adagrad_(weight, sums, rows, gradient, **settings)


def some_rows(kind: str, num_rows: int, num: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind == "distinct":
        return torch.randperm(num_rows, generator=generator)[:num]
    if kind == "one":
        return torch.full((num,), num_rows - 1)
    if kind == "none":
        return torch.full((num,), -1)
    # a few rows many times and many rows a few times, with padding, and the first and the last row
    rows = (torch.rand(num, generator=generator) ** 6 * (num_rows + 1)).long() - 1
    rows[: num // 10] = num_rows - 1
    return rows[torch.randperm(num, generator=generator)]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("kind", "num", "width"),
    [
        *(("distinct", 70, 4), ("one", 65, 3), ("one", 32, 8), ("one", 1, 1), ("one", 2300, 2)),
        *(("mixed", 333, 5), ("mixed", 96, 32), ("mixed", 0, 4), ("none", 40, 2)),
    ],
)
def test_update(kind: str, num: int, width: int, storage: Any, device: str) -> None:
    """Against the twin. Where the two differ in the last bit of fp32, a half may be rounded to its other neighbour."""
    num_rows = 75
    rows, gradient = some_rows(kind, num_rows, num), drawn(num, width)
    old = drawn(num_rows, width, seed=1).to(storage)
    weights, sums = [old.clone(), old.clone().to(device)], [torch.ones(num_rows), torch.ones(num_rows, device=device)]
    update(twin, weights[0], sums[0], rows, gradient)
    update(kernels, weights[1], sums[1], rows.to(device), gradient.to(device))
    torch.testing.assert_close(sums[1].cpu(), sums[0], rtol=1e-5, atol=1e-5)
    if storage == torch.float32:
        torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=1e-5, atol=1e-5)
    else:
        differs = weights[1].cpu() != weights[0]
        assert int(differs.sum()) <= 1 + num * width // 1000
        torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=2**-7, atol=1e-3)
    touched = torch.zeros(num_rows, dtype=torch.bool)
    touched[rows[rows >= 0]] = True
    assert torch.equal(weights[1].cpu()[~touched], old[~touched])


@pytest.mark.parametrize("storage", HALVES)
def test_update_of_halves_has_the_bits_of_the_twin(storage: Any, device: str) -> None:
    """Whole numbers and a width of two to some power make every order of additions exact, so all bits must agree."""
    rows, width, num_rows = some_rows("mixed", 75, 400), 16, 75
    gradient = torch.randint(-4, 5, (400, width), generator=torch.Generator().manual_seed(2)).float() / 8
    old = (drawn(num_rows, width, seed=1) * 10.0 ** torch.arange(-9, 7)).to(storage)
    weights, sums = [old.clone(), old.clone().to(device)], [torch.zeros(num_rows), torch.zeros(num_rows, device=device)]
    update(twin, weights[0], sums[0], rows, gradient)
    key = torch.tensor(KEY, device=device)
    update(kernels, weights[1], sums[1], rows.to(device), gradient.to(device), rounding_key=key)
    assert torch.equal(sums[1].cpu(), sums[0])
    assert torch.equal(weights[1].cpu().view(torch.int16), weights[0].view(torch.int16))


@pytest.mark.parametrize("width", [1, 8])
def test_wide_gradients_and_row_numbers(width: int, device: str) -> None:
    """bf16 gradients (of a lookup as bf16) and int64 rows (of more than 2^31 rows) give what fp32 and int32 give."""
    rows, gradient = some_rows("mixed", 75, 100).to(device), drawn(100, width).bfloat16().to(device)
    weights, sums = torch.ones(2, 75, width, device=device), torch.zeros(2, 75, device=device)
    update(kernels, weights[0], sums[0], rows, gradient)
    update(kernels, weights[1], sums[1], rows.int(), gradient.float())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(sums[0], sums[1])


def test_nothing_changes_unless_kept(device: str) -> None:
    weight, sums = torch.ones(75, 3, device=device), torch.zeros(75, device=device)
    keep = torch.tensor(False, device=device)
    update(kernels, weight, sums, some_rows("mixed", 75, 100).to(device), drawn(100, 3).to(device), keep=keep)
    assert bool((weight == 1).all()) and not sums.any()


def test_a_bad_gradient_spoils_its_own_row_only(device: str) -> None:
    gradient = torch.ones(40, 2, device=device)
    gradient[7, 1], gradient[9, 0] = float("nan"), float("inf")
    weight, sums = torch.ones(75, 2, device=device), torch.zeros(75, device=device)
    update(kernels, weight, sums, torch.arange(40, device=device), gradient)
    assert weight.isnan().any(dim=1).nonzero().flatten().tolist() == [7]
    assert sums[9].item() == pytest.approx((1.5**2 + 1) / 2)


@triton.jit
def rounding_kernel(
    values, rows, key, out, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    BIAS_BELOW: tl.constexpr, LARGEST: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    entry = tl.arange(0, ENTRIES)
    place = entry[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    pattern = kernels.round_stochastically(
        tl.load(values + place), tl.load(rows + entry), tl.load(key), COLUMNS, MANTISSA_BITS, BIAS_BELOW, LARGEST,
        INFINITY, NAN,
    )  # fmt: skip
    tl.store(out + place, pattern)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_has_the_bits_of_stochastic_round(dtype: torch.dtype, device: str) -> None:
    """Random bit patterns of fp32: normal, subnormal, too large, infinite and not numbers, on rows beyond 2^33."""
    generator = torch.Generator().manual_seed(4)
    patterns = torch.randint(-(2**31), 2**31, (512, 16), generator=generator).int()
    patterns[:8] = torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FC00000, 0x7F7FFFFF, 0x33000001])[:, None]
    patterns[8:200] = (patterns[8:200] & 0x0FFFFFFF) + 0x30000000  # exponents at which halves are normal or subnormal
    values = patterns.view(torch.float32)
    rows = torch.arange(512) * (2**25 + 1)
    out = torch.empty(512, 16, dtype=torch.int16, device=device)
    rounding_kernel[(1,)](
        values.to(device), rows.to(device), torch.tensor(KEY, device=device), out, COLUMNS=16, ENTRIES=512,
        **kernels.format_constants(dtype),
    )  # fmt: skip
    assert torch.equal(out.cpu(), stochastic_round(values, dtype, rows, KEY).view(torch.int16))
