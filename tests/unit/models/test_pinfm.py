"""PinFM: causal, indifferent to padding and company, defined on empty histories, and able to learn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, RequestBatch, SequenceBatch, item_rows
from tackboard.batch.builder import make_batch
from tackboard.core.config import from_dict
from tackboard.core.errors import ConfigError
from tackboard.data.index import ItemFrequencies
from tackboard.data.negatives import UniformNegatives
from tackboard.features.column import Column
from tackboard.features.types import BOOL, FLOAT
from tackboard.models.backbone import BACKBONES, BackboneConfig
from tackboard.models.losses import (
    MAX_INVERSE_TEMPERATURE,
    LossConfig,
    info_nce,
    negative_log_weights,
    positive_counts,
    same_user_items,
)
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.models.targets import future_token_pairs, multi_token_pairs, next_token_pairs, row_of_event

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
        return model.project_users(model._hidden(batch, model.item_tables(batch.item_rows)))


COMBINATIONS = [
    {"backbone": {"kind": kind, "positions": positions, "time_bias": time_bias}, "request_time": request_time}
    for kind, time_bias in (("gpt", 0), ("gpt", 20), ("hstu", 0), ("sasrec", 0))
    for positions in BACKBONES[kind].positions
    for request_time in (False, True)
]
EVENTS = {
    "items": [1, 2, 3, 2, 5, 6, 7],
    "actions": [1, 2, 3, 1, 2, 0, 1],
    "surfaces": [1, 2, 1, 2, 1, 0, 2],
    # Ties, a gap right on an edge of HSTU's buckets (1,352 ms) and of ours (3 s), hours and years.
    "times_ms": [10**12, 10**12, 10**12 + 1352, 10**12 + 4352, 10**12 + 10**7, 10**12 + 10**7, 10**12 + 10**9],
}


def named(settings: dict[str, object]) -> str:
    values = [value.values() if isinstance(value, dict) else [value] for value in settings.values()]
    return "-".join(f"{value}" for group in values for value in group)


def with_biases(model: PinFM) -> PinFM:
    """A time bias begins at zero, or close to it: a model in which time matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("time_bias", "position_bias", "request_gaps.weight")):
                parameter.normal_()
    return model


@pytest.mark.parametrize("settings", COMBINATIONS, ids=named)
def test_training_predicts_with_the_vector_that_serving_has(
    make_model: Model, one_history: Histories, settings: dict[str, object]
) -> None:
    """The token before an event at time t is `encode_users` of the history so far and a request at time t."""
    model = with_biases(make_model(**settings))
    trained = predictions(model, one_history(**EVENTS))
    times = EVENTS["times_ms"]
    for seen in range(len(times)):
        past = {name: column[:seen] for name, column in EVENTS.items()}
        since = (times[seen] - times[seen - 1]) / 1000 if seen else -1.0
        served = model.encode_users(one_history(**past, since_last=since)).detach()
        assert torch.allclose(served[0], trained[seen], atol=1e-5)
        if seen:
            elsewhere = model.encode_users(one_history(**past, since_last=50.0)).detach()  # no gap of this history
            moved = float((elsewhere[0] - trained[seen]).abs().max())
            assert moved > 1e-4 if settings["request_time"] else moved < 1e-5


@pytest.mark.parametrize("settings", COMBINATIONS, ids=named)
def test_no_combination_sees_a_later_event(
    make_model: Model, one_history: Histories, settings: dict[str, object]
) -> None:
    """Of the event that a token predicts, only its time may be known, and only with request_time."""
    model = with_biases(make_model(**settings))
    before = predictions(model, one_history(**EVENTS))
    for first in (1, 4):
        for field, values in EVENTS.items():
            later = [value + 10**10 if field == "times_ms" else (value + 1) % 3 for value in values[first:]]
            changed = [*values[:first], *later]
            after = predictions(model, one_history(**(EVENTS | {field: changed})))
            known = first + 1 - (field == "times_ms" and settings["request_time"] is True)
            assert torch.allclose(before[:known], after[:known], atol=1e-5)
            assert (before[first + 1 :] - after[first + 1 :]).abs().max() > 1e-5
            if known == first:
                assert (before[first] - after[first]).abs().max() > 1e-5


