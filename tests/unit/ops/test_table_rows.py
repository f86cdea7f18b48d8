"""The choice between kernels and plain PyTorch, and what is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tackboard.core.errors import DataError
from tackboard.ops import table_rows, table_rows_reference
from tackboard.ops.table_rows import lookup, row_wise_adagrad_

FIRST_ROWS = torch.tensor([0, 4])


def update(**others: torch.Tensor) -> torch.Tensor:
    given = {"weight_Rd": torch.ones(8, 2), "sums_R": torch.zeros(8), "rows_L": torch.tensor([1, -1, 1])}
    given |= {"gradient_Ld": torch.ones(3, 2), "learning_rate": torch.tensor(0.1), "keep": torch.tensor(True)} | others
    row_wise_adagrad_(**given, clip_element=1.0, eps=1e-8, rounding_key=3)  # type: ignore[arg-type]
    return given["weight_Rd"]


def test_rows_are_read_and_updated() -> None:
    vectors, rows = lookup(torch.arange(16.0).view(8, 2), torch.tensor([[1, 0], [3, -1]]), FIRST_ROWS)
    assert vectors.tolist() == [[2, 3, 8, 9], [6, 7, 0, 0]]
    assert rows.tolist() == [1, 4, 3, -1] and rows.dtype == torch.int32
    assert update()[:3].flatten().tolist() == pytest.approx([1, 1, 0.9, 0.9, 1, 1])
    with pytest.raises(IndexError):
        lookup(torch.ones(8, 2), torch.tensor([[0, 4]]), FIRST_ROWS)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="float64"):
        lookup(torch.ones(8, 2).double(), torch.tensor([[0, 1]]), FIRST_ROWS)
    with pytest.raises(DataError, match="as torch.float16"):
        lookup(torch.ones(8, 2), torch.tensor([[0, 1]]), FIRST_ROWS, torch.float16)
    with pytest.raises(DataError, match=r"\(1, 3\)"):
        lookup(torch.ones(8, 2), torch.tensor([[0, 1, 2]]), FIRST_ROWS)
    with pytest.raises(DataError, match=r"\(3, 5\)"):
        update(gradient_Ld=torch.ones(3, 5))
    with pytest.raises(DataError, match=r"\(7,\)"):
        update(sums_R=torch.zeros(7))
    with pytest.raises(DataError, match="sums of torch.float64"):
        update(sums_R=torch.zeros(8).double())
    with pytest.raises(DataError, match="gaps"):
        update(weight_Rd=torch.ones(2, 8).T)


def test_a_missing_triton_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table_rows._implementation.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert table_rows._implementation(True) is table_rows._implementation(True) is table_rows_reference
    assert capsys.readouterr().err.count("Triton is not installed") == 1
    table_rows._implementation.cache_clear()
    assert table_rows._implementation(False) is table_rows_reference
    assert capsys.readouterr().err == ""
