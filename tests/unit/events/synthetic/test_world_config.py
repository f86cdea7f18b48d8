from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from tackboard.core.config import to_dict
from tackboard.core.errors import ConfigError, UsageError
from tackboard.events.synthetic.world_config import WorldConfig, load_world_config, shipped_worlds, world_bytes

FROZEN_DEMO = "740f21e38c64c6b0b8fa087db2fcd8798b64a2a0bc922db1c85bfb366ecaee1c"


def test_the_demo_world_is_frozen_and_states_every_setting() -> None:
    assert hashlib.sha256(world_bytes("demo")).hexdigest() == FROZEN_DEMO, (
        "worlds/demo.json changed. Models are compared on it: a change needs an entry in docs/log.md with the old and "
        "the new figures, and only then a new hash here"
    )
    assert set(json.loads(world_bytes("demo"))) == {field.name for field in dataclasses.fields(WorldConfig)}
    assert shipped_worlds() == ["demo"]


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
    ],
)
def test_settings_that_cannot_be_are_refused(setting: dict) -> None:
    with pytest.raises(ConfigError):
        WorldConfig(**setting)
