from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from tackboard.core.config import from_dict, to_dict
from tackboard.core.errors import ConfigError, UsageError
from tackboard.events.synthetic.world_config import WorldConfig, load_world_config, shipped_worlds, world_bytes

FROZEN_DEMO = "740f21e38c64c6b0b8fa087db2fcd8798b64a2a0bc922db1c85bfb366ecaee1c"
SETTINGS = {field.name for field in dataclasses.fields(WorldConfig)}


def test_the_demo_world_is_frozen_and_states_every_setting() -> None:
    assert hashlib.sha256(world_bytes("demo")).hexdigest() == FROZEN_DEMO, (
        "worlds/demo.json changed. Models are compared on it: a change needs an entry in docs/log.md with the old and "
        "the new figures, and only then a new hash here"
    )
    younger = {"item_half_life_hours"}
    assert set(json.loads(world_bytes("demo"))) == SETTINGS - younger


def test_the_news_world_turns_over_and_states_every_setting() -> None:
    assert shipped_worlds() == ["demo", "news"]
    assert set(json.loads(world_bytes("news"))) == SETTINGS
    assert load_world_config("news").turns_over


def test_a_truth_from_before_turnover_is_read_as_a_world_without_it() -> None:
    truth = to_dict(WorldConfig())
    assert truth.pop("item_half_life_hours") == 0
    assert from_dict(WorldConfig, truth) == WorldConfig()
    assert not from_dict(WorldConfig, truth).turns_over


def test_a_half_life_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"item_half_life_hours = 0.5 .*\n.*at least 3.84"):
        WorldConfig(item_half_life_hours=0.5)
    assert WorldConfig(item_half_life_hours=3.84).days_of_births == 144


def test_a_world_file_is_read_strictly_and_unknown_worlds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({**to_dict(WorldConfig()), "num_users": 7}))
    assert load_world_config(str(path)).num_users == 7
    path.write_text(json.dumps({"num_user": 7}))
    with pytest.raises(ConfigError, match="num_users"):
        load_world_config(str(path))
    with pytest.raises(UsageError, match="did you mean demo"):
        load_world_config("dem")
    with pytest.raises(UsageError, match="does not exist"):
        load_world_config(str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    "setting",
    [
        {"num_users": 0},
        {"num_items": 10},
        {"num_topics": 2},
        {"max_events": 4},
        {"max_events": 10_000},
        {"period_days": 0.0},
        {"mean_session_events": 0.5},
        {"switch_probability": 1.5},
        {"late_share": -0.1},
        {"link_probability": 0.9},
        {"slot_weights": (0.5, 0.4)},
        {"engaged_actions": (0.5, 0.5)},
        {"link_surfaces": (2.0, -0.5, -0.5)},
        {"item_half_life_hours": -1.0},
        {"item_half_life_hours": 24.0, "born_later_share": 0.0},
        {"item_half_life_hours": 1e9, "born_later_share": 1e-6},
    ],
)
def test_settings_that_cannot_be_are_refused(setting: dict) -> None:
    with pytest.raises(ConfigError):
        WorldConfig(**setting)
