"""The sizes of the bench, and the rows of their batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tackboard.bench.pretrain.data import MAX_LENGTH, PRESETS, config_of, dataset_of, find_preset
from tackboard.core.errors import UsageError
from tackboard.train.start import open_source


def lengths_of(preset_rows: str, folder: Path) -> list[int]:
    preset = dataclasses.replace(PRESETS["tiny"], rows=preset_rows, num_events=20_000)
    config = config_of(preset, dataset_of(preset, folder))
    steps = config.data.steps(open_source(config), config.model.tables, 0)
    batches = (batch for _, batch in steps.iterate(range(steps.plan.steps_per_epoch), 0))
    return [length for batch in batches for length in batch.lengths().tolist()]


def test_rows_have_48_events_on_average(tmp_path: Path) -> None:
    lengths = lengths_of("mixed", tmp_path)
    assert 38 <= sum(lengths) / len(lengths) <= 58
    assert max(lengths) <= MAX_LENGTH


def test_full_rows_have_256_events(tmp_path: Path) -> None:
    lengths = lengths_of("full", tmp_path)
    # The last user has the events that are left.
    assert sum(length == MAX_LENGTH for length in lengths) >= len(lengths) - 1


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_size_has_a_valid_config(name: str) -> None:
    config = config_of(PRESETS[name], Path("somewhere"))
    assert config.data.dataset == "somewhere"
    assert config.model.max_history >= config.data.max_length


def test_the_users_dataset_is_read_as_it_is(tmp_path: Path) -> None:
    assert dataset_of(PRESETS["cpu"], tmp_path, tmp_path / "mine") == tmp_path / "mine"
    with pytest.raises(UsageError, match="reads a real dataset"):
        dataset_of(PRESETS["ml-1m"], tmp_path)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no size 'huge'"):
        find_preset("huge")
