"""The stored position of each event's item in the catalogue: made once, verified, and never needed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tackboard.core.errors import CorruptFileError
from tackboard.core.manifest import MANIFEST, verify_manifest, write_manifest
from tackboard.data import positions as positions_module
from tackboard.data.positions import FILE_NAME, KIND, ItemPositions, item_positions
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.events.dataset import INDEX


@pytest.fixture
def dataset(bucketed_dataset: Path, tmp_path: Path) -> Path:
    """A dataset of several buckets, without an index."""
    ignored = shutil.ignore_patterns(INDEX)
    return Path(shutil.copytree(bucketed_dataset, tmp_path / "bucketed", symlinks=True, ignore=ignored))


def check(positions: ItemPositions | None, source: SequenceSource) -> None:
    """Compares positions with a search for the items of all events, whole and in parts."""
    assert positions is not None
    item_ids = source.read().item_ids
    expected = np.searchsorted(source.catalogue, item_ids)
    assert np.array_equal(source.catalogue[expected], item_ids)
    whole = positions.read([(0, len(expected))])
    assert whole.dtype == np.int32
    assert np.array_equal(whole, expected)
    assert np.array_equal(positions.read([(3, 3), (5, 9), (1, 2)]), expected[[5, 6, 7, 8, 1]])
    assert not len(positions.read([]))
    assert np.array_equal(source.dataset.places_of_items(source.catalogue, item_ids), expected)


def test_they_are_made_once_and_then_read(dataset: Path) -> None:
    source = open_sequences(dataset)
    check(item_positions(source), source)
    with mock.patch.object(positions_module, "_store", side_effect=AssertionError("it was kept")):
        again = open_sequences(dataset)
        found = item_positions(again)
    assert again.counters.num_rows == 0
    check(found, again)
    verify_manifest(source.dataset.path, "dataset")


def test_the_system_may_read_less_than_asked(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads less than 2 GiB at a time."""
    source = open_sequences(dataset)
    positions = item_positions(source)
    honest = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: honest(file, [buffers[0][:7]], offset))
    check(positions, source)


@pytest.mark.parametrize("name", [FILE_NAME, MANIFEST])
def test_a_flipped_bit_is_found_and_they_are_made_again(dataset: Path, name: str) -> None:
    source = open_sequences(dataset)
    item_positions(source)
    (path,) = dataset.glob(f"{INDEX}/*/*/{name}")
    intact = path.read_bytes()
    path.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    check(item_positions(source), source)
    assert path.read_bytes() == intact


def test_a_sealed_file_of_another_length_is_made_again(dataset: Path) -> None:
    source = open_sequences(dataset)
    item_positions(source)
    (path,) = dataset.glob(f"{INDEX}/*/*/{FILE_NAME}")
    path.write_bytes(path.read_bytes()[:-4])
    write_manifest(path.parent, KIND)
    check(item_positions(source), source)


def test_without_a_place_to_store_them_there_are_none(dataset: Path, tmp_path: Path) -> None:
    source = open_sequences(dataset)
    with mock.patch.object(positions_module, "new_directory", side_effect=OSError(errno.EROFS, "read-only")):
        assert item_positions(source) is None
    assert not list(dataset.glob(f"{INDEX}/*/*"))
    alone = open_sequences(shutil.copytree(source.dataset.path, tmp_path / "alone" / "snapshot"))
    assert item_positions(alone) is None


def test_a_reader_outlives_the_index(dataset: Path) -> None:
    source = open_sequences(dataset)
    found = item_positions(source)
    shutil.rmtree(dataset / INDEX)
    check(found, source)


def test_a_file_cut_short_while_it_is_read_is_an_error(dataset: Path) -> None:
    source = open_sequences(dataset)
    found = item_positions(source)
    assert found is not None
    (path,) = dataset.glob(f"{INDEX}/*/*/{FILE_NAME}")
    with path.open("r+b") as file:
        file.truncate(8)
    assert len(found.read([(0, 2)])) == 2
    with pytest.raises(CorruptFileError, match="shorter"):
        found.read([(1, 3)])


def test_an_item_that_the_catalogue_lacks_is_an_error(dataset: Path) -> None:
    source = open_sequences(dataset)
    with pytest.raises(CorruptFileError, match="lacks items"):
        unknown = np.array([source.catalogue[0], source.catalogue[-1] + 1])
        source.dataset.places_of_items(source.catalogue, unknown)


def test_writers_at_once_leave_one_file(dataset: Path) -> None:
    """Threads stand for processes: the folder and its locks do not tell them apart."""
    sources = [open_sequences(dataset) for _ in range(6)]
    start = threading.Barrier(len(sources))

    def make(source: SequenceSource) -> ItemPositions | None:
        start.wait(30)
        return item_positions(source)

    with ThreadPoolExecutor(len(sources)) as pool:
        made = list(pool.map(make, sources))
    for positions, source in zip(made, sources, strict=True):
        check(positions, source)
    (path,) = dataset.glob(f"{INDEX}/*/*/{FILE_NAME}")
    verify_manifest(path.parent, KIND)
