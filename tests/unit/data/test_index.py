"""The pass over a dataset before training: tokens per bucket, shares of items, and what cannot be trained on."""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from tackboard.core.errors import DataError
from tackboard.core.manifest import MANIFEST, verify_manifest, write_manifest
from tackboard.data import stored_counts as counts_module
from tackboard.data.index import ItemFrequencies, TrainingIndex, index_training
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.data.step_plan import cut_segments
from tackboard.data.stored_counts import KIND
from tackboard.events.dataset import INDEX


def test_buckets_and_shares_are_those_of_the_whole(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    log = [
        (user, item % 7, ("click", "hide")[item % 3 == 0], "home", item) for user in range(9) for item in range(user)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 8)
        source = open_sequences(make_dataset(tmp_path, log), ("click",))
    assert source.num_buckets > 3
    index, data = index_training(source, 3), source.read()
    segments = cut_segments(data.offsets[:-1], data.train_ends, 3)
    assert index.num_segments == len(segments.lengths)
    assert index.longest == 3
    bucket_of = source.dataset.layout.buckets_of(data.user_ids[segments.users])
    assert index.bucket_tokens.tolist() == np.bincount(bucket_of, segments.lengths).astype(int).tolist()
    training = np.arange(len(data.item_ids)) < np.repeat(data.train_ends, np.diff(data.offsets))
    positives = data.item_ids[training & data.is_positive]
    expected = [np.log(max(0.5, (positives == item).sum()) / len(positives)) for item in data.catalogue]
    assert index.frequencies.log_share(data.catalogue) == pytest.approx(expected, abs=1e-6)


def test_log_share_by_hand() -> None:
    frequencies = ItemFrequencies.of(np.array([5, 5, 9, 5]))
    shares = frequencies.log_share(np.array([9, 5, 7, 100, -3]))
    assert np.exp(shares) == pytest.approx([0.25, 0.75, 0.125, 0.125, 0.125])
    assert shares.dtype == np.float32
    assert np.isfinite(ItemFrequencies.of(np.zeros(0, dtype=np.int64)).log_share(np.array([1]))).all()


def test_nothing_to_train_on_is_an_error(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    single = make_dataset(tmp_path, [(1, 5, "click", "home", 1), (2, 6, "click", "home", 2)], name="single")
    with pytest.raises(DataError, match="no event to train on"):
        index_training(open_sequences(single), 8)


def test_nothing_to_predict_is_an_error(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Every positive is held out: without this the trainer would look for a step forever."""
    events = [(user, 5, action, "home", time) for user in (1, 2) for time, action in enumerate(["hide", "click"])]
    with pytest.raises(DataError, match="no positive event to train on"):
        index_training(open_sequences(make_dataset(tmp_path, events, name="hidden"), ("click",)), 8)


def test_a_long_pass_says_how_far_it_is(
    tiny_source: SequenceSource, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index_training(tiny_source, 97, quiet=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tackboard.data.index.LONG", 10)
    index_training(tiny_source, 98, quiet=False)
    assert "indexing" in capsys.readouterr().err
    index_training(tiny_source, 98, quiet=False)
    assert capsys.readouterr().err == "", "it was kept"


@pytest.fixture
def dataset(bucketed_dataset: Path, tmp_path: Path) -> Path:
    """A dataset of several buckets, without an index."""
    ignored = shutil.ignore_patterns(INDEX)
    return Path(shutil.copytree(bucketed_dataset, tmp_path / "bucketed", symlinks=True, ignore=ignored))


def same(one: TrainingIndex, other: TrainingIndex, source: SequenceSource) -> bool:
    figures = [(each.bucket_tokens.tolist(), each.num_segments, each.longest) for each in (one, other)]
    shares = [each.frequencies.log_share(np.append(source.catalogue, -1)).tobytes() for each in (one, other)]
    return figures[0] == figures[1] and shares[0] == shares[1]


def test_a_second_run_reads_no_event_to_index_them(dataset: Path) -> None:
    first, second = open_sequences(dataset), open_sequences(dataset)
    made, kept = index_training(first, 8), index_training(second, 8)
    assert first.counters.num_rows == first.dataset.num_events
    assert second.counters.num_rows == second.counters.num_bytes == 0
    assert same(made, kept, first)
    verify_manifest(first.dataset.path, "dataset")


def test_every_setting_has_an_index_of_its_own(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [open_sequences(dataset), open_sequences(dataset, held_out=2), open_sequences(dataset, ("click",))]
    settings = [(8, False), (5, False), (8, True)]
    kept = [
        index_training(source, length, newest_only=newest)
        for _ in range(2)
        for source in sources
        for length, newest in settings
    ][len(sources) * len(settings) :]
    assert [source.counters.num_rows for source in sources] == [3 * source.dataset.num_events for source in sources]
    assert len(list(dataset.glob(f"{INDEX}/*/*"))) == 9
    monkeypatch.setattr("tackboard.data.stored_counts.index_folder", lambda _snapshot: None)
    fresh = [index_training(source, length, newest_only=newest) for source in sources for length, newest in settings]
    assert all(same(one, other, sources[0]) for one, other in zip(kept, fresh, strict=True))
    assert not any(same(one, other, sources[0]) for one, other in itertools.combinations(fresh, 2))


@pytest.mark.parametrize("name", ["bucket_tokens", "item_counts", MANIFEST])
def test_a_flipped_bit_is_found_and_the_index_is_made_again(dataset: Path, name: str) -> None:
    source = open_sequences(dataset)
    made = index_training(source, 8)
    (path,) = dataset.glob(f"{INDEX}/*/*/{name}")
    intact = path.read_bytes()
    path.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    again = open_sequences(dataset)
    assert same(index_training(again, 8), made, source)
    assert again.counters.num_rows == source.dataset.num_events
    assert path.read_bytes() == intact


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("bucket_tokens", lambda tokens: tokens[1:]),
        ("bucket_tokens", lambda tokens: -tokens),
        ("bucket_tokens", lambda tokens: tokens * 1000),
        ("item_counts", lambda counts: np.append(counts, 1)),
        ("item_counts", lambda counts: counts * 0),
    ],
)
def test_a_sealed_index_that_cannot_be_of_this_dataset_is_made_again(
    dataset: Path, file: str, change: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> None:
    source = open_sequences(dataset)
    made = index_training(source, 8)
    (place,) = dataset.glob(f"{INDEX}/*/*")
    manifest = verify_manifest(place, KIND)
    change(np.fromfile(place / file, "<i8")).tofile(place / file)
    write_manifest(place, KIND, {key: manifest[key] for key in ("num_segments", "longest")})
    again = open_sequences(dataset)
    assert same(index_training(again, 8), made, source) and again.counters.num_rows


def test_what_stands_in_the_way_of_an_index_stops_nobody(dataset: Path, tmp_path: Path) -> None:
    source, other = open_sequences(dataset), tmp_path / "other"
    other.mkdir()
    (dataset / INDEX).symlink_to(other)  # A link could lead anywhere.
    made = index_training(source, 8)
    assert not list(other.iterdir())
    (dataset / INDEX).unlink()
    (dataset / INDEX).write_text("a file")
    assert same(index_training(source, 8), made, source)
    alone = open_sequences(shutil.copytree(source.dataset.path, tmp_path / "alone" / "snapshot"))
    assert same(index_training(alone, 8), made, source)
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["snapshot"], "no dataset's folder, no index"
    assert source.counters.num_rows == 2 * alone.counters.num_rows == 2 * source.dataset.num_events


def test_a_dataset_that_is_read_only_works(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index, which cannot be kept, and with an index from before."""
    source = open_sequences(dataset)
    with monkeypatch.context() as patch:
        patch.setattr(counts_module, "new_directory", mock.Mock(side_effect=OSError(errno.EROFS, "read-only")))
        made = index_training(source, 8)
    assert not list(dataset.glob(f"{INDEX}/*/*"))
    assert same(index_training(source, 8), made, source) and same(index_training(source, 8), made, source)
    assert source.counters.num_rows == 2 * source.dataset.num_events, "the third call finds the index of the second"


def test_writers_at_once_leave_one_index(dataset: Path) -> None:
    """Threads stand for processes: the folder and its locks do not tell them apart."""
    sources = [open_sequences(dataset) for _ in range(8)]
    start = threading.Barrier(len(sources))

    def make(source: SequenceSource) -> TrainingIndex:
        start.wait(30)
        return index_training(source, 8)

    with ThreadPoolExecutor(len(sources)) as pool:
        made = list(pool.map(make, sources))
    assert all(same(index, made[0], sources[0]) for index in made)
    (place,) = dataset.glob(f"{INDEX}/*/*")
    verify_manifest(place, KIND)
