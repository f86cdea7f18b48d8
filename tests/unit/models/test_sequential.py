"""The rivals: losses equal to plain ones, the same vectors in training and at a request, and able to learn."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tackboard.batch import HashConfig, RequestBatch, SequenceBatch, item_rows
from tackboard.batch.builder import make_batch
from tackboard.core.config import from_dict, to_dict
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.column import Column
from tackboard.features.types import FLOAT
from tackboard.models import sequential
from tackboard.models.backbone import BackboneConfig
from tackboard.models.description import describe_model, restore_config
from tackboard.models.interface import build_model
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.sequential import (
    SequentialConfig,
    SequentialModel,
    draw_negatives,
    hstu,
    hstu_large,
    sasrec,
)
from tackboard.models.tables import TableConfig
from tackboard.models.targets import TokenPlaces

VOCABULARY = Vocabulary(actions=("click", "hide", "save"), surfaces=("home", "search"))
NUM_ITEMS = 12
HASHING = HashConfig(num_hashes=1, num_rows=NUM_ITEMS, method="modulo")
Histories = Callable[..., SequenceBatch]
EVERYTHING = [
    {"kind": kind, "loss": {"kind": loss}, "use_actions": more, "use_time_gap": more, "use_request_time": more}
    | ({"request_vector": place} if more else {})
    for kind, loss, (more, place) in itertools.product(
        ("sasrec", "hstu", "gpt"),
        ("full", "mixed", "sampled", "contrastive"),
        ((False, ""), (True, "auto"), (True, "input"), (True, "output")),
    )
]


@pytest.fixture
def histories(make_history: Callable[..., Column]) -> Histories:
    """`histories(lengths, seed=0)`: of items 0 to 11, all of which are drawn; `request` is that of each event."""

    def make(lengths: list[int], seed: int = 0, items: list[int] | None = None) -> SequenceBatch:
        draw = np.random.default_rng(seed)
        num = sum(lengths)
        chosen = draw.integers(0, NUM_ITEMS, num) if items is None else np.array(items)
        times = np.cumsum(10 ** draw.uniform(2, 8, num)).astype(np.int64) + 1_000_000_000_000
        batch = make_batch(
            history=make_history(lengths, chosen, draw.integers(0, 4, num), draw.integers(0, 3, num), times),
            is_positive=draw.random(num) < 0.8,
            hashing=HASHING,
        )
        since = np.full(num, -1.0, dtype=np.float32)
        since[1:] = np.diff(times) / 1000
        whole = np.arange(NUM_ITEMS)
        return dataclasses.replace(
            batch,
            items=batch.item_ids[batch.items],
            item_ids=torch.from_numpy(whole),
            item_rows=item_rows(whole, HASHING),
            item_log_q=torch.full((NUM_ITEMS,), -math.log(NUM_ITEMS)),
            sampled=torch.from_numpy(whole),
            sample_rate=torch.ones(()),
            request={"since_last": torch.from_numpy(since)},
        )

    return make


def config_of(kind: str = "sasrec", **settings: Any) -> SequentialConfig:
    """A rival of width 8; its settings of `backbone` and `loss` are given as dictionaries."""
    special = {"ffn_width": 6} if kind == "sasrec" else {}
    is_contrastive = settings.get("loss", {}).get("kind") == "contrastive"
    parts = {
        "tables": {"num_rows": NUM_ITEMS} | settings.get("tables", {}),
        "backbone": {"kind": kind, "num_heads": 2} | special | settings.get("backbone", {}),
        "loss": settings.get("loss", {}) if is_contrastive else {"num_negatives": 4} | settings.get("loss", {}),
    }
    return from_dict(SequentialConfig, {"width": 8, "max_history": 9} | settings | parts, "model")


def model_of(**settings: Any) -> SequentialModel:
    """The model of `config_of` with parameters from one fixed seed, in evaluation mode."""
    torch.manual_seed(0)
    model = config_of(**settings).build(VOCABULARY).eval()
    with torch.no_grad():  # fresh items are so small that every effect would be lost in rounding
        model.items.weight.mul_(20)
    return model


def cut(batch: SequenceBatch, make_history: Callable[..., Column], first: int, end: int, since: float) -> SequenceBatch:
    """One history of the events from `first` to `end`, `since` seconds before a request."""
    columns = (batch.items, batch.actions, batch.surfaces, batch.times_ms)
    return make_batch(
        history=make_history([end - first], *(column[first:end].tolist() for column in columns)),
        request={"since_last": Column.of(FLOAT, [since])},
        hashing=HASHING,
    )


@pytest.mark.parametrize("settings", EVERYTHING, ids=lambda settings: "-".join(map(str, settings.values())))
def test_training_and_requests_use_the_same_vectors(
    monkeypatch: pytest.MonkeyPatch,
    histories: Histories,
    make_history: Callable[..., Column],
    settings: dict[str, object],
) -> None:
    """Of every prediction: what `encode_users` makes of the events before it and the time since the last of these."""
    model, batch = model_of(**settings), histories([5, 0, 1, 9])
    seen = []
    names = {"mixed": (model, "_mixed_loss"), "contrastive": (sequential, "loss_of_targets")}
    owner, name = names.get(model.config.loss.kind, (model, "_entropy_loss"))
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda hidden, *rest: seen.append(hidden) or plain(hidden, *rest))
    assert torch.isfinite(model.loss(batch).loss)
    row_of = torch.repeat_interleave(torch.arange(4), batch.lengths()).tolist()
    predicted = [
        event for event in batch.is_positive.nonzero().squeeze(1).tolist() if event > batch.offsets[row_of[event]]
    ]
    assert len(predicted) == len(seen[0]) > 5
    with torch.no_grad():
        for event, hidden in zip(predicted, seen[0], strict=True):
            since = float(batch.request["since_last"][event])
            alone = cut(batch, make_history, int(batch.offsets[row_of[event]]), event, since)
            assert torch.allclose(model.encode_users(alone)[0], hidden, atol=1e-5)
            if settings["use_request_time"]:
                later = cut(batch, make_history, int(batch.offsets[row_of[event]]), event, since * 50 + 1000)
                assert (model.encode_users(later)[0] - hidden).abs().max() > 1e-5


@pytest.mark.parametrize("tile_cells", [1 << 24, 30])
@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_full_loss_is_cross_entropy_over_the_catalogue(
    monkeypatch: pytest.MonkeyPatch, histories: Histories, kind: str, tile_cells: int
) -> None:
    monkeypatch.setattr(sequential, "BLOCK_CELLS", {"cpu": tile_cells})
    batch = histories([6, 4, 0, 1, 5])
    model, twin = model_of(kind=kind), model_of(kind=kind)
    loss = model.loss(batch).loss
    loss.backward()
    hidden = twin._hidden(batch, twin.items(batch.item_rows[:, 0]), None)
    firsts = {0, 6, 10, 11}
    events = [event for event in range(batch.num_events) if batch.is_positive[event] and event not in firsts]
    terms = []
    for event in events:
        logits = torch.stack([hidden[event - 1] @ twin.items.weight[item] for item in range(NUM_ITEMS)])
        terms.append(functional.cross_entropy(logits[None], batch.items[event][None]))
    expected = torch.stack(terms).mean()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, plain.grad, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("tile_cells", [1 << 24, 50])
def test_the_sampled_loss_equals_a_plain_loop_and_leaves_the_target_out(
    monkeypatch: pytest.MonkeyPatch, histories: Histories, tile_cells: int
) -> None:
    monkeypatch.setattr(sequential, "BLOCK_CELLS", {"cpu": tile_cells})
    batch = histories([6, 4], items=[1, 4, 7, 2, 4, 1, 7, 1, 3, 4])
    batch = dataclasses.replace(batch, sampled=torch.tensor([1, 4, 7]))  # most targets are among so few
    model = model_of(loss={"kind": "sampled", "num_negatives": 5, "temperature": 0.5})
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(
        sequential, "draw_negatives", lambda *arguments: drawn.append(draw_negatives(*arguments)) or drawn[0]
    )
    loss = float(model.loss(batch).loss.detach())
    hidden = model._hidden(batch, model.items(batch.item_rows[:, 0]), None).detach()
    items = functional.normalize(model.items.weight.detach(), dim=-1)
    events = [event for event in range(10) if batch.is_positive[event] and event not in (0, 6)]
    terms, collisions = [], 0
    for place, event in enumerate(events):
        target, user = int(batch.items[event]), functional.normalize(hidden[event - 1], dim=-1)
        negatives = [item for item in drawn[0][place].tolist() if item != target]
        collisions += 5 - len(negatives)
        logits = torch.stack([user @ items[item] / 0.5 for item in (target, *negatives)])
        terms.append(float(logits.logsumexp(0) - logits[0]))
    assert collisions > 0
    assert loss == pytest.approx(float(np.mean(terms)), abs=1e-5)


def test_the_mixed_loss_weights_every_item_by_how_often_it_is_there(histories: Histories) -> None:
    batch = histories([6, 4, 5])
    shares = torch.linspace(1, 2, NUM_ITEMS) / 18
    batch = dataclasses.replace(
        batch, sampled=torch.tensor([0, 3, 5]), sample_rate=torch.tensor(0.25), item_log_q=shares.log()
    )
    model = model_of(loss={"kind": "mixed"})
    hidden = model._hidden(batch, model.items(batch.item_rows[:, 0]), None).detach()
    items, positives = model.items.weight.detach(), batch.items[batch.is_positive].tolist()
    terms = []
    for event in range(batch.num_events):
        if not batch.is_positive[event] or event in (0, 6, 10):
            continue
        target = int(batch.items[event])
        total = own = math.exp(float(hidden[event - 1] @ items[target]))
        for item in set(range(NUM_ITEMS)) - {target}:
            there = positives.count(item) + (item in (0, 3, 5))
            expected = len(positives) * float(shares[item]) + 0.25
            total += there / expected * math.exp(float(hidden[event - 1] @ items[item]))
        terms.append(-math.log(own / total))
    assert len(terms) > 5
    assert float(model.loss(batch).loss.detach()) == pytest.approx(float(np.mean(terms)), abs=1e-5)


CONTRASTIVE: list[dict[str, Any]] = [
    {},
    {"correct_popularity": False, "initial_temperature": 0.5},
    {"in_batch_negatives": False},
    {"in_batch_negatives": False, "later_negatives": True},
    {"mask_same_user": False},
    {"future_token_weight": 2.0, "future_token_anchor": 2, "future_token_window": 3},
]


@pytest.mark.parametrize("settings", CONTRASTIVE, ids=lambda settings: "-".join(settings))
@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_contrastive_loss_is_pinfm_s_loss_of_the_same_vectors(
    monkeypatch: pytest.MonkeyPatch, histories: Histories, kind: str, settings: dict[str, Any]
) -> None:
    """A PinFM whose hidden vectors and items are those of the rival has the same loss, and hands back its gradients."""
    batch = with_two_users(histories([6, 4, 0, 1, 5]))
    # PinFM also predicts the first event of a row, from its start token. Here these events are no positives.
    is_positive = batch.is_positive.clone()
    is_positive[batch.offsets[:-1][batch.lengths() > 0]] = False
    batch = dataclasses.replace(batch, is_positive=is_positive)
    model, twin = (model_of(kind=kind, loss={"kind": "contrastive"} | settings) for _ in range(2))
    ours = model.loss(batch)
    ours.loss.backward()

    tables = TableConfig(num_hashes=1, num_rows=NUM_ITEMS, method="modulo", dim=8)
    pinfm = PinFMConfig(tables=tables, width=8, max_history=9, loss=LossConfig(**settings)).build(VOCABULARY).eval()
    items = twin.items(batch.item_rows[:, 0])
    hidden = twin._hidden(batch, items, None)
    places = TokenPlaces.of(batch)
    tokens = hidden.new_zeros(places.num_tokens, 8).index_copy(0, places.before + 1, hidden)
    monkeypatch.setattr(pinfm, "_hidden", lambda *_: tokens)
    monkeypatch.setattr(pinfm, "project_users", lambda vectors: functional.normalize(vectors, dim=-1))
    monkeypatch.setattr(pinfm, "project_items", lambda _: functional.normalize(items, dim=-1))
    theirs = pinfm.loss(batch)
    theirs.loss.backward()
    assert float(ours.loss.detach()) == pytest.approx(float(theirs.loss.detach()), abs=1e-6)
    assert ours.metrics.keys() == theirs.metrics.keys()
    assert model.log_inverse_temperature is not None and twin.log_inverse_temperature is not None
    gradient = pinfm.log_inverse_temperature.grad
    assert torch.allclose(model.log_inverse_temperature.grad, gradient, atol=1e-6)  # type: ignore[arg-type]
    twin.log_inverse_temperature.grad = gradient
    for name, parameter in model.named_parameters():
        other = dict(twin.named_parameters())[name].grad
        assert parameter.grad is not None and other is not None, name
        assert torch.allclose(parameter.grad, other, atol=1e-6), name


@pytest.mark.parametrize("mask", ["none", "own", "earlier"])
def test_masks_and_further_targets_of_the_contrastive_loss_equal_a_plain_loop(histories: Histories, mask: str) -> None:
    """Each positive is predicted from the one to three events before it, but never from before a row's first event."""
    batch = with_two_users(histories([6, 4, 5]))
    settings = {
        "kind": "contrastive",
        "in_batch_negatives": False,
        "multi_token_weight": 0.5,
        "multi_token_window": 3,
        "multi_token_share": 1.0,
        "mask_same_user": mask != "none",
        "later_negatives": mask == "earlier",
    }
    model = model_of(loss=settings)
    hidden = model._hidden(batch, model.items(batch.item_rows[:, 0]), None).detach()
    users, items = (functional.normalize(x, dim=-1) for x in (hidden, model.items.weight.detach()))
    row_of = torch.repeat_interleave(torch.arange(3), batch.lengths()).tolist()
    positives = batch.is_positive.nonzero().squeeze(1).tolist()
    terms: dict[int, list[float]] = {1: [], 2: []}
    for event, back in itertools.product(positives, (1, 2, 3)):
        row, token = row_of[event], event - back
        if token < batch.offsets[row]:
            continue
        out = {
            "none": [],
            "own": [one for one in positives if batch.users[row_of[one]] == batch.users[row]],
            "earlier": [one for one in positives if row_of[one] == row and one <= token],
        }[mask]
        target = int(batch.items[event])
        negatives = set(range(NUM_ITEMS)) - {int(batch.items[one]) for one in out} - {target}
        logits = torch.stack([users[token] @ items[item] / 0.07 for item in (target, *sorted(negatives))])
        terms[min(back, 2)].append(float(logits.logsumexp(0) - logits[0]))
    expected = float(np.mean(terms[1])) + 0.5 * float(np.mean(terms[2]))
    output = model.loss(batch)
    assert float(output.loss.detach()) == pytest.approx(expected, abs=1e-5)
    assert output.weight is not None and int(output.weight) == len(terms[1]) < len(positives)
    assert float(output.metrics["temperature"]) == pytest.approx(0.07)
    prepared = model.prepare(batch)
    assert torch.equal(model.loss(prepared).loss, output.loss), "prepared before or not"


