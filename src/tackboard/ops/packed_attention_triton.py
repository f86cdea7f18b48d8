"""Computes causal attention of packed rows on a GPU, with any bias, as Triton kernels without padding.

Input and output are those of `packed_attention_reference.grouped_attention`, its twin. One program computes a block of
BLOCK tokens of one row and one head; `RowLayout` lists the blocks. Weights exist only as tiles in registers; the
backward pass computes them again. The kernels are registered with torch as operations, so compiled layers may call
them.

The gradients of biases have a kernel of their own. Each program sums its part over its heads: by bucket of time in
registers, and by distance into memory that no other program writes. PyTorch adds up the parts. So all sums have a fixed
order, and every gradient is the same in every run. To sum by distance, a tile is turned so that its diagonals become
columns. Buckets are summed one by one, from the least to the greatest bucket of the tile. In rows sorted by time, tiles
far from the diagonal have few buckets.

Shapes: T packed tokens, H heads, d width of a head, N blocks, V buckets of time, P distances, G heads with a bias of
their own (H or 1).
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have no types: Triton derives them when it compiles, and they differ from call to call.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tackboard.batch.row_layout import BLOCK, RowLayout
from tackboard.ops.packed_attention_reference import Weighing


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
        layout.offsets,
        layout.block_rows,
        layout.block_starts,
        weighing.pointwise_over,
        layout.bound,
    )
    return read_THd


@triton.jit
def _bias(
    position, time, boundaries, asked_q, known_k, distance_qk, group, num_groups,
    num_distances, num_boundaries, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Returns the bias of a tile and its buckets of time."""
    bias_qk = tl.zeros(distance_qk.shape, tl.float32)
    bucket_qk = tl.zeros(distance_qk.shape, tl.int32)
    if POSITION:
        bias_qk += tl.load(position + tl.minimum(tl.maximum(distance_qk, 0), num_distances - 1))
    if TIME:
        elapsed_qk = asked_q[:, None] - known_k[None, :]
        for step in tl.static_range(STEPS):
            next_qk = bucket_qk + (1 << (STEPS - 1 - step))
            is_there = next_qk <= num_boundaries
            begin_qk = tl.load(boundaries + next_qk - 1, mask=is_there, other=0)
            bucket_qk = tl.where(is_there & (elapsed_qk >= begin_qk), next_qk, bucket_qk)
        bias_qk += tl.load(time + bucket_qk * num_groups + group)
    return bias_qk, bucket_qk


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
def _weights_and_slopes(scores_qk, dweights_qk, is_seen_qk, lse_q, delta_q, share, SOFTMAX: tl.constexpr):
    """Returns the weights of a tile, and the gradient of its scores from the gradient of its weights."""
    if SOFTMAX:
        weights_qk = tl.where(is_seen_qk, tl.exp(scores_qk - lse_q[:, None]), 0.0)
        dscores_qk = weights_qk * (dweights_qk - delta_q[:, None])
    else:
        gate_qk = 1.0 / (1.0 + tl.exp(-scores_qk))
        weights_qk = tl.where(is_seen_qk, scores_qk * gate_qk * share, 0.0)
        slope_qk = gate_qk * (1.0 + scores_qk * (1.0 - gate_qk))
        dscores_qk = tl.where(is_seen_qk, dweights_qk * slope_qk * share, 0.0)
    return weights_qk, dscores_qk


