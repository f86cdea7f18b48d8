"""Rounds fp32 numbers up or down to fp16 or bf16 at random, so that the result is right on average.

A number lies between two neighbouring numbers of the smaller format. It is rounded up with a probability equal to its
distance from the lower neighbour, divided by the gap between the two neighbours. Updates far smaller than a gap then
add up over time, while rounding to nearest would lose them. So half-precision tables can be trained.

The random bits are the result of `core.keyed_random.bits(seed, step, table, row, column)`, which is a pure function and
has no state. So an update gives the same bits in any order of rows, for any subset of rows, on any device and in a
resumed run. All arithmetic is done with integers on bit patterns, so neither a compiler's fast maths nor a device's
subnormal mode can change a result.

Decided: a finite number beyond the largest finite number of the smaller format becomes that largest number, so rounding
never creates an infinity. An infinity or NaN is kept, so that a check for finite numbers finds it.

Shapes: R rows, D columns.
"""

from __future__ import annotations

import dataclasses

import torch

from tackboard.core.errors import DataError
from tackboard.core.keyed_random import bits
from tackboard.ops.row_ids import mix64

KEY_DEPTH = 3
"""Number of inputs of `rounding_key`: seed (0), step (1) and table (2). `random_bits` adds row (3) and column (4)."""
MOST_DROPPED_BITS = 62
"""Largest number of random bits that are added to a number. With more bits, the sum would not fit into int64."""


@dataclasses.dataclass(frozen=True)
class HalfFormat:
    """A 16-bit format. `bias_below` is the exponent bias of fp32 minus the exponent bias of this format."""

    mantissa_bits: int
    bias_below: int
    largest: int
    infinity: int
    nan: int


FORMATS = {
    torch.float16: HalfFormat(mantissa_bits=10, bias_below=112, largest=0x7BFF, infinity=0x7C00, nan=0x7E00),
    torch.bfloat16: HalfFormat(mantissa_bits=7, bias_below=0, largest=0x7F7F, infinity=0x7F80, nan=0x7FC0),
}


def rounding_key(seed: int, step: int, table: int = 0) -> int:
    """Returns the key for rounding one table in one step, 64 bits as a signed integer."""
    return int(bits(seed, step, table).view("int64")[0])


def random_bits(key: int | torch.Tensor, rows: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Returns 64 random bits for each of `num_columns` columns of `rows` (int64 [R]), as int64 [R, D]."""
    columns_D = torch.arange(num_columns, device=rows.device)
    state_R = mix64(mix64(rows, KEY_DEPTH) + key, KEY_DEPTH)
    lane_D = mix64(columns_D, KEY_DEPTH + 1)
    return mix64(state_R[:, None] + lane_D, KEY_DEPTH + 1)


def stochastic_round(
    values: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor, key: int | torch.Tensor
) -> torch.Tensor:
    """Rounds `values` (float32 [R, D]) to `dtype` (float16 or bfloat16), each to one of its two neighbours.

    `rows` (int64 [R]) holds the position of each row of `values` in the table. The position, the column and `key` (see
    `rounding_key`; an int or an int64 tensor without dimensions) decide the random bits. Probabilities are exact to
    2^-62 of the smallest gap.
    """
    if dtype not in FORMATS or values.dtype != torch.float32:
        raise DataError(f"cannot round {values.dtype} to {dtype}", allowed="allowed: float32 to float16 or bfloat16")
    if values.dim() != 2 or rows.shape != values.shape[:1]:
        raise DataError(
            f"values have shape {tuple(values.shape)} and rows have shape {tuple(rows.shape)}",
            allowed="allowed: values [R, D] with rows [R]",
        )
    target = FORMATS[dtype]
    pattern_RD = values.contiguous().view(torch.int32).to(torch.int64)
    magnitude_RD = pattern_RD & 0x7FFFFFFF
    field_RD = magnitude_RD >> 23
    # A subnormal has the exponent of the smallest normal number and no hidden bit.
    mantissa_RD = (magnitude_RD & 0x7FFFFF) | ((field_RD > 0).to(torch.int64) << 23)
    exponent_RD = field_RD.clamp_min(1) - target.bias_below
    # Below the target's smallest normal number the gaps stop shrinking, so more mantissa bits fall below one gap.
    too_small_RD = (1 - exponent_RD).clamp_min(0)
    dropped_RD = 23 - target.mantissa_bits + too_small_RD
    excess_RD = (dropped_RD - MOST_DROPPED_BITS).clamp_min(0)
    dropped_RD -= excess_RD
    random_RD = random_bits(key, rows, values.shape[1]) & ((1 << MOST_DROPPED_BITS) - 1)
    # The part of the mantissa that is smaller than one gap has `dropped` bits. Adding a random number of `dropped` bits
    # produces a carry with probability part / gap.
    gaps_RD = ((mantissa_RD >> excess_RD) + (random_RD >> (MOST_DROPPED_BITS - dropped_RD))) >> dropped_RD
    # A carry out of the mantissa raises the exponent by one, which correctly gives the next power of two.
    rounded_RD = gaps_RD + ((exponent_RD.clamp_min(1) - 1) << target.mantissa_bits)
    rounded_RD = rounded_RD.clamp_max(target.largest)
    rounded_RD = torch.where(magnitude_RD == 0x7F800000, target.infinity, rounded_RD)
    rounded_RD = torch.where(magnitude_RD > 0x7F800000, target.nan, rounded_RD)
    rounded_RD = torch.where(pattern_RD < 0, rounded_RD - 0x8000, rounded_RD)
    return rounded_RD.to(torch.int16).view(dtype)