def test_the_first_event_is_predicted_without_its_time(make_model: Model, one_history: Histories) -> None:
    """What came before a segment is not part of it: nothing to count the time from."""
    for settings in COMBINATIONS:
        model = with_biases(make_model(**settings))
        early = predictions(model, one_history([1, 2], [1, 1], [1, 1], [5, 1000]))
        late = predictions(model, one_history([1, 2], [1, 1], [1, 1], [10**14, 10**14 + 995]))
        assert torch.allclose(early, late, atol=1e-6)  # a shift of all times changes nothing either


def test_a_request_dated_before_the_newest_event_is_asked_at_that_event(
    make_model: Model, one_history: Histories
) -> None:
    for settings in COMBINATIONS:
        model = with_biases(make_model(**settings))
        vectors = [model.encode_users(one_history(**EVENTS, since_last=since)) for since in (0.0, -1.0, -(10.0**9))]
        assert all(torch.equal(vector, vectors[0]) for vector in vectors)


@pytest.mark.parametrize("settings", COMBINATIONS, ids=named)
def test_company_changes_nothing_whatever_the_backbone(
    make_model: Model, make_histories: Histories, one_history: Histories, settings: dict[str, object]
) -> None:
    model = with_biases(make_model(**settings))
    batch = make_histories([3, 0, 10, 1])
    since = torch.tensor([5.0, -1.0, 0.25, 10.0**7])
    together = model.encode_users(dataclasses.replace(batch, request={"since_last": since})).detach()
    assert torch.isfinite(together).all()
    columns = (batch.item_ids[batch.items], batch.actions, batch.surfaces, batch.times_ms)
    for row in range(batch.num_rows):
        events = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        alone = one_history(*(column[events].tolist() for column in columns), since_last=float(since[row]))
        assert torch.allclose(model.encode_users(alone)[0], together[row], atol=1e-5)


def test_an_empty_history_has_a_vector_of_its_own(make_model: Model, one_history: Histories) -> None:
    model = make_model()
    scores = model.scores(asked(one_history([], [], [], []), range(5)))
    assert scores.shape == (5,)
    assert torch.isfinite(scores).all()
    assert scores.detach().std() > 0


def test_vectors_are_unit_and_scores_cosines_over_temperature(make_model: Model, make_histories: Histories) -> None:
    model = make_model(loss={"initial_temperature": 0.5})
    batch = make_histories([4, 2])
    users, items = model.encode_users(batch), model.encode_items(batch.item_rows)
    for vectors in (users, items):
        assert torch.allclose(vectors.norm(dim=-1), torch.ones(len(vectors)), atol=1e-5)
    one = asked(make_histories([4]), range(5))
    cosines = model.encode_items(one.candidate_rows()) @ model.encode_users(one.histories)[0]
    assert torch.allclose(model.scores(one), cosines / 0.5, atol=1e-5)
    with torch.no_grad():
        model.log_inverse_temperature.fill_(50.0)
    assert float(model.scores(one).detach().abs().max()) <= MAX_INVERSE_TEMPERATURE * 1.0001


def asked(histories: SequenceBatch, items: Iterable[int]) -> RequestBatch:
    """The request of one history, with these candidates."""
    ids = np.union1d(histories.item_ids.numpy(), np.array([*items]))
    places = torch.from_numpy(ids.searchsorted(histories.item_ids.numpy()))
    candidates = torch.from_numpy(ids.searchsorted(np.array([*items])))
    rows = item_rows(ids, HashConfig(num_hashes=3, num_rows=32))
    whole = dataclasses.replace(
        histories, items=places[histories.items], item_ids=torch.from_numpy(ids), item_rows=rows
    )
    none = torch.zeros(len(candidates), dtype=torch.int64)
    return RequestBatch(whole, torch.zeros(1), none, candidates, none, none.float(), {}, {}, {})


