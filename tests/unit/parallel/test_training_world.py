"""A process that is alone needs no other; several are named in few words. tests/dist/ lets several talk."""

from __future__ import annotations

import pytest
import torch

from tackboard.parallel.training_world import ALONE, named


def test_a_process_that_is_alone_gets_back_what_it_gives() -> None:
    tensor = torch.arange(3)
    assert ALONE.is_alone and ALONE.is_first
    assert ALONE.sum_(tensor) is tensor
    assert ALONE.gather("a") == ["a"]
    assert ALONE.gather_tensors(tensor, [3])[0] is tensor
    assert ALONE.for_another_thread() is ALONE
    assert ALONE.from_first("a") == "a"
    ALONE.wait_for_all()


@pytest.mark.parametrize(
    ("ranks", "size", "words"),
    [
        ([2], 4, "process 2 of 4"),
        ([0, 1, 2, 5, 7, 8], 9, "processes 0-2, 5, 7-8 of 9"),
        ([3, 1], None, "processes 1, 3"),
    ],
)
def test_processes_have_short_names(ranks: list[int], size: int | None, words: str) -> None:
    assert named(ranks, size) == words
