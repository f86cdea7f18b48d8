"""PinFM: causal, indifferent to padding and company, defined on empty histories, and able to learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch, item_rows, make_batch
from tackboard.core.errors import ConfigError
from tackboard.features.column import Column
from tackboard.features.types import BOOL, FLOAT
from tackboard.models.pinfm import MAX_INVERSE_TEMPERATURE, PinFM, PinFMConfig

Histories = Callable[..., SequenceBatch]
Model = Callable[..., PinFM]


@pytest.fixture
def one_history(make_history: Callable[..., Column]) -> Histories:
    """`one_history(items, actions, surfaces, times_ms, **request)`: a batch of one history and features beside it."""

    def make(
        items: list[int], actions: list[int], surfaces: list[int], times_ms: list[int], **request: float
    ) -> SequenceBatch:
        return make_batch(
            history=make_history([len(items)], items, actions, surfaces, times_ms),
            request={name: Column.of(FLOAT, [value]) for name, value in request.items()},
            hashing=HashConfig(num_hashes=3, num_rows=32),
        )

    return make


def predictions(model: PinFM, batch: SequenceBatch) -> torch.Tensor:
    """The projected hidden vectors of all tokens [T, D], the start token first."""
    with torch.no_grad():
        return model._project(model._hidden(batch, model.item_tables(batch.item_rows)))


@pytest.mark.parametrize("field", ["items", "actions", "surfaces", "times_ms"])
def test_a_later_event_never_changes_an_earlier_prediction(
    make_model: Model, one_history: Histories, field: str
) -> None:
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


def test_a_history_alone_equals_the_same_history_in_company(
    make_model: Model, make_histories: Histories, one_history: Histories
) -> None:
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


def test_an_empty_history_has_a_vector_of_its_own(make_model: Model, one_history: Histories) -> None:
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


def losses_one_by_one(
    model: PinFM, batch: SequenceBatch, one_history: Histories, request: Callable[[int], dict[str, float]]
) -> list[float]:
    """The loss of every positive event from `encode_users` of what came before it and the request at that event."""
    items = batch.item_ids[batch.items]
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths()).tolist()
    losses = []
    candidates = model.encode_items(batch.item_rows)
    counts = torch.bincount(batch.items[batch.is_positive], minlength=len(batch.item_ids)).float()
    for event in batch.is_positive.nonzero().squeeze(1).tolist():
        past = slice(int(batch.offsets[rows[event]]), event)
        columns = (items, batch.actions, batch.surfaces, batch.times_ms)
        user = model.encode_users(one_history(*(column[past].tolist() for column in columns), **request(event)))
        logits = model.score(user, candidates)[0]
        target = int(batch.items[event])
        weighted = torch.where(torch.arange(len(counts)) == target, torch.ones_like(counts), counts) * logits.exp()
        losses.append(float((weighted.sum().log() - logits[target]).detach()))
    return losses


def test_the_loss_predicts_each_positive_from_what_came_before_it(
    make_model: Model, make_histories: Histories, one_history: Histories
) -> None:
    """The vector that predicts event s is the one after s events: encode_users of the history cut there."""
    model = make_model(correct_popularity=False, mask_same_user=False)
    batch = make_histories([5, 4])
    losses = losses_one_by_one(model, batch, one_history, lambda _event: {})
    assert float(model.loss(batch).loss.detach()) == pytest.approx(float(np.mean(losses)), abs=1e-5)


def test_the_loss_reads_the_request_just_before_each_event(
    make_model: Model, make_histories: Histories, one_history: Histories
) -> None:
    """Training has features of the request per event, serving one value; both predict with the same vector."""
    model = make_model(correct_popularity=False, mask_same_user=False, request_features=("hour", "is_new"))
    batch = make_histories([5, 0, 4])
    hours = torch.linspace(-2, 3, batch.num_events)
    new = torch.arange(batch.num_events) % 2 == 0
    batch = dataclasses.replace(batch, request={"hour": hours, "is_new": new})
    losses = losses_one_by_one(
        model, batch, one_history, lambda event: {"hour": float(hours[event]), "is_new": float(new[event])}
    )
    assert float(model.loss(batch).loss.detach()) == pytest.approx(float(np.mean(losses)), abs=1e-5)
    elsewhere = losses_one_by_one(model, batch, one_history, lambda _event: {"hour": 0.0, "is_new": 0.0})
    assert abs(float(np.mean(losses)) - float(np.mean(elsewhere))) > 1e-4


def test_features_of_the_request_change_the_users_vector_and_no_other(
    make_model: Model, make_history: Callable[..., Column]
) -> None:
    model = make_model(request_features=("hour", "is_new"))
    history = make_history([2, 0, 2], [1, 2, 1, 2], [1] * 4, [1] * 4, [0, 1000, 0, 1000])

    def users(hours: list[float], new: list[bool]) -> torch.Tensor:
        request = {"is_new": Column.of(BOOL, new), "hour": Column.of(FLOAT, hours)}
        batch = make_batch(history=history, request=request, hashing=HashConfig(num_hashes=3, num_rows=32))
        return model.encode_users(batch).detach()

    before = users([0.5, 0.5, 0.5], [True, True, True])
    assert torch.allclose(before[0], before[2], atol=1e-6)  # the same history and the same request
    assert torch.allclose(before.norm(dim=-1), torch.ones(3), atol=1e-5)
    for after in (users([0.5, 0.5, -1.0], [True, True, True]), users([0.5, 0.5, 0.5], [True, True, False])):
        assert torch.allclose(before[:2], after[:2], atol=1e-6)
        assert (before[2] - after[2]).abs().max() > 1e-4


def test_what_a_model_reads() -> None:
    columns = ("history.item", "history.action", "history.surface")
    assert PinFMConfig().reads == (*columns, "history.gap")
    assert PinFMConfig(num_time_buckets=0).reads == columns
    assert PinFMConfig(request_features=("hour",)).reads == (*columns, "history.gap", "hour")


@pytest.mark.parametrize(("gap_ms", "bucket"), [(0, 0), (2999, 1), (3000, 2), (2**10 * 1000, 10), (2**11 * 1000, 11)])
def test_gaps_beyond_the_last_bucket_are_in_it(
    make_model: Model, one_history: Histories, gap_ms: int, bucket: int
) -> None:
    """log2(1 + seconds), cut off at the last of 11 buckets."""
    model = make_model(num_time_buckets=11)
    history = one_history([1, 2], [1, 1], [1, 1], [10**12, 10**12 + gap_ms])
    assert history.column("gap").tolist() == [0, bucket]
    asked: list[list[int]] = []
    model.time_gaps.register_forward_hook(lambda _module, given, _out: asked.append(given[0].tolist()))
    model.encode_users(history)
    assert asked == [[0, min(bucket, 10)]]


def test_time_can_be_left_out(make_model: Model, one_history: Histories) -> None:
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


@pytest.mark.parametrize("request_features", [(), ("hour", "age")])
def test_every_parameter_takes_part_in_the_loss(
    make_model: Model, make_histories: Histories, request_features: tuple[str, ...]
) -> None:
    model = make_model(request_features=request_features)
    batch = make_histories([6, 6])
    request = {name: torch.linspace(-1, 1, batch.num_events) for name in request_features}
    model.loss(dataclasses.replace(batch, request=request)).loss.backward()
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
