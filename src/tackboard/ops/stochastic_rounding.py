"""Stochastic rounding: fp32 numbers in, fp16 or bf16 numbers out that are right on average.

A number between two neighbours of the smaller format becomes the upper one with a probability that is its distance
from the lower one, in gaps. Many updates that are each far below a gap then still add up, where rounding to the
nearest would lose every one of them; that is what lets a table be trained in half precision.

The random bits are `core.keyed_random.bits(seed, step, table, row, column)`: a pure function, never a stream. So an
update gives the same bits in any order of rows, for any subset of them, on any device and in a resumed run. All of it
is integer arithmetic on the bit patterns, which no compiler's fast maths and no device's subnormal mode can change.

Decided: what lies beyond the largest finite number becomes that number, so that a long run does not end in an infinity
that rounding made; what was not finite before stays so, and the guard sees it.

Shapes: R rows, D columns.
"""

from __future__ import annotations

import dataclasses

import torch

from tackboard.core.errors import DataError
from tackboard.core.keyed_random import bits
from tackboard.ops.row_ids import mix64

KEY_DEPTH = 3
"""Keys that `rounding_key` has taken in: seed (0), step (1), table (2). Row and column follow."""
MOST_DROPPED_BITS = 62
"""Random bits that a number is compared with at most, so that int64 holds the sum."""


@dataclasses.dataclass(frozen=True)
class _Format:
    """A 16-bit format: bits of its mantissa, how far its exponent's bias lies below fp32's, notable bit patterns."""

    mantissa_bits: int
    bias_below: int
    largest: int
    infinity: int
    nan: int


_FORMATS = {
    torch.float16: _Format(mantissa_bits=10, bias_below=112, largest=0x7BFF, infinity=0x7C00, nan=0x7E00),
    torch.bfloat16: _Format(mantissa_bits=7, bias_below=0, largest=0x7F7F, infinity=0x7F80, nan=0x7FC0),
}


def rounding_key(seed: int, step: int, table: int = 0) -> int:
    """The key of one step's rounding of one table: 64 bits as a signed integer."""
    return int(bits(seed, step, table).view("int64")[0])


def random_bits(key: int, rows: torch.Tensor, num_columns: int) -> torch.Tensor:
    """64 random bits for each of `num_columns` columns of `rows` (int64 [R]), as int64 [R, D]."""
    columns_D = torch.arange(num_columns, device=rows.device)
    state_R = mix64(mix64(rows, KEY_DEPTH) + key, KEY_DEPTH)
    lane_D = mix64(columns_D, KEY_DEPTH + 1)
    return mix64(state_R[:, None] + lane_D, KEY_DEPTH + 1)


def stochastic_round(values: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor, key: int) -> torch.Tensor:
    """`values` (float32 [R, D]) as `dtype` (float16 or bfloat16), each one of its two neighbours and right on average.

    `rows` (int64 [R]) names each row of `values` in its table; with `key` (see `rounding_key`) and the column it
    decides the random bits. The probability is exact; only what is below 2^-62 of the smallest gap is dropped.
    """
    if dtype not in _FORMATS or values.dtype != torch.float32:
        raise DataError(f"cannot round {values.dtype} to {dtype}", allowed="allowed: float32 to float16 or bfloat16")
    if values.dim() != 2 or rows.shape != values.shape[:1]:
        raise DataError(
            f"values have shape {tuple(values.shape)} and rows have shape {tuple(rows.shape)}",
            allowed="allowed: values [R, D] with rows [R]",
        )
    target = _FORMATS[dtype]
    pattern_RD = values.contiguous().view(torch.int32).to(torch.int64)
    magnitude_RD = pattern_RD & 0x7FFFFFFF
    field_RD = magnitude_RD >> 23
    # A subnormal has the exponent of the smallest normal number and no hidden bit.
    mantissa_RD = (magnitude_RD & 0x7FFFFF) | ((field_RD > 0).to(torch.int64) << 23)
    exponent_RD = field_RD.clamp_min(1) - target.bias_below
    # Below the target's smallest normal number its gaps stop shrinking: more of the mantissa lies beneath a gap.
    too_small_RD = (1 - exponent_RD).clamp_min(0)
    dropped_RD = 23 - target.mantissa_bits + too_small_RD
    excess_RD = (dropped_RD - MOST_DROPPED_BITS).clamp_min(0)
    dropped_RD -= excess_RD
    random_RD = random_bits(key, rows, values.shape[1]) & ((1 << MOST_DROPPED_BITS) - 1)
    # The part beneath a gap is a number of `dropped` bits; as many random ones carry with its share of the gap.
    gaps_RD = ((mantissa_RD >> excess_RD) + (random_RD >> (MOST_DROPPED_BITS - dropped_RD))) >> dropped_RD
    # A carry out of the mantissa runs into the exponent, which is the next power of two, as it should be.
    rounded_RD = gaps_RD + ((exponent_RD.clamp_min(1) - 1) << target.mantissa_bits)
    rounded_RD = rounded_RD.clamp_max(target.largest)
    rounded_RD = torch.where(magnitude_RD == 0x7F800000, target.infinity, rounded_RD)
    rounded_RD = torch.where(magnitude_RD > 0x7F800000, target.nan, rounded_RD)
    rounded_RD = torch.where(pattern_RD < 0, rounded_RD - 0x8000, rounded_RD)
    return rounded_RD.to(torch.int16).view(dtype)
