"""What a trained model takes, by part."""

from __future__ import annotations

from pathlib import Path

import torch

from tackboard.core.vocabulary import Vocabulary
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.footprint import footprint
from tackboard.train.optimizers import OptimizerConfig, Optimizers

VOCABULARY = Vocabulary(actions=("view",), surfaces=("feed",))


def test_bytes_by_part_and_the_share_of_moved_rows(tmp_path: Path) -> None:
    config = PinFMConfig(tables=TableConfig(num_hashes=2, num_rows=10, dim=4, storage="fp16"), width=8)
    model = build_model(config, VOCABULARY)
    optimizers = Optimizers(model, OptimizerConfig(), 10)
    (tmp_path / "one").write_bytes(b"12345")
    (tmp_path / "two").write_bytes(b"123")
    fresh = footprint(model, optimizers, tmp_path)
    assert (fresh["table_bytes"], fresh["table_optimizer_bytes"]) == (2 * 10 * 4 * 2, 2 * 10 * 4)
    num_dense = sum(p.numel() for p in model.parameters()) - 80
    assert (fresh["dense_bytes"], fresh["dense_optimizer_bytes"]) == (4 * num_dense, 0)
    assert (fresh["rows_moved_share"], fresh["checkpoint_bytes"]) == (0.0, 8) and fresh["peak_bytes"] > 0
    optimizers.prepare(0)
    model.encode_items(torch.tensor([[0, 3], [0, 4]])).sum().backward()  # type: ignore[operator]
    optimizers.step()
    after = footprint(model, optimizers, tmp_path)
    assert after["rows_moved_share"] == 3 / 20
    assert after["dense_optimizer_bytes"] > 0


def test_a_model_whose_tables_are_frozen_moves_no_row(tmp_path: Path) -> None:
    model = build_model(PinFMConfig(width=8), VOCABULARY)
    optimizers = Optimizers(model, OptimizerConfig(multipliers={"item_tables.": 0.0}), 10)
    assert footprint(model, optimizers, tmp_path)["rows_moved_share"] is None
