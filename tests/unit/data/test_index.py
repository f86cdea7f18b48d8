"""The pass over a dataset before training: tokens per bucket, shares of items, and what cannot be trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.core.errors import DataError
from tackboard.data.index import ItemFrequencies, index_training
from tackboard.data.plan import cut_segments
from tackboard.data.source import SequenceSource, open_sequences


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
    index_training(tiny_source, 8, quiet=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tackboard.data.index.LONG", 10)
    index_training(tiny_source, 8, quiet=False)
    assert "indexing" in capsys.readouterr().err
