"""Copies of the state: only what is written, whole if that is smaller, and never with numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tackboard.checkpoint import copies as module
from tackboard.checkpoint.copies import Copies, count_rows, stored_bytes
from tackboard.models.changed_rows import ChangedRows, whole_tensor
from tackboard.ops.fresh_rows import FreshRows

FRESH = FreshRows(5, 0.1)


def table_of(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.empty(100, 4, dtype=torch.float16, device=device)
    FRESH.fill(table)
    is_changed = torch.zeros(100, dtype=torch.bool, device=device)
    is_changed[torch.tensor([0, 9, 10, 57, 99])] = True
    table[is_changed] = 3.0
    return table, is_changed


def check(device: str) -> None:
    table, is_changed = table_of(device)
    copies = Copies()
    counts = count_rows(100, lambda place: is_changed[place])
    stored = copies.rows("t", table, lambda place: is_changed[place], counts, FRESH)
    assert copies.finish() is None
    assert isinstance(stored, ChangedRows)
    assert stored.rows_N.tolist() == [0, 9, 10, 57, 99] and stored.rows_N.dtype == torch.int32
    assert torch.equal(whole_tensor(stored, Path()), table.cpu())
    expected = whole_tensor(stored, Path())
    table += 1  # training goes on
    assert torch.equal(whole_tensor(stored, Path()), expected)
    assert stored.rows_N.nbytes + stored.values_Nd.nbytes == stored_bytes(table, 5) == 5 * 12
    is_changed[:] = True
    counts = count_rows(100, lambda place: is_changed[place])
    whole = copies.rows("t", table, lambda place: is_changed[place], counts, FRESH)
    copies.finish()
    assert isinstance(whole, torch.Tensor) and whole.data_ptr() != table.data_ptr()
    assert torch.equal(whole, table.cpu()) and whole.nbytes == stored_bytes(table, 100)


def test_changed_rows_are_copied_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    check("cpu")
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 10)
    check("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_copies_from_a_gpu_are_pinned_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 10)
    check("cuda")
    copies = Copies()
    copy = copies.whole("x", torch.arange(1 << 20, device="cuda"))
    copies.finish()
    assert copy.is_pinned() and torch.equal(copy, torch.arange(1 << 20))


def test_numbers_that_are_not_finite_are_named() -> None:
    table, is_changed = table_of()
    table[57, 3] = float("nan")
    for flags, bad in ((is_changed, "t"), (torch.zeros(100, dtype=torch.bool), None)):
        copies = Copies()
        copies.rows("t", table, flags.__getitem__, count_rows(100, flags.__getitem__), FRESH)
        assert copies.finish() == bad
    copies = Copies()
    copies.whole("moments", table)
    copies.whole("counts", torch.arange(3), must_be_finite=True)
    assert copies.finish() is None
    copies.whole("dense", table.T, must_be_finite=True)
    assert copies.finish() == "dense"
