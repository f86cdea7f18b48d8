"""Copies of the state: only what is written, whole if that is smaller, and never with numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tackboard.checkpoint import copies as module
from tackboard.checkpoint.copies import Copies, RowBlock, stored_bytes
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
    block = RowBlock(0, table, lambda place: is_changed[place])
    stored = copies.rows("t", [block], [block.count()], 100, FRESH)
    assert copies.finish() is None
    assert isinstance(stored, ChangedRows)
    assert stored.rows_N.tolist() == [0, 9, 10, 57, 99] and stored.rows_N.dtype == torch.int32
    assert torch.equal(whole_tensor(stored, Path()), table.cpu())
    expected = whole_tensor(stored, Path())
    table += 1  # training goes on
    assert torch.equal(whole_tensor(stored, Path()), expected)
    assert stored.rows_N.nbytes + stored.values_Nd.nbytes == stored_bytes(table, 5) == 5 * 12
    is_changed[:] = True
    whole = copies.rows("t", [block], [block.count()], 100, FRESH)
    copies.finish()
    assert isinstance(whole, torch.Tensor) and whole.data_ptr() != table.data_ptr()
    assert torch.equal(whole, table.cpu()) and whole.nbytes == stored_bytes(table, 100)
    rows = copies.rows("t", [block], [block.count()], 100, FRESH, may_be_whole=False)
    copies.finish()
    assert isinstance(rows, ChangedRows) and rows.rows_N.tolist() == list(range(100))
    assert rows.rows_N.nbytes + rows.values_Nd.nbytes == stored_bytes(table, 100, may_be_whole=False) == 100 * 12


def test_blocks_of_a_table_become_one_tensor_or_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 10)
    table, is_changed = table_of()
    halves = [
        RowBlock(start, table[start:end], lambda place, start=start: is_changed[start:][place])  # type: ignore[misc]
        for start, end in ((0, 57), (57, 100))
    ]
    counts = [block.count() for block in halves]
    assert list(map(sum, counts)) == [3, 2]
    stored = Copies().rows("t", halves, counts, 100, FRESH)
    assert isinstance(stored, ChangedRows) and stored.rows_N.tolist() == [0, 9, 10, 57, 99]
    assert torch.equal(whole_tensor(stored, Path()), table)
    second = Copies().rows("t", halves[1:], counts[1:], 100, FRESH)
    assert isinstance(second, ChangedRows) and (second.rows_N.tolist(), second.num_rows) == ([57, 99], 100)
    assert second.rows_N.nbytes + second.values_Nd.nbytes == stored_bytes(table[57:], 2, 100)
    is_changed[:] = True
    whole = Copies().rows("t", halves, [block.count() for block in halves], 100, FRESH)
    assert isinstance(whole, torch.Tensor) and torch.equal(whole, table)
    table[99, 0] = float("inf")
    copies = Copies()
    copies.rows("t", halves, [block.count() for block in halves], 100, FRESH)
    assert copies.finish() == "t"


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
        block = RowBlock(0, table, flags.__getitem__)
        copies.rows("t", [block], [block.count()], 100, FRESH)
        assert copies.finish() == bad
    copies = Copies()
    copies.whole("moments", table)
    copies.whole("counts", torch.arange(3), must_be_finite=True)
    assert copies.finish() is None
    copies.whole("dense", table.T, must_be_finite=True)
    assert copies.finish() == "dense"
