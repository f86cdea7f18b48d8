from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.sealing import (
    SEAL_BYTES,
    Seals,
    check_version,
    event_key,
    open_settings,
    seal_settings,
    split_event_key,
)

SEALS = Seals("users.db", b"salt")


def test_a_seal_is_what_the_scripts_of_a_server_compute() -> None:
    sealed = SEALS.seal(b"value", "a place", b"key")
    assert sealed == b"value" + hashlib.sha1(b"salta place:keyvalue", usedforsecurity=False).digest()[:8]
    assert SEALS.open(sealed, "a place", b"key") == b"value"


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    sealed = SEALS.seal(b"value", "a place", b"key")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFileError, match=r"users\.db: a place is damaged"):
            SEALS.open(bytes(changed), "a place", b"key")
    for length in range(len(sealed)):
        with pytest.raises(CorruptFileError):
            SEALS.open(sealed[:length], "a place", b"key")


@pytest.mark.parametrize("value", [None, 7, 1.5, "value", b""])
def test_what_is_not_bytes_is_damage(value: Any) -> None:
    with pytest.raises(CorruptFileError):
        SEALS.open(value, "a place")


def test_a_block_belongs_to_its_place_and_its_store() -> None:
    head = Head(3, 0, 3, 1, np.array([[0, 5, 1, 2, 3]], dtype=np.int64))
    sealed = SEALS.seal_head(1, head)
    assert SEALS.open_head(1, sealed).num_events == 8
    with pytest.raises(CorruptFileError, match="the directory of user 2"):
        SEALS.open_head(2, sealed)
    with pytest.raises(CorruptFileError):
        Seals("users.db", b"other").open_head(1, sealed)
    data = SEALS.seal_column(1, "item_id", 7, b"data")
    assert SEALS.open_columns(1, {("item_id", 7): data}, ["item_id"], [7]) == {("item_id", 7): b"data"}
    for user, name, chunk in ((2, "item_id", 7), (1, "action", 7), (1, "item_id", 8)):
        with pytest.raises(CorruptFileError, match=f"column {name} of chunk {chunk} of user {user} is damaged"):
            SEALS.open_columns(user, {(name, chunk): data}, [name], [chunk])
    with pytest.raises(CorruptFileError, match="column item_id of chunk 8 of user 1 is missing"):
        SEALS.open_columns(1, {("item_id", 7): data}, ["item_id"], [7, 8])


def test_a_buffer_comes_back_whole_or_not_at_all() -> None:
    rows = [(5, b"one", 6, 0), (5, b"two", 2**62, 1)]
    sealed = [SEALS.seal_recent(1, row) for row in rows]
    assert SEALS.open_recent(1, sealed, 2) == rows
    assert split_event_key(event_key(5, b"one")) == (5, b"one")
    with pytest.raises(CorruptFileError, match="the buffer of user 1 holds 1 events instead of 2"):
        SEALS.open_recent(1, sealed[:1], 2)
    wrong: list[Any] = [
        (6, *sealed[0][1:]),
        (None, *sealed[0][1:]),
        (5, "one", sealed[0][2]),
        (5, b"two", sealed[0][2]),
    ]
    for row in wrong:
        with pytest.raises(CorruptFileError, match="the buffer of user 1 is damaged"):
            SEALS.open_recent(1, [row], 1)


def test_names_are_all_there_and_have_their_own_numbers() -> None:
    held = {name: SEALS.seal_name("action", name, code) for name, code in ((b"", 2), (b"a", 0), ("ä".encode(), 1))}
    assert SEALS.open_names("action", held) == ["a", "ä"]
    assert SEALS.open_names("action", {}) == []
    for lost in held:
        with pytest.raises(CorruptFileError, match="the list of actions has lost a name"):
            SEALS.open_names("action", {name: value for name, value in held.items() if name != lost})
    with pytest.raises(CorruptFileError, match="the list of surfaces"):
        SEALS.open_names("surface", held)


def test_settings_come_back() -> None:
    settings = seal_settings("users.db", b"salt", '{"a": 1}')
    seals, config = open_settings("users.db", FORMAT_VERSION, settings)
    assert (seals.salt, config) == (b"salt", '{"a": 1}')
    with pytest.raises(CorruptFileError, match="lost its settings"):
        open_settings("users.db", FORMAT_VERSION, {"config": settings["config"]})
    with pytest.raises(CorruptFileError, match="the setting config"):
        open_settings("users.db", FORMAT_VERSION, {**settings, "config": settings["salt"]})
    digest = b"d" * 16
    assert SEALS.open_forgotten(digest, SEALS.seal_forgotten(digest, 99)) == 99


def test_version_1_is_read_as_it_is_and_not_written() -> None:
    old = Seals("users.db", b"salt", 1)
    assert old.open("5:0", "a place") == b"5:0" and old.open(7, "a place") == b"7"
    assert old.open_names("action", {b"a": 0}) == ["a"]
    with pytest.raises(UsageError, match=r"tackboard sequences migrate users\.db"):
        old.check_writable()
    SEALS.check_writable()
    assert len(SEALS.seal(b"", "a place")) == SEAL_BYTES
    for version in (0, FORMAT_VERSION + 1):
        with pytest.raises(DataError, match=f"format version {version}"):
            check_version("users.db", version)
