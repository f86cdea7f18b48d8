"""The run's config: it survives JSON, brings a user's model back, and refuses what cannot run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tackboard.core.config import apply_overrides
from tackboard.core.errors import ConfigError, UsageError
from tackboard.core.trusted_code import trust_code
from tackboard.core.user_code import load_code
from tackboard.core.vocabulary import Vocabulary
from tackboard.train.config import RunConfig, TrainingConfig, config_from_json, config_to_json, features_for

OWN_MODEL = """
import dataclasses
from torch import nn
from tackboard.models.interface import ModelConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(ModelConfig):
    depth: int = 1

    def build(self, vocabulary):
        return nn.Linear(self.depth, 1)
"""


def test_round_trip_through_json(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config("seed=5", "optimizer.weight_decay=0.25", "evaluation.cutoffs=[3]")
    data = json.loads(json.dumps(config_to_json(config)))
    assert data["model"]["config_class"] == "tackboard.models.pinfm:PinFMConfig"
    assert config_from_json(data) == config


def test_a_users_model_comes_back_from_its_file(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL)
    config = dataclasses.replace(tiny_config(), model=load_code(path).Mine(depth=7))
    assert config_from_json(config_to_json(config), path) == config
    with pytest.raises(UsageError, match="no record of training"):
        config_from_json(config_to_json(config))
    trust_code(path, config_to_json(config)["model"]["code_sha256"])
    assert config_from_json(config_to_json(config)) == config


def test_settings_of_a_users_model_can_be_overridden(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN_MODEL)
    config = dataclasses.replace(tiny_config(), model=load_code(path).Mine())
    assert apply_overrides(config, ["model.depth=3", "model.tables.num_rows=9"]).model.depth == 3
    with pytest.raises(ConfigError, match=r"did you mean model\.depth"):
        apply_overrides(config, ["model.dept=3"])


def test_segments_longer_than_the_model_reads_are_refused(tiny_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length = 9") as caught:
        tiny_config("data.max_length=9")
    assert "data.max_length=8" in caught.value.fix


FEATURES = """
from tackboard.features.language import Events, FeatureSet, Request
late = FeatureSet("late", hour=Request().time.hour("UTC"))
busy = FeatureSet("busy", busy=Events().count())
"""


def test_features_are_those_the_model_reads_of_the_users_file_and_the_standard_ones(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    vocabulary = Vocabulary(actions=("click",), surfaces=("home",))
    assert features_for(tiny_config())(vocabulary).reads() == list(tiny_config().model.reads)
    path = tmp_path / "features.py"
    path.write_text(FEATURES)
    config = tiny_config(f"data.features={path}:busy", 'model.request_features=["busy"]')
    assert config_from_json(config_to_json(config)) == config
    features = features_for(config)(vocabulary)
    assert (features.name, features.reads()[-1]) == ("busy", "busy")
    assert features.plan.trimmed(["history"]).newest_events == 8
    unread = features_for(tiny_config(f"data.features={path}:late"))(vocabulary)
    assert unread.reads() == list(tiny_config().model.reads)
    assert unread.feature_hashes() == features_for(tiny_config())(vocabulary).feature_hashes()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.features={path}", 'model.request_features=["hour"]'], "has 2 feature sets"),
        (["data.features={path}:later", 'model.request_features=["hour"]'], "has no feature set later"),
        (["data.features={path}:late", 'model.request_features=["our"]'], "did you mean hour?"),
        (["data.features=absent.py", 'model.request_features=["hour"]'], "absent.py is not a file"),
        (['model.request_features=["hour"]'], "the model reads hour, which is not a standard feature"),
    ],
)
def test_features_that_cannot_be_read_are_told(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, overrides: list[str], expected: str
) -> None:
    path = tmp_path / "features.py"
    path.write_text(FEATURES)
    config = tiny_config(*(override.replace("{path}", str(path)) for override in overrides))
    with pytest.raises(UsageError) as caught:
        features_for(config)(Vocabulary(actions=("click",), surfaces=("home",)))
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "a b", "x" * 65])
def test_names_that_are_no_folder_names_are_refused(tiny_config: Callable[..., RunConfig], name: str) -> None:
    with pytest.raises(ConfigError, match="name = "):
        tiny_config(f"name={name}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"checkpoint_every": 0},
        {"log_every": 0},
        {"num_threads": -1},
        {"device": "gpu"},
        {"device": "cuda:x"},
        {"precision": "fp16"},
    ],
)
def test_impossible_training_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"training\.{next(iter(wrong))}"):
        TrainingConfig(**wrong)  # type: ignore[arg-type]


def test_a_seed_beyond_64_bits_is_refused(tiny_config: Callable[..., RunConfig]) -> None:
    assert tiny_config(f"seed={2**63 - 1}").seed == 2**63 - 1
    for seed in (2**63, 99999999999999999999, -(2**63) - 1):
        with pytest.raises(ConfigError, match=f"seed = {seed}"):
            tiny_config(f"seed={seed}")


def test_losses_that_would_find_nothing_are_refused_before_a_run_is_made(tiny_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"data.uniform_negatives is 0"):
        tiny_config("model.loss.in_batch_negatives=false")
    anchored = ("model.loss.future_token_weight=1.0", "model.loss.future_token_anchor=7")
    with pytest.raises(ConfigError, match=r"data.max_length = 4"):
        tiny_config(*anchored, "data.max_length=4")
    assert tiny_config(*anchored, "data.max_length=8").data.max_length == 8


def test_positions_that_are_never_trained_are_warned_of(tiny_config: Callable[..., RunConfig]) -> None:
    model = tiny_config().model
    assert "never trained" in model.warnings(4)[0]
    rotary = dataclasses.replace(model.backbone, positions="rotary")
    assert dataclasses.replace(model, backbone=rotary).warnings(4) == []
    assert model.warnings(8) == []
