"""PinFM: causal, indifferent to padding and company, defined on empty histories, and able to learn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch, item_rows, make_batch
from tackboard.core.errors import ConfigError
from tackboard.models.pinfm import MAX_INVERSE_TEMPERATURE, PinFM, PinFMConfig

Histories = Callable[..., SequenceBatch]
Model = Callable[..., PinFM]


def one_history(items: list[int], actions: list[int], surfaces: list[int], times_ms: list[int]) -> SequenceBatch:
    return make_batch(
        lengths=np.array([len(items)]),
        users=np.zeros(1, dtype=np.int64),
        item_ids=np.array(items, dtype=np.int64),
        actions=np.array(actions, dtype=np.int64),
        surfaces=np.array(surfaces, dtype=np.int64),
        times_ms=np.array(times_ms, dtype=np.int64),
        hashing=HashConfig(num_hashes=3, num_rows=32),
    )


def predictions(model: PinFM, batch: SequenceBatch) -> torch.Tensor:
    """The projected hidden vectors of all tokens [T, D], the start token first."""
    with torch.no_grad():
        return model._project(model._hidden(batch, model.item_tables(batch.item_rows)))


@pytest.mark.parametrize("field", ["items", "actions", "surfaces", "times_ms"])
def test_a_later_event_never_changes_an_earlier_prediction(make_model: Model, field: str) -> None:
    columns = {
        "items": [1, 2, 3, 4, 5],
        "actions": [1, 2, 3, 1, 2],
        "surfaces": [1, 2, 1, 2, 1],
        "times_ms": [0, 1000, 9000, 10_000, 11_000],
    }
    model = make_model()
    before = predictions(model, one_history(**columns))
    values = list(columns[field])
    values[3:] = [5_000_000, 6_000_000] if field == "times_ms" else [0, values[4]]
    after = predictions(model, one_history(**(columns | {field: values})))
    assert torch.allclose(before[:4], after[:4], atol=1e-6)  # the start token and events 0 to 2
    assert (before[4] - after[4]).abs().max() > 1e-5


def test_a_history_alone_equals_the_same_history_in_company(make_model: Model, make_histories: Histories) -> None:
    model = make_model()
    batch = make_histories([3, 0, 10, 1])
    together = model.encode_users(batch).detach()
    for row in range(batch.num_rows):
        events = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        alone = one_history(
            batch.item_ids[batch.items][events].tolist(),
            batch.actions[events].tolist(),
            batch.surfaces[events].tolist(),
            batch.times_ms[events].tolist(),
        )
        assert torch.allclose(model.encode_users(alone)[0], together[row], atol=1e-5)


def test_an_empty_history_has_a_vector_of_its_own(make_model: Model) -> None:
    model = make_model()
    users = model.encode_users(one_history([], [], [], []))
    scores = model.score(users, model.encode_items(item_rows(np.arange(5), HashConfig(num_hashes=3, num_rows=32))))
    assert scores.shape == (1, 5)
    assert torch.isfinite(scores).all()
    assert scores.detach().std() > 0


def test_vectors_are_unit_and_scores_cosines_over_temperature(make_model: Model, make_histories: Histories) -> None:
    model = make_model(initial_temperature=0.5)
    batch = make_histories([4, 2])
    users, items = model.encode_users(batch), model.encode_items(batch.item_rows)
    for vectors in (users, items):
        assert torch.allclose(vectors.norm(dim=-1), torch.ones(len(vectors)), atol=1e-5)
    assert torch.allclose(model.score(users, items), users @ items.T / 0.5, atol=1e-5)
    with torch.no_grad():
        model.log_inverse_temperature.fill_(50.0)
    assert float(model.score(users, items).detach().abs().max()) <= MAX_INVERSE_TEMPERATURE * 1.0001


def test_the_loss_predicts_each_positive_from_what_came_before_it(make_model: Model, make_histories: Histories) -> None:
    """The vector that predicts event s is the one after s events: encode_users of the history cut there."""
    model = make_model(correct_popularity=False, mask_same_user=False)
    batch = make_histories([5, 4])
    items = batch.item_ids[batch.items]
    rows = [row for row in range(2) for _ in range(int(batch.lengths()[row]))]
    losses = []
    candidates = model.encode_items(batch.item_rows)
    counts = torch.bincount(batch.items[batch.is_positive], minlength=len(batch.item_ids)).float()
    for event in batch.is_positive.nonzero().squeeze(1).tolist():
        past = slice(int(batch.offsets[rows[event]]), event)
        columns = (items, batch.actions, batch.surfaces, batch.times_ms)
        user = model.encode_users(one_history(*(column[past].tolist() for column in columns)))
        logits = model.score(user, candidates)[0]
        target = int(batch.items[event])
        weighted = torch.where(torch.arange(len(counts)) == target, torch.ones_like(counts), counts) * logits.exp()
        losses.append(float((weighted.sum().log() - logits[target]).detach()))
    assert float(model.loss(batch).loss.detach()) == pytest.approx(float(np.mean(losses)), abs=1e-5)


@pytest.mark.parametrize(
    ("gap_ms", "bucket"), [(0, 0), (999, 0), (1000, 1), (2999, 1), (3000, 2), (7000, 3), (10**15, 11), (-5000, 0)]
)
def test_gap_buckets(make_model: Model, gap_ms: int, bucket: int) -> None:
    """log2(1 + seconds), cut off at the last of 12 buckets; clocks that go backwards count as no gap."""
    model = make_model(num_time_buckets=12)
    history = one_history([1, 2], [1, 1], [1, 1], [10**12, 10**12 + gap_ms])
    assert model._gap_buckets(history).tolist() == [0, bucket]


def test_the_first_event_of_a_row_has_no_gap_to_the_row_before(make_model: Model) -> None:
    batch = make_batch(
        lengths=np.array([1, 0, 2]),
        users=np.arange(3),
        item_ids=np.arange(3),
        actions=np.ones(3, dtype=np.int64),
        surfaces=np.ones(3, dtype=np.int64),
        times_ms=np.array([0, 10**9, 10**9 + 3000]),
        hashing=HashConfig(num_hashes=3, num_rows=32),
    )
    assert make_model()._gap_buckets(batch).tolist() == [0, 0, 2]


def test_time_can_be_left_out(make_model: Model) -> None:
    model = make_model(num_time_buckets=0)
    early, late = ([1, 2], [1, 1], [1, 1], [0, 1000]), ([1, 2], [1, 1], [1, 1], [0, 10**9])
    assert torch.equal(model.encode_users(one_history(*early)), model.encode_users(one_history(*late)))


def test_it_learns_one_batch_by_heart(make_model: Model, make_histories: Histories) -> None:
    model = make_model(width=32, correct_popularity=False).train()
    batch = make_histories([6, 6, 6, 6])
    # Four first events follow the same start token: no model can tell them apart.
    batch.is_positive[batch.offsets[:-1]] = False
    dense = [parameter for name, parameter in model.named_parameters() if name != "item_tables.weight"]
    optimizers = [torch.optim.Adam(dense, lr=1e-2), torch.optim.SparseAdam([model.item_tables.weight], lr=1e-2)]
    losses = []
    for _ in range(60):
        loss = model.loss(batch).loss
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_every_parameter_takes_part_in_the_loss(make_model: Model, make_histories: Histories) -> None:
    model = make_model()
    model.loss(make_histories([6, 6])).loss.backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.to_dense().any()]
    assert idle == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0},
        {"num_heads": 3},
        {"dropout": 1.0},
        {"num_time_buckets": 65},
        {"initial_temperature": 0.001},
        {"max_history": 0},
    ],
)
def test_impossible_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PinFMConfig(**wrong)  # type: ignore[arg-type]


def test_a_temperature_without_end_is_reported_not_raised(make_model: Model, make_histories: Histories) -> None:
    model = make_model()
    with torch.no_grad():
        model.log_inverse_temperature.fill_(-1e6)
    assert model.loss(make_histories([3, 2])).metrics["temperature"] == float("inf")