def with_two_users(batch: SequenceBatch) -> SequenceBatch:
    """The same rows; the first and the last are of one user."""
    users = torch.arange(batch.num_rows)
    users[-1] = 0
    return dataclasses.replace(batch, users=users)


def test_negatives_are_uniform_over_what_was_drawn() -> None:
    torch.manual_seed(0)
    drawn = draw_negatives(torch.tensor([2, 5, 9]), 1000, 30)
    counts = torch.bincount(drawn.flatten(), minlength=10)
    assert counts.nonzero().squeeze(1).tolist() == [2, 5, 9]
    assert (counts[[2, 5, 9]] - 10_000).abs().max() < 500


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
@pytest.mark.parametrize("loss", ["full", "mixed", "sampled", "contrastive"])
def test_an_empty_history_is_the_vector_zero(histories: Histories, kind: str, loss: str) -> None:
    model = model_of(kind=kind, loss={"kind": loss}, use_request_time=True)
    for lengths in ([0, 3, 0], [0, 0], []):
        batch = dataclasses.replace(histories(lengths), request={"since_last": torch.full((len(lengths),), 5.0)})
        users = model.encode_users(batch)
        assert users.shape == (len(lengths), 8)
        assert (users.detach().abs().amax(dim=1) > 0).tolist() == [length > 0 for length in lengths]
        assert torch.isfinite(users @ model.encode_items(batch.item_rows).T).all()


