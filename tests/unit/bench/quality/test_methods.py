"""Methods by name: whole configs, sized by the dataset, and overridden one by one."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from tackboard.bench.quality.data import BENCHES, DatasetFacts
from tackboard.bench.quality.methods import (
    INPUTS,
    METHODS,
    QUICK_RATE,
    MethodContext,
    check_overrides,
    config_of,
    find_method,
    newest_steps,
)
from tackboard.bench.quality.tuned import TUNED, Tuned
from tackboard.core.errors import ConfigError, UsageError
from tackboard.models.losses import LossConfig
from tackboard.models.sequential import SequentialConfig, SoftmaxConfig
from tackboard.train.config import config_from_json, config_to_json

LENGTHS = np.concatenate([np.full(3_000, 21), np.full(3_040, 400)])


def place_of(name: str = "ml-1m", *, num_items: int = 3_883, quick: bool = False) -> MethodContext:
    facts = DatasetFacts(Path("d"), num_items, num_items + 70, LENGTHS, ("a",), 0.4)
    return MethodContext(BENCHES[name], facts, f"{name}-file", quick)


FITTED = [method for method in METHODS.values() if method.build]


@pytest.mark.parametrize("method", FITTED, ids=lambda method: method.name)
@pytest.mark.parametrize("name", list(BENCHES))
@pytest.mark.parametrize("quick", [False, True])
def test_every_method_fits_every_dataset(method: object, name: str, quick: bool) -> None:
    place = place_of(name, quick=quick, num_items=505_840 if name == "kakao-brunch" else 3_000)
    config = config_of(method, place, seed=3)  # type: ignore[arg-type]
    assert config.seed == 3 and config.data.dataset == place.prepared
    assert config_from_json(config_to_json(config)) == config
    assert config.data.tokens_per_step >= 2 * config.data.max_length
    assert 4 <= config.training.steps / config.training.checkpoint_every <= 26 or quick
    drawn = (1_024 if quick else 16_384) if place.is_large else place.facts.num_items
    assert config.data.uniform_negatives == (0 if "published-" in method.name else drawn)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", FITTED, ids=lambda method: method.name)
def test_inputs_are_what_the_model_reads(method: object) -> None:
    reads = config_of(method, place_of(), seed=0).model.reads  # type: ignore[arg-type]
    inputs = INPUTS[method.inputs]  # type: ignore[attr-defined]
    assert ("history.action" in reads) == ("actions" in inputs)
    assert ("since_last" in reads) == ("request's time" in inputs)
    assert ("history.gap" in reads or "history.time" in reads) == ("times" in inputs)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("sasrec", ("sasrec", 2, 1, 50)), ("hstu", ("hstu", 2, 1, 50)), ("hstu-large", ("hstu", 8, 2, 50))],
)
def test_published_rivals_have_the_published_settings(name: str, sizes: tuple[str, int, int, int]) -> None:
    place = place_of()
    config = config_of(METHODS[name], place, seed=0)
    model = config.model
    assert isinstance(model, SequentialConfig)
    assert (model.backbone.kind, model.backbone.num_layers, model.backbone.num_heads, model.width) == sizes
    assert model.loss == SoftmaxConfig(kind="sampled", num_negatives=128, temperature=0.05)
    assert model.dropout == 0.2
    assert (model.tables.method, model.tables.num_rows, model.max_history) == ("modulo", 3_953, 200)
    optimizer = config.optimizer
    assert (optimizer.dense_learning_rate, optimizer.weight_decay) == (1e-3, 0.0)
    assert (optimizer.warmup_steps, optimizer.final_share) == (0, 1.0)
    assert (config.data.max_length, config.data.segments) == (200, "newest")
    # 6,040 users over 128 are 47.2 steps an epoch, 101 epochs.
    assert config.training.steps == round(101 * 6_040 / 128)
    per_step = place.facts.newest_tokens(200) / 6_040 * 128
    assert config.data.tokens_per_step - 200 == pytest.approx(per_step, abs=1)


@pytest.mark.parametrize("inputs", ["history", "request"])
@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
@pytest.mark.parametrize("name", list(BENCHES))
def test_a_fair_rival_has_all_of_pinfm_but_its_architecture(name: str, kind: str, inputs: str) -> None:
    place = place_of(name, num_items=505_840 if name == "kakao-brunch" else 3_000)
    ours = config_of(METHODS[f"pinfm-{inputs}"], place, seed=0)
    rival = config_of(METHODS[f"{kind}-fair-{inputs}"], place, seed=0)
    assert rival.data == ours.data and rival.data.segments == "all", "the same negatives, and all events"
    loss = {field.name: getattr(rival.model.loss, field.name) for field in dataclasses.fields(LossConfig)}
    assert LossConfig(**loss) == ours.model.loss and rival.model.loss.kind == "contrastive"
    assert (rival.model.width, rival.model.max_history) == (ours.model.width, ours.model.max_history)
    sizes = [(one.model.backbone.num_layers, one.model.backbone.num_heads) for one in (rival, ours)]
    assert sizes[0] == sizes[1] and rival.model.backbone.kind == kind
    rate = ours.optimizer.dense_learning_rate
    assert dataclasses.replace(rival.optimizer, dense_learning_rate=rate) == ours.optimizer, "the same schedule"


def test_pinfm_as_published_differs_from_the_recipe_in_what_the_publication_says() -> None:
    ours = config_of(METHODS["pinfm-history"], place_of(), seed=0)
    published = config_of(METHODS["pinfm-published-history"], place_of(), seed=0)
    loss, backbone = published.model.loss, published.model.backbone
    assert published.data == dataclasses.replace(ours.data, uniform_negatives=0)
    assert (loss.in_batch_negatives, loss.correct_popularity) == (True, False)
    assert (loss.mask_same_user, loss.later_negatives) == (True, False)
    assert (loss.multi_token_weight, loss.future_token_weight, loss.future_token_anchor) == (1.0, 1.0, 100)
    assert (backbone.kind, backbone.positions, published.model.maps) == ("gpt", "learned", "mlp")
    assert (published.model.width, published.model.tables) == (ours.model.width, ours.model.tables)
    assert published.optimizer == ours.optimizer and published.training == ours.training


def test_settings_that_were_chosen_are_applied_but_for_quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = METHODS["sasrec-wide-history"]
    config = config_of(wide, place_of(), seed=0)
    assert (config.training.steps, config.training.checkpoint_every) == (3_700, 309)
    assert (config.model.dropout, config.optimizer.dense_learning_rate) == (0.3, 1e-3)
    tried = config_of(wide, place_of(), 0, ["training.steps=9"], ["model.dropout=0.1", "training.steps=120"])
    assert (tried.model.dropout, tried.training.steps, tried.training.checkpoint_every) == (0.1, 9, 10)
    for method in FITTED:
        monkeypatch.setitem(TUNED, (method.family, "ml-1m"), Tuned(tries=1, settings=("model.dropout=0.125",)))
    found = {method.name: config_of(method, place_of(), 0).model.dropout for method in FITTED}
    assert {name for name, dropout in found.items() if dropout != 0.125} == {"sasrec", "hstu", "hstu-large"}
    quick = {config_of(method, place_of(quick=True), 0).model.dropout for method in FITTED}
    assert 0.125 not in quick
    rates = {config_of(method, place_of(quick=True), 0).optimizer.dense_learning_rate for method in FITTED}
    assert rates == {QUICK_RATE}


def test_steps_of_few_users_hold_a_quarter_of_them() -> None:
    facts = DatasetFacts(Path("d"), 30, 31, np.full(8, 12), ("a",), 0.0)
    tokens, steps = newest_steps(MethodContext(BENCHES["ml-1m"], facts, "d"), epochs=3)
    assert (tokens, steps) == (400, 12)


def test_overrides_are_for_all_or_for_one() -> None:
    place = place_of()
    overrides = ["training.steps=7", "pinfm-history:model.backbone.num_layers=3", "data.max_length=100"]
    ours = config_of(METHODS["pinfm-history"], place, 0, overrides)
    other = config_of(METHODS["sasrec-history"], place, 0, overrides)
    assert (ours.training.steps, ours.model.backbone.num_layers, ours.data.max_length) == (7, 3, 100)
    assert (other.training.steps, other.model.backbone.num_layers, other.data.max_length) == (7, 2, 100)
    with pytest.raises(ConfigError, match="training.step"):
        config_of(METHODS["pinfm-history"], place, 0, ["training.step=7"])
    with pytest.raises(UsageError, match="popularity fits nothing"):
        config_of(METHODS["popularity"], place, 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sasrek:model.width=1", r"names sasrek, which is not run\nmethods that are run: sasrec, hstu"),
        ("sasrek:model.width=1", r"did you mean sasrec\?"),
        ("pinfm-history:model.width=1", "add it to --methods: pinfm-history"),
        ("seed=5", "use --seeds"),
        ("hstu:seed=5", "use --seeds"),
        ("data.held_out=1", "the study says which event"),
        ('hstu:data.positive_actions=["rating_5"]', "judged on the same events"),
        ("data.dataset=other", "use --dataset"),
        ("data={}", "data.dataset cannot be set here"),
        ("training.device=cpu", "use --device"),
    ],
)
def test_overrides_that_would_do_nothing_or_harm(override: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        check_overrides([override], ["sasrec", "hstu"])
    assert re.search(words, str(error.value), re.DOTALL)
    check_overrides(["hstu:model.width=8", "training.steps=3"], ["sasrec", "hstu"])
    with pytest.raises(UsageError, match="no method that is run has settings"):
        check_overrides(["training.steps=3"], [])


def test_names() -> None:
    assert find_method("popularity").build is None
    with pytest.raises(UsageError, match=r"did you mean hstu-large\?"):
        find_method("hstu-larg")
    assert METHODS["sasrec-items"].reads_no_more_than(METHODS["pinfm-history"])
    assert not METHODS["hstu-large"].reads_no_more_than(METHODS["pinfm-history"])
    assert METHODS["hstu-large"].reads_no_more_than(METHODS["pinfm-request"])
    assert METHODS["pinfm-request"].reads == "items, actions, times, request's time"
