"""Cases of the kernels of packed attention against their plain twin; collected only by `triton_runs.run_cases`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tackboard.batch import row_layout
from tackboard.batch.row_layout import RowLayout
from tackboard.ops import packed_attention_triton as kernels
from tackboard.ops.packed_attention_reference import Elapsed, Weighing, grouped_attention
from tackboard.ops.packed_attention_triton import bucket_tiles, triton_attention

SETTINGS = ("softmax", "softmax, time", "softmax, position", "pointwise", "pointwise, time, position")
"""Buckets of time are stored in tiles, as in the models."""
SEARCHED = ("softmax, searched time", "pointwise, searched time, position")
"""Each program searches the buckets that it needs."""
SHORT = ((5, 0, 1, 70, 64), 2, 24)
LONG = ((512, 0, 1), 1, 16)
CASES = [
    *((setting, SHORT, dtype) for setting in SETTINGS for dtype in (torch.float32, torch.float16)),
    *((setting, LONG, torch.float32) for setting in SETTINGS),
    *((setting, LONG, torch.float16) for setting in SETTINGS[1::3]),
    *((setting, SHORT, torch.float32) for setting in SEARCHED),
]
BOUNDARIES = torch.tensor([1_000, 3_000, 10_000, 60_000, 3_600_000, 86_400_000])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error, as a share of the largest number."""


def weighing_of(setting: str, num_heads: int, lengths: tuple[int, ...], device: str) -> Weighing:
    """A bias for each head with a softmax, one bias for all heads without, as in the models."""
    layout = RowLayout.of_lengths(torch.tensor(lengths)).to(device)
    torch.manual_seed(1)
    pointwise = 50 if "pointwise" in setting else 0
    position = torch.randn(40, device=device).requires_grad_() if "position" in setting else None
    if "time" not in setting:
        return Weighing(pointwise, position)
    times = torch.cat([torch.randint(-20_000, 3_000_000, (length,)).cumsum(0) for length in lengths])
    elapsed = Elapsed(times.to(device), (times + 5_000).to(device), BOUNDARIES.to(device))
    if "searched" not in setting:
        elapsed = dataclasses.replace(elapsed, tiles=bucket_tiles(elapsed, layout))
    groups = 1 if pointwise else num_heads
    bias = torch.randn(len(BOUNDARIES) + 1, groups, device=device).requires_grad_()
    return Weighing(pointwise, position, bias, elapsed)


def check(setting: str, lengths: tuple[int, ...], num_heads: int, d: int, dtype: torch.dtype, device: str) -> None:
    """Compares what tokens read, and all gradients, with those of the twin in fp64."""
    layout = RowLayout.of_lengths(torch.tensor(lengths)).to(device)
    weighing = weighing_of(setting, num_heads, lengths, device)
    torch.manual_seed(0)
    packed = torch.randn(layout.num_tokens, 3 * num_heads, d, device=device).to(dtype)
    upstream = torch.randn(layout.num_tokens, num_heads, d, device=device).to(dtype)
    results = []
    for attend, kind in ((grouped_attention, torch.float64), (triton_attention, dtype)):
        leaf = packed.to(kind).requires_grad_()
        given = (weighing.position_bias_P, weighing.time_bias_VH)
        position, time = (None if bias is None else bias.to(torch.promote_types(kind, bias.dtype)) for bias in given)
        biases = [bias for bias in (position, time) if bias is not None]
        read = attend(
            *leaf.chunk(3, dim=1),
            layout,
            dataclasses.replace(weighing, position_bias_P=position, time_bias_VH=time),
        )
        assert read.dtype == kind
        results.append([read.detach(), *torch.autograd.grad(read, [leaf, *biases], upstream.to(kind))])
    for number, (expected, found) in enumerate(zip(*results, strict=True)):
        error = float((found - expected).abs().max()) / float(expected.abs().max())
        # The gradient of a softmax's bias also carries the rounding of what tokens read, summed over all pairs.
        is_rough = number > 1 and dtype != torch.float32
        assert error <= TOLERANCE[dtype] * (2 if is_rough else 1), (number, setting, error)


@pytest.mark.parametrize(("setting", "rows", "dtype"), CASES)
def test_kernels_equal_their_twin(
    setting: str,
    rows: tuple[tuple[int, ...], int, int],
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rows is LONG and device == "cpu":  # The interpreter takes as long for a large tile as for a small one.
        for module in (row_layout, kernels):
            monkeypatch.setattr(module, "BLOCK", 128)
    check(setting, *rows, dtype, device)


@pytest.mark.parametrize("lengths", [(1,), (0, 0), (1, 0, 1, 1)])
@pytest.mark.parametrize("setting", SETTINGS[::4])
def test_one_event_and_none(setting: str, lengths: tuple[int, ...], device: str) -> None:
    if sum(lengths):
        check(setting, lengths, 2, 8, torch.float32, device)
        return
    layout, empty = RowLayout.of_lengths(torch.tensor(lengths)).to(device), torch.zeros(0, 2, 8, device=device)
    assert triton_attention(empty, empty, empty, layout, weighing_of(setting, 2, lengths, device)).shape == (0, 2, 8)


def test_the_same_in_every_run(device: str) -> None:
    layout = RowLayout.of_lengths(torch.tensor([70, 3])).to(device)
    weighing = weighing_of(SETTINGS[-1], 2, (70, 3), device)
    q, k, v = (torch.randn(73, 2, 16, device=device, requires_grad=True) for _ in range(3))
    runs = []
    for _ in range(2):
        read = triton_attention(q, k, v, layout, weighing)
        inputs = [q, k, v, weighing.position_bias_P, weighing.time_bias_VH]
        runs.append([read, *torch.autograd.grad(read.square().sum(), inputs)])  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_padded_blocks_change_nothing(device: str) -> None:
    """A layout that lists more blocks without tokens gives the same result."""
    layout = RowLayout.of_lengths(torch.tensor([70, 3])).to(device)
    more = dataclasses.replace(
        layout,
        block_rows=torch.cat([layout.block_rows, layout.block_rows.new_zeros(2)]),
        block_starts=torch.cat([layout.block_starts, layout.block_starts.new_full((2,), 70)]),
    )
    q, k, v = (torch.randn(73, 1, 16, device=device) for _ in range(3))
    weighing = weighing_of("pointwise", 1, (70, 3), device)
    assert torch.equal(triton_attention(q, k, v, layout, weighing), triton_attention(q, k, v, more, weighing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS)
def test_long_rows_on_a_gpu(setting: str, dtype: torch.dtype, device: str) -> None:
    if device == "cuda":
        check(setting, (16_000, 0, 1, 4_001, 63, 257), 2, 64, dtype, device)
        check(setting, (300, 0, 1, 1, 129), 3, 40, dtype, device)
