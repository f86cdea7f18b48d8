"""Layouts of rows: every token has its place, its cell and its block; the groups cost less than one grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.batch.row_layout import BLOCK, CELL_COST, GROUP_COST, INDEX_FIELDS, RowLayout, cuts_of
from tackboard.core.errors import DataError

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 300)), max_size=40)


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_every_token_has_its_place_its_cell_and_its_block(lengths: list[int]) -> None:
    layout = RowLayout.of_lengths(torch.tensor(lengths, dtype=torch.int64))
    assert (layout.num_rows, layout.num_tokens, layout.longest) == (len(lengths), sum(lengths), max(lengths, default=0))
    assert layout.places.tolist() == [place for length in lengths for place in range(length)]
    assert layout.offsets.tolist() == np.append(0, np.cumsum(lengths)).astype(int).tolist()
    assert layout.tokens[layout.cells].tolist() == list(range(sum(lengths)))
    rows_of_tokens = np.repeat(np.arange(len(lengths)), lengths)
    num_cells = 0
    for group in layout.groups:
        assert group.first_cell == num_cells
        tokens = layout.tokens[num_cells:][: group.num_cells].view(group.num_rows, group.length).numpy()
        rows = rows_of_tokens[tokens]
        assert (rows == rows[:, :1]).all(), "a grid's row holds the tokens of one row"
        assert (
            layout.places.numpy()[tokens] == np.minimum(np.arange(group.length), tokens[:, -1:] - tokens[:, :1])
        ).all()
        num_cells += group.num_cells
    assert num_cells == len(layout.tokens)
    covered = [
        (row, place)
        for row, start in zip(layout.block_rows.tolist(), layout.block_starts.tolist(), strict=True)
        for place in range(start, min(start + BLOCK, lengths[row]))
    ]
    assert sorted(covered) == [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    assert len(layout.block_rows) == sum(lengths) // BLOCK + len(lengths)
    blocks = [-(-length // BLOCK) for length in lengths]
    tiles = [
        first + tile
        for first, n in zip(layout.row_tiles.tolist()[:-1], blocks, strict=True)
        for tile in range(n * (n + 1) // 2)
    ]
    assert tiles == list(range(layout.num_tiles)) == list(range(int(layout.row_tiles[-1])))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_cuts_cost_least(lengths: list[int]) -> None:
    """Among all ways to cut rows of few lengths, at which cuts may lie anywhere."""
    rows = np.sort(np.array(lengths) * 16)
    cost = lambda cuts: sum(  # noqa: E731
        (end - begin) * rows[end - 1] * (rows[end - 1] + CELL_COST) + GROUP_COST
        for begin, end in zip([0, *cuts], cuts, strict=False)
    )
    ways = [
        [*(place for place in range(1, len(rows)) if chosen >> place & 1), len(rows)]
        for chosen in range(0, 1 << len(rows), 2)
    ]
    assert cost(cuts_of(rows)) == min(cost(way) for way in ways)


def test_groups_leave_little_padding() -> None:
    lengths = np.minimum(256, np.random.default_rng(0).geometric(1 / 48, 1400))
    layout = RowLayout.of_lengths(torch.from_numpy(lengths))
    assert len(layout.tokens) < 1.1 * layout.num_tokens
    assert len(layout.groups) <= 40
    assert len(lengths) * layout.longest > 5 * layout.num_tokens


def test_one_copy_moves_all_tensors() -> None:
    layout = RowLayout.of(torch.tensor([0, 3, 3, 5]))
    moved = layout.to("meta")
    for name in ("offsets", "places", "cells", "tokens", "block_rows", "block_starts", "row_tiles"):
        part = getattr(moved, name)
        assert part.is_meta and part.shape == getattr(layout, name).shape
        assert getattr(layout, name).data_ptr() % 16 == layout.packed.data_ptr() % 16
    assert layout.to("cpu") is layout
    assert [RowLayout.of(torch.tensor([0, longest])).bound for longest in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_wrong_offsets_and_rows_that_are_too_long() -> None:
    for wrong in ([1, 2], [0, 3, 2], [0, 1 << 31]):
        with pytest.raises(DataError, match="offsets run from"):
            RowLayout.of(torch.tensor(wrong))
    with pytest.raises(DataError, match=r"a row has 9 tokens\nallowed: at most 8"):
        RowLayout.of(torch.tensor([0, 9])).check_fits(8)


@pytest.mark.filterwarnings("ignore")  # torch warns itself of what it does to compile
def test_compiled_code_reads_the_bound_without_being_compiled_again() -> None:
    num_compiled = 0

    def count(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        nonlocal num_compiled
        num_compiled += 1
        return graph

    scaled = torch.compile(lambda x, layout: x[: layout.num_tokens] * layout.bound, dynamic=True, backend=count)
    for lengths, bound in (([3, 5], 8), ([9, 4], 16), ([17, 2], 32), ([70, 80], 128), ([200, 4, 5], 256)):
        layout = RowLayout.of_lengths(torch.tensor(lengths))
        assert torch.equal(scaled(torch.ones(300), layout), torch.full((sum(lengths),), float(bound)))
    assert num_compiled == 1


def test_positions_in_the_packed_tensor_depend_on_rows_and_tokens_alone() -> None:
    """Cells depend on the mix of lengths, so they come last, and `size_of` pads what is left."""
    rows = [torch.tensor(lengths) for lengths in ([9, 1], [5, 5])]
    layouts = [RowLayout.of_lengths(lengths, lambda size: -(-size // 128) * 128) for lengths in rows]
    assert len(layouts[0].tokens) > len(layouts[1].tokens)
    for name in INDEX_FIELDS:
        assert len({getattr(layout, name).storage_offset() for layout in layouts}) == 1, name
    assert {len(layout.packed) for layout in layouts} == {layout.num_tiles for layout in layouts} == {128}
