"""The newest tokens of a row read what they read when the whole row is computed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tackboard.batch.row_layout import RowLayout
from tackboard.ops import newest_attention as module
from tackboard.ops.newest_attention import newest_attention
from tackboard.ops.packed_attention import Elapsed, Weighing, packed_attention

T, H, D = 9, 2, 4
BOUNDARIES = torch.tensor([10, 100, 1000])
WEIGHINGS = {
    "softmax": Weighing(),
    "pointwise, position": Weighing(pointwise_over=8, position_bias_P=torch.randn(4).double()),
    "time of each head": Weighing(time_bias_VH=torch.randn(4, H).double()),
    "time of all heads": Weighing(pointwise_over=8, time_bias_VH=torch.randn(4, 1).double()),
}


@pytest.mark.parametrize("name", WEIGHINGS)
@pytest.mark.parametrize("cells", [1, 1 << 24])
def test_the_newest_tokens_read_as_in_the_whole_row(monkeypatch: pytest.MonkeyPatch, name: str, cells: int) -> None:
    monkeypatch.setattr(module, "TILE_CELLS", {"cpu": cells})
    torch.manual_seed(0)
    q, k, v = (torch.randn(T, H, D).double() for _ in range(3))
    times = torch.randint(0, 3000, (T,)).sort().values
    asked = times + torch.randint(0, 500, (T,))
    for num_new in (0, 1, 4, T):
        whole = newest = WEIGHINGS[name]
        if whole.time_bias_VH is not None:
            whole = dataclasses.replace(whole, elapsed=Elapsed(times, asked, BOUNDARIES))
            newest = dataclasses.replace(whole, elapsed=Elapsed(times, asked[T - num_new :], BOUNDARIES))
        expected = packed_attention(q, k, v, RowLayout.of_lengths(torch.tensor([T])), whole)[T - num_new :]
        torch.testing.assert_close(newest_attention(q[T - num_new :], k, v, newest), expected)
