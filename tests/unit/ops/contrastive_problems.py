"""Problems on which the implementations of the contrastive loss are compared."""

from __future__ import annotations

import torch
from torch.nn import functional

from tackboard.ops.contrastive import ContrastivePairs, Implementation, OwnItems, contrastive_loss

MODES = ["no own items", "own items", "own items before", "listed", "own items, listed", "own items before, listed"]
SIZES = [(133, 77, 24), (1, 1, 16), (65, 130, 64), (17, 40, 3)]
"""Numbers of sums and items, and the width."""


def make_problem(
    sizes: tuple[int, int, int],
    mode: str,
    *,
    is_left_out: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ContrastivePairs, OwnItems | None, torch.Tensor | None]:
    """Makes vectors, weights, pairs, own items and negatives. Some items are no negatives; some groups own nothing.

    If `mode` says "listed", the negatives are a list of items; some items are listed twice.
    """
    num_sums, num_items, width = sizes
    generator = torch.Generator().manual_seed(num_sums)

    def whole(high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=generator).to(device)

    def unit(count: int) -> torch.Tensor:
        return functional.normalize(torch.randn(count, width, generator=generator), dim=-1)

    hidden = (8.0 * unit(num_sums)).to(device, dtype).requires_grad_()
    items = unit(num_items).to(device, dtype).requires_grad_()
    log_weights = torch.randn(num_items, generator=generator).to(device)
    log_weights[3::7] = -torch.inf
    num_pairs = num_sums if is_left_out else num_sums + num_sums // 2
    sums = torch.arange(num_sums, device=device) if is_left_out else whole(num_sums, num_pairs)
    weights = torch.rand(num_pairs, generator=generator).to(device) / num_pairs
    pairs = ContrastivePairs(sums, whole(num_items, num_pairs), weights, is_left_out)
    own = None
    if mode.startswith("own items"):
        num_groups = num_sums // 9 + 1
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), whole(6, num_groups).cumsum(0)])
        own_items, of_sum = whole(num_items, int(offsets[-1])), whole(num_groups, num_sums)
        places, seen = whole(9, len(own_items)).int(), whole(9, num_sums)
        own = OwnItems(offsets, own_items, of_sum, *((places, seen) if "before" in mode else ()))
    negatives = None
    if mode.endswith("listed"):
        order = torch.randperm(num_items, generator=generator)[: num_items // 2 + 1]
        negatives = torch.cat([order, order[:2]]).to(device)
    return hidden, items, log_weights.clamp_min(-1e4), pairs, own, negatives


def outcome(implementation: Implementation | None, problem: tuple) -> list[torch.Tensor]:
    """Returns the total, the losses and the gradients of hidden vectors and items, in fp64."""
    hidden, items = problem[:2]
    total, losses = contrastive_loss(*problem, implementation=implementation)
    assert not losses.requires_grad
    gradients = torch.autograd.grad(3.0 * total, [hidden, items])
    return [tensor.detach().double() for tensor in (total, losses, *gradients)]


def require_equal(fast: Implementation, slow: Implementation, problem: tuple, tolerance: float) -> None:
    """Raises AssertionError unless all outcomes agree within `tolerance` of the largest element of each outcome."""
    names = ("total", "losses", "gradient of hidden", "gradient of items")
    hidden, items, _, pairs = problem[:4]
    # A gradient is a sum of such terms. If the terms cancel, the sum is 0, but it is still rounded as its terms are.
    term = (
        float(3.0 * pairs.weights.max() * torch.cat([hidden, items]).detach().abs().max())
        if len(pairs.weights)
        else 0.0
    )
    for name, found, expected in zip(names, outcome(fast, problem), outcome(slow, problem), strict=True):
        difference = (found - expected).abs().max() / expected.abs().max().clamp_min(max(1e-2, term))
        assert difference < tolerance, f"{name} differs by {difference:.2g}"
