"""The plain update: against a loop over entries, with any number of threads, for every order of sorting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tackboard.ops import table_rows_reference as reference
from tackboard.ops.stochastic_rounding import rounding_key, stochastic_round

KEY = rounding_key(1, 2, 3)
STORAGES = [torch.float32, torch.float16, torch.bfloat16]


def entries(num: int, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = (torch.rand(num, generator=generator) ** 4 * (num_rows + 1)).int() - 1
    return rows, torch.randn(num, width, generator=generator)


def update(weight: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, **other: Any) -> None:
    settings = {"learning_rate": torch.tensor(0.05), "keep": torch.tensor(True), "rounding_key": KEY} | other
    reference.row_wise_adagrad_(weight, sums, rows, gradient, clip_element=1.5, eps=1e-8, **settings)


@pytest.mark.parametrize("block", [1, 35, 1 << 16])
@pytest.mark.parametrize("storage", STORAGES)
def test_an_update_equals_a_loop_over_entries(
    storage: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    rows, gradient = entries(200, 30, 5)
    weight, sums = torch.ones(30, 5, dtype=storage), torch.full((30,), 0.25)
    expected, expected_sums = weight.clone(), sums.clone()
    for row in sorted(set(rows.tolist()) - {-1}):
        total = torch.zeros(5)
        for entry in (rows == row).nonzero().flatten().tolist():
            total += gradient[entry]
        total = total.clamp(-1.5, 1.5)
        expected_sums[row] += total.square().mean()
        moved = expected[row].float() - 0.05 * total / (expected_sums[row].sqrt() + 1e-8)
        if storage != torch.float32:
            moved = stochastic_round(moved[None], storage, torch.tensor([row]), KEY)[0]
        expected[row] = moved
    update(weight, sums, rows, gradient)
    assert torch.equal(sums, expected_sums)
    assert torch.equal(weight, expected)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("storage", STORAGES)
def test_threads_and_the_kind_of_numbers_do_not_matter(storage: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    rows, gradient = entries(40_000, 5000, 16)
    results = []
    for threads, most, key in ((1, 1 << 30, KEY), (3, 1 << 30, torch.tensor(KEY)), (1, 10, KEY)):
        monkeypatch.setattr(reference, "MOST_NARROW_ROWS", most)
        torch.set_num_threads(threads)
        weight, sums = torch.ones(5000, 16, dtype=storage), torch.zeros(5000)
        update(weight, sums, rows.to(reference.row_dtype(5000)), gradient, rounding_key=key)
        results.append((weight, sums))
    for weight, sums in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(sums, results[0][1])


def test_nothing_changes_without_entries_or_unless_kept() -> None:
    weight, sums = torch.ones(5, 2), torch.zeros(5)
    update(weight, sums, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2))
    update(weight, sums, torch.tensor([-1, -1]), torch.ones(2, 2))
    update(weight, sums, torch.tensor([1, 2]), torch.ones(2, 2), keep=torch.tensor(False))
    assert bool((weight == 1).all()) and not sums.any()


def test_the_last_row_of_2_to_the_31_is_sorted() -> None:
    rows = torch.tensor([2**31 - 2, 0, -1, 2**31 - 2, 5], dtype=torch.int32)
    found, order = reference.sorted_rows(rows, 2**31 - 1)
    assert found.tolist() == [-1, 0, 5, 2**31 - 2, 2**31 - 2]
    assert order.tolist() == [2, 1, 4, 0, 3]
    wide, order = reference.sorted_rows(torch.tensor([2**40, 3, -1]), 2**41)
    assert (wide.tolist(), order.tolist()) == ([-1, 3, 2**40], [2, 1, 0])
    assert (reference.row_dtype(2**31 - 1), reference.row_dtype(2**31)) == (torch.int32, torch.int64)