def losses_one_by_one(
    model: PinFM, batch: SequenceBatch, one_history: Histories, request: Callable[[int], dict[str, float]]
) -> list[float]:
    """The loss of every positive event from `encode_users` of what came before it and the request at that event.

    With `later_negatives` the positives among what came before are no negatives.
    """
    items = batch.item_ids[batch.items]
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths()).tolist()
    losses = []
    candidates = model.encode_items(batch.item_rows)
    counts = torch.bincount(batch.items[batch.is_positive], minlength=len(batch.item_ids)).float()
    for event in batch.is_positive.nonzero().squeeze(1).tolist():
        past = slice(int(batch.offsets[rows[event]]), event)
        columns = (items, batch.actions, batch.surfaces, batch.times_ms)
        user = model.encode_users(one_history(*(column[past].tolist() for column in columns), **request(event)))
        logits = candidates @ user[0] * model.log_inverse_temperature.exp()
        target = int(batch.items[event])
        weights = counts.clone()
        if model.config.loss.later_negatives:
            weights[batch.items[past][batch.is_positive[past]]] = 0.0
        weights[target] = 1.0
        weighted = weights * logits.exp()
        losses.append(float((weighted.sum().log() - logits[target]).detach()))
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": {"correct_popularity": False, "mask_same_user": False}},
        {"loss": {"correct_popularity": False, "later_negatives": True}},
        {"loss": {"correct_popularity": False, "mask_same_user": False}, "maps": "residual", "width": 12},
    ],
    ids=["plain", "later", "residual"],
)
def test_the_loss_predicts_each_positive_from_what_came_before_it(
    make_model: Model, make_histories: Histories, one_history: Histories, settings: dict[str, object]
) -> None:
    """The vector that predicts event s is the one after s events: encode_users of the history cut there."""
    model = make_model(**settings)
    batch = make_histories([5, 4])
    losses = losses_one_by_one(model, batch, one_history, lambda _event: {})
    assert float(model.loss(batch).loss.detach()) == pytest.approx(float(np.mean(losses)), abs=1e-5)


def test_the_loss_reads_the_request_just_before_each_event(
    make_model: Model, make_histories: Histories, one_history: Histories
) -> None:
    """Training has features of the request per event, serving one value; both predict with the same vector."""
    loss = {"correct_popularity": False, "mask_same_user": False}
    model = make_model(loss=loss, request_features=("hour", "is_new"))
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


LOSSES = {
    "multi_token_weight": 0.5,
    "multi_token_window": 3,
    "multi_token_share": 1.0,
    "future_token_weight": 0.25,
    "future_token_anchor": 2,
    "future_token_window": 3,
}


@pytest.mark.parametrize("mask", [True, False])
def test_further_losses_are_added_with_their_weights(make_model: Model, make_histories: Histories, mask: bool) -> None:
    """Each is the mean over its own pairs, of the same vectors and negatives, with the request of the next event."""
    model = make_model(loss={**LOSSES, "mask_same_user": mask}, request_features=("hour",))
    batch = make_histories([5, 0, 4, 6], users=[1, 2, 3, 1])
    hours = torch.linspace(-2, 3, batch.num_events)
    batch = dataclasses.replace(batch, request={"hour": hours})
    hidden = model._hidden(batch, model.item_tables(batch.item_rows))
    next_hour = torch.zeros(len(hidden))
    for event, row in enumerate(row_of_event(batch).tolist()):
        next_hour[event + row] = hours[event]  # of the token before the event
    assert model.request is not None
    vectors = model.project_users(hidden + model.request(next_hour[:, None])) / 0.07
    parts = {
        "next_token": (1.0, next_token_pairs(batch)),
        "multi_token": (0.5, multi_token_pairs(batch, 3)),
        "future_token": (0.25, future_token_pairs(batch, 2, 3)),
    }
    own = same_user_items(batch) if mask else None
    weights = negative_log_weights(batch)
    output, total = model.loss(batch), 0.0
    for name, (weight, pairs) in parts.items():
        assert len(pairs) > 0
        items = model.encode_items(batch.item_rows)
        mean = float(info_nce(vectors, items, pairs, torch.ones(len(pairs)), weights, own)[1].mean())
        assert float(output.metrics[f"loss_{name}"]) == pytest.approx(mean, abs=1e-5)
        total += weight * mean
    assert float(output.loss.detach()) == pytest.approx(total, abs=1e-5)
    assert [name for name in make_model().loss(batch).metrics if name.startswith("loss")] == []


