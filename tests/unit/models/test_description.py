"""How models are named and found again, and whose code is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tackboard.core.errors import ConfigError, DataError, UsageError
from tackboard.core.user_code import load_code
from tackboard.core.vocabulary import Vocabulary
from tackboard.models.description import describe_model, restore_config
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFM, PinFMConfig
from tackboard.models.tables import TableConfig

VOCABULARY = Vocabulary(actions=("click",), surfaces=("home",))
USER_FILE = """
import dataclasses
from torch import nn
from tackboard.models.interface import ModelConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class MineConfig(ModelConfig):
    width: int = 4

    def build(self, vocabulary):
        return Mine()

class Mine(nn.Module):
    def loss(self, batch): ...
    def scores(self, batch): ...

not_a_config = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_own_models_round_trip() -> None:
    config = PinFMConfig(width=8, tables=TableConfig(num_rows=7))
    description = describe_model(config)
    assert description["config_class"] == "tackboard.models.pinfm:PinFMConfig"
    assert "code_file" not in description
    assert restore_config(description) == config
    assert isinstance(build_model(config, VOCABULARY), PinFM)


def test_a_users_model_round_trips_through_its_file(user_file: Path) -> None:
    config = load_code(user_file).MineConfig(width=9)
    description = describe_model(config)
    assert description["config_class"] == "mine.py:MineConfig"
    assert description["code_file"] == str(user_file)
    assert len(description["code_sha256"]) == 64
    assert restore_config(description, user_file) == config
    assert type(build_model(config, VOCABULARY)).__name__ == "Mine"


def test_a_users_code_is_run_only_when_its_file_is_named(user_file: Path) -> None:
    description = describe_model(load_code(user_file).MineConfig())
    with pytest.raises(UsageError, match=r"--code mine\.py"):
        restore_config(description)


@pytest.mark.parametrize(
    "place",
    ["os:system", "tackboard.cli.main:app", "tackboard_models:X", "tackboard.modelsX.y:Z", "/etc/passwd:x", "", ":"],
)
def test_foreign_modules_are_never_imported(place: str) -> None:
    with pytest.raises(UsageError, match="never taken from a bundle"):
        restore_config({"config_class": place, "config": {}})


@pytest.mark.parametrize(
    "place", ["tackboard.models.pinfm:PinFM", "tackboard.models.absent:X", "tackboard.models.pinfm:os"]
)
def test_places_that_hold_no_config_are_refused(place: str) -> None:
    with pytest.raises(DataError):
        restore_config({"config_class": place, "config": {}})
    with pytest.raises(DataError, match="lacks"):
        restore_config({"config": {}})


def test_values_of_a_description_are_checked_like_any_config() -> None:
    with pytest.raises(ConfigError, match=r"model\.widht"):
        restore_config({"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {"widht": 3}})
    with pytest.raises(ConfigError, match=r"model\.width"):
        restore_config({"config_class": "tackboard.models.pinfm:PinFMConfig", "config": {"width": -3}})


def test_the_named_file_must_hold_the_config(user_file: Path) -> None:
    for name in ("not_a_config", "Mine"):
        with pytest.raises(UsageError, match=f"no config class {name}"):
            restore_config({"config_class": f"mine.py:{name}", "config": {}}, user_file)


def test_a_file_is_imported_once_and_leaves_nothing_behind_when_it_fails(tmp_path: Path, user_file: Path) -> None:
    assert load_code(user_file) is load_code(user_file.parent / "." / "mine.py")
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('no')")
    modules = set(sys.modules)
    with pytest.raises(UsageError, match="RuntimeError: no"):
        load_code(broken)
    assert set(sys.modules) == modules
    with pytest.raises(UsageError, match="is not a file"):
        load_code(tmp_path / "absent.py")
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(UsageError, match="not a Python file"):
        load_code(tmp_path / "text.txt")
