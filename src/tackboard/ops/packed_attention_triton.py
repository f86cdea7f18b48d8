"""Computes causal attention of packed rows on a GPU, with any bias, as Triton kernels without padding.

Input and output are those of `packed_attention_reference.grouped_attention`, its twin. One program computes a block of
BLOCK tokens of one row and one head; `RowLayout` lists the blocks. Weights exist only as tiles in registers; the
backward pass computes them again. The kernels are registered with torch as operations, so compiled layers may call
them.

A bias of time needs the bucket of every pair of query and key. All heads and layers have the same buckets, so
`bucket_tiles` computes them once per batch. A tile belongs to a block of queries and a block of keys. It holds one byte
for each pair of query and key. The tiles of a row lie in the order of its queries, then of its keys. A row of S tokens
takes S² / 2 bytes: 128 MB for 16,000 tokens. Without tiles, each program searches for the bucket of each pair again,
which is several times as slow.

Gradients of biases are sums over all pairs. Each program sums its part: by bucket of time in registers, and by distance
in memory that no other program writes. PyTorch adds up the parts. So all sums have a fixed order, and every gradient is
the same in every run. If each head has its own bias of time and there is no bias by distance, the kernel for the
gradient of queries sums the gradient of the bias. All other biases go to a separate kernel, which first adds up the
heads that share a bias. To sum by distance, a tile is turned so that its diagonals become columns. Buckets are summed
one by one, from the least to the greatest bucket of the tile. In rows sorted by time, tiles far from the diagonal have
few buckets.

Shapes: T packed tokens, H heads, d width of a head, N blocks, V buckets of time, P distances, G heads with a bias of
their own (H or 1).
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have no types: Triton derives them when it compiles, and they differ from call to call.
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from tackboard.batch.row_layout import BLOCK, RowLayout
from tackboard.ops.packed_attention_reference import Elapsed, Weighing


def triton_attention(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, layout: RowLayout, weighing: Weighing
) -> torch.Tensor:
    """Returns what each token reads [T, H, d]."""
    q_THd, k_THd, v_THd = (part if part.stride(2) == 1 else part.contiguous() for part in (q_THd, k_THd, v_THd))
    position_P, time_VG, elapsed = weighing.position_bias_P, weighing.time_bias_VH, weighing.elapsed
    times = () if time_VG is None or elapsed is None else (elapsed.keys_T, elapsed.queries_T, elapsed.boundaries)
    read_THd, _ = _forward(
        q_THd,
        k_THd,
        v_THd,
        None if position_P is None else position_P.float(),
        None if time_VG is None else time_VG.float(),
        *(part.contiguous() for part in times or (layout.offsets,) * 3),
        elapsed.tiles if times and elapsed is not None else None,
        layout.offsets,
        layout.row_tiles,
        layout.block_rows,
        layout.block_starts,
        weighing.pointwise_over,
        layout.bound,
    )
    return read_THd


def bucket_tiles(elapsed: Elapsed, layout: RowLayout) -> torch.Tensor:
    """Returns the bucket of each pair of query and key, tile by tile. There may be at most 256 buckets."""
    return _bucket_tiles(
        elapsed.keys_T,
        elapsed.queries_T,
        elapsed.boundaries,
        layout.offsets,
        layout.row_tiles,
        layout.block_rows,
        layout.block_starts,
        layout.num_tiles,
    )


@triton.jit
def _block(block_rows, block_starts, offsets):
    """Returns the row of this program's block, the block's start in its row, and the row's first token and length."""
    row = tl.load(block_rows + tl.program_id(0))
    start = tl.load(block_starts + tl.program_id(0))
    first = tl.load(offsets + row).to(tl.int64)
    return row, start, first, (tl.load(offsets + row + 1) - first).to(tl.int32)


