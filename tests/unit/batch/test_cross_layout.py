"""The layout of candidates: every candidate has a cell, and a cell's piece belongs to the candidate's row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tackboard.batch import cross_layout
from tackboard.batch.cross_layout import CrossLayout
from tackboard.core.errors import DataError


def layout_of(lengths: list[int], counts: list[int], fixed_length: int = 0) -> CrossLayout:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
    return CrossLayout.of(offsets, torch.repeat_interleave(torch.tensor(counts)), fixed_length)


@pytest.mark.parametrize("piece", [2, 256])
def test_every_candidate_meets_the_tokens_of_its_row(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(cross_layout, "PIECE", piece)
    lengths, counts = [7, 1, 30, 12, 3], [3, 0, 5, 1, 9]
    layout = layout_of(lengths, counts)
    starts = [sum(lengths[:row]) for row in range(5)]
    row_of = torch.repeat_interleave(torch.tensor(counts)).tolist()
    assert layout.num_candidates == sum(counts)
    assert layout.candidates[layout.cells].tolist() == list(range(sum(counts)))
    seen: dict[int, list[int]] = {}
    for group in layout.groups:
        for number in range(group.num_pieces):
            first = group.first_token_cell + number * group.num_tokens
            tokens = layout.tokens[first : first + int(layout.lengths[group.first_piece + number])].tolist()
            cell = group.first_candidate_cell + number * group.num_candidates
            candidates = layout.candidates[cell : cell + group.num_candidates].tolist()
            assert len(set(candidates)) <= piece
            seen |= dict.fromkeys(candidates, tokens)
    for candidate, row in enumerate(row_of):
        assert seen[candidate] == list(range(starts[row], starts[row] + lengths[row]))
    assert layout.places.tolist() == [lengths[row] for row in row_of]


def test_a_fixed_length_hides_what_does_not_fit() -> None:
    layout = layout_of([7, 5, 2], [1, 1, 1], fixed_length=6)
    hidden = dict(zip(layout.lengths.tolist(), layout.first_visible.tolist(), strict=True))
    assert hidden == {7: 2, 5: 0, 2: 0}, "6 slots hold 5 tokens and the candidate"
    assert not layout_of([7, 5], [1, 1]).first_visible.any()


def test_a_layout_moves_with_all_its_tensors() -> None:
    layout = layout_of([7, 5, 2], [1, 3, 1], fixed_length=6)
    moved = layout.to(torch.device("meta"))
    assert moved.groups == layout.groups
    for field in dataclasses.fields(layout):
        value = getattr(moved, field.name)
        assert not isinstance(value, torch.Tensor) or value.is_meta, field.name


def test_there_may_be_no_candidates_and_no_rows() -> None:
    assert layout_of([3, 2], [0, 0]).groups == ()
    empty = torch.zeros(0, dtype=torch.int64)
    assert CrossLayout.of(torch.zeros(1, dtype=torch.int64), empty).num_candidates == 0


def test_candidates_must_be_sorted_by_request() -> None:
    with pytest.raises(DataError, match="sort the candidates"):
        CrossLayout.of(torch.tensor([0, 2, 3]), torch.tensor([1, 0]))
    with pytest.raises(DataError, match="not ascending numbers from 0 to 1"):
        CrossLayout.of(torch.tensor([0, 2, 3]), torch.tensor([0, 2]))
