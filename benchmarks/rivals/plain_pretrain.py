"""This module is the rival of `tackboard bench pretrain`: the same model, loss and negatives in plain PyTorch.

    python -m rivals.plain_pretrain SPEC.json

The module reads a spec (`tackboard.bench.pretrain.contender.Spec`) and the file of batches that the spec names. It
trains, and prints its figures as one JSON object. It is written as a competent engineer would write it in a day:

- `nn.Embedding` with sparse gradients for the tables, and `torch.optim.Adagrad`, which updates only the touched rows;
- every distinct item of a batch is looked up once, as in Tackboard;
- `nn.TransformerEncoder` (pre-norm) over a padded grid (rows × positions), with a causal mask and a key padding mask;
- dense logits of all predictions and items, masked, and `cross_entropy`; the logQ weights are added to the logits;
- AdamW that updates all dense parameters at once (`foreach`), with gradients clipped by their norm;
- the loss is read every ten steps.

The rival has no loader: its batches lie in memory when the clock starts, which is to its advantage. It has no guard, no
checkpoints and no metrics either. With the same parameters its first loss equals ours, which the bench checks.

Shapes: B rows, S positions, D width, M distinct items, P predictions.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

LOG_EVERY = 10
EXCLUDED = -1e4


def main(arguments: list[str]) -> None:
    """Trains the model of the spec in the file `arguments[0]` and prints the figures."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps(train(spec)) + "\n")


