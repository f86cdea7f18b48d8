"""The GPU does what the CPU does. Each test runs the same code on both devices and compares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tackboard.batch import SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.core import hashing
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, INT
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.ops.row_ids import row_ids
from tackboard.train.optimizers import OptimizerConfig, Optimizers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one"),
]

VOCABULARY = Vocabulary.from_names(["click", "hide"], ["home", "search"])
TABLES = TableConfig(num_hashes=4, num_rows=512)


def some_batch(seed: int = 0, num_users: int = 32) -> SequenceBatch:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 20, num_users)
    count = int(lengths.sum())
    history = sequence_column(
        lengths,
        item=Column(ID, random.integers(-(2**63), 2**63 - 1, 300)[random.integers(0, 300, count)]),
        action=Column(INT, random.integers(0, 3, count)),
        surface=Column(INT, random.integers(0, 3, count)),
        gap=Column(INT, random.integers(0, 24, count)),
    )
    return make_batch(
        history=history,
        users=np.arange(num_users),
        is_positive=random.random(count) < 0.8,
        hashing=TABLES,
        log_q=lambda ids: np.full(len(ids), np.log(1 / 300), dtype=np.float32),
    )


def fresh_model() -> PinFM:
    torch.manual_seed(0)
    return PinFMConfig(tables=TABLES, width=32, max_history=20).build(VOCABULARY)


def test_row_ids_are_equal_bit_for_bit() -> None:
    ids = np.concatenate(
        [[0, 1, -1, 2**63 - 1, -(2**63)], np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 9999)]
    )
    on_device = row_ids(torch.from_numpy(ids).cuda(), 8, 80_000_000, seed=3)
    assert np.array_equal(on_device.cpu().numpy(), hashing.row_ids(ids, 8, 80_000_000, seed=3))


def test_loss_and_scores_agree() -> None:
    model, batch = fresh_model(), some_batch()
    expected = model.loss(batch).loss
    users = model.encode_users(batch)
    scores = users @ model.encode_items(batch.item_rows).T
    model = model.cuda()
    moved = batch.to(torch.device("cuda"))
    torch.testing.assert_close(model.loss(moved).loss.cpu(), expected, rtol=1e-4, atol=1e-4)
    found = (model.encode_users(moved) @ model.encode_items(moved.item_rows).T).cpu()
    torch.testing.assert_close(found, scores, rtol=1e-3, atol=1e-3)


def test_training_steps_agree() -> None:
    finals = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = fresh_model().to(device)
        optimizers = Optimizers(model, OptimizerConfig(warmup_steps=2), total_steps=10)
        losses = []
        for step in range(10):
            optimizers.prepare(step)
            loss = model.loss(some_batch(step).to(device)).loss
            loss.backward()
            optimizers.clip()
            optimizers.step()
            losses.append(float(loss.detach()))
        finals.append(losses)
    assert np.allclose(finals[0], finals[1], rtol=2e-3), finals
    assert finals[0][-1] < finals[0][0]
