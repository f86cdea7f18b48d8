"""Adds attributes of items that are computed from the log, as a new snapshot of the dataset.

    items.parquet          gains columns; so does item_history.parquet, if attributes change with time
    live_counts.parquet    the versions of the live counts, which change with time
    attributes.json        how each added column was made, the SHA-256 of the events, and the counts

Three kinds of columns can be added. One is the time of each item's first event: it stands for the time at which the
item was created, if that is unknown. Another is a vector per item, from the co-engagement graph (co_engagement.py). The
third is a live count: how many events an item had lately (count_history.py). All other files stay as they are. Decided:
stored features (features.parquet) are left out if an added column replaces an older one, because they may depend on the
older column. Decided: new live counts are made together with those that the dataset has, because one file holds all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tackboard.core.config import did_you_mean
from tackboard.core.documents import read_document
from tackboard.core.errors import DataError, UsageError
from tackboard.core.files import reach, write_json_atomic
from tackboard.core.progress import Progress
from tackboard.data.co_engagement import Floats, Ints, PairCounts, ppmi, vectors_of
from tackboard.data.count_history import LiveCountConfig, config_of, count_history, settings_of
from tackboard.events.attributes import VALID_FROM
from tackboard.events.columns import has_action, one_array
from tackboard.events.dataset import EVENTS, ITEMS, LIVE_COUNTS, Dataset
from tackboard.events.impressions import check_action
from tackboard.events.layout import ROWS_PER_BUCKET, write_buckets
from tackboard.events.schema import encode, is_field_name, numpy_column
from tackboard.events.staging import check_newest, derive_snapshot
from tackboard.events.stored_tables import reading
from tackboard.events.vector_columns import to_stored
from tackboard.features.entity_tables import find_ids

ATTRIBUTES = "attributes.json"
VERSION = 1
HISTORY = "item_history.parquet"
LIVE_COUNT = "live count"
STORED_FEATURES = ("features.parquet", "features.json")
MAX_WIDTH = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorsConfig:
    """Settings of the vectors that are made from the co-engagement graph."""

    name: str
    """Name of the attribute."""
    width: int = 32
    """Number of numbers in a vector."""
    window: int = 5
    """Two items are neighbours if at most this many steps lie between their events in the history of one user."""
    until_ms: int | None = None
    """Only events that happened and were received before this time (ms UTC) count; None means the whole log."""
    actions: tuple[str, ...] = ()
    """Only events with these actions count; empty means all actions."""
    group: str | None = None
    """Name of an attribute. An item without neighbours gets the mean vector of the items with the same value."""
    max_pairs: int = 1 << 25
    """Largest number of distinct pairs of items in memory (about 130 bytes each); the rarest are dropped."""
    seed: int = 0
    """Seed of the random numbers that start the computation and that break ties between pairs to drop."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(sorted(self.actions)))
        for option, value, highest in (("--width", self.width, MAX_WIDTH), ("--window", self.window, 100)):
            if not 1 <= value <= highest:
                raise UsageError(f"{option} is {value}", allowed=f"allowed: 1 to {highest:,}")
        if self.max_pairs < 1:
            raise UsageError(f"--max-pairs is {self.max_pairs}", allowed="allowed: 1 or more")


@dataclasses.dataclass(frozen=True)
class VectorCounts:
    """Counts of a job that makes vectors. The first three fields add up to the number of items."""

    with_neighbours: int
    from_group: int
    zero: int
    """Items that got zeros, because they have neither neighbours nor a group with neighbours."""
    events: int
    """Events that counted."""
    pairs: int
    """Distinct pairs of items with a positive weight."""
    pairs_dropped: int


@dataclasses.dataclass(frozen=True)
class Attributes:
    """The result of a job: the snapshot, and what attributes.json says about each added attribute."""

    path: Path
    made: dict[str, dict[str, Any]]