def train(spec: dict[str, Any]) -> dict[str, float]:
    """Trains `warmup` and then `timed` steps, and returns the figures of the timed steps."""
    import torch
    from safetensors import safe_open
    from torch import nn

    from tackboard.core.machine import peak_rss_bytes

    device = torch.device(spec["device"])
    with safe_open(spec["batches"], "pt") as file:
        setting = json.loads(file.metadata()["setting"])
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
    torch.set_num_threads(setting["num_threads"])
    torch.manual_seed(0)
    model = build(setting).to(device)
    if setting["has_parameters"]:
        take_parameters(model, {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    batches = [
        {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{number}.")}
        for number in range(setting["num_batches"])
    ]
    dense = [parameter for name, parameter in model.named_parameters() if name != "tables.weight"]
    tables = torch.optim.Adagrad(model.tables.parameters(), lr=setting["table_learning_rate"])
    adamw = torch.optim.AdamW(dense, lr=setting["dense_learning_rate"], betas=(0.9, 0.98), foreach=True)
    is_gpu = device.type == "cuda"
    first = value = math.nan
    num_tokens, started, cpu_s = 0, 0.0, 0.0
    for step in range(spec["warmup"] + spec["timed"]):
        if step == spec["warmup"]:
            if is_gpu:
                torch.cuda.synchronize()
            started, cpu_s, num_tokens = time.perf_counter(), time.process_time(), 0
        batch = batches[step % len(batches)]
        with torch.autocast(device.type, torch.bfloat16, enabled=setting["is_half"]):
            loss = model(batch)
        adamw.zero_grad()
        tables.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(dense, setting["clip_norm"])
        adamw.step()
        tables.step()
        num_tokens += len(batch["items"])
        if step == 0 or step % LOG_EVERY == 0:
            value = loss.item()
        first = value if step == 0 else first
    if is_gpu:
        torch.cuda.synchronize()
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    return {
        "wall_ms": 1000 * wall_s / spec["timed"],
        "cpu_ms": 1000 * cpu_s / spec["timed"],
        "tokens_per_s": num_tokens / wall_s,
        "peak_bytes": peak_rss_bytes(),
        "first_loss": first,
        "last_loss": loss.item(),
    }


def build(setting: dict[str, Any]) -> Any:
    """Returns the model for a setting of `tackboard.bench.pretrain.prepared`."""
    import torch
    from torch import nn
    from torch.nn import functional

    gelu = functools.partial(functional.gelu, approximate="tanh")
    width, dims = setting["width"], setting["num_hashes"] * setting["dim"]

    def projection(width_in: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width_in, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    class PlainModel(nn.Module):
        first_rows: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            rows = setting["num_hashes"] * setting["num_rows"]
            self.tables = nn.Embedding(rows, setting["dim"], sparse=True)
            nn.init.normal_(self.tables.weight, std=0.1)
            self.actions = nn.Embedding(setting["num_actions"], dims)
            self.surfaces = nn.Embedding(setting["num_surfaces"], dims)
            self.time_gaps = nn.Embedding(setting["num_time_buckets"], dims)
            self.positions = nn.Embedding(setting["max_positions"], width)
            self.start = nn.Parameter(torch.randn(width))
            self.phi_in, self.phi_out, self.psi = projection(dims), projection(width), projection(dims)
            layer = nn.TransformerEncoderLayer(
                width, setting["num_heads"], 4 * width, 0.0, gelu, batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(
                layer, setting["num_layers"], nn.LayerNorm(width), enable_nested_tensor=False
            )
            self.log_inverse_temperature = nn.Parameter(torch.tensor(-math.log(0.07)))
            first_rows = torch.arange(setting["num_hashes"]) * setting["num_rows"]
            self.register_buffer("first_rows", first_rows, persistent=False)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            items_M = self.tables(batch["item_rows"] + self.first_rows).flatten(1)
            events = functional.embedding(batch["items"], items_M) + self.actions(batch["action"])
            events = events + self.surfaces(batch["surface"])
            events = events + self.time_gaps(batch["gap"].clamp_max(setting["num_time_buckets"] - 1))
            events_ND = functional.normalize(self.phi_in(events), dim=-1) * math.sqrt(width)
            hidden = self.hidden(events_ND, batch["offsets"])
            predicting_PD = functional.normalize(self.phi_out(hidden), dim=-1) * self.log_inverse_temperature.exp()
            items_MD = functional.normalize(self.psi(items_M), dim=-1)
            return self.info_nce(predicting_PD, items_MD, batch)

        def hidden(self, events_ND: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            """Returns the hidden vector before each event [N, D], from a padded grid with a start token per row."""
            lengths = offsets[1:] - offsets[:-1]
            num_rows, longest = len(lengths), int(lengths.max()) + 1
            rows_N = torch.repeat_interleave(torch.arange(num_rows, device=lengths.device), lengths)
            places_N = torch.arange(len(rows_N), device=lengths.device) - offsets[rows_N]
            grid = torch.zeros(num_rows, longest, width, dtype=events_ND.dtype, device=lengths.device)
            grid[:, 0] = self.start.to(grid.dtype)
            grid[rows_N, places_N + 1] = events_ND
            grid = grid + self.positions.weight[:longest]
            causal = nn.Transformer.generate_square_subsequent_mask(longest, device=lengths.device)
            is_padding = torch.arange(longest, device=lengths.device) > lengths[:, None]
            padding = torch.zeros(is_padding.shape, device=lengths.device).masked_fill(is_padding, -math.inf)
            hidden = self.encoder(grid, mask=causal, src_key_padding_mask=padding, is_causal=True)
            return hidden[rows_N, places_N]

        def info_nce(
            self, predicting_PD: torch.Tensor, items_MD: torch.Tensor, batch: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            """Returns the mean cross entropy. The negatives of an event are drawn items that its user did not touch."""
            negatives_K, items_N = batch["negatives"], batch["items"]
            lengths = batch["offsets"][1:] - batch["offsets"][:-1]
            rows_N = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
            users_N = torch.unique(batch["users"], return_inverse=True)[1][rows_N]
            engaged = torch.zeros(len(lengths), len(items_MD), dtype=torch.bool, device=lengths.device)
            engaged[users_N, items_N] = True
            logits = (predicting_PD @ items_MD[negatives_K].T).float() + batch["log_weights"]
            logits = logits.masked_fill(engaged[:, negatives_K][users_N], EXCLUDED)
            right = (predicting_PD.float() * items_MD[items_N].float()).sum(dim=1, keepdim=True)
            targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            return functional.cross_entropy(torch.cat([right, logits], dim=1), targets)

    return PlainModel()


def take_parameters(model: Any, ours: dict[str, Any]) -> None:
    """Copies the parameters of Tackboard's model into the plain model."""
    layer_names = {
        "attention_norm": "norm1",
        "attention_in.weight": "self_attn.in_proj_weight",
        "attention_in.bias": "self_attn.in_proj_bias",
        "attention_out": "self_attn.out_proj",
        "mlp_norm": "norm2",
        "mlp_in": "linear1",
        "mlp_out": "linear2",
    }
    renamed = {}
    for name, tensor in ours.items():
        if name.startswith("decoder.blocks."):
            number, _, rest = name.removeprefix("decoder.blocks.").partition(".")
            old = next(old for old in layer_names if rest.startswith(old))
            renamed[f"encoder.layers.{number}.{layer_names[old]}{rest.removeprefix(old)}"] = tensor
        else:
            for old, new in (
                ("decoder.positions", "positions"),
                ("decoder.final_norm", "encoder.norm"),
                ("item_tables", "tables"),
            ):
                name = name.replace(old, new)
            renamed[name] = tensor
    model.load_state_dict(renamed)


if __name__ == "__main__":
    main(sys.argv[1:])
