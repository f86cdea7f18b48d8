"""Which way attention of packed rows is computed, and torch's kernel for it, traced without a GPU."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from tackboard.batch.row_layout import BLOCK, SHORT_ROWS, RowLayout
from tackboard.core.errors import DataError
from tackboard.ops import packed_attention as module
from tackboard.ops import packed_attention_reference
from tackboard.ops.packed_attention import (
    Elapsed,
    Weighing,
    choose,
    packed_attention,
    varlen_attention,
    with_tiles,
)

BIASED = Weighing(
    time_bias_VH=torch.zeros(3, 2),
    elapsed=Elapsed(torch.zeros(9), torch.zeros(9), torch.tensor([1, 2])),
)
LONG = RowLayout.of(torch.tensor([0, SHORT_ROWS]))
SHORT = RowLayout.of(torch.tensor([0, SHORT_ROWS, 2 * SHORT_ROWS - 1]))


def on_fake_gpu(dtype: torch.dtype, width: int = 16) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(9, 2, width, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "weighing", "width", "expected"),
    [
        (torch.bfloat16, Weighing(), 16, "varlen"),
        (torch.float16, Weighing(), 64, "varlen"),
        (torch.bfloat16, Weighing(), 12, "triton"),
        (torch.float32, Weighing(), 16, "triton"),
        (torch.bfloat16, BIASED, 16, "triton"),
        (torch.bfloat16, Weighing(pointwise_over=9), 16, "triton"),
        (torch.bfloat16, Weighing(dropout=0.1), 16, "grouped"),
        (torch.float32, Weighing(), 256, "grouped"),
        (torch.bfloat16, Weighing(), 256, "varlen"),
    ],
)
def test_the_way_on_a_gpu(dtype: torch.dtype, weighing: Weighing, width: int, expected: str) -> None:
    assert choose(on_fake_gpu(dtype, width), LONG, weighing) == expected
    assert choose(on_fake_gpu(dtype, width), SHORT, weighing) == expected.replace("varlen", "triton")


def test_short_rows_take_varlen_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_TRITON", False)
    assert choose(on_fake_gpu(torch.bfloat16), SHORT, Weighing()) == "varlen"


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
    assert choose(torch.zeros(9, 2, 16), LONG, BIASED) == "grouped"
    monkeypatch.setattr(module, "HAS_TRITON", False)
    assert choose(on_fake_gpu(torch.float32), LONG, BIASED) == "grouped"
    packed_attention_reference._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        packed_attention_reference._say_once()
        packed_attention_reference._say_once()
    assert [record.getMessage()[:42] for record in caplog.records] == ["attention on the GPU runs on padded grids,"]


def test_varlen_attention_traces_forward_and_backward() -> None:
    """torch's kernel gets causal windows, the offsets and the longest row, and has the shapes that we expect."""
    names = inspect.signature(varlen_attn).parameters
    assert list(names)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "window_size" in names
    layout = RowLayout.of_lengths(torch.tensor([5, 0, 4]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = torch.empty(9, 6, 16, dtype=torch.bfloat16, device="cuda")
        moved = dataclasses.replace(layout, offsets=torch.empty(4, dtype=torch.int32, device="cuda"))
        read = varlen_attention(*packed.chunk(3, dim=1), moved)
        assert (read.shape, read.dtype, read.device.type) == ((9, 2, 16), torch.bfloat16, "cuda")
    # The backward pass of fake tensors on a GPU needs a GPU, so it is traced without values on the device `meta`.
    leaf = torch.empty(9, 6, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    read = varlen_attention(*leaf.chunk(3, dim=1), layout.to("meta"))
    assert torch.autograd.grad(read.sum(), leaf)[0].shape == leaf.shape


def test_varlen_attention_is_causal_and_has_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda *args, **named: (calls.append((args, named)), args[0])[1]
    )
    layout = RowLayout.of_lengths(torch.tensor([5, 0, 4]))
    q = torch.zeros(9, 2, 16)
    varlen_attention(q, q, q, layout)
    (args, named), *_ = calls
    assert args[3] is args[4] is layout.offsets and args[5:] == (8, 8)
    assert named == {"window_size": (-1, 0)}


def test_tokens_must_be_those_of_the_layout() -> None:
    q = torch.zeros(9, 2, 16)
    with pytest.raises(DataError, match="9 tokens, but the layout of their rows has 8"):
        packed_attention(q, q, q, RowLayout.of_lengths(torch.tensor([8])))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
@pytest.mark.parametrize("lengths", [[5, 0, 1, 300], [16_000, 1, 0, 4_001], [1]])
def test_varlen_attention_equals_its_twin(lengths: list[int]) -> None:
    layout = RowLayout.of_lengths(torch.tensor(lengths)).to("cuda")
    packed = torch.randn(layout.num_tokens, 12, 64, device="cuda").bfloat16()
    upstream = torch.randn(layout.num_tokens, 4, 64, device="cuda").bfloat16()
    found = []
    for attend, dtype in ((module.grouped_attention, torch.float32), (varlen_attention, torch.bfloat16)):
        leaf = packed.to(dtype).requires_grad_()
        read = attend(*leaf.chunk(3, dim=1), layout)
        found.append((read.detach().float(), torch.autograd.grad(read, leaf, upstream.to(dtype))[0].float()))
    for expected, other in zip(*found, strict=True):
        assert float((other - expected).abs().max()) <= 1e-2 * float(expected.abs().max())
