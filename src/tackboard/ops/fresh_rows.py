"""Makes the fresh rows of a table: their values before training, as a pure function of (key, row, column).

The key stands for a seed and a table. A value is made from the 64 bits of `random_bits(key, row, column)` (see
`stochastic_rounding`), read as four fields of 16 bits. The sum of the fields, minus its mean, is a whole number that
fp32 holds exactly. One multiplication by an fp32 constant gives the value. Only integer arithmetic and one exactly
rounded product are used. So the same row has the same bits on any device, in any order and for any subset of the rows.
The arithmetic is 64-bit, so a table may have more than 2^31 elements.

Decided: a sum of four uniform numbers stands for a normal number. Mean and variance are exact. The kurtosis is 2.7
instead of 3, and no value is further than 3.47 standard deviations from 0. This is enough for fresh rows, while a
logarithm or a cosine would differ in its last bits between devices. A half-precision value is the fp32 value rounded to
nearest. Tables are filled and compared block by block, so that no second table is ever in memory.

Shapes: R rows, d width of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch

from tackboard.ops.stochastic_rounding import random_bits

FIELD_BITS = 16
MEAN_OF_SUM = 4 * ((1 << FIELD_BITS) - 1) // 2
STD_OF_SUM = math.sqrt(((1 << 2 * FIELD_BITS) - 1) / 3)
"""A uniform number from 0 to 65,535 has the variance (65,536² - 1) / 12. A sum of four has four times this variance."""
_LOW_FIELDS = 0x0000_FFFF_0000_FFFF
_SUM_MASK = 0x3_FFFF
ELEMENTS_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Number of elements that are made at once (on a CPU: by each thread). A CPU is fastest with blocks that fit into its
cache."""
_BIT_PATTERNS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@dataclasses.dataclass(frozen=True)
class FreshRows:
    """The fresh rows of one table. `key` is a signed 64-bit number; `std` is the standard deviation of the values."""

    key: int
    std: float

    def rows(self, rows_R: torch.Tensor, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the fresh values [R, d] of the rows with these positions in the whole table (int64 [R])."""
        bits_Rd = random_bits(self.key, rows_R, width)
        pairs_Rd = (bits_Rd & _LOW_FIELDS) + ((bits_Rd >> FIELD_BITS) & _LOW_FIELDS)
        sums_Rd = (pairs_Rd & _SUM_MASK) + (pairs_Rd >> 32)
        # The constant is rounded to fp32 here, so that every device multiplies by the same number.
        return (sums_Rd - MEAN_OF_SUM).float().mul_(float(np.float32(self.std / STD_OF_SUM))).to(dtype)

    @torch.no_grad()
    def fill(self, table_Rd: torch.Tensor, first_row: int = 0, dtype: torch.dtype | None = None) -> None:
        """Fills `table_Rd`, which holds the rows of the whole table from `first_row` on, with its fresh values.

        With `dtype`, the values are first rounded to that type.
        """
        for block in _blocks(table_Rd):
            rows_B = torch.arange(first_row + block.start, first_row + block.stop, device=table_Rd.device)
            table_Rd[block] = self.rows(rows_B, table_Rd.shape[1], dtype or table_Rd.dtype)

    @torch.no_grad()
    def differing(self, table_Rd: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Returns the sorted positions in `table_Rd` of all rows that differ from the fresh rows in any bit (int64).

        `table_Rd` holds the rows of the whole table from `first_row` on.
        """
        pattern = _BIT_PATTERNS[table_Rd.dtype]
        is_other_R = torch.empty(table_Rd.shape[0], dtype=torch.bool, device=table_Rd.device)
        for block in _blocks(table_Rd):
            rows_B = torch.arange(first_row + block.start, first_row + block.stop, device=table_Rd.device)
            fresh_Bd = self.rows(rows_B, table_Rd.shape[1], table_Rd.dtype)
            is_other_R[block] = (table_Rd[block].view(pattern) != fresh_Bd.view(pattern)).any(dim=1)
        return is_other_R.nonzero().view(-1)


def draw_key() -> int:
    """Draws the key of a new table from torch's random stream: `torch.manual_seed` and the order of tables decide it.

    The key is drawn on the CPU, so that it is the same for every device, and for a table without memory (meta).
    """
    return int(torch.randint((1 << 63) - 1, (), device="cpu"))


def _blocks(table_Rd: torch.Tensor) -> Iterator[slice]:
    threads = torch.get_num_threads() if table_Rd.device.type == "cpu" else 1
    elements = ELEMENTS_AT_ONCE.get(table_Rd.device.type, ELEMENTS_AT_ONCE["cuda"]) * threads
    step = max(1, elements // max(1, table_Rd.shape[1]))
    for start in range(0, table_Rd.shape[0], step):
        yield slice(start, min(start + step, table_Rd.shape[0]))
