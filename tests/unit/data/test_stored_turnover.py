"""The measures of a log are made once and kept beside the snapshot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tackboard.core.manifest import MANIFEST
from tackboard.data import stored_turnover as turnover_module
from tackboard.data.source import open_sequences
from tackboard.data.stored_turnover import turnover_once
from tackboard.events.checks.turnover import measure_turnover
from tackboard.events.dataset import INDEX, open_dataset


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Counts the passes over the events."""
    counter = mock.Mock(side_effect=measure_turnover)
    monkeypatch.setattr(turnover_module, "measure_turnover", counter)
    return counter


def test_the_second_run_reads_what_the_first_measured(tmp_path: Path, tiny_dataset: Path, counting: mock.Mock) -> None:
    shutil.copytree(tiny_dataset, tmp_path / "tiny", symlinks=True, ignore=shutil.ignore_patterns(INDEX))
    source = open_sequences(tmp_path / "tiny")
    expected = measure_turnover(source.dataset)
    assert turnover_once(source) == turnover_once(source) == expected
    assert counting.call_count == 1
    (manifest,) = (tmp_path / "tiny" / INDEX).glob(f"*/*/{MANIFEST}")
    manifest.write_text(manifest.read_text().replace(str(expected.num_repeats), "7"))
    assert turnover_once(source) == expected, "damaged measures are made again"
    assert counting.call_count == 2


def test_a_measure_that_the_log_does_not_have_stays_none(
    tmp_path: Path, make_dataset: Callable[..., Path], counting: mock.Mock
) -> None:
    source = open_sequences(make_dataset(tmp_path, [(1, 5, "click", "home", 1), (1, 6, "click", "home", 2)]))
    assert turnover_once(source).half_life_ms is None
    assert turnover_once(source) == measure_turnover(source.dataset)
    assert counting.call_count == 1


def test_without_a_place_to_store_it_is_measured_each_time(
    tmp_path: Path, tiny_dataset: Path, counting: mock.Mock
) -> None:
    snapshot = tmp_path / "alone"
    shutil.copytree((tiny_dataset / "latest").resolve(), snapshot)
    source = open_sequences(snapshot)
    assert turnover_once(source) == turnover_once(source) == measure_turnover(open_dataset(snapshot))
    assert counting.call_count == 2
