"""Measures the peaks of a device: the time of a matrix product of a given shape, and the bandwidth of a large copy.

Decided: a peak is the shortest of several measurements, because a floor must not contain the work of other processes.
Every shape is measured once per run. If the matrices of a product are too large, the longest side of the product is
halved until the matrices fit, and the measured time is scaled up.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

SQUARE = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices whose product gives the peak speed of a device."""
COPIED_NUMBERS = {"cpu": 1 << 25, "cuda": 1 << 30}
"""Number of fp32 numbers in the copy that gives the bandwidth of a device. These numbers do not fit into any cache."""
MOST_CELLS = {"cpu": 1 << 25, "cuda": 1 << 31}
"""Largest number of cells of a measured matrix."""


class Peaks:
    """The peaks of one device in one precision of matrix products."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, repeats: int = 5) -> None:
        self.device, self.dtype, self.repeats = device, dtype, repeats
        self._seconds: dict[tuple[int, int, int], float] = {}

    @functools.cached_property
    def flops_per_s(self) -> float:
        """FLOP per second of a large square product."""
        side = SQUARE[self.device.type]
        return 2.0 * side**3 / self.product_seconds(side, side, side)

    @functools.cached_property
    def bytes_per_s(self) -> float:
        """Bytes per second that a large copy reads and writes."""
        source = torch.zeros(COPIED_NUMBERS[self.device.type], device=self.device)
        target = torch.empty_like(source)
        return 2.0 * source.nbytes / self._best(lambda: target.copy_(source))

    def product_seconds(self, rows: int, inner: int, columns: int) -> float:
        """Returns the seconds of a product [rows, inner] × [inner, columns]; 0 if the product is empty."""
        shape = (rows, inner, columns)
        if min(shape) == 0:
            return 0.0
        if shape not in self._seconds:
            self._seconds[shape] = self._measure(*shape)
        return self._seconds[shape]

    def _measure(self, rows: int, inner: int, columns: int) -> float:
        sides, scale = [rows, inner, columns], 1.0
        while max(sides[0] * sides[1], sides[1] * sides[2], sides[0] * sides[2]) > MOST_CELLS[self.device.type]:
            longest = sides.index(max(sides))
            half = sides[longest] // 2
            scale *= sides[longest] / half
            sides[longest] = half
        left = torch.randn(sides[0], sides[1], device=self.device, dtype=self.dtype)
        right = torch.randn(sides[1], sides[2], device=self.device, dtype=self.dtype)
        out = torch.empty(sides[0], sides[2], device=self.device, dtype=self.dtype)
        return scale * self._best(lambda: torch.mm(left, right, out=out))

    def _best(self, work: Callable[[], object]) -> float:
        """Returns the seconds of one call of `work`: the shortest of several measurements, of about 5 ms each."""
        work()
        calls = max(1, min(1000, int(0.005 / max(self._once(work, 1), 1e-6))))
        return min(self._once(work, calls) for _ in range(self.repeats))

    def _once(self, work: Callable[[], object], calls: int) -> float:
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if is_gpu:
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) / calls