def test_a_batch_without_further_pairs_has_the_loss_of_the_next_events(
    make_model: Model, make_histories: Histories
) -> None:
    batch = make_histories([1, 0, 1, 2])
    batch.is_positive[-1] = False
    batch.is_positive[0] = True
    output = make_model(loss=LOSSES).loss(batch)
    assert float(output.loss.detach()) == pytest.approx(float(make_model().loss(batch).loss.detach()), abs=1e-6)
    assert (output.metrics["loss_multi_token"], output.metrics["loss_future_token"]) == (0.0, 0.0)
    output.loss.backward()


def test_negatives_come_from_where_the_config_says(make_model: Model, make_histories: Histories) -> None:
    batch = make_histories([5, 4])
    frequencies = ItemFrequencies.of(batch.item_ids[batch.items].numpy())
    catalogue = np.arange(-3, 40)
    more = UniformNegatives(catalogue, 10, HashConfig(num_hashes=3, num_rows=32), frequencies, seed=0).add(batch, 0)
    found = [
        float(make_model(loss={"in_batch_negatives": in_batch}).loss(given).loss.detach())
        for in_batch, given in ((True, batch), (True, more), (False, more))
    ]
    assert len({round(loss, 4) for loss in found}) == 3
    with pytest.raises(ConfigError, match="in_batch_negatives is off"):
        make_model(loss={"in_batch_negatives": False}).loss(batch)


def test_streaming_frequencies_are_counted_in_training_only_and_belong_to_the_state(
    make_model: Model, make_histories: Histories
) -> None:
    model, batch = make_model(loss={"streaming_frequencies": True}), make_histories([6, 4])
    assert model.frequencies is not None
    keys = {name for name in model.state_dict() if name.startswith("frequencies.")}
    assert {"frequencies.step", "frequencies.last_seen", "frequencies.interval"} <= keys
    assert not any(name.startswith("frequencies.") for name, _ in model.named_parameters())

    def state() -> dict[str, Any]:
        return {name: model.state_dict()[name].tolist() for name in keys}

    fresh = state()
    model.loss(batch)
    model.encode_users(batch)
    assert state() == fresh  # in evaluation mode
    model.train()
    model.loss(batch)
    after = state()
    assert after["frequencies.step"] == 1
    model.loss(batch)
    assert state()["frequencies.step"] == 2
    expected = model.frequencies.log_expected(batch.item_rows)
    counts = positive_counts(batch)
    # Two steps with the same batch: what occurs is expected as often as it occurs, unless another shares its slots.
    assert (expected[counts > 0].exp() >= counts[counts > 0] * 0.999).all()
    model.eval()
    given = negative_log_weights(batch, log_expected_M=expected)
    assert torch.equal(model._log_weights(batch, model.prepare(batch).targets), given)
    again = make_model(loss={"streaming_frequencies": True})
    again.load_state_dict(model.state_dict())
    assert torch.equal(again._log_weights(batch, again.prepare(batch).targets), given)


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
    assert PinFMConfig(request_time=True).reads == (*columns, "history.gap", "since_last")
    assert PinFMConfig(backbone=BackboneConfig(time_bias=9)).reads == (*columns, "history.gap", "history.time")
    hstu = PinFMConfig(backbone=BackboneConfig(kind="hstu"), request_time=True, request_features=("hour",))
    assert hstu.reads == (*columns, "history.gap", "history.time", "since_last", "hour")


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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backbone": {"kind": "hstu"}, "request_time": True},
        {"backbone": {"kind": "sasrec"}},
        {"loss": {**LOSSES, "multi_token_share": 0.5}, "backbone": {"positions": "rotary", "time_bias": 8}},
        {"loss": {**LOSSES, "streaming_frequencies": True, "correct_popularity": True}},
    ],
    ids=["next", "hstu", "sasrec", "all losses", "streaming"],
)
def test_it_learns_one_batch_by_heart(make_model: Model, make_histories: Histories, settings: dict[str, Any]) -> None:
    loss = {"correct_popularity": False, **settings.get("loss", {})}
    model = make_model(**{"width": 32, **settings, "loss": loss}).train()
    torch.manual_seed(0)
    batch = make_histories([6, 6, 6, 6])
    # Four first events follow the same start token: no model can tell them apart.
    batch.is_positive[batch.offsets[:-1]] = False
    dense = [parameter for name, parameter in model.named_parameters() if name != "item_tables.weight"]
    optimizers = [torch.optim.Adam(dense, lr=1e-2), torch.optim.SparseAdam([model.item_tables.weight], lr=1e-2)]
    losses = []
    for _ in range(15 if settings else 40):
        loss = model.loss(batch).loss
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    # Several right answers for one token cannot all be certain; of the next events alone all can.
    assert losses[-1] < (0.8 if settings else 0.2) * losses[0]


