"""On which device a run trains, and what is compiled, padded and replayed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tackboard.core.errors import UsageError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import SequentialConfig
from tackboard.train import devices
from tackboard.train.config import RunConfig
from tackboard.train.devices import choose_device, shall_compile, shall_pad, shall_replay

Config = Callable[..., RunConfig]


def test_choosing_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    assert not capsys.readouterr().err
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    assert capsys.readouterr().err.count("torch sees no GPU, so the CPU is used") == 1, (
        "not where the CPU was asked for"
    )
    with pytest.raises(UsageError, match=r"training\.device = cuda"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda") == torch.device("cuda") and choose_device("cuda:1").index == 1
    with pytest.raises(UsageError, match=r"cuda:2, but torch sees 2 GPUs\nallowed: cuda:0, cuda:1\n"):
        choose_device("cuda:2")


def test_what_compiles_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "a-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not shall_compile("off", gpu) and not shall_compile("auto", cpu)
    with pytest.raises(UsageError, match="there is no a-compiler"):
        shall_compile("on", cpu)
    assert not shall_compile("auto", gpu)
    assert "does not compile" in capsys.readouterr().err
    (tmp_path / "a-compiler").touch(mode=0o755)
    assert shall_compile("on", cpu) and shall_compile("auto", gpu)


def test_who_pads_where(tiny_config: Config) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    vocabulary = Vocabulary.from_names(["click", "save"], ["home"])
    pinfm, rival = (config.build(vocabulary) for config in (tiny_config().model, SequentialConfig()))
    assert shall_pad("auto", pinfm, gpu, is_compiled=True)
    assert not shall_pad("auto", pinfm, cpu, is_compiled=True) and not shall_pad("auto", pinfm, gpu, is_compiled=False)
    assert shall_pad("on", pinfm, cpu, is_compiled=False) and not shall_pad("off", pinfm, gpu, is_compiled=True)
    for cannot in (rival, nn.Linear(1, 1)):
        assert not shall_pad("auto", cannot, gpu, is_compiled=True)
        with pytest.raises(UsageError, match="cannot pad its batches"):
            shall_pad("on", cannot, gpu, is_compiled=True)


def test_who_is_replayed() -> None:
    model = PinFMConfig().build(Vocabulary.from_names(["click"], ["home"]))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert shall_replay("auto", model, gpu, pads=True) == model.can_replay
    assert not shall_replay("off", model, gpu, pads=True)
    assert not shall_replay("auto", model, gpu, pads=False)
    assert not shall_replay("auto", model, cpu, pads=True)
    assert not shall_replay("auto", torch.nn.Linear(1, 1), gpu, pads=True)
    with pytest.raises(UsageError, match="cannot replay its steps"):
        shall_replay("on", model, cpu, pads=True)
