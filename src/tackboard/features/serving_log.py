"""The log of served features holds the values that a model received, one JSON line per request.

`features replay` reads the log. The log consists of files in a folder:

    FOLDER/features-<utc>-<pid>.jsonl    a header, then one record per request; when a file is full, a new file begins

The header holds the complete features.json, so a reader needs only the log and the secret key (see `read_key`). A
record holds the request's time, its user, its candidates (if a feature needs them), the context values that features
read, and the exact value of every feature. For some features, a hash replaces the value (see below). The log holds
nothing else.

Decided: the user's id, and every feature that is computed from it, are written only as keyed hashes. Anyone who has the
key and the dataset can compute the hashes again and compare them with the log. To anyone else, the hashes reveal
nothing. Every line ends with a seal, a keyed hash of the line's text, so a changed byte is reported as a damaged log
and never as skew. Logging never delays serving, because a request only puts its arrays into a queue. If the writer
cannot keep up or the disk is full, records are dropped and counted. Log files are never removed, so once the size limit
is reached, new records are dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.core.config import check
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.files import storage_error
from tackboard.core.progress import say
from tackboard.features.column import Column
from tackboard.features.contexts import context_sources
from tackboard.features.feature_set import FeatureSet
from tackboard.features.logged_columns import decode_array, decode_column, encode_array, encode_column
from tackboard.features.plan import CANDIDATE, Plan
from tackboard.features.types import FeatureType
from tackboard.features.views import Positions

FORMAT_VERSION = 1
KIND = "feature log"
PATTERN = "features-*.jsonl"
KEY_BYTES = 32
DIGEST_BYTES = 16
RESCAN_S = 10.0
"""Seconds after which the size of a full folder is measured again, because someone may have deleted old files."""
_SEAL = ',"seal":"'


def read_key(path: Path) -> bytes:
    """Reads the key from a file of 64 hexadecimal digits. Raises UsageError if the file holds anything else."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {os.strerror(error.errno or 0)}") from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"{path} holds no key",
            allowed="allowed: 64 hexadecimal digits",
            fix=f"make a key: python -c 'import secrets; print(secrets.token_hex({KEY_BYTES}))' > log.key",
        )
    return key


def user_digest(key: bytes, user_id: int) -> bytes:
    """Returns the 16 bytes that replace a user's id in the log. Without the key, nobody can find the id from them."""
    return _keyed(key, b"user", user_id.to_bytes(8, "little", signed=True))


def column_digest(key: bytes, column: Column) -> str:
    """Returns the keyed hash that replaces a column computed from the user's id. Equal columns have equal hashes."""
    text = json.dumps(encode_column(column), sort_keys=True)
    return _keyed(key, b"column", text.encode()).hex()


def private_features(plan: Plan) -> set[str]:
    """Returns the features that depend on the user's id. The log never holds the values of these features."""
    return plan.column_readers("user", lambda column: column == "id")


