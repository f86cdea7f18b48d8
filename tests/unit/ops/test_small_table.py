"""Lookups in a small table: an embedding's rows and gradient, however many indices share a row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tackboard.ops import small_table
from tackboard.ops.small_table import small_table_rows


@pytest.mark.parametrize("copies", [1, 7])
def test_equal_to_an_embedding(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows bit for bit; the gradient up to the order of its sums, also where it is added up in parts."""
    monkeypatch.setattr(small_table, "COPIES", copies)
    table = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 9, (5, 40, 41), dtype=torch.int32)
    weight = torch.randn(5, 40, 41, 3, dtype=torch.float64)
    rows = small_table_rows(table, index)
    assert torch.equal(rows, functional.embedding(index, table))
    (rows * weight).sum().backward()
    expected = torch.zeros(9, 3, dtype=torch.float64)
    for row in range(9):
        expected[row] = weight[index == row].sum(dim=0)
    assert table.grad is not None
    torch.testing.assert_close(table.grad, expected, rtol=1e-5, atol=1e-4)


def test_no_indices_and_rows_that_none_names() -> None:
    table = torch.randn(4, 2, requires_grad=True)
    small_table_rows(table, torch.zeros((0, 3), dtype=torch.int64)).sum().backward()
    assert table.grad is not None and not table.grad.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_the_gpu_adds_up_what_the_cpu_does() -> None:
    index, weight, grads = torch.randint(0, 100, (1000, 1001)), torch.randn(1000, 1001, 2), []
    start = torch.randn(100, 2)
    for device in ("cpu", "cuda"):
        table = start.clone().to(device).requires_grad_()
        (small_table_rows(table, index.to(device)) * weight.to(device)).sum().backward()
        assert table.grad is not None
        grads.append(table.grad.cpu())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=0.05)
