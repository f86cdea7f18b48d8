"""Measures, on a GPU, our own kernels for parts of a training step, and other implementations of the same parts.

    python scripts/gpu_speed.py [attention] [loss] [tables]

    attention   plain softmax attention of packed rows, 65,536 tokens, 8 heads of width 64, bf16: torch's kernel, ours
    loss        the contrastive loss of 65,536 hidden vectors and 32,768 negatives of width 512: PyTorch in blocks, ours
    tables      lookup, backward and update of 524,288 rows of 8 tables: FBGEMM if installed, plain PyTorch, and ours

All times are in milliseconds. They cover forward and backward and, for tables, the update. `tackboard bench pretrain`
measures the whole step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from tackboard.batch.row_layout import RowLayout
from tackboard.bench.pretrain.table_speed import TableSpeedConfig, measure_tables
from tackboard.ops import contrastive_blocked, contrastive_triton
from tackboard.ops.contrastive import ContrastivePairs, OwnItems, contrastive_loss
from tackboard.ops.packed_attention import SOFTMAX
from tackboard.ops.packed_attention_triton import triton_attention

NUM_TOKENS, NUM_HEADS, WIDTH = 65_536, 8, 64
NUM_NEGATIVES, LOSS_WIDTH, NUM_USERS = 32_768, 512, 1365
REPEATS = 10


def measure_ms(step: Callable[[], object]) -> float:
    """Returns the milliseconds of one step, replayed as a CUDA graph."""
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
    """Prints the times of torch's kernel and of our kernel, for rows of these lengths."""
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


def attention() -> None:
    """Compares our kernel of plain softmax attention with torch's kernel for packed rows."""
    compare("rows of 48 on average", mixed_lengths())
    for length in (128, 256, 512, 1024, 4096, 16_384):
        compare(f"rows of {length:,}", [length] * (NUM_TOKENS // length))


def loss() -> None:
    """Compares the implementations of the contrastive loss. For each user, 48 items are not used as negatives."""
    hidden = 20 * torch.nn.functional.normalize(torch.randn(NUM_TOKENS, LOSS_WIDTH, device="cuda"), dim=1)
    items = torch.nn.functional.normalize(torch.randn(NUM_NEGATIVES, LOSS_WIDTH, device="cuda"), dim=1)
    leaves = hidden.requires_grad_(), items.requires_grad_()
    numbers = torch.arange(NUM_TOKENS, device="cuda")
    own = OwnItems(
        48 * torch.arange(NUM_USERS + 1, device="cuda"),
        torch.randint(NUM_NEGATIVES, (48 * NUM_USERS,), device="cuda"),
        numbers * NUM_USERS // NUM_TOKENS,
    )
    rights = torch.randint(NUM_NEGATIVES, (NUM_TOKENS,), device="cuda")
    pairs = ContrastivePairs(numbers, rights, torch.full((NUM_TOKENS,), 1 / NUM_TOKENS, device="cuda"), False)
    log_weights = torch.full((NUM_NEGATIVES,), -10.0, device="cuda")
    for name, module in (("PyTorch in blocks", contrastive_blocked), ("ours", contrastive_triton)):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for repeat in range(REPEATS + 1):
            if repeat == 1:
                begin.record()
            with torch.autocast("cuda", torch.bfloat16):
                total, _ = contrastive_loss(*leaves, log_weights, pairs, own, implementation=module.contrastive_loss)
            torch.autograd.grad(total, leaves)
        end.record()
        torch.cuda.synchronize()
        print(f"loss, {name:<18} {begin.elapsed_time(end) / REPEATS:.2f} ms")


def tables() -> None:
    """Compares lookup and update of tables in fp32 and fp16."""
    for storage in ("fp32", "fp16"):
        found = measure_tables(TableSpeedConfig(storage=storage), torch.device("cuda"))
        times = "   ".join(f"{name} {ms:.3f} ms" for name, ms in found["ms"].items())
        print(f"tables in {storage}: {times}   floor {found['floor_ms']:.3f} ms")


if __name__ == "__main__":
    parts = {"attention": attention, "loss": loss, "tables": tables}
    for part in sys.argv[1:] or parts:
        parts[part]()
