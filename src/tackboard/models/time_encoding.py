"""Sorts elapsed times into buckets.

The module takes elapsed times and returns a bucket number for each. A minute and a year differ a lot, but two and three
years hardly differ. So buckets of longer times are wider. From one bucket to the next, times grow by a factor of 2 in
our buckets, and by a factor of e^0.301 in HSTU's buckets, as in its public code.

Decided: buckets are found by comparing with boundaries, never by a logarithm, so that a CPU and a GPU agree on every
bucket. Negative times are in bucket 0.
"""

from __future__ import annotations

import functools
import math

import torch

HSTU_LOG_STEP = 0.301
MAX_INT64 = (1 << 63) - 1


def log2_bucket(elapsed: torch.Tensor, num_buckets: int, *, per_second: int = 1) -> torch.Tensor:
    """Returns floor(log2(1 + seconds)) of each element, at most `num_buckets` - 1, as int64; 0 if time is negative.

    `elapsed` is in units of 1 / `per_second` seconds (1: seconds, 1,000: milliseconds), as whole numbers or floats.
    """
    boundaries = log2_boundaries(num_buckets, per_second, elapsed.device)
    return torch.bucketize(elapsed, boundaries.to(elapsed.dtype), right=True)


def log2_boundaries(num_buckets: int, per_second: int, device: torch.device) -> torch.Tensor:
    """Returns the elapsed times at which the buckets of `log2_bucket` begin, except for bucket 0, as int64."""
    last = min(num_buckets, 63 - per_second.bit_length())
    powers = torch.arange(1, last, device=device)
    return ((torch.ones_like(powers) << powers) - 1) * per_second


def hstu_bucket(elapsed_ms: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Returns floor(ln(seconds) / 0.301) of each element, at most `num_buckets` - 1, as int64; 0 below one second."""
    return torch.bucketize(elapsed_ms, hstu_boundaries(num_buckets, elapsed_ms.device), right=True)


@functools.cache
@torch.inference_mode(False)
def hstu_boundaries(num_buckets: int, device: torch.device) -> torch.Tensor:
    """Returns the elapsed times in ms at which the buckets of `hstu_bucket` begin, except for bucket 0, as int64.

    The numbers are kept on the device. Copying them in every step would make the host wait for the device.
    """
    exact = [math.ceil(1000 * math.exp(HSTU_LOG_STEP * number)) for number in range(1, num_buckets)]
    boundaries = [boundary for boundary in exact if boundary <= MAX_INT64]
    return torch.tensor(boundaries, dtype=torch.int64, device=device)
