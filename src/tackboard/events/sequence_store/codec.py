"""Converts what is stored about a user (head, buffered events, columns of chunks; see `merging`) to bytes and back.

A column has a header, a bitmap if values are missing, and the values. Integers are stored as their distance from the
smallest value, in the narrowest unsigned type that fits. A string column holds its own dictionary. So the user's texts
are deleted with the user. A buffered event is packed into bytes without its times; two events with the same time are
duplicates if and only if their bytes are equal. Numbers are little-endian. Malformed bytes raise CorruptFileError.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import CorruptFileError
from tackboard.events.sequence_store.values import DTYPES, Columns, Integers, Values, object_array

FORMAT_VERSION = 2
_HEADER = struct.Struct("<4sIq")
"""A column's header: four bytes (kind, width of a value in bytes, whether a bitmap follows, unused), the number of
values, and the smallest value."""
_KINDS = ("int", "float", "bool", "string", "name")
_WIDTHS: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_HEAD = struct.Struct("<4q")
CHUNK_FIELDS = ("id", "num_events", "first_ms", "last_ms", "max_received_ms")
"""The names of the columns of `Head.chunks`, which has one row per chunk."""
ID, NUM_EVENTS, FIRST_MS, LAST_MS, MAX_RECEIVED_MS = range(len(CHUNK_FIELDS))
_NO_CHUNKS = np.empty((0, len(CHUNK_FIELDS)), dtype=np.int64)
_ROW_TYPES = {"int": ("q", "<i8"), "float": ("d", "<f8"), "bool": ("?", "?"), "string": ("I", "<u4")}


def encode_column(kind: str, column: Values) -> bytes:
    """Returns one column of a chunk as bytes."""
    values, base, dictionary = column.values, 0, b""
    bitmap = b""
    if column.present is not None:
        bitmap = np.packbits(column.present, bitorder="little").tobytes()
        # The value of a missing entry is undefined and must not widen the type.
        values = np.where(column.present, values, values.dtype.type(0))
    if kind == "string":
        values, dictionary = _used_texts(values, column)
    if kind == "float":
        data, width = values.astype("<f8", copy=False), 8
    elif kind == "bool":
        data, width = values.astype("<u1", copy=False), 1
    else:
        base = int(values.min()) if len(values) else 0
        distance = values.view(np.uint64) - np.uint64(base & 0xFFFF_FFFF_FFFF_FFFF)
        largest = int(distance.max()) if len(values) else 0
        width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8
        data = distance.astype(_WIDTHS[width])
    head = _HEADER.pack(bytes((_KINDS.index(kind), width, bool(bitmap), 0)), len(values), base)
    return b"".join((head, bitmap, data.tobytes(), dictionary))


def decode_column(data: bytes) -> Values:
    """Does the inverse of `encode_column`."""
    try:
        (kind, width, has_bitmap, _), count, base = _HEADER.unpack_from(data)
        place, present = _HEADER.size, None
        if has_bitmap:
            num_bytes = (count + 7) // 8
            bits = np.frombuffer(data, np.uint8, num_bytes, place)
            present = np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
            place += num_bytes
        name = _KINDS[kind]
        if name in ("float", "bool"):
            dtype: Any = "<f8" if name == "float" else np.bool_
            return Values(np.frombuffer(data, dtype, count, place), present)
        values = np.frombuffer(data, _WIDTHS[width], count, place).astype(np.int64)
        if base:
            values += base
        if name != "string":
            return Values(values, present)
        return Values(values, present, _texts_at(data, place + width * count))
    except (struct.error, ValueError, IndexError, KeyError, UnicodeDecodeError):
        raise CorruptFileError(
            "a column of the sequence store cannot be read",
            fix="restore the store, or make it again with `tackboard sequences append`",
        ) from None


def _used_texts(codes: Integers, column: Values) -> tuple[Integers, bytes]:
    """Drops unused strings from the dictionary; returns the new codes, and the new dictionary as bytes."""
    assert column.dictionary is not None
    known: dict[str, int] = {}
    texts = column.dictionary
    if len(texts):
        distinct, inverse = np.unique(codes, return_inverse=True)
        merged = np.array([known.setdefault(str(texts[code]), len(known)) for code in distinct], dtype=np.int64)
        codes = merged[inverse]
    encoded = [text.encode("utf-8", "surrogatepass") for text in known]
    lengths = np.array([len(text) for text in encoded], dtype="<u4")
    return codes, b"".join((struct.pack("<I", len(encoded)), lengths.tobytes(), *encoded))


def _texts_at(data: bytes, place: int) -> NDArray[np.object_]:
    (count,) = struct.unpack_from("<I", data, place)
    ends = np.frombuffer(data, "<u4", count, place + 4).astype(np.int64).cumsum()
    start = place + 4 + 4 * count
    if count and start + int(ends[-1]) != len(data):
        raise ValueError("the strings do not fill the column")
    bounds = [start, *(ends + start).tolist()]
    return object_array([data[low:high].decode("utf-8", "surrogatepass") for low, high in itertools.pairwise(bounds)])


class RowCodec:
    """Packs item, action, surface and the declared fields of each buffered event into one byte string."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = dict(fields)
        self._struct = struct.Struct("<qIIQ" + "".join(_ROW_TYPES[kind][0] for kind in fields.values()))
        names = [("item_id", "<i8"), ("action", "<u4"), ("surface", "<u4"), ("present", "<u8")]
        self._dtype = np.dtype(names + [(f"field_{name}", _ROW_TYPES[kind][1]) for name, kind in fields.items()])

    def pack(self, columns: Columns) -> list[bytes]:
        """Packs every event of `columns`. Actions and surfaces must be the store's codes, not names."""
        present = np.zeros(len(columns["item_id"]), dtype=np.int64)
        lists = [columns[name].values.tolist() for name in ("item_id", "action", "surface")]
        tails: list[list[bytes]] = []
        for bit, (name, kind) in enumerate(self.fields.items()):
            column = columns[name]
            there = column.present
            present |= 1 << bit if there is None else there.astype(np.int64) << bit
            values = column.values if there is None else np.where(there, column.values, column.values.dtype.type(0))
            if kind != "string":
                lists.append(values.tolist())
                continue
            texts = [b"" if text is None else text.encode("utf-8", "surrogatepass") for text in column.to_pylist()]
            lists.append([len(text) for text in texts])
            tails.append(texts)
        lists.insert(3, present.tolist())
        rows = [self._struct.pack(*row) for row in zip(*lists, strict=True)]
        return [b"".join(parts) for parts in zip(rows, *tails, strict=True)] if tails else rows

    def unpack(self, rows: Sequence[bytes]) -> dict[str, Values]:
        """Does the inverse of `pack`."""
        size = self._struct.size
        fixed = np.frombuffer(b"".join([row[:size] for row in rows]), self._dtype)
        if len(fixed) != len(rows):
            raise CorruptFileError("a buffered event of the sequence store cannot be read", fix="restore the store")
        columns = {name: Values(fixed[name].astype(np.int64)) for name in ("item_id", "action", "surface")}
        starts = np.full(len(rows), size, dtype=np.int64)
        for bit, (name, kind) in enumerate(self.fields.items()):
            there = (fixed["present"] >> np.uint64(bit)) & np.uint64(1) == 1
            present = None if there.all() else there
            values = fixed[f"field_{name}"].astype(DTYPES[kind])
            if kind != "string":
                columns[name] = Values(values, present)
                continue
            ends = starts + values
            texts = [
                row[low:high].decode("utf-8", "surrogatepass")
                for row, low, high in zip(rows, starts.tolist(), ends.tolist(), strict=True)
            ]
            starts = ends
            columns[name] = Values(np.arange(len(rows), dtype=np.int64), present, object_array(texts))
        return columns


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """A user's head holds counters and the list of chunks. The store can read the head without reading events."""

    num_recent: int = 0
    """Number of events in the buffer."""
    num_late: int = 0
    """Number of buffered events that are older than an event in a chunk."""
    next_arrival: int = 0
    """Arrival number of the next buffered event. Events with equal times are ordered by their arrival numbers."""
    next_chunk: int = 0
    """Id of the next chunk. Chunks of later events have larger ids. If a user loses all events, ids restart at 0."""
    chunks: Integers = dataclasses.field(default_factory=lambda: _NO_CHUNKS)
    """One row per chunk, oldest first [k, 5]. CHUNK_FIELDS names the columns."""

    @property
    def num_chunked(self) -> int:
        """Number of events in chunks."""
        return int(self.chunks[:, NUM_EVENTS].sum())

    @property
    def num_events(self) -> int:
        """Number of events in chunks and in the buffer, including events beyond the cap."""
        return self.num_chunked + self.num_recent

    @property
    def chunked_until_ms(self) -> int:
        """Time of the newest event in the chunks; -1 if there are no chunks."""
        return int(self.chunks[-1, LAST_MS]) if len(self.chunks) else -1

    def to_bytes(self) -> bytes:
        """Returns the head as bytes."""
        numbers = _HEAD.pack(self.num_recent, self.num_late, self.next_arrival, self.next_chunk)
        return numbers + self.chunks.astype("<i8", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        """Does the inverse of `to_bytes`."""
        try:
            num_recent, num_late, next_arrival, next_chunk = _HEAD.unpack_from(data)
            chunks = _NO_CHUNKS
            if len(data) > _HEAD.size:
                chunks = np.frombuffer(data, "<i8", -1, _HEAD.size).reshape(-1, len(CHUNK_FIELDS))
            return cls(num_recent, num_late, next_arrival, next_chunk, chunks)
        except (struct.error, ValueError):
            raise CorruptFileError("a user of the sequence store cannot be read", fix="restore the store") from None
