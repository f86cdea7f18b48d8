"""Attention in groups of rows equals attention on one padded grid, gradients too, and every run gives the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tackboard.batch.row_layout import RowLayout
from tackboard.ops import packed_attention_reference as module
from tackboard.ops.packed_attention_reference import Elapsed, Weighing, distances_of, grouped_attention, tiles_of

BOUNDARIES = torch.tensor([1_000, 3_000, 60_000, 3_600_000])
KINDS = ("softmax", "softmax, time", "pointwise, position", "pointwise, time, position")
LENGTHS = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.tuples(st.integers(60, 150), st.lists(st.integers(0, 5), max_size=8)).map(lambda rows: [rows[0], *rows[1]]),
)


def weighing_of(kind: str, num_tokens: int) -> Weighing:
    pointwise = 10 if "pointwise" in kind else 0
    position = torch.randn(6, dtype=torch.float64, requires_grad=True) if "position" in kind else None
    if "time" not in kind:
        return Weighing(pointwise, position)
    times = torch.randint(-500, 9_000, (num_tokens,)).cumsum(0)
    bias = torch.randn(5, 1 if pointwise else 2, dtype=torch.float64, requires_grad=True)
    return Weighing(pointwise, position, bias, Elapsed(times, times + 700, BOUNDARIES))


def on_one_grid(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], weighing: Weighing
) -> torch.Tensor:
    """The definition: all rows padded on the right to the longest, with a mask; the padding is cut off at the end."""
    size = max(lengths)
    is_token = torch.arange(size) < torch.tensor(lengths)[:, None]
    grids = []
    for part in (q, k, v):
        grid = part.new_zeros(len(lengths), size, *part.shape[1:])
        grids.append(grid.masked_scatter(is_token[:, :, None, None], part).transpose(1, 2))
    qs, ks, vs = grids
    distance = torch.arange(size)[:, None] - torch.arange(size)
    scores = qs @ ks.transpose(2, 3) * (1 if weighing.pointwise_over else q.shape[2] ** -0.5)
    if weighing.position_bias_P is not None:
        scores = scores + weighing.position_bias_P[distance.clamp(0, 5)]
    if weighing.time_bias_VH is not None and weighing.elapsed is not None:
        known, asked = (
            torch.zeros(len(lengths), size, dtype=torch.int64).masked_scatter(is_token, times)
            for times in (weighing.elapsed.keys_T, weighing.elapsed.queries_T)
        )
        bucket = ((asked[:, :, None] - known[:, None, :])[..., None] >= BOUNDARIES).sum(-1)
        scores = scores + weighing.time_bias_VH[bucket].permute(0, 3, 1, 2)
    if weighing.pointwise_over:
        weights = (functional.silu(scores) / weighing.pointwise_over).masked_fill(distance < 0, 0.0)
    else:
        weights = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
    return (weights @ vs).transpose(1, 2)[is_token]


def results(attend: object, packed: torch.Tensor, rows: object, weighing: Weighing) -> list[torch.Tensor]:
    leaf = packed.clone().requires_grad_()
    read = attend(*leaf.chunk(3, dim=1), rows, weighing)  # type: ignore[operator]
    leaves = [leaf, *(bias for bias in (weighing.position_bias_P, weighing.time_bias_VH) if bias is not None)]
    return [read.detach(), *torch.autograd.grad(read.pow(3).sum(), leaves)]


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from(KINDS), st.sampled_from([1 << 24, 200]))
def test_groups_equal_one_grid(lengths: list[int], kind: str, tile_cells: int) -> None:
    torch.manual_seed(sum(lengths))
    packed = torch.randn(sum(lengths), 6, 4, dtype=torch.float64)
    weighing, layout = weighing_of(kind, len(packed)), RowLayout.of_lengths(torch.tensor(lengths))
    if not len(packed):
        assert grouped_attention(*packed.chunk(3, dim=1), layout, weighing).shape == (0, 2, 4)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_CELLS", {"cpu": tile_cells})
        found = results(grouped_attention, packed, layout, weighing)
    for one, other in zip(found, results(on_one_grid, packed, lengths, weighing), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_gives_the_same_under_deterministic_algorithms(kind: str) -> None:
    lengths = [40, 0, 3, 3, 17, 90, 1]
    packed, layout = torch.randn(sum(lengths), 6, 8, dtype=torch.float64), RowLayout.of_lengths(torch.tensor(lengths))
    weighing = weighing_of(kind, len(packed))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results(grouped_attention, packed, layout, weighing) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_buckets_are_computed_once_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [100, 5, 5, 40]
    layout, weighing = RowLayout.of_lengths(torch.tensor(lengths)), weighing_of("softmax, time", 150)
    q = torch.randn(150, 2, 4)
    assert weighing.elapsed is not None and len(layout.groups) > 1
    grouped_attention(q, q, q, layout, weighing)
    assert set(weighing.elapsed.grids) == {group.first_cell for group in layout.groups}
    weighing.elapsed.grids.clear()
    monkeypatch.setattr(module, "TILE_CELLS", {"cpu": 5_000})
    grouped_attention(q, q, q, layout, weighing)
    assert 0 < sum(grid.numel() for grid in weighing.elapsed.grids.values()) <= 5_000


def test_weights_with_a_bias_are_never_dropped() -> None:
    with pytest.raises(AssertionError, match="never dropped"):
        Weighing(position_bias_P=torch.zeros(2), dropout=0.1)


def test_tiles_cover_the_grid_once() -> None:
    for cells, num_rows, length in ((1, 3, 4), (40, 5, 3), (25, 2, 7), (1 << 24, 4, 9), (100, 0, 5)):
        covered = torch.zeros(num_rows, length)
        for tile in tiles_of(num_rows, 2, length, cells):
            covered[tile.rows, tile.queries] += 1
            num_cells = len(range(*tile.rows.indices(num_rows))) * 2 * length * (tile.queries.stop - tile.queries.start)
            assert num_cells <= max(cells, 2 * length)
        assert bool((covered == 1).all())
    queries, keys = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 4, 3)
    assert distances_of(queries, keys).tolist() == [[2, 1, 0, -1], [3, 2, 1, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1::2])
def test_the_memory_of_a_long_row_with_a_bias_is_bounded(kind: str) -> None:
    """One row of 16,000 tokens and 2 heads has 2 GB of scores in fp32; a step holds about twenty tiles of 64 MiB."""
    program = (
        "import resource, sys, torch; torch.set_num_threads(1); import test_packed_attention_reference as t;"
        "from tackboard.batch.row_layout import RowLayout;"
        "import dataclasses; w = t.weighing_of(sys.argv[1], 16_000);"
        "given = {n: getattr(w, n) for n in ('position_bias_P', 'time_bias_VH') if getattr(w, n) is not None};"
        "w = dataclasses.replace(w, **{n: b.detach().float().requires_grad_() for n, b in given.items()});"
        "t.results(t.grouped_attention, torch.randn(16_000, 6, 4), RowLayout.of(torch.tensor([0, 16_000])), w);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(module.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", program, kind],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) * 1024 < 2.5e9
