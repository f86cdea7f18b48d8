"""Loads the tables that the executors read: the events of all users, and the attributes of users and items.

Only the columns that a plan reads are loaded. Attributes may change with time. A table with `valid_from` may hold
several versions of an entity. A request sees the newest version that was already valid at the request's time. Live
counts of items change far more often than other attributes, so they have a table of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.errors import UsageError
from tackboard.events.dataset import Dataset
from tackboard.events.schema import numpy_column, starts_of_users
from tackboard.features.arrow import from_arrow
from tackboard.features.column import DTYPES, Column
from tackboard.features.entities import FUTURE
from tackboard.features.plan import Plan
from tackboard.features.views import Positions, first_above

Lookup = Callable[[str, Any], Column]
EVENT_COLUMNS = {"item": "item_id", "action": "action", "surface": "surface", "time": "time_ms"}
"""Maps the built-in columns of events to their names in events.parquet."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EventTable:
    """Holds the events of U users end to end. The events of each user are sorted by (time, order).

    The keys of `columns` are the names of the feature language, such as `item`, not the names in events.parquet.
    """

    user_ids: Positions
    offsets: Positions
    times: Positions
    received: Positions
    columns: Mapping[str, Column]

    @classmethod
    def from_arrow(cls, table: pa.Table, plan: Plan) -> EventTable:
        """Reads the columns that `plan` needs from a dataset's events. `table` is sorted by user_id, time_ms and order.

        If `table` has no times, all times become 0, which is enough for plans that need only the order of the events.
        """
        users = numpy_column(table, "user_id")
        starts = starts_of_users(users)
        columns = {}
        for index, node in plan.sources():
            if node.params["entity"] != "event":
                continue
            name = str(node.params["column"])
            stored = EVENT_COLUMNS.get(name, name)
            if stored not in table.column_names:
                raise plan.missing_source(index)
            columns[name] = read_source(table[stored], plan, index)
        return cls(
            user_ids=users[starts],
            offsets=np.append(starts, len(users)).astype(np.int64),
            times=_numbers_or_zeros(table, "time_ms"),
            received=_numbers_or_zeros(table, "received_ms"),
            columns=columns,
        )

    def owners_of(self, user_ids: Positions) -> Positions:
        """Returns the position of each user in this table, or -1 for a user without events."""
        return find_ids(self.user_ids, user_ids)

    def slice(self, first: int, last: int) -> EventTable:
        """Returns the events of the users at positions `first` to `last` - 1."""
        start, end = int(self.offsets[first]), int(self.offsets[last])
        window = np.arange(start, end, dtype=np.int64)
        return EventTable(
            user_ids=self.user_ids[first:last],
            offsets=self.offsets[first : last + 1] - start,
            times=self.times[start:end],
            received=self.received[start:end],
            columns=self.columns
            if (start, end) == (0, len(self.times))
            else {name: column.take(window) for name, column in self.columns.items()},
        )


@dataclasses.dataclass(frozen=True, eq=False)
class EntityTable:
    """Holds attributes of users or items, sorted by id. Several versions of an id are sorted by `valid_from`.

    `also` holds more attributes, which are not in `columns`, and which change at other times.
    """

    ids: Positions
    columns: Mapping[str, Column]
    valid_from: Positions | None = None
    also: EntityTable | None = None

    @classmethod
    def from_arrow(
        cls,
        table: pa.Table,
        entity: str,
        plan: Plan,
        *,
        elsewhere: Collection[str] = (),
        also: EntityTable | None = None,
    ) -> EntityTable:
        """Reads the attributes of `entity` (user or item) that `plan` reads, except `elsewhere`, from a table."""
        columns = {}
        for index, node in plan.sources():
            name = str(node.params["column"])
            if node.params["entity"] != entity or name == "id" or name in elsewhere:
                continue
            if name not in table.column_names:
                inner = {entity, f"{entity}_id", "valid_from_ms", *FUTURE}
                known = [*table.column_names, *elsewhere]
                raise plan.missing_source(index, [each for each in known if each not in inner])
            columns[name] = read_source(table[name], plan, index)
        valid_from = numpy_column(table, "valid_from_ms") if "valid_from_ms" in table.column_names else None
        return cls(numpy_column(table, f"{entity}_id"), columns, valid_from, also)

    def parts(self) -> list[EntityTable]:
        """Returns this table and `also`, if there is one. No attribute is in both."""
        return [self] if self.also is None else [self, self.also]

    def lookup(self, ids: Positions, times: Positions | None) -> Lookup:
        """Returns a function of (attribute, default). The function returns the attribute of every id, as it was at the
        id's time in `times`. The default replaces missing values."""
        places = self.places(ids, times)
        known = places >= 0
        safe, all_known = np.where(known, places, 0), bool(known.all())

        def read(name: str, default: Any = None) -> Column:
            column = self.columns[name] if len(self.ids) else Column.of(self.columns[name].type, [None])
            taken = column.take(safe)
            if not all_known:
                present = known if taken.present is None else known & taken.present
                taken = dataclasses.replace(taken, present=present)
            return taken if default is None else with_default(taken, default)

        return read

    def places(self, ids: Positions, times: Positions | None) -> Positions:
        """Returns, for each id, the row that is valid at the id's time in `times`; -1 if there is no such row."""
        if self.valid_from is None:
            return find_ids(self.ids, ids)
        if times is None:
            raise UsageError(
                "attributes change with time, and the time of the request is not known", allowed="give request_ms"
            )
        starts = np.searchsorted(self.ids, ids, side="left").astype(np.int64)
        ends = np.searchsorted(self.ids, ids, side="right").astype(np.int64)
        # `later` is the first version that becomes valid after the request. The request sees the preceding version.
        later = first_above(self.valid_from, starts, ends, times)
        return np.where(later > starts, later - 1, -1)


