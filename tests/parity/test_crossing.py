"""Candidates that cross to the kept context get what they would get if each were appended to its context row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tackboard.batch import cross_layout
from tackboard.batch.cross_layout import CrossLayout
from tackboard.batch.row_layout import RowLayout
from tackboard.models.backbone import BackboneConfig
from tackboard.models.decoder import LayerStack
from tackboard.ops import crossed_attention
from tackboard.ops.packed_attention import Elapsed, packed_attention

WIDTH, NUM_POSITIONS = 16, 40
BACKBONES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt rotary": {"positions": "rotary"},
    "gpt none": {"positions": "none"},
    "gpt time": {"time_bias": 12},
    "hstu": {"kind": "hstu", "head_width": 8},
    "hstu rotary": {"kind": "hstu", "head_width": 8, "positions": "rotary"},
    "sasrec": {"kind": "sasrec", "ffn_width": 20},
}
RAGGED = ([7, 1, 3, 12, 3], [3, 0, 5, 1, 9])
"""Context tokens and candidates of each row."""


def backbone(name: str) -> LayerStack:
    torch.manual_seed(3)
    stack: Any = BackboneConfig(num_layers=2, **BACKBONES[name]).build(
        width=WIDTH, max_positions=NUM_POSITIONS, dropout=0.0
    )
    for parameter in stack.parameters():  # Biases of time begin as zeros, which would hide a wrong bucket.
        torch.nn.init.normal_(parameter, std=0.3)
    return stack.double()


class Problem:
    """Context tokens and candidates with their times, and both ways to compute the candidates' hidden vectors."""

    def __init__(self, name: str, lengths: list[int], counts: list[int]) -> None:
        self.stack = backbone(name)
        self.lengths, self.counts = (torch.tensor(numbers, dtype=torch.int64) for numbers in (lengths, counts))
        self.x = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, requires_grad=True)
        self.candidates = torch.randn(sum(counts), WIDTH, dtype=torch.float64, requires_grad=True)
        self.times = torch.cat([torch.randint(0, 10**8, (n,)).sort().values for n in [*lengths, 0]])
        self.row_of = torch.repeat_interleave(torch.arange(len(counts)), self.counts)
        self.asked = torch.randint(10**8, 2 * 10**8, (len(counts),))[self.row_of]

    @property
    def offsets(self) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def crossed(self, fixed_length: int = 0, *, needs_hidden: bool = True) -> torch.Tensor:
        context = self.stack.read_context(
            self.x, RowLayout.of_lengths(self.lengths), self.times, needs_hidden=needs_hidden
        )
        crossing = CrossLayout.of(self.offsets, self.row_of, fixed_length)
        return self.stack.cross(self.candidates, context, crossing, self.asked)

    def appended(self) -> torch.Tensor:
        """Runs every candidate through its whole row, one at a time."""
        found = []
        for number, row in enumerate(self.row_of.tolist()):
            tokens = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
            x = torch.cat([self.x[tokens], self.candidates[number : number + 1]])
            times = torch.cat([self.times[tokens], self.asked[number : number + 1]])
            found.append(self.stack(x, torch.tensor([len(x)]), times)[-1])
        return torch.stack(found)

    def appended_in_slots(self, slots: int) -> torch.Tensor:
        """As `appended`, but in every layer a candidate sees only the newest `slots` tokens, itself included."""
        found = []
        for number, row in enumerate(self.row_of.tolist()):
            tokens = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
            x = torch.cat([self.x[tokens], self.candidates[number : number + 1]])
            times = torch.cat([self.times[tokens], self.asked[number : number + 1]])
            whole = RowLayout.of_lengths(torch.tensor([len(x)]))
            newest = slice(max(0, len(x) - slots), len(x))
            seen = RowLayout.of_lengths(torch.tensor([min(slots, len(x))]))
            x, rotation, elapsed = self.stack._entered(x, whole, times, None)
            part = None if elapsed is None else Elapsed(times[newest], times[newest], elapsed.boundaries)
            for layer in self.stack.layers_in_order():
                q, k, v, rest = layer.project(x, rotation)
                read = packed_attention(q, k, v, whole, layer.weighing(elapsed))
                last = packed_attention(q[newest], k[newest], v[newest], seen, layer.weighing(part))[-1:]
                x = layer.finish(x, torch.cat([read[:-1], last]), rest)
            found.append((x if self.stack.final_norm is None else self.stack.final_norm(x))[-1])
        return torch.stack(found)

    def gradients(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        weights = torch.sin(torch.arange(hidden.numel(), dtype=torch.float64)).view_as(hidden)
        wanted = [self.x, self.candidates, *self.stack.parameters()]
        return list(torch.autograd.grad((hidden * weights).sum(), wanted, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("limits", ["one grid", "pieces of 2", "tiles of 1"])
def test_values_and_gradients_equal_appended_candidates(
    name: str, limits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limits == "pieces of 2":
        monkeypatch.setattr(cross_layout, "PIECE", 2)
    if limits == "tiles of 1":
        monkeypatch.setattr(crossed_attention, "TILE_CELLS", {"cpu": 1})
    problem = Problem(name, *RAGGED)
    crossed, appended = problem.crossed(), problem.appended()
    torch.testing.assert_close(crossed, appended, rtol=1e-9, atol=1e-9)
    for found, expected in zip(problem.gradients(crossed), problem.gradients(appended), strict=True):
        tolerance = 1e-5 if "rotary" in name else 1e-8  # Rotations are computed in fp32.
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("lengths", "counts"), [([1], [1]), ([5, 2], [4, 0]), ([3], [270]), ([2] * 7, [1] * 7)])
def test_any_mix_of_rows_and_candidates(name: str, lengths: list[int], counts: list[int]) -> None:
    problem = Problem(name, lengths, counts)
    torch.testing.assert_close(problem.crossed(), problem.appended(), rtol=1e-9, atol=1e-9)


def test_without_candidates_there_is_nothing_to_compute() -> None:
    assert Problem("gpt", [3, 2], [0, 0]).crossed().shape == (0, WIDTH)
    assert Problem("hstu", [], []).crossed().shape == (0, WIDTH)


@pytest.mark.parametrize("name", BACKBONES)
def test_candidates_need_no_hidden_vectors_of_the_last_layer(name: str) -> None:
    problem = Problem(name, *RAGGED)
    assert torch.equal(problem.crossed(needs_hidden=False), problem.crossed())
    context = problem.stack.read_context(
        problem.x, RowLayout.of_lengths(problem.lengths), problem.times, needs_hidden=False
    )
    assert context.hidden_TD is None


@pytest.mark.parametrize("name", BACKBONES)
def test_the_context_is_what_the_backbone_computes(name: str) -> None:
    problem = Problem(name, *RAGGED)
    context = problem.stack.read_context(problem.x, RowLayout.of_lengths(problem.lengths), problem.times)
    torch.testing.assert_close(context.hidden_TD, problem.stack(problem.x, problem.lengths, problem.times))


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("slots", [1, 4, 8, 13])
def test_a_fixed_length_equals_appended_candidates_that_do_not_see_the_overwritten_slots(name: str, slots: int) -> None:
    problem = Problem(name, *RAGGED)
    fixed, appended = problem.crossed(fixed_length=slots), problem.appended_in_slots(slots)
    torch.testing.assert_close(fixed, appended, rtol=1e-9, atol=1e-9)
    for found, expected in zip(problem.gradients(fixed), problem.gradients(appended), strict=True):
        tolerance = 1e-5 if "rotary" in name else 1e-8
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(fixed, problem.crossed()) == (slots == 13), "the longest row needs 13 slots"


@pytest.mark.parametrize("name", ["gpt", "gpt time", "hstu"])
def test_a_fixed_length_hides_the_oldest_tokens(name: str) -> None:
    """With 6 slots, a candidate after 7 tokens does not see tokens 0 and 1, and one after 5 tokens sees all."""
    problem = Problem(name, [7, 5], [2, 2])
    full, fixed = problem.crossed(), problem.crossed(fixed_length=6)
    torch.testing.assert_close(fixed[2:], full[2:])
    assert not torch.allclose(fixed[:2], full[:2])
    # The appended candidate whose attention leaves out the overwritten slots: keys of both layers as in the context.
    context = problem.stack.read_context(problem.x, RowLayout.of_lengths(problem.lengths), problem.times)
    layers = [(k.clone(), v.clone()) for k, v in context.layers]
    changed = [(torch.where(torch.arange(12)[:, None, None] < 2, 9.0, k), v) for k, v in layers]
    other = crossed_attention_of(problem, changed)
    torch.testing.assert_close(other[:2], fixed[:2])


def crossed_attention_of(problem: Problem, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    import dataclasses

    context = problem.stack.read_context(problem.x, RowLayout.of_lengths(problem.lengths), problem.times)
    crossing = CrossLayout.of(problem.offsets, problem.row_of, 6)
    return problem.stack.cross(problem.candidates, dataclasses.replace(context, layers=layers), crossing, problem.asked)
