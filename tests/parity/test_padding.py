"""A padded batch teaches a PinFM exactly what the batch itself teaches: loss, metrics, gradients, rows and counts."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from small_models import VOCABULARY, histories_over_all_items

from tackboard.batch import SequenceBatch
from tackboard.core.config import from_dict
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.ops import contrastive, contrastive_reference
from tackboard.train.guard import Guard, GuardConfig
from tackboard.train.optimizers import OptimizerConfig, Optimizers

THREE_LOSSES = {
    "multi_token_weight": 0.5,
    "multi_token_share": 0.5,
    "future_token_weight": 0.25,
    "future_token_anchor": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt, three losses": {"loss": THREE_LOSSES},
    "gpt, three losses, dropout": {"loss": THREE_LOSSES, "dropout": 0.2},
    "gpt, rotary": {"backbone": {"positions": "rotary"}},
    "gpt, time bias, request's time": {"backbone": {"time_bias": 12}, "request_time": True},
    "hstu": {"backbone": {"kind": "hstu"}, "request_time": True, "loss": THREE_LOSSES, "dropout": 0.1},
    "sasrec": {"backbone": {"kind": "sasrec"}},
    "drawn negatives alone": {"loss": {"in_batch_negatives": False}},
    "without drawn negatives": {"is_drawn": False},
    "without the popularity correction": {"loss": {"correct_popularity": False}},
    "without a mask": {"loss": {"mask_same_user": False} | THREE_LOSSES},
    "later negatives": {"loss": {"later_negatives": True} | THREE_LOSSES},
    "streaming frequencies": {"loss": {"streaming_frequencies": True}},
    "features of the request": {"request_features": ["since_last"]},
    "half-precision table": {"tables": {"storage": "fp16"}},
}


def model_of(case: dict[str, Any]) -> PinFM:
    settings = {name: value for name, value in case.items() if name != "is_drawn"}
    tables = {"num_hashes": 1, "num_rows": 256, "method": "modulo", "dim": 8} | settings.pop("tables", {})
    torch.manual_seed(0)
    values = {"width": 16, "max_history": 20, "tables": TableConfig(**tables)} | settings
    return from_dict(PinFMConfig, values).build(VOCABULARY).train()


def batch_of(seed: int, case: dict[str, Any]) -> SequenceBatch:
    """Histories of which some are empty; two rows belong to one user. About half of the items are drawn."""
    batch = histories_over_all_items(seed, num_rows=40)
    assert (batch.lengths() == 0).any()
    sampled = torch.arange(0, 200, 2) if case.get("is_drawn", True) else torch.zeros(0, dtype=torch.int64)
    rate = torch.tensor(0.5 if len(sampled) else 0.0)
    users = torch.arange(batch.num_rows) // 2
    log_q = torch.full_like(batch.item_log_q, 1 / 200).log()
    request = {"since_last": batch.of_request("since_last") / 1e5}
    return dataclasses.replace(batch, sampled=sampled, sample_rate=rate, users=users, item_log_q=log_q, request=request)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-4, atol=1e-5 * (1e-3 + float(one.abs().max()))
    )


class Training:
    """A few steps of a model with its optimisers and its guard, padded or not."""

    def __init__(self, model: PinFM, *, pad: bool) -> None:
        self.model, self.pad = model, pad
        self.optimizers = Optimizers(model, OptimizerConfig(warmup_steps=0), 10)
        self.guard = Guard(GuardConfig(settle_steps=1, spike_factor=1.5))

    def step(self, number: int, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        batch = self.model.prepare(batch, torch.Generator().manual_seed(number), pad=self.pad)
        assert bool(batch.num_padding) == self.pad
        torch.manual_seed(number)
        self.optimizers.prepare(number)
        output = self.model.loss(batch.to(torch.device("cpu")))
        output.loss.backward()
        found = {f"metric {name}": torch.as_tensor(value) for name, value in output.metrics.items()}
        found |= {
            f"gradient {name}": parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        tables = self.model.item_tables
        found["rows"] = torch.cat([rows[rows >= 0].unique() for rows, _ in tables.pending])
        found["gradient of rows"] = tables.pending_gradient()
        verdict = self.guard.judge(output.loss, self.optimizers.clip())
        self.optimizers.step(verdict.keep)
        found["kept"] = verdict.keep
        found["examples"] = torch.tensor([batch.num_examples(), batch.num_tokens])
        return found | {"loss": output.loss.detach(), "norm": verdict.norm}


def dropout_by_token(x: torch.Tensor, share: float, training: bool) -> torch.Tensor:
    """Dropout that draws for one token after another, so that tokens at the end change nothing for earlier tokens."""
    if not training or not share:
        return x
    return x * (torch.rand(4096, *x.shape[1:])[: len(x)] >= share) / (1 - share)


@pytest.mark.parametrize("name", [*CASES, *(f"{name}, as on a GPU" for name in CASES if "loss" in CASES[name])])
def test_padding_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith(", as on a GPU"):
        # The kernels read own items from the same table as the definition.
        monkeypatch.setattr(contrastive, "choose", lambda _: contrastive_reference.contrastive_loss)
        name = name.removesuffix(", as on a GPU")
    # torch's own dropout draws other numbers for a tensor of another size, so only its numbers are replaced here.
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_by_token)
    plain = model_of(CASES[name])
    trainings = [Training(plain, pad=False), Training(copy.deepcopy(plain), pad=True)]
    for number in range(3):
        batch = batch_of(number, CASES[name])
        one, other = (training.step(number, batch) for training in trainings)
        assert one.keys() == other.keys()
        for key in one:
            assert same(one[key].double(), other[key].double()), (number, key)
        tables = [training.optimizers.tables["item_tables"] for training in trainings]
        assert same(tables[0].sums, tables[1].sums) and torch.equal(tables[0].sums > 0, tables[1].sums > 0)
        for key, tensor in plain.state_dict().items():
            if key.startswith("frequencies."):
                assert torch.equal(tensor, trainings[1].model.state_dict()[key]), key
        # AdamW turns the rounding of a gradient near 0 into a whole step, so each step begins with the same parameters.
        trainings[1].model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("lengths", [[0], [1], [0, 0, 3], [19] * 30])
def test_small_and_even_batches(lengths: list[int]) -> None:
    """One row without events, one event, and rows that are all equally long."""
    whole = histories_over_all_items(0, num_rows=60)
    count = sum(lengths)
    cut = {name: getattr(whole, name)[:count] for name in ("items", "is_positive")}
    batch = dataclasses.replace(
        whole,
        **cut,
        columns={name: column[:count] for name, column in whole.columns.items()},
        request={name: whole.of_request(name)[:count] for name in whole.request},
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        users=torch.arange(len(lengths)),
    )
    model = model_of({"request_time": True, "loss": THREE_LOSSES}).eval()
    plain, padded = (model.loss(model.prepare(batch, torch.Generator(), pad=pad)) for pad in (False, True))
    assert float(padded.loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=1e-5, abs=1e-6)


def test_dropout_of_a_padded_batch_is_a_function_of_the_seed() -> None:
    model, batch = model_of({"dropout": 0.3}), batch_of(0, {})
    padded, losses = model.prepare(batch, pad=True), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(model.loss(padded).loss.detach()))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("own", ["mask_same_user", "later_negatives"])
def test_every_prepared_tensor_is_padded(own: str) -> None:
    model = model_of({"loss": THREE_LOSSES | {"streaming_frequencies": True, own: True}})
    tensors = model.prepare(batch_of(0, {}), pad=True).tensors()
    # Offsets have one element more than rows, and two rates of the batch are single numbers.
    assert {len(tensor) % 16 for tensor in tensors if tensor.dim()} == {0, 1}
    assert sum(len(tensor) % 16 == 1 for tensor in tensors if tensor.dim()) == 2
