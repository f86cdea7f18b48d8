"""Crossed attention against its definition, candidate by candidate."""

from __future__ import annotations

import pytest
import torch

from tackboard.batch.cross_layout import CrossLayout
from tackboard.ops import crossed_attention as module
from tackboard.ops.crossed_attention import crossed_attention
from tackboard.ops.packed_attention import Elapsed, Weighing

LENGTHS, COUNTS, H, D = [4, 1, 6], [2, 3, 1], 2, 3
OFFSETS = torch.tensor([0, 4, 5, 11])
BOUNDARIES = torch.tensor([10, 100, 1000])
WEIGHINGS = {
    "softmax": Weighing(),
    "pointwise": Weighing(pointwise_over=8),
    "position": Weighing(pointwise_over=8, position_bias_P=torch.randn(4).double()),
    "time of each head": Weighing(time_bias_VH=torch.randn(4, H).double()),
    "time of all heads": Weighing(pointwise_over=8, time_bias_VH=torch.randn(4, 1).double()),
}


def read_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, waited: torch.Tensor, weighing: Weighing
) -> torch.Tensor:
    """What one query [H, d] reads from keys and values [S, H, d] that end with its own."""
    scores = torch.einsum("hd,shd->hs", q, k)
    if not weighing.pointwise_over:
        scores = scores / D**0.5
    if weighing.position_bias_P is not None:
        distances = torch.arange(len(k) - 1, -1, -1).clamp_max(len(weighing.position_bias_P) - 1)
        scores = scores + weighing.position_bias_P[distances]
    if weighing.time_bias_VH is not None:
        scores = scores + weighing.time_bias_VH[torch.bucketize(waited, BOUNDARIES, right=True)].T
    if weighing.pointwise_over:
        weights = torch.nn.functional.silu(scores) / weighing.pointwise_over
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hs,shd->hd", weights, v)


@pytest.mark.parametrize("name", WEIGHINGS)
@pytest.mark.parametrize("cells", [1, 1 << 24])
def test_a_candidate_reads_its_row_and_itself(monkeypatch: pytest.MonkeyPatch, name: str, cells: int) -> None:
    monkeypatch.setattr(module, "TILE_CELLS", {"cpu": cells})
    torch.manual_seed(0)
    row_of = torch.repeat_interleave(torch.tensor(COUNTS))
    q, k_own, v_own = (torch.randn(6, H, D).double() for _ in range(3))
    k, v = (torch.randn(11, H, D).double() for _ in range(2))
    times, asked = torch.randint(0, 1000, (11,)), torch.randint(1000, 3000, (3,))[row_of]
    weighing = WEIGHINGS[name]
    if weighing.time_bias_VH is not None:
        weighing = Weighing(
            weighing.pointwise_over, time_bias_VH=weighing.time_bias_VH, elapsed=Elapsed(times, asked, BOUNDARIES)
        )
    found = crossed_attention(q, k_own, v_own, k, v, CrossLayout.of(OFFSETS, row_of), weighing)
    for candidate, row in enumerate(row_of.tolist()):
        tokens = slice(int(OFFSETS[row]), int(OFFSETS[row + 1]))
        own = slice(candidate, candidate + 1)
        waited = torch.cat([asked[own] - times[tokens], torch.zeros(1, dtype=torch.int64)])
        keys, values = torch.cat([k[tokens], k_own[own]]), torch.cat([v[tokens], v_own[own]])
        torch.testing.assert_close(found[candidate], read_one(q[candidate], keys, values, waited, weighing))


def test_weights_are_dropped_if_asked() -> None:
    row_of = torch.repeat_interleave(torch.tensor(COUNTS))
    parts = [torch.ones(6, H, D), torch.ones(6, H, D), torch.ones(6, H, D), torch.ones(11, H, D), torch.ones(11, H, D)]
    layout = CrossLayout.of(OFFSETS, row_of)
    assert torch.allclose(crossed_attention(*parts, layout), torch.ones(6, H, D))  # type: ignore[misc]
    dropped = crossed_attention(*parts, layout, Weighing(dropout=0.5))  # type: ignore[misc]
    assert not torch.allclose(dropped, torch.ones(6, H, D))
