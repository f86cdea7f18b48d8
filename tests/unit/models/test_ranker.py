"""The small ranker: one encoding per request, a loss of known labels alone, and a pattern that it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tackboard.batch import RequestBatch
from tackboard.core.errors import ConfigError
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.interface import build_model, can_retrieve
from tackboard.models.ranker import HeadConfig, Ranker, RankerConfig
from tackboard.train.config import RunConfig
from tackboard.train.optimizers import OptimizerConfig, Optimizers
from tackboard.train.start import open_source

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def batch(ranker_config: Config) -> RequestBatch:
    config = ranker_config()
    found: RequestBatch = config.data.steps(open_source(config), config.model.tables, 0)[0]
    return found


def make(ranker_config: Config, *settings: str) -> Ranker:
    torch.manual_seed(1)
    vocabulary = Vocabulary(actions=("click", "hide", "save", "share"), surfaces=("home", "related", "search"))
    model = build_model(ranker_config(*settings).model, vocabulary)
    assert isinstance(model, Ranker)
    return model.eval()


@pytest.mark.parametrize("reads", ["outputs", "hidden"])
def test_a_candidate_scores_the_same_alone_and_among_others(
    ranker_config: Config, batch: RequestBatch, reads: str
) -> None:
    model = make(ranker_config, f"model.head.reads={reads}")
    with torch.no_grad():
        together = model.scores(batch)
        assert together.shape == (batch.num_candidates,)
        order = torch.randperm(batch.num_candidates).sort().values[::2]  # every other candidate of the same requests
        fewer = dataclasses.replace(batch, candidates=batch.candidates[order], request_of=batch.request_of[order])
        assert torch.allclose(model.scores(fewer), together[order], atol=1e-6)
    assert together.std() > 0


def test_a_history_is_encoded_once_however_many_candidates_it_has(ranker_config: Config, batch: RequestBatch) -> None:
    model, seen = make(ranker_config), []
    model.pinfm.decoder.register_forward_pre_hook(lambda _module, inputs: seen.append(len(inputs[0])))
    with torch.no_grad():
        model.scores(batch)
    assert seen == [batch.histories.num_events + batch.num_requests], "an event or a start token each"
    assert batch.num_candidates > 2 * batch.num_requests


def test_what_is_not_known_yet_teaches_nothing(ranker_config: Config, batch: RequestBatch) -> None:
    model = make(ranker_config)
    known = {"click": batch.known["click"].clone(), "save": batch.known["save"]}
    known["click"][::3] = False
    some = dataclasses.replace(batch, known=known)
    flipped = torch.where(known["click"], batch.labels["click"], 1.0 - batch.labels["click"])
    other = dataclasses.replace(some, labels={**batch.labels, "click": flipped})
    assert float(model.loss(some).loss.detach()) == float(model.loss(other).loss.detach())
    assert model.loss(some).weight == known["click"].sum(), "what is known of another action does not count"
    scores, labels = model.scores(batch).detach(), batch.labels["click"]
    losses = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")[known["click"]]
    assert float(model.loss(some).loss.detach()) == pytest.approx(float(losses.mean()), rel=1e-5)


def test_weights_weigh(ranker_config: Config, batch: RequestBatch) -> None:
    model = make(ranker_config)
    is_first = torch.arange(batch.num_candidates) == 0
    heavy = dataclasses.replace(batch, weights=torch.where(is_first, 1e6, 1.0))
    score, label = model.scores(batch)[:1].detach(), batch.labels["click"][:1]
    alone = torch.nn.functional.binary_cross_entropy_with_logits(score, label)
    assert float(model.loss(heavy).loss.detach()) == pytest.approx(float(alone), rel=1e-2)


def test_it_learns_what_is_wanted(ranker_config: Config, batch: RequestBatch) -> None:
    """Items with an odd id are clicked: after some steps nearly all are told apart."""
    model = make(ranker_config, "model.dropout=0.0").train()
    odd = (batch.histories.item_ids[batch.candidates] % 2).float()
    taught = dataclasses.replace(batch, labels={"click": odd}, known={"click": torch.ones_like(odd, dtype=torch.bool)})
    settings = OptimizerConfig(dense_learning_rate=0.02, warmup_steps=0, final_share=1.0)
    optimizers = Optimizers(model, settings, total_steps=40)
    for step in range(40):
        optimizers.prepare(step)
        model.loss(taught).loss.backward()
        optimizers.step()
    model.eval()
    with torch.no_grad():
        assert float(((model.scores(taught) > 0) == (odd > 0.5)).float().mean()) > 0.9


def test_the_label_is_named_or_the_only_one(ranker_config: Config, batch: RequestBatch) -> None:
    unnamed = make(ranker_config, "model.head.labels=[]")
    with pytest.raises(ConfigError, match="allowed: click, save"):
        unnamed.loss(batch)
    only = dataclasses.replace(batch, labels={"save": batch.labels["save"]}, known={"save": batch.known["save"]})
    named = make(ranker_config, 'model.head.labels=["save"]')
    assert float(unnamed.loss(only).loss.detach()) == float(named.loss(batch).loss.detach())


def test_a_ranker_scores_and_does_not_retrieve(ranker_config: Config) -> None:
    assert not can_retrieve(make(ranker_config))
    assert not ranker_config("model.loss.in_batch_negatives=false").model.needs_drawn_negatives


@pytest.mark.parametrize("wrong", [{"reads": "all"}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_impossible_heads_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model.head.{next(iter(wrong))}"):
        HeadConfig(**wrong)


def test_its_settings_are_those_of_the_model_inside(ranker_config: Config, tiny_config: Config) -> None:
    inside = tiny_config().model
    assert RankerConfig.on(inside, HeadConfig(labels=("click",))) == ranker_config().model
    assert ranker_config().model.tables == inside.tables


def test_requests_of_one_user_are_no_negatives_of_each_other(ranker_config: Config, batch: RequestBatch) -> None:
    """Several requests of a user share most of a history, so other rows of the batch hold what the user chose."""
    model = make(ranker_config, "model.extra_loss.next_token=1.0").train()
    histories = batch.histories
    own = model.prepare(batch).targets.next_token.own
    row_of_event = torch.repeat_interleave(torch.arange(batch.num_requests), histories.lengths())
    num_shared = 0
    for row in range(batch.num_requests):
        of_user = histories.users == histories.users[row]
        wanted = histories.items[histories.is_positive & of_user[row_of_event]]
        group = own.groups[row]
        assert sorted(own.items[own.offsets[group] : own.offsets[group + 1]].tolist()) == sorted(wanted.tolist())
        num_shared += int(of_user.sum()) > 1
    assert num_shared > 2, "the batch has users with several requests"

    # If all requests are of one user, the loss has no negative left.
    of_one = dataclasses.replace(
        batch, histories=dataclasses.replace(histories, users=torch.zeros_like(histories.users))
    )
    assert float(model.loss(of_one).metrics["loss_next_token"]) == pytest.approx(0.0, abs=1e-5)
    unmasked = make(ranker_config, "model.extra_loss.next_token=1.0", "model.loss.mask_same_user=false").train()
    assert float(unmasked.loss(of_one).metrics["loss_next_token"]) > 0.5
    assert float(model.loss(batch).metrics["loss_next_token"]) > 0.5


def test_the_card_says_what_a_score_is(ranker_config: Config, tiny_config: Config) -> None:
    both = 'model.head.labels=["click","save"]'
    assert "A score s is the log odds of click: 1 / (1 + e^-s)" in ranker_config().model.meaning_of_scores
    assert "Other heads: save." in ranker_config(both).model.meaning_of_scores
    weighted = ranker_config(both, 'model.head.utilities={"click": 0.5, "save": 2.0}').model.meaning_of_scores
    assert "A score is 0.5 × click + 2 × save, the weighted sum of predicted probabilities" in weighted
    assert "not probabilities" in tiny_config().model.meaning_of_scores


def test_labels_are_checked_without_a_batch(ranker_config: Config) -> None:
    config = ranker_config().model
    config.check_labels(("click", "save"))
    with pytest.raises(ConfigError, match="names 'click', which is not a label of the data") as caught:
        config.check_labels(("save",))
    assert caught.value.allowed == "allowed: save"
