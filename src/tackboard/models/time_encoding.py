"""Sorts elapsed times into buckets.

The module takes elapsed times and returns a bucket number for each. A minute and a year differ a lot, but two and three
years hardly differ. So buckets of longer times are wider. From one bucket to the next, times grow by a factor of 2 in
our buckets, and by a factor of e^0.301 in HSTU's buckets, as in its public code.

Decided: buckets are found by comparing with boundaries, never by a logarithm, so that a CPU and a GPU agree on every
bucket. Negative times are in bucket 0.
"""

from __future__ import annotations

import math

import torch

HSTU_LOG_STEP = 0.301
MAX_INT64 = (1 << 63) - 1


def log2_bucket(elapsed: torch.Tensor, num_buckets: int, *, per_second: int = 1) -> torch.Tensor:
    """Returns floor(log2(1 + seconds)) of each element, at most `num_buckets` - 1, as int64; 0 if time is negative.

    `elapsed` is in units of 1 / `per_second` seconds (1: seconds, 1,000: milliseconds), as whole numbers or floats.
    """
    last = min(num_buckets, 63 - per_second.bit_length())
    powers = torch.arange(1, last, device=elapsed.device)
    boundaries = ((torch.ones_like(powers) << powers) - 1) * per_second
    return torch.bucketize(elapsed, boundaries.to(elapsed.dtype), right=True)


def hstu_bucket(elapsed_ms: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Returns floor(ln(seconds) / 0.301) of each element, at most `num_buckets` - 1, as int64; 0 below one second."""
    exact = [math.ceil(1000 * math.exp(HSTU_LOG_STEP * number)) for number in range(1, num_buckets)]
    boundaries = [boundary for boundary in exact if boundary <= MAX_INT64]
    return torch.bucketize(
        elapsed_ms, torch.tensor(boundaries, dtype=torch.int64, device=elapsed_ms.device), right=True
    )