def test_scores_are_products_or_cosines_over_temperature(histories: Histories) -> None:
    batch = histories([4, 2])
    model = model_of()
    users, items = model.encode_users(batch), model.encode_items(batch.item_rows)
    assert torch.equal(items, model.items.weight)
    candidates = torch.tensor([2, 0, 1])
    none = torch.zeros(3, dtype=torch.int64)
    owners = torch.tensor([0, 1, 1])
    request = RequestBatch(batch, torch.zeros(2), owners, candidates, none, none.float(), {}, {}, {})
    assert torch.allclose(model.scores(request), (users @ items.T)[owners, candidates])
    learned = model_of(loss={"kind": "contrastive", "initial_temperature": 0.2})
    cosines = learned.encode_users(batch) @ learned.encode_items(batch.item_rows).T
    assert torch.allclose(learned.scores(request), 5 * cosines[owners, candidates], atol=1e-5)
    model = model_of(loss={"kind": "sampled", "temperature": 0.1})
    users, items = model.encode_users(batch), model.encode_items(batch.item_rows)
    assert torch.allclose(items.norm(dim=1), torch.ones(NUM_ITEMS), atol=1e-5)
    assert torch.allclose(model.scores(request), 10 * (users @ items.T)[owners, candidates], atol=1e-5)


