"""Backfill computes a feature set for all events of a dataset and makes a new snapshot with features.parquet.

Every event becomes one row. Backfill turns the event into a request that has the event's user, time and context, and
the event's item as its only candidate. The row holds the features of this request. The request sees only events that
were received before its time. The old snapshot stays in use until the new snapshot is complete (see
events/staging.py). If the computation of a feature did not change since the last backfill, its values are copied.
Memory is bounded, because backfill computes one bucket (all events of some users) at a time. Each bucket is written as
one row group, so features.parquet and events.parquet have the same buckets.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.core.files import reach, read_json
from tackboard.core.progress import Progress
from tackboard.events.dataset import Dataset
from tackboard.events.schema import numpy_column
from tackboard.events.staging import check_newest, derive_snapshot
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.data_check import check_data
from tackboard.features.entity_tables import EventTable, load_entities, stored_event_columns
from tackboard.features.evolution import FeatureChange, check_evolution
from tackboard.features.feature_set import FILE_NAME, UNICODE, ZONED, FeatureSet, read_features
from tackboard.features.plan import Plan
from tackboard.features.stored_features import FEATURES, StoredRows, stored_arrays, stored_schema


@dataclasses.dataclass(frozen=True)
class Backfilled:
    """The result of a backfill. `computed` names the computed features, and `taken_over` names the copied features."""

    path: Path
    num_rows: int
    computed: list[str]
    taken_over: list[str]
    changes: list[FeatureChange]


def backfill(dataset: Dataset, features: FeatureSet, *, quiet: bool = False) -> Backfilled:
    """Makes a new snapshot of `dataset` with the features of every event, and points `latest` at the new snapshot.

    If the newest snapshot already has exactly these features, nothing is written. Raises UsageError if a change of the
    feature set needs a new version (see evolution.py), and DataError if the data do not fit the features. If an error
    or a kill interrupts the backfill, the old snapshot stays in use.
    """
    source = dataset.path.resolve()
    check_newest(dataset)
    old = read_features(source)
    changes = [] if old is None else check_evolution(old, features)
    stored = {} if old is None else dict(read_json(source / FILE_NAME))
    kept = [] if old is None else _unchanged(old, stored, features, pq.read_schema(source / FEATURES))
    computed = [name for name in features.plan.features if name not in kept]
    result = Backfilled(source, dataset.num_events, computed, kept, changes)
    if stored == features.to_json():
        return result
    check_data(features.trimmed(computed), dataset)

    def fill(staging: Path) -> tuple[str, ...]:
        with Progress("computing features", total=dataset.num_events, unit="events", quiet=quiet) as progress:
            _write_rows(dataset, features, kept, staging / FEATURES, progress)
        features.write(staging)
        return written

    written = (FEATURES, FILE_NAME)
    final = derive_snapshot(dataset, "features", features.to_json(), replaced=written, fill=fill)
    return dataclasses.replace(result, path=final)


def _unchanged(old: FeatureSet, stored: Mapping[str, Any], features: FeatureSet, schema: pa.Schema) -> list[str]:
    """Returns the features whose stored values are still valid. For these features, the computation, the stored type,
    and the versions of the time zones and Unicode tables that they use are the same as before."""
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


def _write_rows(dataset: Dataset, features: FeatureSet, kept: list[str], path: Path, progress: Progress) -> None:
    reach(f"{FEATURES}:before-write")
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
    """Yields (number of events, feature arrays to store) for each chunk. All events of a user are in the same chunk."""
    users, items = load_entities(dataset, plan)
    names = [*stored_event_columns(dataset, plan), "item_id"]
    if context_sources(plan):
        names.append("context")
    for chunk in dataset.event_chunks(names):
        rows = RequestRows(
            user_ids=numpy_column(chunk, "user_id"),
            request_ms=numpy_column(chunk, "time_ms"),
            item_ids=numpy_column(chunk, "item_id"),
            context=context_columns(plan, chunk["context"]) if "context" in chunk.column_names else {},
        )
        events = EventTable.from_arrow(chunk, plan) if plan.reads_events else None
        executor = BatchExecutor(plan, events=events, users=users, items=items)
        yield chunk.num_rows, stored_arrays(executor.compute(rows), schema)
