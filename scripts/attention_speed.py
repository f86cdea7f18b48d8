"""Compares our kernel of plain softmax attention with torch's kernel for packed rows, on a GPU.

    python scripts/attention_speed.py

Prints milliseconds of forward and backward together for 65,536 tokens, 8 heads of width 64, in bf16. Both are replayed
as CUDA graphs, so that the times are those of the kernels and not those of starting them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from tackboard.batch.row_layout import RowLayout
from tackboard.ops.packed_attention import SOFTMAX
from tackboard.ops.packed_attention_triton import triton_attention

NUM_TOKENS, NUM_HEADS, WIDTH = 65_536, 8, 64
REPEATS = 10


def measure_ms(step: Callable[[], object]) -> float:
    """Returns the milliseconds of one step."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


def mixed_lengths() -> list[int]:
    """Returns lengths of rows of 48 tokens on average and at most 256."""
    random, lengths = np.random.default_rng(0), [0]
    while sum(lengths) < NUM_TOKENS:
        lengths.append(int(min(256, max(1, random.exponential(48)), NUM_TOKENS - sum(lengths))))
    return lengths[1:]


def compare(name: str, lengths: list[int]) -> None:
    """Prints the times of both kernels for rows of these lengths."""
    layout = RowLayout.of_lengths(torch.tensor(lengths)).to("cuda")
    shape = (NUM_TOKENS, NUM_HEADS, WIDTH)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cut, bound = layout.offsets, layout.bound

    def torchs() -> object:
        read = varlen_attn(q, k, v, cut, cut, bound, bound, window_size=(-1, 0))
        return torch.autograd.grad(read, (q, k, v), upstream)

    def ours() -> object:
        return torch.autograd.grad(triton_attention(q, k, v, layout, SOFTMAX), (q, k, v), upstream)

    print(f"{name:<24} torch {measure_ms(torchs):.3f} ms   ours {measure_ms(ours):.3f} ms")


if __name__ == "__main__":
    compare("rows of 48 on average", mixed_lengths())
    for length in (128, 256, 512, 1024, 4096, 16_384):
        compare(f"rows of {length:,}", [length] * (NUM_TOKENS // length))
