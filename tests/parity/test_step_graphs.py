"""On a GPU, steps that are replayed as CUDA graphs have the bits of steps that run as usual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import VOCABULARY, histories_over_all_items

from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.guard import Guard, GuardConfig
from tackboard.train.optimizers import OptimizerConfig, Optimizers
from tackboard.train.step_graphs import StepReplay


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
@pytest.mark.parametrize("kind", ["gpt", "hstu"])
def test_replayed_steps_have_the_bits_of_steps_as_usual(kind: str) -> None:
    """With dropout, several losses, half-precision tables, and one bad step, which must move nothing."""
    plain, plain_parameters, _ = trained_on_gpu(kind, is_replayed=False)
    replayed, parameters, num_graphs = trained_on_gpu(kind, is_replayed=True)
    assert num_graphs >= 1
    assert [verdict[3] for verdict in plain] == [float(number != 8) for number in range(12)]
    assert str(plain) == str(replayed)
    assert all(torch.equal(one, other) for one, other in zip(plain_parameters, parameters, strict=True))


def trained_on_gpu(kind: str, *, is_replayed: bool) -> tuple[list[list[float]], list[torch.Tensor], int]:
    """Trains 12 steps; returns the verdict and metrics of each step, the parameters, and the number of graphs."""
    config = PinFMConfig(
        tables=TableConfig(num_hashes=1, num_rows=256, dim=8, storage="fp16", method="modulo"),
        backbone=BackboneConfig(kind=kind, num_heads=2, num_layers=2, positions="none" if kind == "hstu" else "rotary"),
        loss=LossConfig(multi_token_weight=0.5, multi_token_window=3),
        width=32,
        max_history=40,
        dropout=0.2,
    )
    torch.manual_seed(0)
    model = config.build(VOCABULARY).cuda().train()
    optimizers = Optimizers(model, OptimizerConfig(warmup_steps=2), total_steps=20)
    guard = Guard(GuardConfig(), torch.device("cuda"))

    def compute(batch: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            output = model.loss(batch)
        output.loss.backward()
        verdict = guard.judge(output.loss, optimizers.clip())
        optimizers.step(verdict.keep)
        return verdict.packed(), output.metrics

    replayed = StepReplay(compute, optimizers.recording)
    step = replayed if is_replayed else compute
    verdicts = []
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        batch = model.prepare(histories_over_all_items(number % 3, 32), generator, pad=True)
        if number == 8:
            batch.targets.weights.fill_(float("nan"))
        torch.cuda.manual_seed(number)
        optimizers.prepare(number)
        packed, metrics = step(batch.to(torch.device("cuda")))
        verdicts.append([*packed.tolist(), *(float(value) for value in metrics.values())])
    assert replayed.is_on
    return verdicts, [parameter.detach().clone() for parameter in model.parameters()], replayed.num_graphs