def test_a_batch_in_which_nothing_is_predicted_has_loss_zero(histories: Histories) -> None:
    for kind in ("full", "contrastive"):
        loss = model_of(loss={"kind": kind}).loss(histories([1, 0, 1])).loss
        loss.backward()
        assert float(loss.detach()) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "sasrec", "loss": {"kind": "full"}},
        {"kind": "sasrec", "loss": {"kind": "sampled", "num_negatives": 8}},
        {"kind": "sasrec", "loss": {"kind": "contrastive", "mask_same_user": False}},
        {"kind": "hstu", "loss": {"kind": "full"}, "use_request_time": True},
        {"kind": "hstu", "loss": {"kind": "contrastive", "mask_same_user": False}, "use_request_time": True},
        {"kind": "hstu", "loss": {"kind": "sampled", "num_negatives": 8}, "use_actions": True, "use_time_gap": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_learns_a_pattern(histories: Histories, settings: dict[str, object]) -> None:
    """Item i is followed by 5i + 1: after some steps the last item of every row has the first rank."""
    rows = []
    for first in range(6):
        rows.append([first])
        while len(rows[-1]) < 7:
            rows[-1].append((5 * rows[-1][-1] + 1) % NUM_ITEMS)
    batch = histories([7] * 6, items=[*itertools.chain(*rows)])
    batch = dataclasses.replace(batch, is_positive=torch.ones(42, dtype=torch.bool))
    model = model_of(width=16, dropout=0.0, **settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    torch.manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch).loss.backward()
        optimizer.step()
    model.eval()
    known = histories([6] * 6, items=[item for row in rows for item in row[:6]])
    known = dataclasses.replace(known, request={"since_last": torch.full((6,), 60.0)})
    with torch.no_grad():
        best = (model.encode_users(known) @ model.encode_items(batch.item_rows).T).argmax(dim=1)
    assert best.tolist() == [row[6] for row in rows]


def test_losses_without_the_items_they_need_are_refused(histories: Histories) -> None:
    batch = histories([4, 3])
    some = dataclasses.replace(batch, sampled=torch.arange(5), sample_rate=torch.tensor(0.4))
    none = dataclasses.replace(batch, sampled=torch.arange(0), sample_rate=torch.zeros(()))
    with pytest.raises(ConfigError, match="only 5 items were drawn"):
        model_of().loss(some)
    with pytest.raises(ConfigError, match="5 items were drawn"):
        model_of().loss(dataclasses.replace(some, item_rows=batch.item_rows[:5], items=batch.items % 5))
    assert torch.isfinite(model_of(loss={"kind": "sampled"}).loss(some).loss)
    assert torch.isfinite(model_of(loss={"kind": "mixed"}).loss(some).loss)
    assert torch.isfinite(model_of(loss={"kind": "mixed"}).loss(none).loss), "those of the batch are left"
    with pytest.raises(ConfigError, match="no item was drawn"):
        model_of(loss={"kind": "sampled"}).loss(none)
    with pytest.raises(DataError, match="a row has 10 tokens"):
        model_of().loss(histories([10]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tables": {"num_hashes": 2}}, "num_hashes = 2"),
        ({"tables": {"dim": 8}}, "set model.width"),
        ({"tables": {"storage": "fp16"}}, "model.tables.storage"),
        ({"tables": {"init_std": 0.0}}, "model.tables.init_std"),
        ({"kind": "gru"}, "model.backbone.kind"),
        ({"loss": {"kind": "bce"}}, "model.loss.kind"),
        ({"backbone": {"num_heads": 3}}, "a divisor of width 8"),
        ({"backbone": {"head_width": 4}}, "0 with sasrec"),
        ({"backbone": {"positions": "none"}}, "model.backbone.positions"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"use_request_time": True, "request_vector": "none"}, "SASRec has no time bias"),
        ({"loss": {"num_negatives": 0}}, "model.loss.num_negatives"),
        ({"loss": {"later_negatives": True}}, "False with full, which does not read it"),
        ({"loss": {"kind": "sampled", "multi_token_weight": 0.1}}, "0.0 with sampled"),
        ({"loss": {"kind": "contrastive", "num_negatives": 4}}, "128 with contrastive"),
        ({"loss": {"kind": "contrastive", "temperature": 0.1}}, "0.05 with contrastive"),
        ({"loss": {"kind": "contrastive", "streaming_frequencies": True}}, "because rivals count the dataset"),
        ({"loss": {"kind": "contrastive", "future_token_weight": 1.0}}, "below max_history 9"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)


def test_hashed_tables_are_no_plain_one() -> None:
    with pytest.raises(ConfigError, match="a PlainTableConfig"):
        SequentialConfig(tables=TableConfig())  # type: ignore[arg-type]


def test_published_sizes_and_what_they_read() -> None:
    assert sasrec(3953).reads == ("history.item",)
    assert hstu(3953).reads == hstu_large(3953).reads == ("history.item", "history.time", "since_last")
    assert hstu(3953, use_request_time=False).reads == ("history.item", "history.time")
    both = sasrec(3953, use_actions=True, use_request_time=True, request_vector="input", loss={"kind": "full"})
    assert both.reads == ("history.item", "history.action", "history.gap", "since_last")
    assert both.backbone == BackboneConfig(kind="sasrec", num_layers=2, num_heads=1, ffn_width=50)
    assert (both.width, both.loss.kind) == (50, "full")
    large = hstu_large(3953)
    assert large.backbone == BackboneConfig(kind="hstu", num_layers=8, num_heads=2, head_width=25)
    assert large.loss.temperature == 0.05
    fair = hstu(100, loss={"kind": "contrastive", "in_batch_negatives": False, "later_negatives": True})
    assert fair.needs_drawn_negatives and not sasrec(9, loss={"kind": "contrastive"}).needs_drawn_negatives
    for config in (sasrec(100), hstu(100), large, both, fair):
        build_model(config, VOCABULARY)
        assert restore_config(describe_model(config)) == config
        assert from_dict(SequentialConfig, to_dict(config)) == config
    layer = hstu(100).build(VOCABULARY).backbone.layers[0]  # type: ignore[index]
    assert tuple(layer.uvqk.weight.shape) == (200, 50)