def context_types(plan: Plan) -> dict[str, FeatureType]:
    """Returns the columns of the context that a plan reads, with their types."""
    return {str(node.params["column"]): node.type for _, node in context_sources(plan)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureLogConfig:
    """Sets the share of requests that are logged, and the limits of the queue and of the disk space."""

    sample: float = 1.0
    """Share of requests that are logged, 0 to 1. A keyed hash of user and time decides whether a request is logged."""
    max_waiting: int = 256
    """Largest number of requests that wait to be written. While this queue is full, no further request is logged."""
    max_waiting_bytes: int = 64 << 20
    """Largest number of bytes that wait to be written. If no other request waits, a request may have more bytes."""
    max_file_bytes: int = 64 << 20
    """Largest size of a log file in bytes. If a record would make the file larger than this, a new file begins."""
    max_total_bytes: int = 4 << 30
    """Largest total size of the folder's log files in bytes. A record that would make the total larger is dropped."""
    flush_every_s: float = 1.0
    """Seconds after which written records are forced to disk."""

    def __post_init__(self) -> None:
        check(0 <= self.sample <= 1, "sample", self.sample, "0 to 1")
        for field in ("max_waiting", "max_waiting_bytes", "max_file_bytes", "max_total_bytes"):
            check(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        check(self.flush_every_s > 0, "flush_every_s", self.flush_every_s, "more than 0 seconds")


class _NoRoom(Exception):
    """Raised if the folder has reached its size limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    user_id: int
    request_ms: int
    item_ids: Positions
    features: Mapping[str, Column]
    context: Mapping[str, Column]
    num_bytes: int


class FeatureLog:
    """Writes the features of one model into a folder, on a separate thread. `offer` may be called from any thread.

    `num_logged` counts the written records. `num_dropped` counts the records that could not be written, mostly because
    the queue or the disk was full or the folder had reached its size limit.
    """

    def __init__(self, folder: Path, features: FeatureSet, key: bytes, config: FeatureLogConfig | None = None) -> None:
        self.folder = folder
        self.features = features
        self.config = config or FeatureLogConfig()
        self.num_logged = 0
        self.num_dropped = 0
        self._key = key
        self._private = private_features(features.plan)
        self._context = context_types(features.plan)
        # Replay needs the candidates only to recompute features of candidate level.
        self._keeps_items = any(node.level == CANDIDATE for node in features.plan.nodes)
        self._line: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._complaints: set[str] = set()
        self._descriptor = -1
        self._file_bytes = 0
        self._total_bytes = 0
        self._scanned_s = -RESCAN_S
        self._is_dirty = False
        _prepare(folder)
        self._thread = threading.Thread(target=self._work, name="tackboard-feature-log", daemon=True)
        self._thread.start()

    def is_sampled(self, user_id: int, request_ms: int) -> bool:
        """Returns whether a request of this user at this time is logged. All processes with the same key agree."""
        if self.config.sample >= 1:
            return True
        moment = user_id.to_bytes(8, "little", signed=True) + request_ms.to_bytes(8, "little", signed=True)
        drawn = int.from_bytes(_keyed(self._key, b"sample", moment)[:8], "little")
        return drawn < self.config.sample * 2.0**64

    def offer(
        self,
        *,
        user_id: int,
        request_ms: int,
        item_ids: Positions,
        features: Mapping[str, Column],
        context: Mapping[str, Column] | None = None,
    ) -> bool:
        """Queues a request if it is sampled. Returns whether the request was queued. Never waits and never raises."""
        if not self.is_sampled(user_id, request_ms):
            return False
        try:
            kept = {name: _own(features[name]) for name in self.features.plan.features}
        except KeyError as error:
            self._drop(f"feature {error} was not computed")
            return False
        item_ids = item_ids.copy() if self._keeps_items else np.zeros(0, dtype=np.int64)
        said = {name: _own(column) for name, column in (context or {}).items() if name in self._context}
        num_bytes = item_ids.nbytes + sum(_size(column) for column in (*kept.values(), *said.values()))
        waiting = _Waiting(user_id, request_ms, item_ids, kept, said, num_bytes)
        config = self.config
        with self._changed:
            is_full = len(self._line) >= config.max_waiting or (
                bool(self._line) and self._waiting_bytes + num_bytes > config.max_waiting_bytes
            )
            if self._closing or is_full:
                self.num_dropped += 1
                return False
            self._line.append(waiting)
            self._waiting_bytes += num_bytes
            self._changed.notify()
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Writes the waiting records and ends the thread. Returns whether the thread ended within `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        flushed_s = time.monotonic()
        while True:
            with self._changed:
                if not self._line and not self._closing:
                    self._changed.wait(self.config.flush_every_s if self._is_dirty else None)
                waiting = self._line.popleft() if self._line else None
                self._waiting_bytes -= waiting.num_bytes if waiting else 0
                is_last = waiting is None and self._closing
            if waiting is not None:
                self._write(waiting)
            if is_last or time.monotonic() - flushed_s >= self.config.flush_every_s:
                self._flush()
                flushed_s = time.monotonic()
            if is_last:
                self._close_file()
                return

    def _write(self, waiting: _Waiting) -> None:
        try:
            self._append(self._record(waiting))
            self.num_logged += 1
        except _NoRoom:
            self._drop(f"the folder has reached its limit of {self.config.max_total_bytes:,} bytes")
        except OSError as error:
            self._drop(os.strerror(error.errno or 0))
        except Exception as error:  # noqa: BLE001 - a bug may lose this record, but must not end the writer thread
            self._drop(f"a bug: {type(error).__name__}")

    def _drop(self, reason: str) -> None:
        with self._changed:
            self.num_dropped += 1
        self._complain(reason)

    def _complain(self, reason: str) -> None:
        """Prints a warning once per reason, because a full disk must not fill the server's own log with warnings."""
        if reason not in self._complaints:
            self._complaints.add(reason)
            say(
                f"warning: features are not logged to {self.folder}: {reason}; "
                "serving goes on, and lost records are counted"
            )

    def _record(self, waiting: _Waiting) -> bytes:
        columns = {
            name: {"digest": column_digest(self._key, column)} if name in self._private else encode_column(column)
            for name, column in waiting.features.items()
        }
        record = {
            "time": waiting.request_ms,
            "user": user_digest(self._key, waiting.user_id).hex(),
            "items": encode_array(waiting.item_ids),
            "context": {name: encode_column(column) for name, column in waiting.context.items()},
            "features": columns,
        }
        return _sealed(self._key, record)

    def _header(self) -> bytes:
        header = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "key": _keyed(self._key, b"check", b"").hex(),
            "sample": self.config.sample,
            "hash": self.features.hash,
            "features": self.features.to_json(),
        }
        return _sealed(self._key, header)

    def _append(self, line: bytes) -> None:
        """Writes a line, all or nothing. Raises _NoRoom or OSError if the line cannot be written."""
        if self._descriptor >= 0 and self._file_bytes + len(line) > self.config.max_file_bytes:
            self._flush()
            self._close_file()
        self._make_room(len(line))
        if self._descriptor < 0:
            self._open_file()
        self._write_all(line)

    def _make_room(self, num_bytes: int) -> None:
        """Raises _NoRoom if the folder would exceed its size limit."""
        limit = self.config.max_total_bytes
        if self._total_bytes + num_bytes > limit or self._descriptor < 0:
            if time.monotonic() - self._scanned_s >= RESCAN_S:
                self._scanned_s = time.monotonic()
                self._total_bytes = sum(path.stat().st_size for path in self.folder.glob(PATTERN))
            if self._total_bytes + num_bytes > limit:
                raise _NoRoom

    def _open_file(self) -> None:
        now_s, fraction = divmod(time.time(), 1)
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_s)) + f".{int(fraction * 1e6):06d}Z"
        path = self.folder / f"features-{moment}-{os.getpid()}.jsonl"
        # Only the server's own account may read the file: a history tells much about a person, even without a name.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file_bytes = 0
        try:
            self._write_all(self._header())
        except OSError:
            # A file without a header is of no use, and every later record would leave another file without a header.
            self._close_file()
            path.unlink(missing_ok=True)
            raise

    def _write_all(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # Remove a line that was written only in part. If the file cannot be truncated, close it, so that the torn
            # line stays the last line of the file.
            try:
                os.ftruncate(self._descriptor, self._file_bytes)
            except OSError:
                self._close_file()
            raise
        self._file_bytes += len(line)
        self._total_bytes += len(line)
        self._is_dirty = True

    def _flush(self) -> None:
        if self._is_dirty and self._descriptor >= 0:
            self._is_dirty = False
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._complain(os.strerror(error.errno or 0))

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._is_dirty = -1, False


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A record of the log. `features` holds the logged values by name. `digests` holds hashes of private features."""

    request_ms: int
    user: bytes
    item_ids: Positions
    context: dict[str, Column]
    features: dict[str, Column]
    digests: dict[str, str]


class LogFile:
    """One file of a log. The constructor checks the header. `features` is None if the header line was cut short.

    After the records have been read, `is_torn` tells whether the last line was cut short, usually by a killed server.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self.is_torn = False
        self.features: FeatureSet | None = None
        self._key = key
        with path.open("rb") as file:
            line = file.readline()
        if not line.endswith(b"\n"):
            self.is_torn = True
            return
        header = _parsed(line, f"{path}: its header")
        if header.get("kind") != KIND or type(header.get("format_version")) is not int:
            raise DataError(
                f"{path} is not a log of features", allowed="allowed: a file that tackboard serve --log-features wrote"
            )
        if header["format_version"] > FORMAT_VERSION:
            raise DataError(
                f"{path} has log format version {header['format_version']}",
                allowed=f"allowed: up to {FORMAT_VERSION}",
                fix="use a newer tackboard",
            )
        if header.get("key") != _keyed(key, b"check", b"").hex():
            raise DataError(f"{path} was written with another key", fix="give the key that the server used")
        _check_seal(line, key, f"{path}: its header")
        self.features = FeatureSet.from_json(header.get("features"), str(path))
        if self.features.hash != header.get("hash"):
            raise CorruptFileError(f"{path}: its header has the hash of another feature set")

    def records(self) -> Iterator[LoggedRequest]:
        """Yields the requests in the order of the file. If a line is damaged, a CorruptFileError names the line."""
        if self.features is None:
            return
        plan = self.features.plan
        rows = {name: plan.nodes[index].level == CANDIDATE for name, index in plan.features.items()}
        private, context = private_features(plan), context_types(plan)
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    self.is_torn = True
                    return
                where = f"{self.path}, line {number}"
                _check_seal(line, self._key, where)
                yield _read_record(_parsed(line, where), plan, rows, private, context, where)


def open_log(place: Path, key: bytes) -> list[LogFile]:
    """Opens all log files of a folder (oldest first) or a single file. Raises UsageError if there is no log file."""
    paths = sorted(place.glob(PATTERN)) if place.is_dir() else [place] if place.is_file() else []
    if not paths:
        raise UsageError(
            f"{place} holds no log of features",
            allowed=f"allowed: a folder with {PATTERN}, or one such file",
            fix="let a server write a log: tackboard serve BUNDLE --log-features FOLDER --log-key FILE",
        )
    return [LogFile(path, key) for path in paths]


def _read_record(
    record: Mapping[str, Any],
    plan: Plan,
    is_per_candidate: Mapping[str, bool],
    private: set[str],
    context: Mapping[str, Any],
    where: str,
) -> LoggedRequest:
    try:
        stored = record["features"]
        if set(stored) != set(plan.features):
            raise CorruptFileError("the record does not have the features that the header lists")
        item_ids = decode_array(record["items"], np.int64)
        columns: dict[str, Column] = {}
        for name in plan.features:
            if name not in private:
                num_rows = len(item_ids) if is_per_candidate[name] else 1
                columns[name] = decode_column(plan.nodes[plan.features[name]].type, stored[name], num_rows)
        return LoggedRequest(
            request_ms=int(record["time"]),
            user=bytes.fromhex(record["user"]),
            item_ids=item_ids,
            context={name: decode_column(context[name], data, 1) for name, data in record["context"].items()},
            features=columns,
            digests={name: str(stored[name]["digest"]) for name in private},
        )
    except CorruptFileError as error:
        raise CorruptFileError(f"{where}: {error.got}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorruptFileError(f"{where} is not a record of served features") from None


def _keyed(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key, person=purpose).digest()


def _sealed(key: bytes, content: Mapping[str, Any]) -> bytes:
    """Returns the content as a line of JSON. The last field is a keyed hash of all text before that field."""
    text = json.dumps(content, separators=(",", ":"))[:-1].encode("ascii")
    return text + f'{_SEAL}{_keyed(key, b"seal", text).hex()}"}}\n'.encode("ascii")


def _check_seal(line: bytes, key: bytes, where: str) -> None:
    text, _, seal = line.rpartition(_SEAL.encode("ascii"))
    if seal != _keyed(key, b"seal", text).hex().encode("ascii") + b'"}\n':
        raise CorruptFileError(f"{where} is damaged: it is not what the server wrote")


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CorruptFileError(f"{where} is not a JSON object")
    return content


def _prepare(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", allowed="allowed: a folder for the log of features")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, "the log of features cannot be written") or error from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the log of features cannot be written to {folder}", fix="choose a folder you may write to")


def _own(column: Column) -> Column:
    """Copies NumPy views, because a view keeps the whole request body in memory, and the values may change later."""
    return dataclasses.replace(
        column,
        values=_owned(column.values),
        present=_owned(column.present),
        offsets=_owned(column.offsets),
        fields=None if column.fields is None else {name: _own(field) for name, field in column.fields.items()},
    )


def _owned(array: NDArray[Any] | None) -> Any:
    return array if array is None or array.base is None else array.copy()


def _size(column: Column) -> int:
    """Estimates the bytes of a column. The length of strings is only guessed, because measuring it takes time."""
    if column.fields is not None:
        return sum(_size(field) for field in column.fields.values())
    arrays = (column.values, column.present, column.offsets)
    size = sum(array.nbytes for array in arrays if array is not None)
    return size + (0 if column.dictionary is None else 64 * len(column.dictionary))