def read_source(array: pa.ChunkedArray, plan: Plan, index: int) -> Column:
    """Reads a stored column with the type that node `index` of the plan declares. Fills in the declared default."""
    node = plan.nodes[index]
    column = from_arrow(array, node.type, plan.describe_source(index))
    default = node.params.get("default")
    return column if default is None else with_default(column, default)


def with_default(column: Column, default: Any) -> Column:
    """Returns the column with `default` in place of missing values."""
    if column.present is None:
        return column
    if column.dictionary is not None:
        dictionary = np.append(column.dictionary, np.array([default], dtype=np.object_))
        codes = np.where(column.present, column.values, len(dictionary) - 1)
        return Column(column.type, codes, dictionary=dictionary)
    filled = np.where(column.present, column.values, DTYPES[column.type.kind](default))
    return Column(column.type, filled)


def find_ids(sorted_ids: Positions, ids: Positions) -> Positions:
    """Returns the position of each id among sorted, distinct ids, or -1 for an unknown id."""
    if not len(sorted_ids):
        return np.full(len(ids), -1, dtype=np.int64)
    places = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return np.where(sorted_ids[places] == ids, places, -1).astype(np.int64)


def load_tables(
    dataset: Dataset, plan: Plan, *, timed: bool = True
) -> tuple[EventTable | None, EntityTable | None, EntityTable | None]:
    """Loads the tables (events, users, items) of a dataset. A table that `plan` does not read is None.

    If `timed` is False, the times of events are not loaded, so the table cannot tell which events a request saw.
    """
    events = None
    if plan.reads_events:
        events = EventTable.from_arrow(dataset.read_events(stored_event_columns(dataset, plan, timed=timed)), plan)
    users, items = load_entities(dataset, plan)
    return events, users, items


def stored_event_columns(dataset: Dataset, plan: Plan, *, timed: bool = True) -> list[str]:
    """Returns the columns of events.parquet to load for `plan`. Raises DataError if the dataset lacks a column."""
    always = ["user_id", *(["time_ms", "received_ms"] if timed else [])]
    wanted = []
    for index, node in plan.sources():
        name = str(node.params["column"])
        if node.params["entity"] != "event":
            continue
        if name not in EVENT_COLUMNS and name not in dataset.fields:
            raise plan.missing_source(index, [*EVENT_COLUMNS, *dataset.fields])
        wanted.append(EVENT_COLUMNS.get(name, name))
    return list(dict.fromkeys([*always, *wanted]))


def load_entities(dataset: Dataset, plan: Plan) -> tuple[EntityTable | None, EntityTable | None]:
    """Loads the tables (users, items) of a dataset. A table is None if `plan` reads no attribute from it."""
    tables: list[EntityTable | None] = []
    for entity in ("user", "item"):
        sources = [node.params for _, node in plan.sources() if node.params["entity"] == entity]
        names = {str(params["column"]) for params in sources} - {"id"}
        counts = dataset.live_counts if entity == "item" else []
        read = names.intersection(counts)
        also = None
        if read:
            others = names.difference(counts)
            also = EntityTable.from_arrow(dataset.read_live_counts(sorted(read)), entity, plan, elsewhere=others)
        if names == read:
            tables.append(also)
            continue
        table = dataset.read_history(entity)
        if table is None:
            table = dataset.read_users() if entity == "user" else dataset.read_items()
        tables.append(EntityTable.from_arrow(table, entity, plan, elsewhere=counts, also=also))
    return tables[0], tables[1]


def _numbers_or_zeros(table: pa.Table, name: str) -> NDArray[np.int64]:
    if name in table.column_names:
        return numpy_column(table, name)
    return np.broadcast_to(np.zeros(1, dtype=np.int64), (table.num_rows,))
