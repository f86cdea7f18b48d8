"""The floor is counted by hand on a small batch."""

from __future__ import annotations

import pytest
import torch

from tackboard.batch import SequenceBatch
from tackboard.bench.pretrain.floor import FORMULAS, Counts, FloorItem, Product, floor_items, floor_result, model_flops
from tackboard.core.errors import UsageError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig


class FixedSpeeds:
    """A device that computes 1,000 FLOP and moves 100 bytes a second, and needs 1 s for any product."""

    flops_per_s = 1000.0
    bytes_per_s = 100.0

    def product_seconds(self, rows: int, inner: int, columns: int) -> float:
        return 1.0


def config(**loss: object) -> PinFMConfig:
    return PinFMConfig(
        tables=TableConfig(num_hashes=2, num_rows=8, dim=4),
        width=8,
        backbone=BackboneConfig(num_layers=3),
        loss=LossConfig(**loss),
    )


def model(settings: PinFMConfig) -> PinFM:
    with torch.device("meta"):
        return PinFM(settings, Vocabulary(actions=("view",), surfaces=("home",)))


@pytest.fixture
def batch() -> SequenceBatch:
    """Rows of 3 and 2 events over 4 items, of which two are drawn as negatives; items 0 and 1 share a table row."""
    return SequenceBatch(
        offsets=torch.tensor([0, 3, 5]),
        users=torch.tensor([1, 2]),
        items=torch.tensor([0, 1, 0, 2, 1]),
        columns={},
        request={},
        is_positive=torch.tensor([True, True, False, True, True]),
        item_ids=torch.arange(4),
        item_rows=torch.tensor([[0, 1], [0, 2], [3, 4], [5, 6]]),
        item_log_q=torch.zeros(4),
        sampled=torch.tensor([1, 3]),
        sample_rate=torch.tensor(0.5),
    )


def test_a_batch_is_counted(batch: SequenceBatch) -> None:
    counts = Counts.of(batch, config(in_batch_negatives=False))
    assert counts == Counts(
        num_events=5,
        num_rows=2,
        causal_pairs=4 * 5 // 2 + 3 * 4 // 2,
        num_predicting=4,
        num_sums=4,
        num_items=4,
        num_negatives=2,
        num_table_rows=7,
    )
    assert counts.num_tokens == 7
    assert Counts.of(batch, config()).num_negatives == 4
    assert Counts.mean([counts, Counts.of(batch, config())]).num_negatives == 3


def test_later_negatives_need_a_sum_per_pair(batch: SequenceBatch) -> None:
    loss = {"multi_token_weight": 0.1, "multi_token_window": 2, "multi_token_share": 1.0}
    shared = Counts.of(batch, config(**loss))
    apart = Counts.of(batch, config(later_negatives=True, **loss))
    assert (shared.num_predicting, shared.num_sums) == (4, 4)
    assert (apart.num_predicting, apart.num_sums) == (4, 6)


def test_the_items_follow_the_formulas(batch: SequenceBatch) -> None:
    settings = config(in_batch_negatives=False)
    counts = Counts.of(batch, settings)
    pinfm = model(settings)
    items = {item.name: item for item in floor_items(pinfm, counts, number_bytes=2, device_type="cuda")}
    weights = sum(layer.weight.numel() for layer in pinfm.decoder.modules() if isinstance(layer, torch.nn.Linear))
    assert items["backbone products"].total_flops == 3 * 2 * counts.num_tokens * weights == 6 * 7 * 3 * 12 * 64
    assert items["projections"].total_flops == 6 * (5 + 4 + 4) * (8 * 16 + 16 * 8)
    assert items["attention"].flops == 3 * 14 * counts.causal_pairs * 8
    assert items["loss"].total_flops == 4 * 2 * 4 * 2 * 8
    assert items["norms and residuals"].bytes == 6.5 * 7 * 8 * 28
    # A row of 4 fp32 numbers has 16 bytes and takes a whole sector of 32 bytes.
    lookup, update = 7 * 32 + 4 * 8 * 2 + 8 * 4 * 2, 4 * 8 * 4 + 2 * 7 * (32 + 32)
    assert items["table rows"].bytes == lookup + update
    dense = sum(p.numel() for name, p in pinfm.named_parameters() if name != "item_tables.weight")
    assert items["dense optimiser"].bytes == dense * 34
    without_recomputation = items["attention"].flops * 6 // 7
    others = items["backbone products"].total_flops + items["projections"].total_flops
    assert model_flops(list(items.values())) == others + without_recomputation


def test_the_heads_of_hstu_have_a_width_of_their_own(batch: SequenceBatch) -> None:
    settings = PinFMConfig(
        tables=TableConfig(num_hashes=2, num_rows=8, dim=4),
        width=8,
        backbone=BackboneConfig(kind="hstu", num_layers=1, num_heads=2, head_width=3),
    )
    counts = Counts.of(batch, settings)
    items = {item.name: item for item in floor_items(model(settings), counts, number_bytes=4, device_type="cpu")}
    assert items["attention"].flops == 14 * counts.causal_pairs * 6
    assert items["backbone products"].total_flops == 6 * counts.num_tokens * (8 * 24 + 6 * 8)


def test_seconds_are_those_of_the_slower_of_arithmetic_and_memory() -> None:
    speeds = FixedSpeeds()
    assert FloorItem(name="a", flops=3000, bytes=100).seconds(speeds) == 3.0
    assert FloorItem(name="b", flops=3000, bytes=500).seconds(speeds) == 5.0
    item = FloorItem(name="c", products=(Product(2, 3, 4, count=2),), bytes=100)
    assert item.seconds(speeds) == 3.0
    assert item.total_flops == 2 * 2 * 2 * 3 * 4


def test_the_result_sums_the_items(batch: SequenceBatch) -> None:
    settings = config()
    items = floor_items(model(settings), Counts.of(batch, settings), number_bytes=4, device_type="cpu")
    result = floor_result(items, FixedSpeeds())
    assert list(result["items"]) == list(FORMULAS)
    assert result["total_ms"] == pytest.approx(sum(line["ms"] for line in result["items"].values()), rel=1e-6)


def test_another_model_has_no_floor() -> None:
    with pytest.raises(UsageError, match="the floor of Linear is unknown"):
        counts = Counts(
            num_events=1,
            num_rows=1,
            causal_pairs=1,
            num_predicting=1,
            num_sums=1,
            num_items=1,
            num_negatives=1,
            num_table_rows=1,
        )
        floor_items(torch.nn.Linear(1, 1), counts, number_bytes=4, device_type="cpu")
