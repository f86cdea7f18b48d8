"""The watch over torch's compiler: it names what was compiled, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tackboard.train import compilation
from tackboard.train.compilation import LONGEST_REASON, CompilationWatch

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns itself of what it does to compile


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), Doubling())
    model[1].compile(dynamic=False, backend="eager")
    return model


def test_a_new_size_is_named_once(model: nn.Sequential) -> None:
    watch = CompilationWatch(model)
    assert watch.news() == []
    model(torch.ones(3, 2))
    [first] = watch.news()
    assert first == ("Doubling.forward", "it was not called before")
    model(torch.zeros(3, 2))
    assert watch.news() == []
    model(torch.ones(4, 2))
    [again] = watch.news()
    assert again.part == "Doubling.forward" and "expected 3, actual 4" in again.reason
    assert "\n" not in again.reason and len(again.reason) <= LONGEST_REASON
    assert watch.news() == []
    assert CompilationWatch(model).news() == [], "a later watch begins with nothing new"


def test_more_compilations_than_torch_remembers(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CompilationWatch(model)
    model(torch.ones(5, 2))
    watch.news()
    honest = compilation._measurements
    monkeypatch.setattr(compilation, "_measurements", list)
    assert watch.news() == [], "torch has forgotten everything"
    monkeypatch.setattr(compilation, "_measurements", honest)
    assert watch.news()[-1].part == "Doubling.forward", "what is not known to be old is new"
