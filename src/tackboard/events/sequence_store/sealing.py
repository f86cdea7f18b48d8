"""This module makes and checks seals, the checksums of a sequence store. Each block (a stored value) has a seal.

A seal is the first eight bytes of SHA-1 over the store's salt, the block's place and the value. The place is plain text
such as `column item_id of chunk 7 of user 42`; error messages show it. Every read of a block checks the seal. Because
the place is part of the hash, the check also finds two swapped blocks. A wrong seal raises CorruptFileError, so a
damaged value is never served. Two counts reveal missing blocks. A user's head (see `codec`) holds the number of
buffered events. Each list of names (actions or surfaces) has an entry for the empty name, which holds the number of
names.

Decided: seals use SHA-1, because scripts on a Redis server can compute it and processors have instructions for it.
Eight bytes suffice against accidents; a seal does not stop an attacker who can write to the store. A store of version 1
has no seals. It can be read, but it must be migrated (`tackboard sequences migrate`) before it can be written to.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.events.sequence_store.codec import FORMAT_VERSION, Head
from tackboard.events.sequence_store.merging import RecentRow

SEAL_BYTES = 8
UNSEALED_VERSION = 1
"""Stores of this version have no seals."""
_TIME = struct.Struct(">Q")
SealedEvent = tuple[int, bytes, bytes]
"""A buffered event as it is stored: time_ms, the packed event without its times, and a sealed value. The sealed value
holds received_ms and the arrival number."""


class Seals:
    """Seals the blocks of a store and opens them. To open a block means to check its seal and remove the seal.

    `where` is the store's address.
    """

    def __init__(self, where: str, salt: bytes, version: int = FORMAT_VERSION) -> None:
        self.where = where
        self.salt = salt
        self.version = version
        self.has_seals = version != UNSEALED_VERSION

    def seal(self, value: bytes, place: str, key: bytes = b"") -> bytes:
        """Returns `value` with its seal. `place` and `key` say where the value belongs."""
        return value + _digest(self._bound(place) + key + value)

    def open(self, value: Any, place: str, key: bytes = b"") -> bytes:
        """Does the inverse of `seal`. A value that has changed, or belongs elsewhere, raises CorruptFileError."""
        content = self._opened(value, self._bound(place), key)
        if content is None:
            raise self.damaged(place)
        return content

    def _opened(self, value: Any, bound: bytes, key: bytes) -> bytes | None:
        """Like `open`, but returns None for a damaged value. Must be fast, because it runs for every buffered event."""
        if not self.has_seals:
            return value if isinstance(value, bytes) else str(value).encode()
        try:
            content: bytes = value[:-SEAL_BYTES]
            return content if value.endswith(_digest(bound + key + content)) else None
        except (AttributeError, TypeError):
            return None  # On a damaged page, the value may be a number, a text or None instead of bytes.

    def _bound(self, place: str) -> bytes:
        """Returns the salt and the place, which are hashed before the key and the value."""
        return b"%b%b:" % (self.salt, place.encode())

    def damaged(self, place: str, what: str = "is damaged") -> CorruptFileError:
        """Returns the error for a block that is damaged or missing."""
        return CorruptFileError(
            f"{self.where}: {place} {what}",
            fix=f"restore the store; `tackboard verify {self.where}` checks all of it",
        )

    def check_writable(self) -> None:
        """Raises UsageError for a store of an older version."""
        if self.version != FORMAT_VERSION:
            raise UsageError(
                f"{self.where} has format version {self.version}, which has no checksums and can only be read",
                allowed=f"writing needs format version {FORMAT_VERSION}",
                fix=f"run `tackboard sequences migrate {self.where}` once",
            )

    # ---- blocks of a user ----

    def seal_head(self, user_id: int, head: Head) -> bytes:
        """Returns the sealed bytes of a user's head."""
        return self.seal(head.to_bytes(), head_place(user_id))

    def open_head(self, user_id: int, value: Any) -> Head:
        """Does the inverse of `seal_head`."""
        return Head.from_bytes(self.open(value, head_place(user_id)))

    def seal_column(self, user_id: int, name: str, chunk: int, data: bytes) -> bytes:
        """Returns the sealed bytes of one column of one chunk."""
        return self.seal(data, column_place(user_id, name, chunk))

    def open_columns(
        self, user_id: int, held: Mapping[tuple[str, int], Any], names: Sequence[str], chunks: Sequence[int]
    ) -> dict[tuple[str, int], bytes]:
        """Does the inverse of `seal_column` for all `names` in all `chunks`. Missing columns raise CorruptFileError."""
        found = {}
        for name in names:
            for chunk in chunks:
                place = column_place(user_id, name, chunk)
                value = held.get((name, chunk))
                if value is None:
                    raise self.damaged(place, "is missing")
                found[name, chunk] = self.open(value, place)
        return found

    def seal_recent(self, user_id: int, row: RecentRow) -> SealedEvent:
        """Returns a buffered event with a seal."""
        time_ms, event, received_ms, arrival = row
        text = b"%d:%d" % (received_ms, arrival)
        return time_ms, event, self.seal(text, recent_place(user_id), event_key(time_ms, event))

    def open_recent(self, user_id: int, rows: Sequence[SealedEvent], num_recent: int) -> list[RecentRow]:
        """Does the inverse of `seal_recent` for a user's buffer, which must hold `num_recent` events."""
        place = recent_place(user_id)
        if len(rows) != num_recent:
            raise self.damaged(place, f"holds {len(rows)} events instead of {num_recent}")
        found: list[RecentRow] = []
        bound = self._bound(place)
        try:
            for time_ms, event, value in rows:
                content = self._opened(value, bound, _TIME.pack(time_ms) + event)
                received, _, arrival = (content or b"").partition(b":")
                found.append((time_ms, event, int(received), int(arrival)))
        except (struct.error, TypeError, ValueError):
            raise self.damaged(place) from None
        return found

    # ---- blocks of the whole store ----

    def seal_name(self, kind: str, name: bytes, code: int) -> bytes:
        """Returns the sealed code of an action or surface. The code of the empty name is the number of names."""
        return self.seal(b"%d" % code, names_place(kind), name)

    def open_names(self, kind: str, held: Mapping[bytes, Any]) -> list[str]:
        """Returns names in the order of their codes. A missing name or a repeated code raises CorruptFileError."""
        codes = {name: self._number(value, names_place(kind), name) for name, value in held.items()}
        count = codes.pop(b"", None if self.has_seals and codes else len(codes))
        names = sorted(codes, key=codes.__getitem__)
        if [codes[name] for name in names] != list(range(count or 0)):
            raise self.damaged(names_place(kind), "has lost a name")
        return [name.decode("utf-8", "surrogatepass") for name in names]

    def seal_forgotten(self, digest: bytes, at_ms: int) -> bytes:
        """Returns the sealed time at which a user was forgotten."""
        return self.seal(b"%d" % at_ms, FORGOTTEN_PLACE, digest)

    def open_forgotten(self, digest: bytes, value: Any) -> int:
        """Does the inverse of `seal_forgotten`."""
        return self._number(value, FORGOTTEN_PLACE, digest)

    def seal_setting(self, key: str, value: bytes) -> bytes:
        """Returns a setting or a note with a seal."""
        return self.seal(value, setting_place(key))

    def open_setting(self, key: str, value: Any) -> bytes:
        """Does the inverse of `seal_setting`."""
        return self.open(value, setting_place(key))

    def _number(self, value: Any, place: str, key: bytes) -> int:
        try:
            return int(self.open(value, place, key))
        except ValueError:
            raise self.damaged(place) from None


