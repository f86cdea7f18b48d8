"""A table as its changed rows: the whole of it comes back, in place or as a new tensor, within the memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tackboard.core.errors import DataError
from tackboard.models import changed_rows as module
from tackboard.models.changed_rows import ChangedRows, copy_range, copy_rows, rows_within, whole_tensor
from tackboard.ops.fresh_rows import FreshRows

FRESH = FreshRows(5, 0.1)
HERE = Path("run/tables.safetensors")


def table(dtype: torch.dtype = torch.float16) -> tuple[ChangedRows, torch.Tensor]:
    whole = torch.empty(1000, 3, dtype=dtype)
    FRESH.fill(whole)
    rows = torch.arange(7, 1000, 13, dtype=torch.int32)
    values = torch.arange(len(rows) * 3, dtype=dtype).view(-1, 3)
    whole[rows.long()] = values
    return ChangedRows(rows, values, 1000, FRESH), whole


def test_the_whole_table_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 10)
    changed, whole = table()
    assert torch.equal(changed.whole(HERE), whole) and torch.equal(whole_tensor(changed, HERE), whole)
    assert whole_tensor(whole, HERE) is whole
    assert (changed.shape, changed.dtype, changed.numel()) == (whole.shape, whole.dtype, whole.numel())
    assert changed.is_floating_point()
    target = torch.full((1000, 3), 9.0)
    copy_rows(changed, target)
    assert torch.equal(target, whole.float()), "in another type: the stored values, rounded as they were stored"
    copy_rows(whole + 1, target)
    assert torch.equal(target, (whole + 1).float())


def test_sums_are_0_elsewhere() -> None:
    sums = ChangedRows(torch.tensor([2, 5]), torch.tensor([1.0, 3.0]), 7, None)
    target = torch.ones(7)
    copy_rows(sums, target)
    assert target.tolist() == [0, 0, 1, 0, 0, 3, 0] == sums.whole(HERE).tolist()
    nothing = ChangedRows(torch.empty(0, dtype=torch.int32), torch.empty(0), 3, None)
    assert nothing.whole(HERE).tolist() == [0, 0, 0]


def in_parts() -> tuple[ChangedRows, torch.Tensor]:
    """The same table, of which three processes have stored parts; one of them nothing."""
    changed, whole = table()
    order = [torch.arange(len(changed.rows_N)) % 3 == part for part in (1, 0)]
    parts = [ChangedRows(changed.rows_N[flags], changed.values_Nd[flags], 1000, FRESH) for flags in order]
    last = torch.arange(len(changed.rows_N)) % 3 == 2
    more = ChangedRows(changed.rows_N[:0], changed.values_Nd[:0], 1000, FRESH)
    first = ChangedRows(changed.rows_N[last], changed.values_Nd[last], 1000, FRESH, others=(*parts, more))
    return first, whole


def test_parts_of_several_processes_make_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 10)
    stored, whole = in_parts()
    assert [len(part.rows_N) for part in stored.parts] == [25, 26, 26, 0]
    assert torch.equal(stored.whole(HERE), whole) and torch.equal(whole_tensor(stored, HERE), whole)


def test_a_range_of_rows_is_copied() -> None:
    (changed, whole), (stored, _) = table(), in_parts()
    for first, end in ((0, 1000), (7, 8), (8, 20), (20, 21), (990, 1000), (500, 500), (1000, 1000)):
        for source in (changed, stored, whole):
            target = torch.full((end - first, 3), 9.0)
            copy_range(source, target, first)
            assert torch.equal(target, whole[first:end].float())
    for first, shape in ((-1, (3, 3)), (998, (3, 3)), (0, (3, 2)), (0, (3,))):
        with pytest.raises(DataError, match=r"stored rows have shape \(1000, 3\)"):
            copy_range(stored, torch.empty(shape), first)


def test_positions_are_found_up_to_the_last_row_of_the_largest_int32_table() -> None:
    rows = torch.tensor([0, 5, (1 << 31) - 1], dtype=torch.int32)
    limits = [((0, 1 << 31), 3), ((1, 1 << 31), 2), ((6, 1 << 31), 1), ((0, (1 << 31) - 1), 2), ((5, 5), 0)]
    assert [len(rows[rows_within(rows, *limit)]) for limit, _ in limits] == [number for _, number in limits]


def test_another_shape_and_too_little_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed, whole = table()
    with pytest.raises(DataError, match=r"shape \(1000, 3\), not \(999, 3\)"):
        copy_rows(changed, torch.empty(999, 3))
    with pytest.raises(DataError, match="shape"):
        copy_rows(whole[:1], whole)
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 5999)
    with pytest.raises(DataError, match=r"run/tables\.safetensors holds a table of 1000 × 3, which needs") as caught:
        changed.whole(HERE)
    assert "free memory" in caught.value.allowed
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 6000)
    changed.whole(HERE)