@triton.jit
def forward_kernel(
    q, k, v, read, lse, position, time, known, asked, boundaries, offsets, block_rows, block_starts,
    q_token, q_head, k_token, k_head, v_token, v_head, num_tokens, num_heads, d, scale, share,
    num_groups, num_distances, num_boundaries,
    SOFTMAX: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what one block of tokens reads and, for a softmax, the logarithm of the sum of exponentials [H, T]."""
    head = tl.program_id(1)
    row = tl.load(block_rows + tl.program_id(0))
    start = tl.load(block_starts + tl.program_id(0))
    first = tl.load(offsets + row).to(tl.int64)
    length = (tl.load(offsets + row + 1) - first).to(tl.int32)
    if start >= length:
        return
    places_q = start + tl.arange(0, SIZE)
    is_query = places_q < length
    q_qd = _rows(q, first, places_q, head, q_token, q_head, is_query, d, WIDTH)
    asked_q = tl.load(asked + first + places_q, mask=is_query & TIME, other=0)
    group = head % num_groups
    read_qd = tl.zeros((SIZE, WIDTH), tl.float32)
    most_q = tl.full((SIZE,), float("-inf"), tl.float32)
    sum_q = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, start + SIZE, SIZE):
        places_k = begin + tl.arange(0, SIZE)
        is_key = places_k < length
        k_kd = _rows(k, first, places_k, head, k_token, k_head, is_key, d, WIDTH)
        v_kd = _rows(v, first, places_k, head, v_token, v_head, is_key, d, WIDTH)
        known_k = tl.load(known + first + places_k, mask=is_key & TIME, other=0)
        distance_qk = places_q[:, None] - places_k[None, :]
        is_seen_qk = (distance_qk >= 0) & is_key[None, :]
        bias_qk, _ = _bias(
            position, time, boundaries, asked_q, known_k, distance_qk, group, num_groups,
            num_distances, num_boundaries, POSITION, TIME, STEPS,
        )  # fmt: skip
        scores_qk = tl.dot(q_qd, tl.trans(k_kd), input_precision=PRECISION) * scale + bias_qk
        if SOFTMAX:
            scores_qk = tl.where(is_seen_qk, scores_qk, float("-inf"))
            higher_q = tl.maximum(most_q, tl.max(scores_qk, 1))
            weights_qk = tl.exp(scores_qk - higher_q[:, None])
            shrink_q = tl.exp(most_q - higher_q)
            sum_q = sum_q * shrink_q + tl.sum(weights_qk, 1)
            read_qd = read_qd * shrink_q[:, None]
            most_q = higher_q
        else:
            weights_qk = tl.where(is_seen_qk, scores_qk * share / (1.0 + tl.exp(-scores_qk)), 0.0)
        read_qd += tl.dot(weights_qk.to(v_kd.dtype), v_kd, input_precision=PRECISION)
    if SOFTMAX:
        read_qd = read_qd / sum_q[:, None]
        tl.store(lse + head.to(tl.int64) * num_tokens + first + places_q, most_q + tl.log(sum_q), mask=is_query)
    _store(read, read_qd, first, places_q, head, num_heads, is_query, d, WIDTH)


@triton.jit
def backward_kernel(
    q, k, v, dread, lse, delta, dq, dk, dv, position, time, known, asked, boundaries, offsets, block_rows, block_starts,
    q_token, q_head, k_token, k_head, v_token, v_head, num_tokens, num_heads, d, scale, share,
    num_groups, num_distances, num_boundaries,
    OF_QUERIES: tl.constexpr,
    SOFTMAX: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one block of queries, or of one block of keys and values."""
    head = tl.program_id(1)
    row = tl.load(block_rows + tl.program_id(0))
    start = tl.load(block_starts + tl.program_id(0))
    first = tl.load(offsets + row).to(tl.int64)
    length = (tl.load(offsets + row + 1) - first).to(tl.int32)
    if start >= length:
        return
    own = start + tl.arange(0, SIZE)
    is_own = own < length
    group = head % num_groups
    lse += head.to(tl.int64) * num_tokens + first
    delta += head.to(tl.int64) * num_tokens + first
    first_sum = tl.zeros((SIZE, WIDTH), tl.float32)
    second_sum = tl.zeros((SIZE, WIDTH), tl.float32)
    begin_from = 0 if OF_QUERIES else start
    end_at = start + SIZE if OF_QUERIES else length
    if OF_QUERIES:
        q_qd = _rows(q, first, own, head, q_token, q_head, is_own, d, WIDTH)
        dread_qd = _rows(dread, first, own, head, num_heads * d, d, is_own, d, WIDTH)
    else:
        k_kd = _rows(k, first, own, head, k_token, k_head, is_own, d, WIDTH)
        v_kd = _rows(v, first, own, head, v_token, v_head, is_own, d, WIDTH)
    for begin in range(begin_from, end_at, SIZE):
        other = begin + tl.arange(0, SIZE)
        is_other = other < length
        if OF_QUERIES:
            k_kd = _rows(k, first, other, head, k_token, k_head, is_other, d, WIDTH)
            v_kd = _rows(v, first, other, head, v_token, v_head, is_other, d, WIDTH)
            places_q, is_query, places_k, is_key = own, is_own, other, is_other
        else:
            q_qd = _rows(q, first, other, head, q_token, q_head, is_other, d, WIDTH)
            dread_qd = _rows(dread, first, other, head, num_heads * d, d, is_other, d, WIDTH)
            places_q, is_query, places_k, is_key = other, is_other, own, is_own
        asked_q = tl.load(asked + first + places_q, mask=is_query & TIME, other=0)
        known_k = tl.load(known + first + places_k, mask=is_key & TIME, other=0)
        lse_q = tl.load(lse + places_q, mask=is_query & SOFTMAX, other=0.0)
        delta_q = tl.load(delta + places_q, mask=is_query & SOFTMAX, other=0.0)
        distance_qk = places_q[:, None] - places_k[None, :]
        is_seen_qk = (distance_qk >= 0) & is_key[None, :] & is_query[:, None]
        bias_qk, _ = _bias(
            position, time, boundaries, asked_q, known_k, distance_qk, group, num_groups,
            num_distances, num_boundaries, POSITION, TIME, STEPS,
        )  # fmt: skip
        scores_qk = tl.dot(q_qd, tl.trans(k_kd), input_precision=PRECISION) * scale + bias_qk
        dweights_qk = tl.dot(dread_qd, tl.trans(v_kd), input_precision=PRECISION)
        weights_qk, dscores_qk = _weights_and_slopes(scores_qk, dweights_qk, is_seen_qk, lse_q, delta_q, share, SOFTMAX)
        if OF_QUERIES:
            first_sum += tl.dot(dscores_qk.to(k_kd.dtype), k_kd, input_precision=PRECISION)
        else:
            first_sum += tl.dot(tl.trans(dscores_qk).to(q_qd.dtype), q_qd, input_precision=PRECISION)
            second_sum += tl.dot(tl.trans(weights_qk).to(dread_qd.dtype), dread_qd, input_precision=PRECISION)
    if OF_QUERIES:
        _store(dq, first_sum * scale, first, own, head, num_heads, is_own, d, WIDTH)
    else:
        _store(dk, first_sum * scale, first, own, head, num_heads, is_own, d, WIDTH)
        _store(dv, second_sum, first, own, head, num_heads, is_own, d, WIDTH)


@triton.jit
def bias_kernel(
    q, k, v, dread, lse, delta, dposition, dtime, position, time, known, asked, boundaries,
    offsets, block_rows, block_starts,
    q_token, q_head, k_token, k_head, v_token, v_head, num_tokens, num_heads, d, scale, share,
    num_groups, num_distances, num_boundaries, num_buckets, bound,
    SOFTMAX: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what one block of queries adds to the gradients of biases by distance and by bucket [N × G, …]."""
    group = tl.program_id(1)
    program = tl.program_id(0).to(tl.int64) * num_groups + group
    row = tl.load(block_rows + tl.program_id(0))
    start = tl.load(block_starts + tl.program_id(0))
    first = tl.load(offsets + row).to(tl.int64)
    length = (tl.load(offsets + row + 1) - first).to(tl.int32)
    if start >= length:
        return
    numbers = tl.arange(0, SIZE)
    places_q = start + numbers
    is_query = places_q < length
    asked_q = tl.load(asked + first + places_q, mask=is_query & TIME, other=0)
    buckets = tl.arange(0, 1 << STEPS)
    by_bucket = tl.zeros((1 << STEPS,), tl.float32)
    left_over = tl.zeros((SIZE,), tl.float32)
    # The pairs in column c of a turned tile have the distance start - begin + c; if not `is_near`, it is SIZE less.
    turned = (numbers[:, None] - numbers[None, :] + SIZE) % SIZE
    is_near = numbers[:, None] >= numbers[None, :]
    for begin in range(0, start + SIZE, SIZE):
        places_k = begin + numbers
        is_key = places_k < length
        known_k = tl.load(known + first + places_k, mask=is_key & TIME, other=0)
        distance_qk = places_q[:, None] - places_k[None, :]
        is_seen_qk = (distance_qk >= 0) & is_key[None, :] & is_query[:, None]
        bias_qk, bucket_qk = _bias(
            position, time, boundaries, asked_q, known_k, distance_qk, group, num_groups,
            num_distances, num_boundaries, POSITION, TIME, STEPS,
        )  # fmt: skip
        sum_qk = tl.zeros((SIZE, SIZE), tl.float32)
        for head in range(group, num_heads, num_groups):
            q_qd = _rows(q, first, places_q, head, q_token, q_head, is_query, d, WIDTH)
            dread_qd = _rows(dread, first, places_q, head, num_heads * d, d, is_query, d, WIDTH)
            k_kd = _rows(k, first, places_k, head, k_token, k_head, is_key, d, WIDTH)
            v_kd = _rows(v, first, places_k, head, v_token, v_head, is_key, d, WIDTH)
            of_head = tl.cast(head, tl.int64) * num_tokens + first
            lse_q = tl.load(lse + of_head + places_q, mask=is_query & SOFTMAX, other=0.0)
            delta_q = tl.load(delta + of_head + places_q, mask=is_query & SOFTMAX, other=0.0)
            scores_qk = tl.dot(q_qd, tl.trans(k_kd), input_precision=PRECISION) * scale + bias_qk
            dweights_qk = tl.dot(dread_qd, tl.trans(v_kd), input_precision=PRECISION)
            _, dscores_qk = _weights_and_slopes(scores_qk, dweights_qk, is_seen_qk, lse_q, delta_q, share, SOFTMAX)
            sum_qk += dscores_qk
        if TIME:
            least = tl.min(tl.min(tl.where(is_seen_qk, bucket_qk, 1 << STEPS), 1), 0)
            greatest = tl.max(tl.max(tl.where(is_seen_qk, bucket_qk, 0), 1), 0)
            for bucket in range(least, greatest + 1):
                total = tl.sum(tl.sum(tl.where(bucket_qk == bucket, sum_qk, 0.0), 1), 0)
                by_bucket += tl.where(buckets == bucket, total, 0.0)
        if POSITION:
            turned_qc = tl.gather(sum_qk, turned, 1)
            by_distance = left_over + tl.sum(tl.where(is_near, turned_qc, 0.0), 0)
            left_over = tl.sum(tl.where(is_near, 0.0, turned_qc), 0)
            far = start - begin + numbers
            tl.store(dposition + program * bound + far, by_distance, mask=far < bound)
    if TIME:
        tl.store(dtime + program * num_buckets + buckets, by_bucket, mask=buckets < num_buckets)


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
    offsets: torch.Tensor,
    block_rows: torch.Tensor,
    block_starts: torch.Tensor,
    pointwise_over: int,
    bound: int,  # noqa: ARG001 (the backward pass needs it)
) -> tuple[torch.Tensor, torch.Tensor]:
    read_THd, lse_HT = _empty_results(q_THd, pointwise_over)
    settings, sizes = _settings(q_THd, position_P, time_VG, boundaries, pointwise_over)
    forward_kernel[(len(block_rows), q_THd.shape[1])](
        *(q_THd, k_THd, v_THd, read_THd, lse_HT),
        *_tables(q_THd, position_P, time_VG),
        *(keys_T, queries_T, boundaries, offsets, block_rows, block_starts),
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
    offsets: torch.Tensor,
    block_rows: torch.Tensor,
    block_starts: torch.Tensor,
    pointwise_over: int,
    bound: int,
    lse_HT: torch.Tensor,
    delta_HT: torch.Tensor,
    dread_THd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _empty_gradients(q_THd, position_P, time_VG)
    num_blocks, num_heads = len(block_rows), q_THd.shape[1]
    settings, sizes = _settings(q_THd, position_P, time_VG, boundaries, pointwise_over)
    known = (keys_T, queries_T, boundaries, offsets, block_rows, block_starts)
    tables, strides = _tables(q_THd, position_P, time_VG), _strides(q_THd, k_THd, v_THd)
    inputs = (q_THd, k_THd, v_THd, dread_THd, lse_HT, delta_HT)
    for of_queries in (True, False):
        backward_kernel[(num_blocks, num_heads)](
            *inputs, *gradients[:3], *tables, *known, *strides, *sizes, OF_QUERIES=of_queries, **settings
        )
    if position_P is None and time_VG is None:
        return gradients
    num_groups, num_buckets = (1, 0) if time_VG is None else (time_VG.shape[1], time_VG.shape[0])
    reach = bound if position_P is not None else 0
    by_distance = lse_HT.new_zeros(num_blocks * num_groups, reach)
    by_bucket = lse_HT.new_zeros(num_blocks, num_groups, num_buckets)
    bias_kernel[(num_blocks, num_groups)](
        *inputs, by_distance, by_bucket, *tables, *known, *strides, *sizes, num_buckets, reach, **settings
    )
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
    delta_HT = lse_HT  # Without a softmax, neither of these two tensors is read.
    if not ctx.numbers[0]:
        delta_HT = (dread_THd.float() * read_THd.float()).sum(-1).T.contiguous()
    found = _backward(*inputs, *ctx.numbers, lse_HT, delta_HT, dread_THd.contiguous())
    dposition, dtime = (None if given is None else one for given, one in zip(inputs[3:5], found[3:], strict=True))
    return (*found[:3], dposition, dtime, *(None,) * 8)


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


def _tables(
    q_THd: torch.Tensor, position_P: torch.Tensor | None, time_VG: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tables of biases. A missing table is never read, so any tensor may stand for it."""
    return q_THd if position_P is None else position_P.contiguous(), q_THd if time_VG is None else time_VG.contiguous()


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
    pointwise_over: int,
) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Returns the constants of the kernels and the numbers that all of them take."""
    num_tokens, num_heads, d = q_THd.shape
    width = max(16, triton.next_power_of_2(d))
    settings = {
        "SOFTMAX": not pointwise_over,
        "POSITION": position_P is not None,
        "TIME": time_VG is not None,
        "STEPS": len(boundaries).bit_length() if time_VG is not None else 0,
        "WIDTH": width,
        "SIZE": BLOCK,
        "PRECISION": "ieee",
        **launch_options(width, q_THd.element_size()),
    }
    scale, share = (1.0, 1.0 / pointwise_over) if pointwise_over else (d**-0.5, 1.0)
    num_groups = 1 if time_VG is None else time_VG.shape[1]
    num_distances = 1 if position_P is None else len(position_P)
    return settings, (num_tokens, num_heads, d, scale, share, num_groups, num_distances, len(boundaries))
