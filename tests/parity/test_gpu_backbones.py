"""On a GPU the backbones and the rivals do what they do on the CPU, in full precision and nearly so in half."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_models import CONFIGS, VOCABULARY, histories_over_all_items
from torch import nn

from tackboard.core.vocabulary import Vocabulary
from tackboard.models.decoder import Decoder
from tackboard.models.hstu import HSTU
from tackboard.models.interface import compile_parts
from tackboard.models.sequential import hstu, sasrec
from tackboard.models.time_encoding import hstu_bucket, log2_bucket
from tackboard.ops import packed_attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one"),
]

SIZES = {"width": 32, "num_layers": 2, "num_heads": 4, "max_positions": 80, "dropout": 0.0}
BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "learned": lambda: Decoder(**SIZES, mlp_ratio=2),  # type: ignore[arg-type]
    "rotary": lambda: Decoder(**SIZES, mlp_ratio=2, positions="rotary"),  # type: ignore[arg-type]
    "time": lambda: Decoder(**SIZES, mlp_ratio=2, positions="none", time_bias=24),  # type: ignore[arg-type]
    "hstu": lambda: HSTU(**SIZES),  # type: ignore[arg-type]
}


def results(model: nn.Module, device: str, *, half: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden vectors of rows of 77, 0 and 30 tokens, and the gradients of a function of them."""
    torch.manual_seed(1)
    x = torch.randn(107, 32).to(device)
    lengths, times = torch.tensor([77, 0, 30]).to(device), torch.cumsum(torch.randint(0, 10**8, (107,)), 0).to(device)
    weights = torch.randn(107, 32).to(device)
    model = copy.deepcopy(model).to(device)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        hidden = model(x, lengths, times, times + 60_000)
    (hidden * weights).sum().backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach().cpu(), gradients


@pytest.mark.parametrize("tile_cells", [1 << 24, 1 << 12])
@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_backbones_agree(monkeypatch: pytest.MonkeyPatch, name: str, tile_cells: int) -> None:
    monkeypatch.setattr(packed_attention_reference, "TILE_CELLS", {"cpu": tile_cells, "cuda": tile_cells})
    torch.manual_seed(0)
    model = BACKBONES[name]()
    hidden, gradients = results(model, "cpu")
    hidden_gpu, gradients_gpu = results(model, "cuda")
    assert torch.allclose(hidden, hidden_gpu, atol=1e-3)
    assert gradients.keys() == gradients_gpu.keys()
    for key, gradient in gradients.items():
        assert (gradient - gradients_gpu[key]).abs().max() <= 1e-3 * (1 + gradient.abs().max()), key
    hidden_half, gradients_half = results(model, "cuda", half=True)
    assert (hidden_half.float() - hidden).abs().max() < 0.1
    assert all(torch.isfinite(gradient).all() for gradient in gradients_half.values())


def test_buckets_of_time_are_equal() -> None:
    ms = torch.cat([torch.randint(0, 10**6, (10_000,)), 10 ** torch.arange(18), torch.tensor([-5, 0, 2**63 - 1])])
    assert torch.equal(log2_bucket(ms, 40, per_second=1000), log2_bucket(ms.cuda(), 40, per_second=1000).cpu())
    assert torch.equal(hstu_bucket(ms, 128), hstu_bucket(ms.cuda(), 128).cpu())


@pytest.mark.parametrize("loss", ["full", "sampled", "contrastive"])
@pytest.mark.parametrize("make", [sasrec, hstu])
def test_rivals_agree(make: Callable[..., object], loss: str) -> None:
    torch.manual_seed(0)
    inputs = {"use_actions": True, "use_time_gap": True, "use_request_time": True}
    config = make(256, loss={"kind": loss}, **inputs, max_history=20)
    model = config.build(Vocabulary.from_names(["click", "hide"], ["home"])).eval()  # type: ignore[attr-defined]
    batch = histories_over_all_items(0)
    on_cpu = float(model.loss(batch).loss.detach())
    on_gpu = float(copy.deepcopy(model).cuda().loss(batch.to(torch.device("cuda"))).loss.detach())
    assert on_gpu == pytest.approx(on_cpu, abs=0.5 if loss == "sampled" else 1e-3)  # negatives are drawn on the device
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = copy.deepcopy(model).cuda().loss(batch.to(torch.device("cuda"))).loss
    half.backward()
    assert float(half.detach()) == pytest.approx(on_cpu, abs={"full": 0.05, "sampled": 0.7, "contrastive": 0.2}[loss])


@pytest.mark.filterwarnings("ignore")  # Torch's compiler warns of its own features and of products in fp32.
@pytest.mark.parametrize("num_items", [200, 203])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_models_agree(name: str, num_items: int) -> None:
    """Compiled on a GPU as plain on a CPU, also where the items have to be filled up to a multiple of 8."""
    torch.manual_seed(0)
    plain = CONFIGS[name].build(VOCABULARY).train()
    compiled = copy.deepcopy(plain).cuda()
    compile_parts(compiled)
    for seed, num_rows in ((0, 32), (1, 40)):
        batch = histories_over_all_items(seed, num_rows, num_items)
        losses = []
        for model, device in ((plain, "cpu"), (compiled, "cuda")):
            model.zero_grad()
            if hasattr(model, "item_tables"):
                model.item_tables.pending.clear()
            loss = model.loss(batch.to(torch.device(device))).loss
            loss.backward()
            losses.append(float(loss.detach()))
        is_drawn = "sampled" in name or "two losses" in name  # on the device, so others
        assert losses[0] == pytest.approx(losses[1], abs=0.7 if is_drawn else 1e-3)
        for (key, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            if one.grad is not None and other.grad is not None and not is_drawn:
                gap = (one.grad - other.grad.cpu()).abs().max()
                assert gap <= 1e-2 * (1e-3 + one.grad.abs().max()), key
        if not is_drawn and hasattr(plain, "item_tables"):
            gradients = [model.item_tables.pending_gradient().cpu() for model in (plain, compiled)]
            assert (gradients[0] - gradients[1]).abs().max() <= 1e-2 * (1e-3 + gradients[0].abs().max())
