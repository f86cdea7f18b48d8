"""Every way in which PinFM enters the ranker: equal to its plain twin, trainable, and defined for odd requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import RequestBatch
from tackboard.batch.builder import make_request
from tackboard.core.config import apply_overrides
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.column import Column
from tackboard.features.types import FLOAT, FeatureType
from tackboard.models.backbone import BackboneConfig
from tackboard.models.fusion import FusionConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import ExtraLossConfig, HeadConfig, Ranker, RankerConfig
from tackboard.models.recent_events import RecentEventsConfig
from tackboard.train.config import RunConfig
from tackboard.train.start import open_source

Config = Callable[..., RunConfig]
VOCABULARY = Vocabulary(actions=("click", "hide", "save", "share"), surfaces=("home", "related", "search"))
EARLY = FusionConfig(kind="early")
CONTENT = FusionConfig(kind="early", content="content", content_width=3, learnable_token=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "late-last": {"fusion": FusionConfig(kind="late-last")},
    "late-mean": {"fusion": FusionConfig(kind="late-mean")},
    "early": {"fusion": EARLY},
    "learnable token": {"fusion": dataclasses.replace(EARLY, learnable_token=True)},
    "content and token": {"fusion": CONTENT},
    "none, recent events": {
        "fusion": FusionConfig(kind="none"),
        "recent": RecentEventsConfig(num_events=5, width=8),
    },
    "early, recent events": {"fusion": EARLY, "recent": RecentEventsConfig(num_events=5, width=8)},
}


@pytest.fixture(scope="module")
def batch(ranker_config: Config) -> RequestBatch:
    config = ranker_config()
    found: RequestBatch = config.data.steps(open_source(config), config.model.tables, 0)[0]
    torch.manual_seed(4)
    content = torch.randn(found.num_candidates, 3)
    content[::5] = 0.0  # items without features
    ages = torch.randint(-1, 60, (found.num_candidates,)).float()
    times = torch.randint(0, 10**8, (found.histories.num_events,)).sort().values
    histories = dataclasses.replace(found.histories, columns={**found.histories.columns, "time": times})
    return dataclasses.replace(found, histories=histories, features={"content": content, "age_days": ages})


def base(**changes: Any) -> PinFMConfig:
    from tackboard.models.tables import TableConfig

    tables = TableConfig(num_hashes=2, num_rows=64, dim=8)
    return PinFMConfig(tables=tables, width=16, max_history=10, **changes)


def make(pinfm: PinFMConfig, variant: str, *overrides: str, **parts: Any) -> Ranker:
    head = HeadConfig(labels=("click", "save"), num_cross_layers=2, dropout=0.0)
    config = RankerConfig.on(pinfm, head, **{**VARIANTS[variant], **parts})
    torch.manual_seed(2)
    model = apply_overrides(config, overrides).build(VOCABULARY)
    for name, parameter in model.named_parameters():
        if "time_bias" in name:
            torch.nn.init.normal_(parameter)
    return model


BACKBONES = {
    "gpt": BackboneConfig(num_layers=2, num_heads=2),
    "gpt rotary, time": BackboneConfig(num_layers=2, num_heads=2, positions="rotary", time_bias=8),
    "hstu": BackboneConfig(kind="hstu", num_layers=2, num_heads=2, head_width=8, positions="none"),
}


@pytest.mark.parametrize("variant", ["early", "learnable token", "content and token"])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("request_time", [False, True])
def test_dcat_equals_appended_candidates(batch: RequestBatch, variant: str, backbone: str, request_time: bool) -> None:
    if request_time:
        since = torch.arange(batch.num_requests).float() * 1000
        histories = dataclasses.replace(batch.histories, request={**batch.histories.request, "since_last": since})
        batch = dataclasses.replace(batch, histories=histories)
    settings = {"backbone": BACKBONES[backbone], "request_time": request_time}
    crossed = make(base(**settings), variant, "extra_loss.next_token=0.5").train()
    appended = make(base(**settings), variant, "extra_loss.next_token=0.5", "fusion.dcat=false").train()
    outcomes = []
    for model in (crossed, appended):
        result = model.loss(batch)
        result.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients["tables"] = model.tables.pending_gradient()
        outcomes.append((model.scores(batch).detach(), result.loss.detach(), gradients))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=1e-5, atol=1e-6)
    assert outcomes[0][2].keys() == outcomes[1][2].keys()
    for name, found in outcomes[0][2].items():
        expected = outcomes[1][2][name]
        assert (found - expected).abs().max() <= 2e-4 * expected.abs().max() + 1e-6, name


def test_what_was_prepared_moves_with_the_batch(batch: RequestBatch) -> None:
    model = make(base(), "early", "cold_start.random_id_share=0.5", "extra_loss.next_token=0.5")
    layouts = model.prepare(batch).to(torch.device("meta")).targets.layouts
    assert layouts.rows.cells.is_meta
    assert layouts.crossing.cells.is_meta and layouts.crossing.first_visible.is_meta


def test_the_next_token_loss_is_the_same_beside_candidates(batch: RequestBatch) -> None:
    losses = []
    for variant in ("late-last", "early", "learnable token"):
        model = make(base(), variant, "extra_loss.next_token=1.0").train()
        losses.append(float(model.loss(batch).metrics["loss_next_token"]))
    plain = make(base(), "late-last").pinfm.train()
    with_token_of_each = plain.loss(batch.histories).loss.item()
    assert losses == pytest.approx([with_token_of_each] * 3, rel=1e-5)


@pytest.mark.parametrize("variant", ["late-last", "early", "learnable token"])
def test_validation_has_the_next_token_loss_too(batch: RequestBatch, variant: str) -> None:
    model = make(base(), variant, "extra_loss.next_token=0.5")
    assert model.training
    trained = model.loss(batch)
    with torch.no_grad():
        judged = model.eval().loss(batch)
    torch.testing.assert_close(judged, trained)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns(batch: RequestBatch, variant: str) -> None:
    """Candidates with an odd id are clicked, those with an even id are saved."""
    from tackboard.train.optimizers import OptimizerConfig, Optimizers

    model = make(base(), variant).train()
    odd = (batch.histories.item_ids[batch.candidates] % 2).float()
    known = torch.ones_like(odd, dtype=torch.bool)
    labels = {"click": odd, "save": 1.0 - odd}
    taught = dataclasses.replace(batch, labels=labels, known={"click": known, "save": known})
    optimizers = Optimizers(model, OptimizerConfig(dense_learning_rate=0.02, warmup_steps=0, final_share=1.0), 60)
    for step in range(60):
        optimizers.prepare(step)
        model.loss(taught).loss.backward()
        optimizers.step()
    model.eval()
    with torch.no_grad():
        by_action = model.scores_by_action(taught)
        assert torch.equal(model.scores(taught), by_action["click"])
        for name, scores in by_action.items():
            assert float(((scores > 0) == (labels[name] > 0.5)).float().mean()) > 0.9, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_candidate_scores_the_same_alone_and_among_others(batch: RequestBatch, variant: str) -> None:
    model = make(base(), variant).eval()
    with torch.no_grad():
        together = model.scores(batch)
        assert together.std() > 0
        some = torch.arange(0, batch.num_candidates, 3)
        features = {name: values[some] for name, values in batch.features.items()}
        fewer = dataclasses.replace(
            batch, candidates=batch.candidates[some], request_of=batch.request_of[some], features=features
        )
        torch.testing.assert_close(model.scores(fewer), together[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_users_without_history_and_many_candidates(batch: RequestBatch, variant: str) -> None:
    model = make(base(), variant).eval()
    events = batch.histories
    empty = dataclasses.replace(
        events,
        offsets=torch.zeros(2, dtype=torch.int64),
        users=events.users[:1],
        items=events.items[:0],
        columns={name: values[:0] for name, values in events.columns.items()},
        is_positive=events.is_positive[:0],
    )
    number = 3_000
    items = torch.arange(number) % len(events.item_ids)
    request = dataclasses.replace(
        batch,
        histories=empty,
        request_ms=batch.request_ms[:1],
        request_of=torch.zeros(number, dtype=torch.int64),
        candidates=items,
        features={"content": torch.randn(number, 3), "age_days": torch.zeros(number)},
    )
    with torch.inference_mode():
        scores = model.scores(request)
        assert scores.shape == (number,)
        assert scores.isfinite().all()
        one = dataclasses.replace(
            request,
            request_of=request.request_of[:1],
            candidates=items[:1],
            features={name: values[:1] for name, values in request.features.items()},
        )
        torch.testing.assert_close(model.scores(one), scores[:1], rtol=1e-4, atol=1e-5)


def test_random_ids_and_young_items_change_training_only(batch: RequestBatch) -> None:
    settings = ("cold_start.random_id_share=0.5", "cold_start.age_feature=age_days")
    model = make(base(), "early", *settings)
    prepared = model.prepare(batch, torch.Generator().manual_seed(1))
    same = model.prepare(batch, torch.Generator().manual_seed(1))
    replaced = prepared.targets.replaced
    assert torch.equal(replaced, same.targets.replaced)
    assert 0.3 < len(replaced) / batch.num_candidates < 0.7
    assert prepared.targets.random_rows.shape == (len(replaced), 2)
    model.eval()
    plain = make(base(), "early").eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.scores(prepared), plain.scores(batch)), "scores know nothing of cold start"
    assert "age_days" in model.config.reads
    assert "age_days" not in model.config.serving().reads


def test_the_share_of_dropped_outputs_depends_on_age(batch: RequestBatch) -> None:
    model = make(base(), "early", "cold_start.age_feature=age_days").train()
    number = 6_000
    ages = torch.tensor([-1.0, 3.0, 10.0, 40.0]).repeat_interleave(number // 4)
    aged = dataclasses.replace(batch, features={"age_days": ages}, request_of=torch.zeros(number, dtype=torch.int64))
    dropped = model._dropped(aged, torch.ones(number, 4), seed=0)
    is_kept = (dropped[:, 0] > 0).view(4, -1).float().mean(dim=1)
    assert is_kept.tolist() == pytest.approx([0.3, 0.3, 0.5, 1.0], abs=0.05)
    assert dropped.view(4, -1).mean(dim=1).tolist() == pytest.approx([1.0] * 4, abs=0.1)
    assert ((dropped > 0).sum(dim=1) % 4 == 0).all(), "a candidate's outputs are dropped together"


def test_young_items_are_dropped_whether_or_not_their_id_is_random(batch: RequestBatch) -> None:
    """A trainer seeds the generator of `prepare` like torch's own generator, and the draws must differ all the same."""
    model = make(base(), "early", "cold_start.random_id_share=0.3", "cold_start.age_feature=age_days").train()
    young = dataclasses.replace(batch, features={"age_days": torch.zeros(batch.num_candidates)})
    kept: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    model.cross.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for step in range(40):
        seen: list[torch.Tensor] = []
        prepared = model.prepare(young, torch.Generator().manual_seed(step))
        torch.default_generator.manual_seed(step)
        with torch.no_grad():
            model.loss(prepared)
        is_random = torch.zeros(batch.num_candidates, dtype=torch.bool)
        is_random[prepared.targets.replaced] = True
        for group in kept:
            kept[group].append((seen[0] != 0).any(dim=1)[is_random == group])
    shares = {group: float(torch.cat(parts).float().mean()) for group, parts in kept.items()}
    assert shares == pytest.approx({True: 0.3, False: 0.3}, abs=0.06)