@triton.jit
def _tile(tiles, row_tiles, row, start_q, start_k, IS_TURNED: tl.constexpr, SIZE: tl.constexpr):
    """Returns where the buckets of a tile [q, k] are stored. If `IS_TURNED`, the tile is [k, q]."""
    number_q, numbers = tl.cast(start_q // SIZE, tl.int64), tl.arange(0, SIZE)
    tile = tl.load(row_tiles + row) + number_q * (number_q + 1) // 2 + start_k // SIZE
    if IS_TURNED:
        return tiles + tile * (SIZE * SIZE) + numbers[None, :] * SIZE + numbers[:, None]
    return tiles + tile * (SIZE * SIZE) + numbers[:, None] * SIZE + numbers[None, :]


@triton.jit
def _search(known, asked, boundaries, places_q, places_k, length, num_boundaries, STEPS: tl.constexpr):
    """Returns the bucket of each pair: the number of boundaries at or below its elapsed time."""
    asked_q = tl.load(asked + places_q, mask=places_q < length, other=0)
    elapsed = asked_q - tl.load(known + places_k, mask=places_k < length, other=0)
    bucket = tl.zeros(elapsed.shape, tl.int32)
    for step in tl.static_range(STEPS):
        following = bucket + (1 << (STEPS - 1 - step))
        is_there = following <= num_boundaries
        begin = tl.load(boundaries + following - 1, mask=is_there, other=0)
        bucket = tl.where(is_there & (elapsed >= begin), following, bucket)
    return bucket


@triton.jit
def tiles_kernel(
    tiles, known, asked, boundaries, offsets, row_tiles, block_rows, block_starts, num_boundaries,
    STEPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Stores the buckets of one block of queries with all keys up to the end of this block."""
    row, start, first, length = _block(block_rows, block_starts, offsets)
    if start >= length:
        return
    numbers = tl.arange(0, SIZE)
    places_q = (start + numbers)[:, None]
    for begin in range(0, start + SIZE, SIZE):
        places_k = (begin + numbers)[None, :]
        bucket_qk = _search(
            known + first, asked + first, boundaries, places_q, places_k, length, num_boundaries, STEPS
        )  # fmt: skip
        tl.store(_tile(tiles, row_tiles, row, start, begin, False, SIZE), bucket_qk.to(tl.uint8))


@triton.jit
def _bias(
    position, time, known, asked, boundaries, tiles, row_tiles, row, start_q, start_k, places_q, places_k, length,
    num_distances, num_boundaries, IS_TURNED: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, STORED: tl.constexpr, STEPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the bias of a tile and its buckets of time. The places are [q, 1] and [1, k], or [1, q] and [k, 1]."""
    bias = tl.zeros((SIZE, SIZE), tl.float32)
    bucket = tl.zeros((SIZE, SIZE), tl.int32)
    if POSITION:
        bias += tl.load(position + tl.minimum(tl.maximum(places_q - places_k, 0), num_distances - 1))
    if TIME:
        if STORED:
            bucket = tl.load(_tile(tiles, row_tiles, row, start_q, start_k, IS_TURNED, SIZE)).to(tl.int32)
        else:
            bucket = _search(known, asked, boundaries, places_q, places_k, length, num_boundaries, STEPS)
        bias += tl.load(time + bucket)
    return bias, bucket


@triton.jit
def _rows(pointer, first, places, head, stride_token, stride_head, is_there, d, WIDTH: tl.constexpr):
    """Loads the vectors of a head at some places of a row; zeros beyond the row and beyond the head's width."""
    columns = tl.arange(0, WIDTH)
    offsets = (first + places)[:, None] * stride_token + head * stride_head + columns[None, :]
    return tl.load(pointer + offsets, mask=is_there[:, None] & (columns < d)[None, :], other=0.0)


@triton.jit
def _store(pointer, value, first, places, head, num_heads, is_there, d, WIDTH: tl.constexpr):
    """Stores vectors of a head at some places of a row, in a contiguous tensor [T, H, d]."""
    columns = tl.arange(0, WIDTH)
    offsets = ((first + places)[:, None] * num_heads + head) * d + columns[None, :]
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer + offsets, value, mask=is_there[:, None] & (columns < d)[None, :])


@triton.jit
def _weights_and_slopes(scores, dweights, is_seen, lse, delta, share, SOFTMAX: tl.constexpr):
    """Returns the weights of a tile, and the gradient of its scores from the gradient of its weights."""
    if SOFTMAX:
        weights = tl.where(is_seen, tl.exp2(scores - lse), 0.0)
        dscores = weights * (dweights - delta)
    else:
        gate = 1.0 / (1.0 + tl.exp(-scores))
        weights = tl.where(is_seen, scores * gate * share, 0.0)
        slope = gate * (1.0 + scores * (1.0 - gate))
        dscores = tl.where(is_seen, dweights * slope * share, 0.0)
    return weights, dscores


@triton.jit
def _add_by_bucket(by_bucket, bucket, dscores, is_pair, STEPS: tl.constexpr):
    """Adds the gradients of a tile's scores to the sums of their buckets [1 << STEPS]."""
    least = tl.min(tl.where(is_pair, bucket, 1 << STEPS))
    greatest = tl.max(tl.where(is_pair, bucket, 0))
    for number in range(least, greatest + 1):
        total = tl.sum(tl.where(bucket == number, dscores, 0.0))
        by_bucket += tl.where(tl.arange(0, 1 << STEPS) == number, total, 0.0)
    return by_bucket


@triton.jit
def forward_kernel(
    q, k, v, read, lse,
    position, time, known, asked, boundaries, tiles, offsets, row_tiles, block_rows, block_starts,
    q_token, q_head, k_token, k_head, v_token, v_head, num_tokens, num_heads, d, scale, share, units,
    num_groups, num_distances, num_boundaries, num_buckets,
    SOFTMAX: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STORED: tl.constexpr, STEPS: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what one block of tokens reads and, for a softmax, log2 of the sum of exponentials [H, T]."""
    head = tl.program_id(1)
    row, start, first, length = _block(block_rows, block_starts, offsets)
    if start >= length:
        return
    places_q = start + tl.arange(0, SIZE)
    is_query = places_q < length
    q_qd = _rows(q, first, places_q, head, q_token, q_head, is_query, d, WIDTH)
    time += head % num_groups * num_buckets
    read_qd = tl.zeros((SIZE, WIDTH), tl.float32)
    most_q = tl.full((SIZE,), float("-inf"), tl.float32)
    sum_q = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, start + SIZE, SIZE):
        places_k = begin + tl.arange(0, SIZE)
        k_kd = _rows(k, first, places_k, head, k_token, k_head, places_k < length, d, WIDTH)
        v_kd = _rows(v, first, places_k, head, v_token, v_head, places_k < length, d, WIDTH)
        is_seen_qk = places_q[:, None] >= places_k[None, :]
        bias_qk, _ = _bias(
            position, time, known + first, asked + first, boundaries, tiles, row_tiles, row, start, begin,
            places_q[:, None], places_k[None, :], length, num_distances, num_boundaries, False,
            POSITION, TIME, STORED, STEPS, SIZE,
        )  # fmt: skip
        scores_qk = tl.dot(q_qd, tl.trans(k_kd), input_precision=PRECISION) * (scale * units) + bias_qk
        if SOFTMAX:
            scores_qk = tl.where(is_seen_qk, scores_qk, float("-inf"))
            higher_q = tl.maximum(most_q, tl.max(scores_qk, 1))
            weights_qk = tl.exp2(scores_qk - higher_q[:, None])
            shrink_q = tl.exp2(most_q - higher_q)
            sum_q = sum_q * shrink_q + tl.sum(weights_qk, 1)
            read_qd = read_qd * shrink_q[:, None]
            most_q = higher_q
        else:
            weights_qk = tl.where(is_seen_qk, scores_qk * share / (1.0 + tl.exp(-scores_qk)), 0.0)
        read_qd += tl.dot(weights_qk.to(v_kd.dtype), v_kd, input_precision=PRECISION)
    if SOFTMAX:
        read_qd = read_qd / sum_q[:, None]
        tl.store(lse + head.to(tl.int64) * num_tokens + first + places_q, most_q + tl.log2(sum_q), mask=is_query)
    _store(read, read_qd, first, places_q, head, num_heads, is_query, d, WIDTH)


@triton.jit
def backward_kernel(
    q, k, v, dread, lse, delta, read, dq, dk, dv, dtime,
    position, time, known, asked, boundaries, tiles, offsets, row_tiles, block_rows, block_starts,
    q_token, q_head, k_token, k_head, v_token, v_head, num_tokens, num_heads, d, scale, share, units,
    num_groups, num_distances, num_boundaries, num_buckets,
    OF_QUERIES: tl.constexpr, BY_BUCKET: tl.constexpr,
    SOFTMAX: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STORED: tl.constexpr, STEPS: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one block of queries, or of one block of keys and values.

    Tiles are [own, other]: [q, k] for a block of queries, and [k, q] for a block of keys. The program of queries also
    stores `delta`, which the programs of keys read later. If `BY_BUCKET`, the program of queries also stores its
    block's sums of the gradient of the bias.
    """
    head = tl.program_id(1)
    row, start, first, length = _block(block_rows, block_starts, offsets)
    if start >= length:
        return
    own = start + tl.arange(0, SIZE)
    is_own = own < length
    lse += head.to(tl.int64) * num_tokens + first
    delta += head.to(tl.int64) * num_tokens + first
    time += head % num_groups * num_buckets
    own_sum = tl.zeros((SIZE, WIDTH), tl.float32)
    value_sum = tl.zeros((SIZE, WIDTH), tl.float32)
    by_bucket = tl.zeros((1 << STEPS,), tl.float32)
    # The weights of a query beyond the row are 0, because its `lse` is infinite.
    own_lse = tl.load(lse + own, mask=is_own & SOFTMAX & OF_QUERIES, other=float("inf"))
    own_delta = tl.zeros((SIZE,), tl.float32)
    if OF_QUERIES:
        own_in = _rows(q, first, own, head, q_token, q_head, is_own, d, WIDTH)
        own_out = _rows(dread, first, own, head, num_heads * d, d, is_own, d, WIDTH)
        if SOFTMAX:
            read_qd = _rows(read, first, own, head, num_heads * d, d, is_own, d, WIDTH)
            own_delta = tl.sum(own_out.to(tl.float32) * read_qd.to(tl.float32), 1)
            tl.store(delta + own, own_delta, mask=is_own)
    else:
        own_in = _rows(k, first, own, head, k_token, k_head, is_own, d, WIDTH)
        own_out = _rows(v, first, own, head, v_token, v_head, is_own, d, WIDTH)
    for begin in range(0 if OF_QUERIES else start, start + SIZE if OF_QUERIES else length, SIZE):
        other = begin + tl.arange(0, SIZE)
        is_other = other < length
        if OF_QUERIES:
            other_in = _rows(k, first, other, head, k_token, k_head, is_other, d, WIDTH)
            other_out = _rows(v, first, other, head, v_token, v_head, is_other, d, WIDTH)
            start_q, start_k, places_q, places_k = start, begin, own[:, None], other[None, :]
            lse_q, delta_q = own_lse[:, None], own_delta[:, None]
        else:
            other_in = _rows(q, first, other, head, q_token, q_head, is_other, d, WIDTH)
            other_out = _rows(dread, first, other, head, num_heads * d, d, is_other, d, WIDTH)
            start_q, start_k, places_q, places_k = begin, start, other[None, :], own[:, None]
            lse_q = tl.load(lse + other, mask=is_other & SOFTMAX, other=float("inf"))[None, :]
            delta_q = tl.load(delta + other, mask=is_other & SOFTMAX, other=0.0)[None, :]
        bias, bucket = _bias(
            position, time, known + first, asked + first, boundaries, tiles, row_tiles, row, start_q, start_k,
            places_q, places_k, length, num_distances, num_boundaries, not OF_QUERIES,
            POSITION, TIME, STORED, STEPS, SIZE,
        )  # fmt: skip
        is_seen = places_q >= places_k
        scores = tl.dot(own_in, tl.trans(other_in), input_precision=PRECISION) * (scale * units) + bias
        dweights = tl.dot(own_out, tl.trans(other_out), input_precision=PRECISION)
        weights, dscores = _weights_and_slopes(scores, dweights, is_seen, lse_q, delta_q, share, SOFTMAX)
        own_sum += tl.dot(dscores.to(other_in.dtype), other_in, input_precision=PRECISION)
        if not OF_QUERIES:
            value_sum += tl.dot(weights.to(other_out.dtype), other_out, input_precision=PRECISION)
        if BY_BUCKET:
            by_bucket = _add_by_bucket(by_bucket, bucket, dscores, is_seen & (places_q < length), STEPS)
    if OF_QUERIES:
        _store(dq, own_sum * scale, first, own, head, num_heads, is_own, d, WIDTH)
    else:
        _store(dk, own_sum * scale, first, own, head, num_heads, is_own, d, WIDTH)
        _store(dv, value_sum, first, own, head, num_heads, is_own, d, WIDTH)
    if BY_BUCKET:
        buckets = tl.arange(0, 1 << STEPS)
        program = tl.program_id(0).to(tl.int64) * num_heads + head
        tl.store(dtime + program * num_buckets + buckets, by_bucket, mask=buckets < num_buckets)


@triton.jit
def bias_kernel(
    q, k, v, dread, lse, delta, dposition, dtime,
    position, time, known, asked, boundaries, tiles, offsets, row_tiles, block_rows, block_starts,
    q_token, q_head, k_token, k_head, v_token, v_head, num_tokens, num_heads, d, scale, share, units,
    num_groups, num_distances, num_boundaries, num_buckets, bound,
    SOFTMAX: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STORED: tl.constexpr, STEPS: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what one block of queries adds to the gradients of biases by distance and by bucket [N × G, …]."""
    group = tl.program_id(1)
    program = tl.program_id(0).to(tl.int64) * num_groups + group
    row, start, first, length = _block(block_rows, block_starts, offsets)
    if start >= length:
        return
    numbers = tl.arange(0, SIZE)
    places_q = start + numbers
    is_query = places_q < length
    time += group * num_buckets
    by_bucket = tl.zeros((1 << STEPS,), tl.float32)
    left_over = tl.zeros((SIZE,), tl.float32)
    # Pairs in column c of a turned tile have the distance start - begin + c, or SIZE less if they are not `is_near`.
    turned = (numbers[:, None] - numbers[None, :] + SIZE) % SIZE
    is_near = numbers[:, None] >= numbers[None, :]
    for begin in range(0, start + SIZE, SIZE):
        places_k = begin + numbers
        is_key = places_k < length
        is_seen_qk = (places_q[:, None] >= places_k[None, :]) & is_query[:, None]
        bias_qk, bucket_qk = _bias(
            position, time, known + first, asked + first, boundaries, tiles, row_tiles, row, start, begin,
            places_q[:, None], places_k[None, :], length, num_distances, num_boundaries, False,
            POSITION, TIME, STORED, STEPS, SIZE,
        )  # fmt: skip
        sum_qk = tl.zeros((SIZE, SIZE), tl.float32)
        for head in range(group, num_heads, num_groups):
            q_qd = _rows(q, first, places_q, head, q_token, q_head, is_query, d, WIDTH)
            dread_qd = _rows(dread, first, places_q, head, num_heads * d, d, is_query, d, WIDTH)
            k_kd = _rows(k, first, places_k, head, k_token, k_head, is_key, d, WIDTH)
            v_kd = _rows(v, first, places_k, head, v_token, v_head, is_key, d, WIDTH)
            of_head = tl.cast(head, tl.int64) * num_tokens + first
            lse_q = tl.load(lse + of_head + places_q, mask=is_query & SOFTMAX, other=float("inf"))
            delta_q = tl.load(delta + of_head + places_q, mask=is_query & SOFTMAX, other=0.0)
            scores_qk = tl.dot(q_qd, tl.trans(k_kd), input_precision=PRECISION) * (scale * units) + bias_qk
            dweights_qk = tl.dot(dread_qd, tl.trans(v_kd), input_precision=PRECISION)
            _, dscores_qk = _weights_and_slopes(
                scores_qk, dweights_qk, is_seen_qk, lse_q[:, None], delta_q[:, None], share, SOFTMAX
            )  # fmt: skip
            sum_qk += dscores_qk
        if TIME:
            by_bucket = _add_by_bucket(by_bucket, bucket_qk, sum_qk, is_seen_qk, STEPS)
        if POSITION:
            turned_qc = tl.gather(sum_qk, turned, 1)
            by_distance = left_over + tl.sum(tl.where(is_near, turned_qc, 0.0), 0)
            left_over = tl.sum(tl.where(is_near, 0.0, turned_qc), 0)
            far = start - begin + numbers
            tl.store(dposition + program * bound + far, by_distance, mask=far < bound)
    if TIME:
        buckets = tl.arange(0, 1 << STEPS)
        tl.store(dtime + program * num_buckets + buckets, by_bucket, mask=buckets < num_buckets)


@torch.library.custom_op("tackboard::bucket_tiles", mutates_args=())
def _bucket_tiles(
    keys_T: torch.Tensor,
    queries_T: torch.Tensor,
    boundaries: torch.Tensor,
    offsets: torch.Tensor,
    row_tiles: torch.Tensor,
    block_rows: torch.Tensor,
    block_starts: torch.Tensor,
    num_tiles: int,
) -> torch.Tensor:
    tiles = keys_T.new_empty(num_tiles * BLOCK * BLOCK, dtype=torch.uint8)
    known = (keys_T.contiguous(), queries_T.contiguous(), boundaries.contiguous())
    steps = len(boundaries).bit_length()
    tiles_kernel[(len(block_rows),)](
        tiles, *known, offsets, row_tiles, block_rows, block_starts, len(boundaries), STEPS=steps, SIZE=BLOCK
    )
    return tiles


@_bucket_tiles.register_fake
def _(keys_T: torch.Tensor, *others: Any) -> torch.Tensor:
    return keys_T.new_empty(others[-1] * BLOCK * BLOCK, dtype=torch.uint8)


@torch.library.custom_op("tackboard::packed_attention", mutates_args=())
def _forward(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    position_P: torch.Tensor | None,
    time_VG: torch.Tensor | None,
    keys_T: torch.Tensor,
    queries_T: torch.Tensor,
    boundaries: torch.Tensor,
    tiles: torch.Tensor | None,
    offsets: torch.Tensor,
    row_tiles: torch.Tensor,
    block_rows: torch.Tensor,
    block_starts: torch.Tensor,
    pointwise_over: int,
    bound: int,  # noqa: ARG001 (the backward pass needs it)
) -> tuple[torch.Tensor, torch.Tensor]:
    read_THd, lse_HT = _empty_results(q_THd, pointwise_over)
    settings, sizes, tables = _settings(q_THd, position_P, time_VG, boundaries, tiles, pointwise_over)
    forward_kernel[(len(block_rows), q_THd.shape[1])](
        *(q_THd, k_THd, v_THd, read_THd, lse_HT),
        *(*tables, keys_T, queries_T, boundaries, offsets if tiles is None else tiles),
        *(offsets, row_tiles, block_rows, block_starts),
        *_strides(q_THd, k_THd, v_THd),
        *sizes,
        **settings,
    )
    return read_THd, lse_HT


@_forward.register_fake
def _(q_THd: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(q_THd, others[-2])


@torch.library.custom_op("tackboard::packed_attention_backward", mutates_args=())
def _backward(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    position_P: torch.Tensor | None,
    time_VG: torch.Tensor | None,
    keys_T: torch.Tensor,
    queries_T: torch.Tensor,
    boundaries: torch.Tensor,
    tiles: torch.Tensor | None,
    offsets: torch.Tensor,
    row_tiles: torch.Tensor,
    block_rows: torch.Tensor,
    block_starts: torch.Tensor,
    pointwise_over: int,
    bound: int,
    read_THd: torch.Tensor,
    lse_HT: torch.Tensor,
    dread_THd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _empty_gradients(q_THd, position_P, time_VG)
    num_blocks, num_heads = len(block_rows), q_THd.shape[1]
    settings, sizes, tables = _settings(q_THd, position_P, time_VG, boundaries, tiles, pointwise_over)
    known: tuple[Any, ...] = (*tables, keys_T, queries_T, boundaries, offsets if tiles is None else tiles)
    known = (*known, offsets, row_tiles, block_rows, block_starts, *_strides(q_THd, k_THd, v_THd), *sizes)
    inputs = (q_THd, k_THd, v_THd, dread_THd, lse_HT, torch.empty_like(lse_HT))
    num_groups, num_buckets = (1, 0) if time_VG is None else (time_VG.shape[1], time_VG.shape[0])
    by_bucket = lse_HT.new_zeros(num_blocks, num_groups, num_buckets)
    # If each head has its own time bias and there is no position bias, the program of queries sums the gradient of the
    # bias. Otherwise `bias_kernel` does, after it has added up the heads that share a bias.
    is_summed = time_VG is not None and position_P is None and num_groups == num_heads
    for of_queries in (True, False):
        constants = {"OF_QUERIES": of_queries, "BY_BUCKET": is_summed and of_queries}
        backward_kernel[(num_blocks, num_heads)](
            *inputs, read_THd, *gradients[:3], by_bucket, *known, **constants, **settings
        )
    if position_P is not None or (time_VG is not None and not is_summed):
        reach = bound if position_P is not None else 0
        by_distance = lse_HT.new_zeros(num_blocks * num_groups, reach)
        bias_kernel[(num_blocks, num_groups)](*inputs, by_distance, by_bucket, *known, reach, **settings)
        if position_P is not None:
            total, last = by_distance.sum(0), len(position_P) - 1
            gradients[3][: min(last, reach)] = total[:last]
            gradients[3][last] = total[last:].sum()
    if time_VG is not None:
        gradients[4].copy_(by_bucket.sum(0).T)
    return gradients


@_backward.register_fake
def _(q_THd: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return _empty_gradients(q_THd, others[2], others[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:-2], *output)
    ctx.numbers = inputs[-2:]


def _differentiate(ctx: Any, dread_THd: torch.Tensor, _dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *inputs, read_THd, lse_HT = ctx.saved_tensors
    found = _backward(*inputs, *ctx.numbers, read_THd, lse_HT, dread_THd.contiguous())
    dposition, dtime = (None if given is None else one for given, one in zip(inputs[3:5], found[3:], strict=True))
    return (*found[:3], dposition, dtime, *(None,) * 10)


_forward.register_autograd(_differentiate, setup_context=_save)


def _empty_results(q_THd: torch.Tensor, pointwise_over: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = q_THd.shape
    lse_HT = q_THd.new_empty((0 if pointwise_over else num_heads, num_tokens), dtype=torch.float32)
    return q_THd.new_empty(q_THd.shape), lse_HT


def _empty_gradients(
    q_THd: torch.Tensor, position_P: torch.Tensor | None, time_VG: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (q_THd.new_empty(q_THd.shape) for _ in range(3))
    dposition, dtime = (
        q_THd.new_zeros(0 if bias is None else bias.shape, dtype=torch.float32) for bias in (position_P, time_VG)
    )
    return dq, dk, dv, dposition, dtime


def _strides(*parts: torch.Tensor) -> list[int]:
    return [stride for part in parts for stride in part.stride()[:2]]


def launch_options(width: int, num_bytes: int) -> dict[str, int]:
    """Returns launch options that fit the shared memory of an A100, for heads of `width` numbers of `num_bytes`."""
    is_large = width * num_bytes > 128
    return {"num_warps": 8 if is_large else 4, "num_stages": 1 if is_large else 2}


def _settings(
    q_THd: torch.Tensor,
    position_P: torch.Tensor | None,
    time_VG: torch.Tensor | None,
    boundaries: torch.Tensor,
    tiles: torch.Tensor | None,
    pointwise_over: int,
) -> tuple[dict[str, Any], tuple[float, ...], tuple[torch.Tensor, torch.Tensor]]:
    """Returns the constants of the kernels, the numbers that all of them take, and the tables of biases.

    A softmax is computed with powers of 2, so its scores and biases are in units of log 2. Buckets of one head are next
    to each other in memory, so that they take few cache lines. A missing table is never read, so any tensor may stand
    for it.
    """
    num_tokens, num_heads, d = q_THd.shape
    width = max(16, triton.next_power_of_2(d))
    settings = {
        "SOFTMAX": not pointwise_over,
        "POSITION": position_P is not None,
        "TIME": time_VG is not None,
        "STORED": time_VG is not None and tiles is not None,
        "STEPS": len(boundaries).bit_length() if time_VG is not None else 0,
        "WIDTH": width,
        "SIZE": BLOCK,
        "PRECISION": "ieee",
        **launch_options(width, q_THd.element_size()),
    }
    scale, share, units = (1.0, 1.0 / pointwise_over, 1.0) if pointwise_over else (d**-0.5, 1.0, math.log2(math.e))
    num_buckets, num_groups = (0, 1) if time_VG is None else time_VG.shape
    num_distances = 1 if position_P is None else len(position_P)
    tables = (
        q_THd if position_P is None else position_P.contiguous() * units,
        q_THd if time_VG is None else time_VG.T.contiguous() * units,
    )
    counts = (num_groups, num_distances, len(boundaries), num_buckets)
    return settings, (num_tokens, num_heads, d, scale, share, units, *counts), tables
