"""Looks up rows and updates them with Triton kernels; `table_rows` states the contract.

A lookup is one kernel: it adds the number of the sub-table's first row, gathers the rows, converts them and writes the
concatenation. An update sorts the looked-up rows, called entries, and starts two kernels. Each program of the first
kernel owns a tile of TILE_ENTRIES entries. It adds the gradients of each row in the tile. A row that lies within the
tile is updated at once; the partial sum of a row that crosses an edge of the tile goes to scratch memory. The second
kernel has one program per tile. If a row begins in the tile and ends in a later one, the program adds up the partial
sums of the row and updates it. So a row that is repeated 10,000 times is added up by 313 programs, and every order of
additions is fixed.

Decided: division and square root are rounded as on the CPU (`div_rn`, `sqrt_rn`), and rounding to half precision is
`ops.stochastic_rounding` in integers. So a row that is looked up once gets the same bits on both devices, except for
the order in which the squares of its elements are added.

Shapes: M items, k sub-tables, D = k × d, R rows of the weight, d width of a row, L entries (looked-up rows), E entries
of a program, C columns of a program (d, rounded up to a power of two), T tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tackboard.core.hashing import MULTIPLIER_1, MULTIPLIER_2, seed_offset
from tackboard.ops.stochastic_rounding import FORMATS, KEY_DEPTH, MOST_DROPPED_BITS
from tackboard.ops.table_rows_reference import row_dtype

LOOKUP_ELEMENTS = 4096
"""Number of elements that one program of a lookup gathers: with 128 threads, each reads 16 bytes eight times (fp32)."""
TILE_ENTRIES = 32
"""Number of sorted entries that one program adds up."""
NO_ROUNDING = {"MANTISSA_BITS": 23, "BIAS_BELOW": 0, "LARGEST": 0, "INFINITY": 0, "NAN": 0}
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
_ROW_OFFSET = tl.constexpr(seed_offset(KEY_DEPTH))
_COLUMN_OFFSET = tl.constexpr(seed_offset(KEY_DEPTH + 1))
_MOST_DROPPED_BITS = tl.constexpr(MOST_DROPPED_BITS)
_RANDOM_MASK = tl.constexpr((1 << MOST_DROPPED_BITS) - 1)


def lookup(
    weight_Rd: torch.Tensor, item_rows_MK: torch.Tensor, first_rows_K: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `table_rows.lookup`."""
    (num_items, num_tables), (num_rows, width) = item_rows_MK.shape, weight_Rd.shape
    vectors_MD = torch.empty(num_items, num_tables * width, dtype=dtype, device=weight_Rd.device)
    rows_L = torch.empty(num_items * num_tables, dtype=row_dtype(num_rows), device=weight_Rd.device)
    num_columns = triton.next_power_of_2(width)
    num_entries = max(1, LOOKUP_ELEMENTS // num_columns)
    if len(rows_L):
        with torch.cuda.device_of(weight_Rd):
            lookup_kernel[(triton.cdiv(len(rows_L), num_entries),)](
                weight_Rd.contiguous(),
                item_rows_MK.contiguous(),
                first_rows_K.contiguous(),
                vectors_MD,
                rows_L,
                len(rows_L),
                num_rows,
                TABLES=num_tables,
                WIDTH=width,
                COLUMNS=num_columns,
                ENTRIES=num_entries,
            )
    return vectors_MD, rows_L


def row_wise_adagrad_(
    weight_Rd: torch.Tensor,
    sums_R: torch.Tensor,
    rows_L: torch.Tensor,
    gradient_Ld: torch.Tensor,
    *,
    learning_rate: torch.Tensor,
    keep: torch.Tensor,
    clip_element: float,
    eps: float,
    rounding_key: torch.Tensor | int,
) -> None:
    """See `table_rows.row_wise_adagrad_`."""
    (num_entries, width), device = gradient_Ld.shape, weight_Rd.device
    if not num_entries:
        return
    rows_L, order_L = torch.sort(rows_L, stable=True)
    num_tiles = triton.cdiv(num_entries, TILE_ENTRIES)
    partial = torch.empty(num_tiles, 2, width, dtype=torch.float32, device=device)
    if isinstance(rounding_key, int):
        rounding_key = torch.full((), rounding_key, dtype=torch.int64, device=device)
    numbers = (learning_rate, keep.view(torch.uint8), rounding_key, num_entries, len(weight_Rd), clip_element, eps)
    constants = {
        "WIDTH": width,
        "COLUMNS": triton.next_power_of_2(width),
        "ENTRIES": TILE_ENTRIES,
        **format_constants(weight_Rd.dtype),
    }
    with torch.cuda.device_of(weight_Rd):
        update_tiles_kernel[(num_tiles,)](
            weight_Rd, sums_R, rows_L, partial, order_L, gradient_Ld.contiguous(), *numbers, **constants
        )
        update_crossing_rows_kernel[(num_tiles,)](weight_Rd, sums_R, rows_L, partial, *numbers, **constants)


def format_constants(dtype: torch.dtype) -> dict[str, int]:
    """Returns the constants of the kernels for rounding to `dtype`; fp32 is not rounded."""
    if dtype not in FORMATS:
        return NO_ROUNDING
    target = FORMATS[dtype]
    return {
        "MANTISSA_BITS": target.mantissa_bits,
        "BIAS_BELOW": target.bias_below,
        "LARGEST": target.largest,
        "INFINITY": target.infinity,
        "NAN": target.nan,
    }


@triton.jit(do_not_specialize=["num_entries"])
def lookup_kernel(
    weight: tl.tensor,
    item_rows: tl.tensor,
    first_rows: tl.tensor,
    vectors: tl.tensor,
    rows: tl.tensor,
    num_entries: tl.tensor,
    num_rows: tl.tensor,
    TABLES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """Gathers ENTRIES rows and writes them one after another."""
    entry_E = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    column_C = tl.arange(0, COLUMNS)
    is_entry_E = entry_E < num_entries
    item_row_E = tl.load(item_rows + entry_E, mask=is_entry_E, other=-1).to(tl.int64)
    row_E = item_row_E + tl.load(first_rows + entry_E % TABLES, mask=is_entry_E, other=0)
    is_read_E = (item_row_E >= 0) & (row_E < num_rows)
    tl.store(rows + entry_E, tl.where(is_read_E, row_E, -1).to(rows.dtype.element_ty), mask=is_entry_E)
    is_column_EC = (column_C < WIDTH)[None, :] & is_entry_E[:, None]
    value_EC = tl.load(
        weight + row_E[:, None] * WIDTH + column_C[None, :], mask=is_column_EC & is_read_E[:, None], other=0.0
    ).to(tl.float32)
    value_EC = tl.where(((item_row_E >= 0) & (row_E >= num_rows))[:, None], float("nan"), value_EC)
    place_EC = entry_E[:, None] * WIDTH + column_C[None, :]
    tl.store(vectors + place_EC, value_EC.to(vectors.dtype.element_ty), mask=is_column_EC)


@triton.jit(do_not_specialize=["num_entries"])
def update_tiles_kernel(
    weight: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    partial: tl.tensor,
    order: tl.tensor,
    gradient: tl.tensor,
    learning_rate: tl.tensor,
    keep: tl.tensor,
    rounding_key: tl.tensor,
    num_entries: tl.tensor,
    num_rows: tl.tensor,
    clip_element: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS_BELOW: tl.constexpr,
    LARGEST: tl.constexpr,
    INFINITY: tl.constexpr,
    NAN: tl.constexpr,
) -> None:
    """Updates the rows that lie within one tile, and writes partial sums of the rows that cross its edges.

    The partial sum at [tile, 0] belongs to the row at the start of the tile, and at [tile, 1] to the row at its end.
    """
    if tl.load(keep) != 0:
        tile = tl.program_id(0).to(tl.int64)
        start, end = tile * ENTRIES, (tile + 1) * ENTRIES
        number_E = tl.arange(0, ENTRIES)
        column_C = tl.arange(0, COLUMNS)
        entry_E = start + number_E
        is_column_C = column_C < WIDTH
        row_E = tl.load(rows + entry_E, mask=entry_E < num_entries, other=-1).to(tl.int64)
        before_E = tl.load(rows + entry_E - 1, mask=(entry_E > 0) & (entry_E <= num_entries), other=-1).to(tl.int64)
        after = tl.load(rows + end, mask=end < num_entries, other=-1).to(tl.int64)
        is_row_E = (row_E >= 0) & (row_E < num_rows)
        begins_E = is_row_E & (row_E != before_E)
        # A row that began in an earlier tile is treated as if it began at the start of this tile.
        is_head_E = is_row_E & (begins_E | (number_E == 0))
        count_E = tl.sum((row_E[:, None] == row_E[None, :]).to(tl.int32), axis=1)
        longest = tl.max(tl.where(is_head_E, count_E, 0), axis=0)
        total_EC = tl.zeros([ENTRIES, COLUMNS], dtype=tl.float32)
        for repeat in range(longest):
            is_added_E = is_head_E & (repeat < count_E)
            # A masked load here does not compile with Triton 3.6. So an entry beyond the end reads the last place, and
            # `is_added_E` leaves it out of the sum.
            place_E = tl.load(order + tl.minimum(entry_E + repeat, num_entries - 1))
            total_EC += tl.load(
                gradient + place_E[:, None] * WIDTH + column_C[None, :],
                mask=is_added_E[:, None] & is_column_C[None, :],
                other=0.0,
            ).to(tl.float32)
        is_whole_E = begins_E & (row_E != after)
        _update_rows(
            weight, sums, row_E, total_EC, is_whole_E, learning_rate, rounding_key, clip_element, eps,
            WIDTH, COLUMNS, MANTISSA_BITS, BIAS_BELOW, LARGEST, INFINITY, NAN,
        )  # fmt: skip
        slot_E = tile * 2 + (number_E > 0).to(tl.int64)
        tl.store(
            partial + slot_E[:, None] * WIDTH + column_C[None, :],
            total_EC,
            mask=(is_head_E & (is_whole_E == 0))[:, None] & is_column_C[None, :],
        )


@triton.jit(do_not_specialize=["num_entries"])
def update_crossing_rows_kernel(
    weight: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    partial: tl.tensor,
    learning_rate: tl.tensor,
    keep: tl.tensor,
    rounding_key: tl.tensor,
    num_entries: tl.tensor,
    num_rows: tl.tensor,
    clip_element: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS_BELOW: tl.constexpr,
    LARGEST: tl.constexpr,
    INFINITY: tl.constexpr,
    NAN: tl.constexpr,
) -> None:
    """Updates the row that begins in this program's tile and ends in a later tile, if there is such a row."""
    tile = tl.program_id(0).to(tl.int64)
    start, end = tile * ENTRIES, (tile + 1) * ENTRIES
    is_kept = tl.load(keep) != 0
    after = tl.load(rows + end, mask=end < num_entries, other=-1).to(tl.int64)
    last = tl.load(rows + end - 1, mask=end < num_entries, other=-2).to(tl.int64)
    before = tl.load(rows + start - 1, mask=start > 0, other=-1).to(tl.int64)
    if is_kept & (last == after) & (last != before) & (last >= 0) & (last < num_rows):
        column_C = tl.arange(0, COLUMNS)
        is_column_C = column_C < WIDTH
        slot = tile * 2 + (tl.load(rows + start).to(tl.int64) != last).to(tl.int64)
        total_C = tl.load(partial + slot * WIDTH + column_C, mask=is_column_C, other=0.0)
        next_tile = tile + 1
        num_found = ENTRIES
        while num_found == ENTRIES:
            tile_T = next_tile + tl.arange(0, ENTRIES)
            first_T = tl.load(rows + tile_T * ENTRIES, mask=tile_T * ENTRIES < num_entries, other=-1).to(tl.int64)
            is_same_T = first_T == last
            part_TC = tl.load(
                partial + (tile_T * 2)[:, None] * WIDTH + column_C[None, :],
                mask=is_same_T[:, None] & is_column_C[None, :],
                other=0.0,
            )
            total_C += tl.sum(part_TC, axis=0)
            num_found = tl.sum(is_same_T.to(tl.int32), axis=0)
            next_tile += ENTRIES
        only_E = tl.arange(0, 1)
        _update_rows(
            weight, sums, last + only_E, total_C[None, :], only_E == 0, learning_rate, rounding_key, clip_element, eps,
            WIDTH, COLUMNS, MANTISSA_BITS, BIAS_BELOW, LARGEST, INFINITY, NAN,
        )  # fmt: skip


@triton.jit
def _update_rows(
    weight: tl.tensor,
    sums: tl.tensor,
    row_E: tl.tensor,
    total_EC: tl.tensor,
    is_updated_E: tl.tensor,
    learning_rate: tl.tensor,
    rounding_key: tl.tensor,
    clip_element: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS_BELOW: tl.constexpr,
    LARGEST: tl.constexpr,
    INFINITY: tl.constexpr,
    NAN: tl.constexpr,
) -> None:
    """Clips the totals, adds their mean square to the running sums and moves the rows."""
    column_C = tl.arange(0, COLUMNS)
    mask_EC = is_updated_E[:, None] & (column_C < WIDTH)[None, :]
    place_EC = row_E[:, None] * WIDTH + column_C[None, :]
    old_EC = tl.load(weight + place_EC, mask=mask_EC, other=0.0).to(tl.float32)
    sum_E = tl.load(sums + row_E, mask=is_updated_E, other=0.0)
    total_EC = tl.minimum(total_EC, clip_element, propagate_nan=tl.PropagateNan.ALL)
    total_EC = tl.maximum(total_EC, -clip_element, propagate_nan=tl.PropagateNan.ALL)
    sum_E += tl.div_rn(tl.sum(total_EC * total_EC, axis=1), WIDTH * 1.0)
    tl.store(sums + row_E, sum_E, mask=is_updated_E)
    change_EC = tl.div_rn(tl.load(learning_rate) * total_EC, (tl.sqrt_rn(sum_E) + eps)[:, None])
    new_EC = old_EC - tl.where(sum_E[:, None] != 0.0, change_EC, 0.0)
    if MANTISSA_BITS < 23:
        pattern_EC = round_stochastically(
            new_EC, row_E, tl.load(rounding_key), COLUMNS, MANTISSA_BITS, BIAS_BELOW, LARGEST, INFINITY, NAN
        )
        tl.store(weight + place_EC, pattern_EC.to(weight.dtype.element_ty, bitcast=True), mask=mask_EC)
    else:
        tl.store(weight + place_EC, new_EC, mask=mask_EC)


@triton.jit
def round_stochastically(
    value_EC: tl.tensor,
    row_E: tl.tensor,
    rounding_key: tl.tensor,
    COLUMNS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS_BELOW: tl.constexpr,
    LARGEST: tl.constexpr,
    INFINITY: tl.constexpr,
    NAN: tl.constexpr,
) -> tl.tensor:
    """Returns the bit patterns (int16) of `ops.stochastic_rounding.stochastic_round`; see there for the reasons."""
    row_state_E = _mix64(_mix64(row_E.to(tl.uint64), _ROW_OFFSET) + rounding_key.to(tl.uint64), _ROW_OFFSET)
    column_C = _mix64(tl.arange(0, COLUMNS).to(tl.uint64), _COLUMN_OFFSET)
    random_EC = _mix64(row_state_E[:, None] + column_C[None, :], _COLUMN_OFFSET).to(tl.int64) & _RANDOM_MASK
    pattern_EC = value_EC.to(tl.int32, bitcast=True).to(tl.int64)
    magnitude_EC = pattern_EC & 0x7FFFFFFF
    field_EC = magnitude_EC >> 23
    mantissa_EC = (magnitude_EC & 0x7FFFFF) | ((field_EC > 0).to(tl.int64) << 23)
    exponent_EC = tl.maximum(field_EC, 1) - BIAS_BELOW
    dropped_EC = 23 - MANTISSA_BITS + tl.maximum(1 - exponent_EC, 0)
    excess_EC = tl.maximum(dropped_EC - _MOST_DROPPED_BITS, 0)
    dropped_EC -= excess_EC
    gaps_EC = ((mantissa_EC >> excess_EC) + (random_EC >> (-dropped_EC + _MOST_DROPPED_BITS))) >> dropped_EC
    rounded_EC = gaps_EC + ((tl.maximum(exponent_EC, 1) - 1) << MANTISSA_BITS)
    rounded_EC = tl.minimum(rounded_EC, LARGEST)
    rounded_EC = tl.where(magnitude_EC == 0x7F800000, INFINITY, rounded_EC)
    rounded_EC = tl.where(magnitude_EC > 0x7F800000, NAN, rounded_EC)
    return tl.where(pattern_EC < 0, rounded_EC - 0x8000, rounded_EC).to(tl.int16)


@triton.jit
def _mix64(x: tl.tensor, offset: tl.constexpr) -> tl.tensor:
    """Computes `core.hashing.mix64` on uint64; `offset` is the `seed_offset` of its seed."""
    x = x + offset
    x = (x ^ (x >> 30)) * _MULTIPLIER_1
    x = (x ^ (x >> 27)) * _MULTIPLIER_2
    return x ^ (x >> 31)