def test_extra_losses_are_logged_and_move_the_parameters(batch: RequestBatch) -> None:
    weights = ("next_token", "outputs", "agreement", "alignment")
    model = make(base(), "content and token", *(f"extra_loss.{name}=0.5" for name in weights)).train()
    result = model.loss(batch)
    result.loss.backward()
    assert set(result.metrics) == {f"loss_{name}" for name in weights}
    assert all(value.isfinite() for value in result.metrics.values())  # type: ignore[union-attr]
    for name in ("outputs_head.weight", "fusion.content.weight", "pinfm.log_inverse_temperature"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.abs().sum() > 0, name


def test_utilities_weigh_probabilities(batch: RequestBatch) -> None:
    model = make(base(), "late-last", 'head.utilities={"click": 1.0, "save": -2.0}').eval()
    with torch.no_grad():
        by_action = model.scores_by_action(batch)
        expected = by_action["click"].sigmoid() - 2.0 * by_action["save"].sigmoid()
        torch.testing.assert_close(model.scores(batch), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fusion": FusionConfig(kind="none")}, "none only with model.recent or model.features"),
        ({"fusion": {"kind": "middle"}}, "late-last"),
        ({"fusion": {"kind": "late-last", "learnable_token": True}}, "model.fusion.learnable_token"),
        ({"fusion": {"kind": "early", "content": "content"}}, "model.fusion.content_width"),
        ({"fusion": {"kind": "late-last", "anchor_stride": 2}}, "model.fusion.anchor_stride"),
        ({"fusion": {"kind": "early", "anchor_stride": 0}}, "model.fusion.anchor_stride"),
        (
            {"fusion": {"kind": "early", "anchor_stride": 9}, "max_history": 8, "num_positions": 11},
            "at most model.max_history = 8",
        ),
        (
            {"extra_loss": ExtraLossConfig(next_token=0.1), "loss": LossConfig(in_batch_negatives=False)},
            "next_token is 0.1, but model.loss.in_batch_negatives is off",
        ),
        ({"fusion": EARLY}, "max_history is 10; early fusion needs 2 of the 11 positions"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts = {name: FusionConfig(**value) if isinstance(value, dict) else value for name, value in changes.items()}
        dataclasses.replace(RankerConfig.on(base(), HeadConfig(labels=("click",))), **parts)


NUM_EVENTS = 8


def one_request(make_history: Callable[..., Column], number: int, late: int = NUM_EVENTS) -> RequestBatch:
    """A request after `number` of a user's events, a day later for each; from event `late` on, the events differ."""
    events = np.arange(number)
    items = np.where(events < late, (7 * events) % 11, 20 + events)
    times = np.cumsum(1000 * (1 + events**3)) + np.where(events < late, 0, 500_000)
    history = make_history([number], items, events % 4 + 1, events % 3 + 1, times)
    since = Column.of(FLOAT, [86_400.0 * number])
    content = Column.of(FeatureType("vector", width=3), np.random.default_rng(0).normal(size=(5, 3)).tolist())
    return make_request(
        history=history,
        candidates=np.arange(5),
        hashing=base().tables,
        request={"since_last": since},
        features={"content": content},
    )


@pytest.mark.parametrize("variant", ["early", "learnable token", "content and token", "early, recent events"])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("request_time", [False, True])
def test_a_kept_context_scores_as_a_new_one(
    make_history: Callable[..., Column], variant: str, backbone: str, request_time: bool
) -> None:
    """A user's history grows, and each request uses what the request before it has kept."""
    model = make(base(backbone=BACKBONES[backbone], request_time=request_time), variant, "fusion.fixed_length=6").eval()
    for parameter in model.pinfm.decoder.parameters():  # Fresh weights are so small that a wrong context would pass.
        torch.nn.init.normal_(parameter, std=0.4)
    with torch.inference_mode():
        kept = None
        for number in (1, 2, 3, 3, 7, NUM_EVENTS):
            request = one_request(make_history, number)
            scores, kept = model.scores_and_context(request, kept)
            assert kept.num_tokens == number
            torch.testing.assert_close(scores, model.scores(request), rtol=1e-4, atol=2e-5)
        # Two events in the middle turn out to be others: the start token and the first 3 events can still be used.
        late = one_request(make_history, NUM_EVENTS, late=3)
        assert kept is not None
        scores, _ = model.scores_and_context(late, kept.first(3))
        torch.testing.assert_close(scores, model.scores(late), rtol=1e-4, atol=2e-5)
        wrong, _ = model.scores_and_context(late, kept)
        assert (wrong - scores).abs().max() > 1e-4, "a wrong context would be seen"


@pytest.mark.parametrize(("variant", "override"), [("late-last", ""), ("none, recent events", ""), ("early", "false")])
def test_only_early_fusion_with_dcat_keeps_contexts(variant: str, override: str) -> None:
    assert make(base(), "early").can_keep_contexts
    assert not make(base(), variant, *([f"fusion.dcat={override}"] if override else [])).can_keep_contexts
