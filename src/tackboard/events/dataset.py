"""This module writes canonical tables as a snapshot folder, sealed by a manifest of hashes, and reads snapshots.

    datasets/<name>/<snapshot>/   events.parquet items.parquet users.parquet statistics.json layout.json MANIFEST.json
                                  item_history.parquet user_history.parquet   if attributes change with time
                                  impressions.parquet                         if the log says what was shown
                                  truth.json                                  in synthetic worlds
                                  requests.parquet labels.json                after labelling
                                  requests.parquet pseudo_requests.json       after `data pseudo-requests`
                                  features.parquet features.json              after a backfill
                                  attributes.json                             after `data attributes`
                                  live_counts.parquet                         after `data attributes --live-counts`
    datasets/<name>/latest        -> the newest snapshot
    datasets/<name>/index/<snapshot>/   results that can be computed again from the snapshot (see data/index.py)

Decided: a snapshot never changes. Another import makes a new snapshot, and one rename points `latest` at the new
snapshot. So a training run that opened the old snapshot continues to read the data with which the run started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.config import suggest
from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import CorruptFileError, DataError, UsageError
from tackboard.core.files import new_directory, remove_leftovers, write_json_atomic
from tackboard.core.manifest import MANIFEST, read_manifest, verify_manifest, write_manifest
from tackboard.core.progress import say
from tackboard.events.attributes import VALID_FROM, entity_table, split_versions
from tackboard.events.layout import FILE_NAME as LAYOUT
from tackboard.events.layout import ROWS_PER_BUCKET, Layout, RowReader, cut_buckets, read_layout, write_buckets
from tackboard.events.privacy.forgetting import (
    promote,
    read_forgotten,
    refuse_dangling,
    shown_to_others,
    without_forgotten,
)
from tackboard.events.schema import complete_events, numpy_column
from tackboard.events.statistics import FIELDS as STATISTICS
from tackboard.events.statistics import OPTIONAL_FIELDS as OPTIONAL_STATISTICS
from tackboard.events.statistics import describe
from tackboard.events.stored_tables import check_files, check_rows, reading
from tackboard.events.vector_columns import from_stored, to_stored

KIND = "dataset"
LATEST = "latest"
INDEX = "index"
EVENTS = "events.parquet"
TRUTH = "truth.json"
ITEMS = "items.parquet"
REQUESTS = "requests.parquet"
LIVE_COUNTS = "live_counts.parquet"
LABEL = "label_"
"""Prefix of the label columns in requests.parquet."""
KINDS = ("item", "user")
"""The kinds of things that have attributes."""
_VERSION = ("item_id", VALID_FROM)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One snapshot. `statistics` is the content of statistics.json; see `statistics.describe`."""

    path: Path
    manifest: Mapping[str, Any]
    statistics: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The dataset's name, without the snapshot."""
        return str(self.manifest["name"])

    @property
    def num_events(self) -> int:
        return int(self.statistics["num_events"])

    @property
    def num_users(self) -> int:
        return int(self.statistics["num_users"])

    @property
    def num_items(self) -> int:
        """Number of rows of items.parquet. Includes items that occur only in the attribute file or the impressions."""
        return int(self.statistics["num_items_listed"])

    @property
    def user_type(self) -> str:
        """The type of user ids: `int64` or `string`. `item_type` is the type of item ids."""
        return str(self.statistics["user_type"])

    @property
    def item_type(self) -> str:
        return str(self.statistics["item_type"])

    @property
    def actions(self) -> list[str]:
        """The actions in the events, sorted."""
        return sorted(self.statistics["actions"])

    @property
    def surfaces(self) -> list[str]:
        """The surfaces in the events, sorted."""
        return sorted(self.statistics["surfaces"])

    @property
    def fields(self) -> dict[str, str]:
        """Maps the name of each field of the events to its type: `int`, `float`, `bool` or `string`."""
        return {name: str(field["type"]) for name, field in self.statistics.get("fields", {}).items()}

    @property
    def has_context(self) -> bool:
        """Whether events have a column of contexts, which are JSON objects."""
        return "context" in pq.read_schema(self.events_path).names

    @property
    def events_path(self) -> Path:
        """The Parquet file of events, sorted by (user_id, time_ms, order)."""
        return self.path / EVENTS

    def read_events(self, columns: Sequence[str] | None = None) -> pa.Table:
        return _read(self.events_path, columns)

    @functools.cached_property
    def layout(self) -> Layout:
        """Says which users, events and labelled requests belong to each bucket of the snapshot."""
        layout = read_layout(self.path, self.events_path)
        for name, rows in layout.offsets.items():
            path = self.path / f"{name}.parquet"
            if not path.exists() or [rows[0], rows[-1]] != [0, pq.read_metadata(path).num_rows]:
                raise CorruptFileError(f"{self.path / LAYOUT} does not match the rows of {path.name}")
        return layout

    def event_chunks(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields user_id and `columns` of the events in file order, one bucket at a time. No user is split."""
        names = list(dict.fromkeys(["user_id", *columns]))
        with contextlib.closing(RowReader(self.events_path)) as reader:
            for bucket in range(self.layout.num_buckets):
                events = reader.read([self.layout.rows_of("events", bucket)], names)
                self.layout.check_users(bucket, numpy_column(events, "user_id"), self.path)
                yield events

    def places_of_items(self, catalogue: NDArray[np.int64], item_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the position of each item in the sorted `catalogue`. Raises CorruptFileError if it lacks an item."""
        encoded = pa.array(item_ids).dictionary_encode()
        distinct = encoded.dictionary.to_numpy()
        places = np.searchsorted(catalogue, distinct)
        if (places >= len(catalogue)).any() or not np.array_equal(catalogue[places], distinct):
            raise CorruptFileError(f"{self.path / ITEMS} lacks items that {self.events_path} has")
        return np.asarray(places.take(encoded.indices.to_numpy()))

    def read_items(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads the items, one row each, sorted by item_id. Attributes that change with time have the newest value."""
        return _read(self.path / ITEMS, columns)

    def read_users(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads the users, one row each, sorted by user_id. Attributes that change with time have the newest value."""
        return _read(self.path / "users.parquet", columns)

    def read_history(self, kind: str) -> pa.Table | None:
        """Reads all versions of the attributes of items or users (`kind` is `item` or `user`).

        The columns are item_id or user_id, valid_from_ms and the attributes. Rows are sorted by id, then by
        valid_from_ms. Returns None if the attributes do not change with time.
        """
        if kind not in KINDS:
            raise UsageError(f"{kind!r} has no history of attributes", allowed=f"allowed: {', '.join(KINDS)}")
        return self._read_if_there(f"{kind}_history.parquet")

    @functools.cached_property
    def live_counts(self) -> list[str]:
        """Names of the items' live counts (see data/count_history.py)."""
        path = self.path / LIVE_COUNTS
        return [name for name in pq.read_schema(path).names if name not in _VERSION] if path.exists() else []

    def read_live_counts(self, names: Sequence[str]) -> pa.Table:
        """Reads item_id, valid_from_ms and the live counts with these names. Rows are sorted like a history."""
        return _read(self.path / LIVE_COUNTS, [*_VERSION, *names])

    def read_impressions(self) -> pa.Table | None:
        """Reads impressions.parquet, which events/impressions.py describes. Returns None if there is no such file."""
        return self._read_if_there("impressions.parquet")

    def _read_if_there(self, name: str) -> pa.Table | None:
        path = self.path / name
        return _read(path, None) if path.exists() else None

    def read_truth(self) -> dict[str, Any] | None:
        """Reads the config of the synthetic world that made the dataset. Returns None for real data."""
        path = self.path / TRUTH
        return read_document(path, {}) if path.exists() else None


def write_dataset(
    root: Path,
    name: str,
    events: pa.Table,
    *,
    item_attributes: pa.Table | None = None,
    user_attributes: pa.Table | None = None,
    impressions: pa.Table | None = None,
    requests: pa.Table | None = None,
    truth: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
) -> Path:
    """Writes root/name/<snapshot> and points root/name/latest at it. Returns the snapshot's path.

    `events` has the canonical columns, and its rows may be in any order. This function adds int64 ids to the events and
    sorts them. It also makes the tables of items and users, and the statistics. Attribute tables have a column `item`
    or `user`. If they also have a column valid_from_ms (int64, ms UTC), an id may have several rows, and each row is
    valid until the next row of this id. If the caller knows the labels, `requests` holds the labelled requests
    (`requests_schema` of data/labels.py), sorted by (user_id, time_ms). `source` says where the events came from, and
    is stored in the manifest. Users on the dataset's list of forgotten users are left out. The switch of `latest` is
    atomic: a reader sees the old snapshot or the complete new snapshot.
    """
    check_place(root, name)
    if not events.num_rows:
        raise DataError("there are no events", fix="give a log with at least one row")
    folder = root / name
    forgotten = read_forgotten(folder)
    everyone = complete_events(events)
    completed = without_forgotten(everyone, forgotten)
    if not completed.num_rows:
        raise DataError("all events belong to forgotten users", fix="give a log with events of other users")
    if user_attributes is not None:
        user_attributes = without_forgotten(user_attributes, forgotten)
    newest_items, item_history = split_versions("item", item_attributes)
    newest_users, user_history = split_versions("user", user_attributes)
    items = entity_table(completed, "item", newest_items)
    tables = {
        "events": completed,
        "items": items.drop_columns(["last_ms"]),
        "users": entity_table(completed, "user", newest_users),
    }
    histories = {"item_history": item_history, "user_history": user_history}
    tables |= {table_name: history for table_name, history in histories.items() if history is not None}
    if impressions is not None:
        tables["impressions"] = shown_to_others(impressions, everyone, forgotten)
    layout = cut_buckets(numpy_column(completed, "user_id"), ROWS_PER_BUCKET)
    if requests is not None:
        tables["requests"] = without_forgotten(requests, forgotten)
        layout = layout.with_rows("requests", numpy_column(tables["requests"], "user_id"))
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    snapshot = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + _content_hash(tables, truth)[:8]
    final = folder / snapshot
    documents = {"statistics.json": describe(completed, items)} | ({} if truth is None else {TRUTH: truth})
    try:
        with new_directory(final) as temporary:
            layout.write(temporary)
            for table_name, table in tables.items():
                rows = layout.offsets.get(table_name)
                if rows is None:
                    rows = np.append(np.arange(0, table.num_rows, ROWS_PER_BUCKET), table.num_rows)
                write_buckets(to_stored(table), rows, temporary / f"{table_name}.parquet")
            for file_name, document in documents.items():
                write_json_atomic(temporary / file_name, document)
            meant = [LAYOUT, *(f"{table_name}.parquet" for table_name in tables), *documents]
            write_manifest(temporary, KIND, {"name": name, "source": dict(source or {})}, meant=meant)
    except UsageError:
        if not (final / MANIFEST).is_file():
            raise
        # A snapshot's name holds its time in seconds and a hash of its content. So an equal name means equal content.
        say(f"the same events were imported twice in the same second: {final} is the snapshot of both imports")
    promote(final, forgotten)
    return final


def open_dataset(path: str | Path, *, verify: bool = True) -> Dataset:
    """Opens a snapshot folder, or the newest snapshot of a dataset folder. Checks SHA-256s and Parquet footers.

    With `verify=False`, the only SHA-256 that is checked is the manifest's own. A path without a dataset raises
    DataError. A file that differs from the manifest raises CorruptFileError, which names the file.
    """
    folder = snapshot_folder(Path(path))
    manifest = verify_manifest(folder, KIND) if verify else read_manifest(folder)
    if manifest.get("kind") != KIND:
        raise DataError(f"{folder} is a {manifest.get('kind')}, not a dataset", allowed="allowed: a dataset")
    if not isinstance(manifest.get("name"), str):
        raise CorruptFileError(f"{folder / MANIFEST} is malformed: it lacks the dataset's name")
    statistics = read_document(folder / "statistics.json", STATISTICS, OPTIONAL_STATISTICS)
    num_events = statistics["num_events"]
    check_files(folder, {"events": num_events, "features": num_events, "items": statistics["num_items_listed"]})
    return Dataset(path=folder, manifest=manifest, statistics=statistics)


def snapshot_folder(path: Path) -> Path:
    """Returns `path` if it is a snapshot, or the newest snapshot of the dataset `path`. Other paths raise DataError."""
    is_dataset = not (path / MANIFEST).exists() and (path / LATEST).exists()
    folder = (path / LATEST).resolve() if is_dataset else path
    if not (folder / MANIFEST).exists() and not (folder / EVENTS).exists():
        refuse_dangling(path)
        raise _no_dataset(path)
    return folder


def index_folder(snapshot: Path) -> Path | None:
    """Returns the folder for results that can be computed again from a snapshot.

    This folder is not inside the snapshot, because a snapshot is sealed. Returns None if the snapshot does not lie in a
    dataset's folder, or if the folder for results, or the folder above it, is a symlink.
    """
    snapshot = snapshot.resolve()
    everything = snapshot.parent / INDEX
    place = everything / snapshot.name
    is_ours = (snapshot.parent / LATEST).is_symlink() and not everything.is_symlink() and not place.is_symlink()
    return place if is_ours else None


def check_place(root: Path, name: str) -> None:
    """Raises UsageError unless root/name can be a dataset's folder. Does not create the folder."""
    check_name(name)
    for path in (root, root / name):
        if path.exists() and not path.is_dir():
            raise UsageError(
                f"{path} is a file",
                allowed="allowed: a folder, because a dataset is the folder OUT/NAME",
                fix="give another --out",
            )


def check_name(name: str) -> None:
    """Raises UsageError unless `name` can be a dataset's folder name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid dataset name",
            allowed="allowed: letters, digits, `.`, `_` and `-`, at most 100, starting with a letter or digit",
            fix="give another --name",
        )


def _read(path: Path, columns: Sequence[str] | None) -> pa.Table:
    with reading(path):
        table = pq.read_table(path, columns=None if columns is None else list(columns))
    check_rows(table, path)
    with blaming(path):
        return from_stored(table)


def _content_hash(tables: Mapping[str, pa.Table], truth: Mapping[str, Any] | None) -> str:
    sink = _HashSink()
    for name in sorted(tables):
        sink.write(name.encode())
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), tables[name].schema) as writer:
            writer.write_table(tables[name])
    sink.write(json.dumps(truth, sort_keys=True).encode())
    return sink.digest.hexdigest()


class _HashSink(io.RawIOBase):
    """A file-like object that keeps only the SHA-256 of the bytes written to it."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def _no_dataset(path: Path) -> DataError:
    from tackboard.events.public.listing import DATASETS  # Imported here to avoid a circular import.

    folders = path.parent.iterdir() if path.parent.is_dir() else ()
    siblings = sorted(p.name for p in folders if (p / LATEST / EVENTS).exists())
    fix = "make a dataset with `tackboard init` or `tackboard data synth`"
    if path.name in DATASETS:
        place = "" if path.parent == Path("datasets") else f" --out {path.parent}"
        fix = f"download it ({DATASETS[path.name].source}), then `tackboard data import {path.name} FILE{place}`"
    elif close := suggest(path.name, siblings):
        fix = f"did you mean {path.parent / close}?"
    allowed = f"datasets in {path.parent}: {', '.join(siblings[:10])}" if siblings else ""
    return DataError(f"{path} holds no dataset", allowed=allowed, fix=fix)
