from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from sequence_model import event

from tackboard.core.errors import CorruptFileError
from tackboard.events.sequence_store.codec import LAST_MS
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.merging import Change, State
from tackboard.events.sequence_store.verification import verify_store


def filled(store: SequenceStore) -> SequenceStore:
    store.append_many([1] * 20 + [2] * 3, [event(n) for n in range(23)])
    store.append(3, [event(1)])
    store.forget(3)
    return store


def test_an_intact_store_is_counted(store: SequenceStore) -> None:
    assert dataclasses.asdict(verify_store(store))["num_users"] == 0
    report = verify_store(filled(store))
    assert (report.num_users, report.num_events, report.num_forgotten_users) == (2, 23, 1)
    assert report.num_columns == 2 * len(store.config.columns) and report.num_names == 2
    assert report.has_checksums


def test_a_directory_that_contradicts_its_chunks_is_found_though_its_seal_is_right(store: SequenceStore) -> None:
    filled(store)

    def lie(_: int, state: State) -> Change:
        chunks = np.array(state.head.chunks)
        chunks[-1, LAST_MS] += 1
        return Change(dataclasses.replace(state.head, chunks=chunks))

    store.edit([1], lie)
    with pytest.raises(CorruptFileError, match="the directory of user 1 contradicts chunk 1"):
        verify_store(store)


def test_several_damaged_users_are_counted(store: Any) -> None:
    filled(store)
    store.append(5, [event(n) for n in range(20)])
    for user in (1, 5):
        if hasattr(store, "_db"):
            store._db.execute("UPDATE blocks SET data = x'00' WHERE user_id = ? AND number = 2", (user,))
        else:
            store._client.hset(store._keys.user(user, "columns"), "2:0", b"0")
    with pytest.raises(CorruptFileError, match="column surface of chunk 0 of user 1 is damaged; 2 of 3 users"):
        verify_store(store)
