"""Which way attention of packed rows is computed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tackboard.batch.row_layout import BLOCK, RowLayout
from tackboard.core.errors import DataError
from tackboard.ops import packed_attention as module
from tackboard.ops import packed_attention_reference
from tackboard.ops.packed_attention import (
    Elapsed,
    Weighing,
    choose,
    packed_attention,
    with_tiles,
)

BIASED = Weighing(
    time_bias_VH=torch.zeros(3, 2),
    elapsed=Elapsed(torch.zeros(9), torch.zeros(9), torch.tensor([1, 2])),
)


def on_fake_gpu(dtype: torch.dtype, width: int = 16) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(9, 2, width, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "weighing", "width", "expected"),
    [
        (torch.bfloat16, Weighing(), 16, "triton"),
        (torch.float16, Weighing(), 64, "triton"),
        (torch.bfloat16, Weighing(), 12, "triton"),
        (torch.float32, Weighing(), 16, "triton"),
        (torch.bfloat16, BIASED, 16, "triton"),
        (torch.bfloat16, Weighing(pointwise_over=9), 16, "triton"),
        (torch.bfloat16, Weighing(dropout=0.1), 16, "grouped"),
        (torch.float32, Weighing(), 256, "grouped"),
        (torch.bfloat16, Weighing(), 256, "triton"),
    ],
)
def test_the_way_on_a_gpu(dtype: torch.dtype, weighing: Weighing, width: int, expected: str) -> None:
    assert choose(on_fake_gpu(dtype, width), weighing) == expected


def test_buckets_are_stored_where_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU, not without Triton, not if they take too much memory, and not if a byte is too small for them."""
    pytest.importorskip("triton", reason="Triton is in the dev group of the install")
    layout = RowLayout.of_lengths(torch.tensor([BLOCK + 1, 0, 3]))
    on_cpu = Elapsed(torch.zeros(68), torch.zeros(68), torch.arange(255))
    assert with_tiles(on_cpu, layout) is on_cpu
    with FakeTensorMode(allow_non_fake_inputs=True):
        times = torch.empty(68, dtype=torch.int64, device="cuda")
        few, many = (Elapsed(times, times, torch.empty(n, dtype=torch.int64, device="cuda")) for n in (255, 256))
        tiles = with_tiles(few, layout).tiles
        assert tiles is not None and (tiles.dtype, len(tiles)) == (torch.uint8, 4 * BLOCK * BLOCK)
        assert with_tiles(many, layout) is many
        monkeypatch.setattr(module, "MAX_TILE_BYTES", 4 * BLOCK * BLOCK - 1)
        assert with_tiles(few, layout) is few
        monkeypatch.undo()
        monkeypatch.setattr(module, "HAS_TRITON", False)
        assert with_tiles(few, layout) is few


def test_the_cpu_works_in_groups_and_a_missing_triton_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(torch.zeros(9, 2, 16), BIASED) == "grouped"
    monkeypatch.setattr(module, "HAS_TRITON", False)
    assert choose(on_fake_gpu(torch.float32), BIASED) == "grouped"
    packed_attention_reference._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        packed_attention_reference._say_once()
        packed_attention_reference._say_once()
    assert [record.getMessage()[:42] for record in caplog.records] == ["attention on the GPU runs on padded grids,"]


def test_tokens_must_be_those_of_the_layout() -> None:
    q = torch.zeros(9, 2, 16)
    with pytest.raises(DataError, match="9 tokens, but the layout of their rows has 8"):
        packed_attention(q, q, q, RowLayout.of_lengths(torch.tensor([8])))