def _digest(data: bytes) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()[:SEAL_BYTES]


def check_version(where: str, version: int) -> None:
    """Raises DataError for an unknown format version."""
    if not UNSEALED_VERSION <= version <= FORMAT_VERSION:
        raise DataError(
            f"{where} has format version {version}",
            allowed=f"allowed: up to {FORMAT_VERSION}",
            fix="use a newer tackboard, or restore the store",
        )


def open_settings(where: str, version: int, settings: Mapping[str, Any]) -> tuple[Seals, str]:
    """Takes the stored settings of a store; returns the store's `Seals`, and its configuration as JSON."""
    if not settings.keys() >= {"config", "salt"}:
        raise CorruptFileError(f"{where} has lost its settings", fix="restore it, or make a new one")
    # The salt itself is sealed without a salt.
    salt = Seals(where, b"", version).open_setting("salt", settings["salt"])
    seals = Seals(where, salt, version)
    try:
        return seals, seals.open_setting("config", settings["config"]).decode()
    except UnicodeDecodeError:
        raise seals.damaged(setting_place("config")) from None


def seal_settings(where: str, salt: bytes, config: str) -> dict[str, bytes]:
    """Returns the sealed settings of a new store."""
    return {
        "salt": Seals(where, b"").seal_setting("salt", salt),
        "config": Seals(where, salt).seal_setting("config", config.encode()),
    }


def event_key(time_ms: int, event: bytes) -> bytes:
    """Returns the time and the packed event as one key. Duplicates have equal keys."""
    return _TIME.pack(time_ms) + event


def split_event_key(key: bytes) -> tuple[int, bytes]:
    """Does the inverse of `event_key`."""
    return _TIME.unpack_from(key)[0], key[_TIME.size :]


FORGOTTEN_PLACE = "the list of forgotten users"


def head_place(user_id: int) -> str:
    """Returns the place of a user's head. The text calls the head a directory."""
    return f"the directory of user {user_id}"


def column_place(user_id: int, name: str, chunk: int) -> str:
    """Returns the place of a column of a chunk."""
    return f"column {name} of chunk {chunk} of user {user_id}"


def recent_place(user_id: int) -> str:
    """Returns the place of a user's buffered events."""
    return f"the buffer of user {user_id}"


def names_place(kind: str) -> str:
    """Returns the place of the names of a kind, `action` or `surface`."""
    return f"the list of {kind}s"


def setting_place(key: str) -> str:
    """Returns the place of a setting or a note."""
    return f"the setting {key}"
