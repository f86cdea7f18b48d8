"""Features of stored events: a feature set and a dataset in, a new snapshot with features.parquet out.

Every event is a row: the request just before it, by its user, at its time, with its item as the candidate and its
context, seeing only what was received before. The new snapshot is made beside the old one under a temporary name, with
hard links to the files that stay, and becomes `latest` in one rename at the very end; until then the old one is in use.
Features whose computation did not change since the last backfill are taken over. Memory is bounded: whole users, some
ten thousand events at a time, are computed and written as one row group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.core.errors import UsageError
from tackboard.core.files import new_directory, reach, read_json, remove_leftovers, replace_symlink
from tackboard.core.manifest import MANIFEST, read_manifest, verify_manifest, write_manifest
from tackboard.core.progress import Progress
from tackboard.events.dataset import KIND, LATEST, ROWS_PER_GROUP, Dataset
from tackboard.events.schema import numpy_column
from tackboard.features.batch_executor import BatchExecutor, Rows
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.data_check import check_data
from tackboard.features.evolution import Change, check_evolution
from tackboard.features.feature_set import FILE_NAME, UNICODE, ZONED, FeatureSet, read_features
from tackboard.features.plan import Plan
from tackboard.features.stored import FEATURES, StoredRows, stored_arrays, stored_schema
from tackboard.features.tables import EventTable, load_entities, stored_event_columns


@dataclasses.dataclass(frozen=True)
class Backfilled:
    """What a backfill did: where the snapshot is, which features were computed and which were taken over."""

    path: Path
    num_rows: int
    computed: list[str]
    taken_over: list[str]
    changes: list[Change]


def backfill(dataset: Dataset, features: FeatureSet, *, quiet: bool = False) -> Backfilled:
    """Makes a snapshot of `dataset` with the features of every event, and points `latest` at it.

    Where the snapshot has exactly these features already, it stays. A change that needs a new version of the set raises
    UsageError, data that the set cannot read DataError; then, and after a kill, the old snapshot is in use.
    """
    source = dataset.path.resolve()
    _check_newest(source)
    remove_leftovers(source.parent)
    old = read_features(source)
    changes = [] if old is None else check_evolution(old, features)
    stored = {} if old is None else dict(read_json(source / FILE_NAME))
    kept = [] if old is None else _unchanged(old, stored, features, pq.read_schema(source / FEATURES))
    computed = [name for name in features.plan.features if name not in kept]
    result = Backfilled(source, dataset.num_events, computed, kept, changes)
    if stored == features.to_json():
        return result
    check_data(features.trimmed(computed), dataset)
    identity = _identity(dataset, features)
    final = _made_before(source.parent, identity)
    if final is None:
        final = source.with_name(f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{identity[:8]}")
        with new_directory(final) as staging:
            _link_files(dataset, staging)
            with Progress("computing features", total=dataset.num_events, unit="events", quiet=quiet) as progress:
                _write_rows(dataset, features, kept, staging / FEATURES, progress)
            features.write(staging)
            # Read from the manifest, so that what another tackboard noted there stays.
            noted = {key: value for key, value in dataset.manifest.items() if key not in _OWN_KEYS}
            write_manifest(staging, KIND, noted | {"features": {"identity": identity, "from": source.name}})
            _check_newest(source)
    replace_symlink(source.parent / LATEST, final.name)
    return dataclasses.replace(result, path=final)


_OWN_KEYS = ("kind", "format_version", "features", "files", "sha256_of_the_above")


def _check_newest(snapshot: Path) -> None:
    """An older snapshot cannot be promoted: `latest` would go back to older events."""
    latest = snapshot.parent / LATEST
    if not latest.is_symlink() or latest.resolve() != snapshot:
        raise UsageError(
            f"{snapshot} is not the newest snapshot of a dataset",
            allowed=f"features are added to the one that {LATEST} points at",
            fix=f"give the dataset's folder: --data {snapshot.parent}" if latest.is_symlink() else "",
        )


def _unchanged(old: FeatureSet, stored: Mapping[str, Any], features: FeatureSet, schema: pa.Schema) -> list[str]:
    """The features whose stored values are what a computation would give again."""
    fresh = features.to_json()
    databases = {"tzdata": ZONED, "unicode": UNICODE}
    moved = {op for key, ops in databases.items() if stored.get(key) != fresh.get(key) for op in ops}
    wanted, hashes = stored_schema(features), old.feature_hashes()
    return [
        name
        for name, digest in features.feature_hashes().items()
        if hashes.get(name) == digest
        and schema.field(name).type.equals(wanted.field(name).type)
        and moved.isdisjoint(node.op for node in features.plan.trimmed([name]).nodes)
    ]


def _identity(dataset: Dataset, features: FeatureSet) -> str:
    """A digest of what the new snapshot will hold."""
    content = [dataset.manifest["sha256_of_the_above"], features.to_json()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _made_before(folder: Path, identity: str) -> Path | None:
    """The complete snapshot of a backfill that was killed just before it became `latest`, or None."""
    for path in sorted(folder.glob(f"*-{identity[:8]}")):
        if (path / MANIFEST).is_file() and read_manifest(path).get("features", {}).get("identity") == identity:
            verify_manifest(path, KIND)
            return path
    return None


def _link_files(dataset: Dataset, staging: Path) -> None:
    """The files of the old snapshot under the same names; they never change, so a hard link is as good as a copy."""
    for entry in dataset.manifest["files"]:
        name = str(entry["name"])
        if name in (FEATURES, FILE_NAME):
            continue
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(dataset.path / name, target)
        except OSError:
            # Some file systems know no links, and some allow only so many.
            shutil.copyfile(dataset.path / name, target)
    reach(f"{FEATURES}:before-write")


def _write_rows(dataset: Dataset, features: FeatureSet, kept: list[str], path: Path, progress: Progress) -> None:
    schema = stored_schema(features)
    plan = features.plan.trimmed([name for name in features.plan.features if name not in kept])
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(pq.ParquetWriter(path, schema))
        old = None
        if kept:
            old = stack.enter_context(contextlib.closing(StoredRows(dataset.path / FEATURES, kept)))
        for num_rows, arrays in _computed(dataset, plan, schema):
            if old is not None:
                taken = old.read(num_rows)
                arrays |= {name: taken[name] for name in kept}
            rows = pa.table([arrays[name] for name in schema.names], schema=schema)
            writer.write_table(rows, row_group_size=max(1, num_rows))
            reach(f"{FEATURES}:after-group")
            progress.advance(num_rows)
    reach(f"{FEATURES}:after-write")


def _computed(dataset: Dataset, plan: Plan, schema: pa.Schema) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of events, features as they are stored) of whole users, chunk by chunk."""
    users, items = load_entities(dataset, plan)
    names = [*stored_event_columns(dataset, plan), "item_id"]
    if context_sources(plan):
        names.append("context")
    for chunk in dataset.event_chunks(names, ROWS_PER_GROUP):
        rows = Rows(
            user_ids=numpy_column(chunk, "user_id"),
            request_ms=numpy_column(chunk, "time_ms"),
            item_ids=numpy_column(chunk, "item_id"),
            context=context_columns(plan, chunk["context"]) if "context" in chunk.column_names else {},
        )
        events = EventTable.from_arrow(chunk, plan) if plan.reads_events else None
        executor = BatchExecutor(plan, events=events, users=users, items=items)
        yield chunk.num_rows, stored_arrays(executor.compute(rows), schema)
