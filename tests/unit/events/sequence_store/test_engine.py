from __future__ import annotations

import pytest
from sequence_model import event

from tackboard.core.errors import UsageError
from tackboard.events.sequence_store.codec import Head
from tackboard.events.sequence_store.engine import Update
from tackboard.events.sequence_store.interface import SequenceStore
from tackboard.events.sequence_store.merging import Change


def test_an_update_is_written_whole_or_not_at_all(store: SequenceStore) -> None:
    store.append(1, [event(1)])
    both = Update({1: Change(Head(), clear_recent=True)}, {"notes": {"a": store.seals.seal_setting("note:a", b"x")}})

    def fail() -> Update:
        raise UsageError("changed my mind")

    with pytest.raises(UsageError, match="changed my mind"):
        store._update(fail, users=[1])
    assert store.user_ids().tolist() == [1] and store.note("a") is None
    store._update(lambda: both, users=[1])
    assert store.user_ids().tolist() == [] and store.note("a") == "x"
    store._update(lambda: Update(entries={"notes": {"a": None}}))
    assert store.note("a") is None


def test_tables_are_read_by_key_and_whole(store: SequenceStore) -> None:
    assert store._get("notes", ["a", "b"]) == [None, None] and store._items("gone") == {}
    store.set_note("b", "text")
    store.forget(7)
    missing, held = store._get("notes", ["a", "b"])
    assert missing is None and held is not None and held.startswith(b"text")
    assert list(store._items("gone")) == [store.digest(7)]
