"""Histories and the leave-last-out split, on a log small enough to check by eye."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tackboard.core.errors import ConfigError, CorruptFileError
from tackboard.core.hashing import string_id
from tackboard.data.sequences import last_positive, load_sequences
from tackboard.events.vocabulary import Vocabulary

LOG = [
    # user, item, action, surface, time: written out of order on purpose.
    (7, 12, "hide", "home", 3000),
    (7, 10, "click", "search", 1000),
    (7, 11, "save", "home", 2000),
    (2, 10, "hide", "home", 5000),
    (5, 13, "click", "home", 4000),
    (9, 10, "click", "home", 1000),
    (9, 10, "click", "home", 1000),
]


def test_leave_last_out_by_hand(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    sequences = load_sequences(make_dataset(tmp_path, LOG), ("click", "save"))
    assert sequences.user_ids.tolist() == [2, 5, 7, 9]
    assert sequences.offsets.tolist() == [0, 1, 2, 5, 7]
    assert sequences.item_ids.tolist() == [10, 13, 10, 11, 12, 10, 10]
    assert sequences.times_ms.tolist() == [5000, 4000, 1000, 2000, 3000, 1000, 1000]
    assert sequences.vocabulary.actions == ("click", "hide", "save")
    assert sequences.actions.tolist() == [2, 1, 1, 3, 2, 1, 1]
    assert sequences.surfaces.tolist() == [1, 1, 2, 1, 1, 1, 1]
    assert sequences.is_positive.tolist() == [False, True, True, True, False, True, True]
    # User 2 has no positive; user 7's trailing hide is used by neither; users 5 and 9 end on their target.
    assert sequences.targets.tolist() == [-1, 1, 3, 6]
    assert sequences.train_ends.tolist() == [1, 1, 3, 6]
    assert sequences.catalogue.tolist() == [10, 11, 12, 13]
    assert sequences.id_type == "int64"
    assert sequences.lineage()["num_events"] == 7


def test_without_a_holdout_everything_is_training(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    sequences = load_sequences(make_dataset(tmp_path, LOG), holdout="none")
    assert sequences.targets.tolist() == [-1] * 4
    assert sequences.train_ends.tolist() == [1, 2, 5, 7]
    assert sequences.is_positive.all()  # no positive actions named: all are


def test_string_ids_are_hashed(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    events = [("u1", "b", "click", "home", 2), ("u1", "a", "click", "home", 1), ("u2", "b", "click", "home", 1)]
    sequences = load_sequences(make_dataset(tmp_path, events))
    assert sequences.id_type == "string"
    user = sequences.user_ids.tolist().index(string_id("u1"))
    begin, end = sequences.offsets[user : user + 2]
    assert sequences.item_ids[begin:end].tolist() == [string_id("a"), string_id("b")]
    assert sorted(sequences.catalogue.tolist()) == sorted([string_id("a"), string_id("b")])


def test_a_models_vocabulary_decides_the_indices_but_not_what_is_positive(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    vocabulary = Vocabulary(actions=("buy", "save"), surfaces=("search",))
    sequences = load_sequences(make_dataset(tmp_path, LOG), ("click", "save"), vocabulary=vocabulary)
    assert sequences.vocabulary is vocabulary
    assert sequences.actions.tolist() == [0, 0, 0, 2, 0, 0, 0]
    assert sequences.surfaces.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert sequences.is_positive.tolist() == [False, True, True, True, False, True, True]
    assert load_sequences(tmp_path / "tiny", vocabulary=vocabulary).is_positive.all()


def test_a_snapshot_can_be_named_and_is_verified(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    dataset = make_dataset(tmp_path, LOG)
    snapshot = (dataset / "latest").resolve()
    assert load_sequences(snapshot).snapshot == load_sequences(dataset).snapshot == snapshot.name
    data = bytearray((snapshot / "events.parquet").read_bytes())
    data[len(data) // 2] ^= 4
    (snapshot / "events.parquet").write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"events\.parquet"):
        load_sequences(dataset)


def test_an_unknown_positive_action_gets_a_suggestion(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="did you mean click"):
        load_sequences(make_dataset(tmp_path, LOG), ("clik",))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
@settings(max_examples=50)
def test_last_positive_equals_a_plain_loop(users: list[list[bool]]) -> None:
    offsets = np.concatenate([[0], np.cumsum([len(user) for user in users])]).astype(np.int64)
    expected = [
        max((int(begin) + place for place, positive in enumerate(user) if positive), default=-1)
        for begin, user in zip(offsets, users, strict=False)
    ]
    assert last_positive(offsets, np.concatenate(users)).tolist() == expected