def add_attributes(
    dataset: Dataset,
    *,
    first_event: str | None = None,
    vectors: VectorsConfig | None = None,
    live_counts: Sequence[LiveCountConfig] = (),
    quiet: bool = False,
) -> Attributes:
    """Makes a new snapshot of `dataset` whose items have more attributes, and points `latest` at the new snapshot.

    `first_event` names an attribute that is the time of the item's first event (ms UTC); it is null for an item without
    events. `vectors` describes an attribute of vectors, and `live_counts` describes attributes that change with time.
    `dataset` must be the newest snapshot. If it already has exactly these attributes, no snapshot is made. After an
    error or a kill, the old snapshot stays in use.
    """
    check_newest(dataset)
    stored = read_attributes(dataset.path)
    wanted = _wanted(dataset, first_event, vectors, live_counts)
    _check_names(dataset, wanted, stored)
    for config in (vectors, *live_counts):
        for action in () if config is None else config.actions:
            check_action(dataset, action, f"--action {action}")
    if vectors is not None:
        _check_group(dataset, vectors)
    if live_counts:
        wanted = {name: _renewed(made, wanted) for name, made in stored.items() if made["kind"] == LIVE_COUNT} | wanted
    changed = [name for name, made in wanted.items() if _settings(stored.get(name, {})) != _settings(made)]
    if not changed:
        return Attributes(dataset.path, stored)
    fixed = (ITEMS, HISTORY) if (dataset.path / HISTORY).is_file() else (ITEMS,)
    tables = fixed if first_event is not None or vectors is not None else ()
    stale = STORED_FEATURES if set(changed) & set(stored) else ()

    def fill(staging: Path) -> tuple[str, ...]:
        columns: dict[str, pa.Array] = {}
        if first_event is not None:
            columns[first_event] = one_array(dataset.read_items(["first_ms"])["first_ms"])
        if vectors is not None:
            columns[vectors.name], counts = _make_vectors(dataset, vectors, quiet=quiet)
            wanted[vectors.name]["counts"] = dataclasses.asdict(counts)
        ids = numpy_column(dataset.read_items(["item_id"]), "item_id")
        for name in tables:
            _write_with(dataset.path / name, staging / name, ids, columns)
        if live_counts:
            _write_live_counts(dataset, wanted, staging / LIVE_COUNTS, quiet=quiet)
        write_json_atomic(staging / ATTRIBUTES, {"version": VERSION, "attributes": {**stored, **wanted}})
        return written

    written = (*tables, *((LIVE_COUNTS,) if live_counts else ()), ATTRIBUTES)
    path = derive_snapshot(dataset, "attributes", wanted, replaced=(*written, *stale), fill=fill)
    return Attributes(path, read_attributes(path))


def read_attributes(snapshot: Path) -> dict[str, dict[str, Any]]:
    """Reads attributes.json of a snapshot folder: how each added attribute was made. Empty if nothing was added."""
    path = snapshot / ATTRIBUTES
    if not path.exists():
        return {}
    content = read_document(path, {"version": int, "attributes": dict[str, dict[str, Any]]})
    if content["version"] > VERSION:
        raise DataError(f"{path} has version {content['version']}", allowed=f"allowed: up to {VERSION}")
    return dict(content["attributes"])


def _wanted(
    dataset: Dataset, first_event: str | None, vectors: VectorsConfig | None, live_counts: Sequence[LiveCountConfig]
) -> dict[str, dict[str, Any]]:
    """Returns what attributes.json will say about the attributes, without the counts."""
    given = (first_event, None if vectors is None else vectors.name, *(config.name for config in live_counts))
    names = [name for name in given if name is not None]
    if not names:
        raise UsageError("no attribute was named", fix="give --first-event NAME, --vectors NAME or --live-counts")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two attributes are named {name}", fix="give them different names")
    (events,) = [str(entry["sha256"]) for entry in dataset.manifest["files"] if entry["name"] == EVENTS]
    wanted: dict[str, dict[str, Any]] = {}
    if first_event is not None:
        wanted[first_event] = {"kind": "first event", "events": events}
    if vectors is not None:
        settings = dataclasses.asdict(vectors)
        settings |= {"actions": list(vectors.actions)}
        wanted[settings.pop("name")] = {"kind": "vectors", "events": events, **settings}
    for config in live_counts:
        wanted[config.name] = {"kind": LIVE_COUNT, "events": events, **settings_of(config)}
    return wanted


def _settings(made: dict[str, Any]) -> dict[str, Any]:
    """Returns what attributes.json says about an attribute, without the counts."""
    return {key: value for key, value in made.items() if key != "counts"}