@pytest.mark.parametrize("settings", [{}, *COMBINATIONS], ids=named)
def test_every_parameter_takes_part_in_the_loss(
    make_model: Model, make_histories: Histories, settings: dict[str, object]
) -> None:
    model = make_model(request_features=("hour", "age"), **settings)
    batch = make_histories([6, 6])
    request = {name: torch.linspace(-1, 1, batch.num_events) for name in ("hour", "age")}
    model.loss(dataclasses.replace(batch, request=request)).loss.backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == ["item_tables.weight"]  # its gradient waits elsewhere
    assert model.item_tables.pending_gradient().any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 0},
        {"backbone": {"num_heads": 3}},
        {"dropout": 1.0},
        {"num_time_buckets": 65},
        {"loss": {"initial_temperature": 0.001}},
        {"max_history": 0},
        {"tables": {"storage": "int8"}},
        {"tables": {"dim": 0}},
        {"tables": {"init_std": -0.1}},
        {"backbone": {"kind": "lstm"}},
        {"backbone": {"positions": "sinus"}},
        {"backbone": {"time_bias": 65}},
        {"request_time": True, "num_time_buckets": 0},
        {"loss": {"later_negatives": True, "mask_same_user": False}},
        {"maps": "linear"},
        {"maps": "residual", "width": 32},
        {"loss": {"multi_token_weight": -0.1}},
        {"loss": {"multi_token_window": 0}},
        {"loss": {"multi_token_share": 0.0}},
        {"loss": {"future_token_weight": -1.0}},
        {"loss": {"future_token_anchor": 0}},
        {"loss": {"future_token_anchor": 64, "future_token_weight": 1.0}},
    ],
)
def test_impossible_sizes_are_refused(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    path = f"model.{name}.{next(iter(value))}" if isinstance(value, dict) else f"model.{name}"
    with pytest.raises(ConfigError, match=path):
        from_dict(PinFMConfig, wrong)


def test_tables_that_do_not_fit_residual_maps_are_told_what_would() -> None:
    wide = TableConfig(num_hashes=8, dim=32)
    with pytest.raises(ConfigError, match=r"8 × 32") as caught:
        PinFMConfig(tables=wide, maps="residual", width=64)
    assert caught.value.fix.startswith("--set model.tables.dim=8,")
    assert PinFMConfig(tables=dataclasses.replace(wide, dim=8), maps="residual", width=64).maps == "residual"
    with pytest.raises(ConfigError) as caught:
        PinFMConfig(tables=wide, maps="residual", width=60)
    assert caught.value.fix == "--set model.maps=mlp", "no number of columns would fit"


def test_a_temperature_without_end_is_reported_not_raised(make_model: Model, make_histories: Histories) -> None:
    model = make_model()
    with torch.no_grad():
        model.log_inverse_temperature.fill_(-1e6)
    assert model.loss(make_histories([3, 2])).metrics["temperature"] == float("inf")


def test_the_temperature_comes_back_from_its_limit(make_model: Model, make_histories: Histories) -> None:
    """Beyond a clamp there would be no gradient: the temperature would stay at its lowest for ever."""
    model = make_model(loss={"initial_temperature": 0.01})
    model.train()
    batch = make_histories([6, 4, 5], users=[1, 2, 3])
    with torch.no_grad():
        model.log_inverse_temperature.add_(3.0)
    model.loss(batch).loss.backward()
    limit = math.log(MAX_INVERSE_TEMPERATURE)
    assert float(model.log_inverse_temperature.detach()) == pytest.approx(limit)
    assert model.log_inverse_temperature.grad is not None and float(model.log_inverse_temperature.grad) != 0.0


@pytest.mark.parametrize("off", ["correct_popularity", "in_batch_negatives"])
def test_frequencies_that_nothing_reads_are_refused(off: str) -> None:
    with pytest.raises(ConfigError, match="streaming_frequencies"):
        LossConfig(streaming_frequencies=True, **{off: False})