def _renewed(made: dict[str, Any], wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns an older live count, made again from the events from which the `wanted` attributes are made."""
    return {**_settings(made), "events": next(iter(wanted.values()))["events"]}


def _check_names(dataset: Dataset, wanted: dict[str, dict[str, Any]], stored: dict[str, dict[str, Any]]) -> None:
    known = [*pq.read_schema(dataset.path / ITEMS).names, VALID_FROM]
    for name, made in wanted.items():
        if not is_field_name(name):
            raise UsageError(f"{name!r} cannot name an attribute", allowed="allowed: a Python name, e.g. content")
        if name in known and name not in stored:
            raise UsageError(
                f"items have an attribute {name} that this command did not make",
                allowed=f"taken: {', '.join(known)}",
                fix="give another name",
            )
        kind = stored.get(name, made)["kind"]
        if kind != made["kind"] and LIVE_COUNT in (kind, made["kind"]):
            raise UsageError(
                f"items have a {kind} named {name}, which would become a {made['kind']}", fix="give another name"
            )


def _check_group(dataset: Dataset, config: VectorsConfig) -> None:
    schema = pq.read_schema(dataset.path / ITEMS)
    if config.group is None:
        return
    if config.group not in schema.names:
        raise UsageError(
            f"items have no attribute {config.group!r} (--group)",
            allowed=f"attributes: {', '.join(schema.names)}",
            fix=did_you_mean(config.group, schema.names),
        )
    if pa.types.is_nested(schema.field(config.group).type):
        raise UsageError(f"--group {config.group} is a column of lists", allowed="allowed: texts, numbers, bools")


def _make_vectors(dataset: Dataset, config: VectorsConfig, *, quiet: bool) -> tuple[pa.Array, VectorCounts]:
    items = dataset.read_items(["item_id", *([] if config.group is None else [config.group])])
    ids = numpy_column(items, "item_id")
    pairs = PairCounts(len(ids), window=config.window, max_pairs=config.max_pairs, seed=config.seed)
    num_events = 0
    with Progress("counting neighbours", total=dataset.num_events, unit="events", quiet=quiet) as progress:
        for events in dataset.event_chunks(["item_id", "action", "time_ms", "received_ms"]):
            progress.advance(events.num_rows)
            chosen = has_action(events, config.actions)
            if config.until_ms is not None:
                for name in ("time_ms", "received_ms"):
                    chosen &= numpy_column(events, name) < config.until_ms
            num_events += int(chosen.sum())
            places = find_ids(ids, numpy_column(events, "item_id")[chosen])
            pairs.add(numpy_column(events, "user_id")[chosen], places)
    edges = ppmi(pairs)
    vectors, own = vectors_of(edges, ids, config.width, config.seed, quiet=quiet)
    from_group = np.zeros(len(ids), dtype=bool)
    if config.group is not None:
        from_group = _fill_from_groups(vectors, own, encode(items[config.group]))
    counts = VectorCounts(
        with_neighbours=int(own.sum()),
        from_group=int(from_group.sum()),
        zero=int((~own & ~from_group).sum()),
        events=num_events,
        pairs=len(edges[0]),
        pairs_dropped=pairs.num_dropped,
    )
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), config.width), counts


def _fill_from_groups(vectors: Floats, own: NDArray[np.bool_], groups: pa.DictionaryArray) -> NDArray[np.bool_]:
    """Gives each item without a vector the mean vector of its group, in place. Returns which items got such a mean."""
    codes = groups.indices.fill_null(len(groups.dictionary)).to_numpy().astype(np.int64)
    num_groups = len(groups.dictionary) + 1
    sizes = np.bincount(codes[own], minlength=num_groups)
    sizes[-1] = 0
    filled = ~own & (sizes[codes] > 0)
    for column in vectors.T:
        sums = np.bincount(codes[own], weights=column[own], minlength=num_groups)
        column[filled] = (sums / np.maximum(sizes, 1))[codes[filled]]
    return np.asarray(filled)


def _write_with(old: Path, new: Path, ids: Ints, columns: dict[str, pa.Array]) -> None:
    """Writes the table `old` with added or replaced columns. `columns` has a value for each of the sorted `ids`."""
    with reading(old):
        table = pq.read_table(old)
    places = pa.array(find_ids(ids, numpy_column(table, "item_id")))
    added = to_stored(pa.table({name: column.take(places) for name, column in columns.items()}))
    kept = [name for name in table.column_names if name not in columns]
    table = table.select(kept)
    for field in added.schema:
        table = table.append_column(field, added[field.name])
    reach(f"{new.name}:before-write")
    write_buckets(table, np.append(np.arange(0, table.num_rows, ROWS_PER_BUCKET), table.num_rows), new)
    reach(f"{new.name}:after-write")


def _write_live_counts(dataset: Dataset, wanted: dict[str, dict[str, Any]], new: Path, *, quiet: bool) -> None:
    """Writes the versions of all live counts among `wanted`. Adds to each how many versions it needs by itself."""
    configs = [config_of(name, made) for name, made in wanted.items() if made["kind"] == LIVE_COUNT]
    changes: Counter[str] = Counter()
    reach(f"{new.name}:before-write")
    with contextlib.ExitStack() as stack:
        writer = None
        for table, changed in count_history(dataset, configs, quiet=quiet):
            writer = writer or stack.enter_context(pq.ParquetWriter(new, table.schema))
            writer.write_table(table, row_group_size=ROWS_PER_BUCKET)
            changes.update(changed)
    reach(f"{new.name}:after-write")
    for config in configs:
        wanted[config.name]["counts"] = {"changes": changes[config.name]}
