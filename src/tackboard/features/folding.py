"""If an expression depends only on the attributes of a user or item, folding computes it once per user or item.

For example, the lower-case title of an item and the logarithm of its price are the same in every request. `fold`
computes such expressions for the whole table of items (or users). It returns a plan that reads the computed values as
if they were columns of the table. The value of a row is computed from that row alone, so computing before the lookup of
a row gives the same bits as computing after the lookup. For an id that is not in the table, the plan reads an
additional last row, in which attributes are missing or have their default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from tackboard.features.column import Column, join_columns
from tackboard.features.entity_tables import EntityTable, Lookup, with_default
from tackboard.features.execution import Program
from tackboard.features.frame import Frame
from tackboard.features.operators import REGISTRY
from tackboard.features.plan import CANDIDATE, CONSTANT, REQUEST, Node, Plan
from tackboard.features.types import SCALARS
from tackboard.features.views import Positions, no_events

LEVEL_OF = {"item": CANDIDATE, "user": REQUEST}
SLOTS_PER_ID = 8
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class IdIndex:
    """Finds ids among sorted, distinct ids with a hash table.

    The upper bits of the product of the id and a constant give the slot of the id. A slot holds only one id. If several
    ids have the same slot, a binary search finds those that the slot does not hold. For 1000 ids, the hash table is
    several times faster than a binary search alone.
    """

    def __init__(self, ids: Positions) -> None:
        self._ids = np.append(ids, 0)
        self._num_ids = len(ids)
        slot_bits = max(1, (SLOTS_PER_ID * len(ids)).bit_length())
        self._shift = np.uint64(64 - slot_bits)
        self._slots = np.full(1 << slot_bits, len(ids), dtype=np.int32 if len(ids) < 1 << 31 else np.int64)
        self._slots[self._slots_of(ids)] = np.arange(len(ids))

    def _slots_of(self, ids: Positions) -> Positions:
        return ((ids.view(np.uint64) * GOLDEN) >> self._shift).view(np.int64)

    def places(self, ids: Positions) -> Positions:
        """Returns the position of each id. For an unknown id, returns the total number of ids instead."""
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        places = self._slots.take(self._slots_of(ids)).astype(np.int64)
        other = np.flatnonzero(self._ids.take(places) != ids)
        if len(other):
            sought = ids[other]
            found = self._ids[: self._num_ids].searchsorted(sought)
            places[other] = np.where(self._ids.take(found) == sought, found, self._num_ids)
        return places


class PackedColumns:
    """Stores columns so that the numbers of a row lie together in memory.

    A request reads a thousand scattered rows and spends most of its time waiting for memory. Reading one place in
    memory per row costs less than reading one place per value. Bools, masks, vectors and lists are not packed.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        packed = [
            name for name, column in columns.items() if column.type.kind in SCALARS and column.type.kind != "bool"
        ]
        self._whole = {name: column for name, column in columns.items() if name not in packed}
        # The packed columns themselves are not kept, because their values would then be in memory twice.
        self._parts = [
            (name, columns[name].values.dtype, columns[name].type, columns[name].present, columns[name].dictionary)
            for name in packed
        ]
        arrays = [np.ascontiguousarray(columns[name].values).view(np.int64) for name in packed]
        self._block = np.stack(arrays, axis=1) if arrays else np.zeros((0, 0), dtype=np.int64)

    def take(self, places: Positions) -> dict[str, Column]:
        """Returns the rows at `places` of every column."""
        columns = {name: column.take(places) for name, column in self._whole.items()}
        if self._parts:
            rows = np.ascontiguousarray(self._block.take(places, axis=0).T)
            for (name, dtype, type_, present, dictionary), row in zip(self._parts, rows, strict=True):
                mask = None if present is None else present.take(places)
                columns[name] = Column(type_, row.view(dtype), present=mask, dictionary=dictionary)
        return columns


class FoldedTable:
    """Holds computed columns of an entity's table, with an additional last row for ids that are not in the table."""

    def __init__(self, table: EntityTable, columns: dict[str, Column]) -> None:
        self._table = table
        self.columns = columns

    def lookup(self, ids: Positions, times: Positions | None) -> Lookup:
        """Returns a function of (column name, default). The function returns the column's value for every id, as it was
        at the time that `times` gives for this id. It ignores the default, because the columns already contain it."""
        places = _places(self._table, ids, times)
        return lambda name, _default: self.columns[name].take(places)

    def for_requests(self) -> FoldedRequestTable:
        """Returns the same table in a layout that is fast for lookups of about a thousand ids at a time."""
        return FoldedRequestTable(self._table, self.columns)


class FoldedRequestTable:
    """A folded table. A request reads all columns of all its ids at once, with the values at the request's time."""

    def __init__(self, table: EntityTable, columns: Mapping[str, Column]) -> None:
        self.table = table
        self.index = IdIndex(table.ids) if table.valid_from is None else None
        self.names = frozenset(columns)
        self.packed = PackedColumns(columns)

    def read(self, ids: Positions, request_ms: int | None) -> dict[str, Column]:
        """Returns all columns by name, with one row per id."""
        if self.index is not None:
            return self.packed.take(self.index.places(ids))
        times = None if request_ms is None else np.full(len(ids), request_ms, dtype=np.int64)
        return self.packed.take(_places(self.table, ids, times))


def _places(table: EntityTable, ids: Positions, times: Positions | None) -> Positions:
    """Returns the row of each id at the time that `times` gives for this id. An unknown id gets the additional row."""
    places = table.places(ids, times)
    return np.where(places >= 0, places, len(table.ids))


def fold(plan: Plan, entity: str, table: EntityTable) -> tuple[Plan, FoldedTable]:
    """Computes every node that depends only on `entity`. Returns the remaining plan and the computed columns."""
    own = _own(plan, entity, table)
    if any(own):
        plan = _with_parts(plan, own)
        own = _own(plan, entity, table)
    edge = {plan.features[name] for name in plan.features if own[plan.features[name]]}
    for index, node in enumerate(plan.nodes):
        if not own[index]:
            edge |= {argument for argument in node.args if own[argument]}
    if not edge:
        return plan, FoldedTable(table, {})
    # A column is named after a feature that reads it, so that an error about the column can name that feature. A plan
    # into which another table of the entity was folded already has such names, with one @ less.
    sources = [str(node.params["column"]) for _, node in plan.sources() if node.params["entity"] == entity]
    mark = "@" * (1 + max((name.count("@") for name in sources), default=0))
    names = {index: f"{plan.readers(index)[0]}{mark}{index}" for index in sorted(edge)}
    inner = Plan(plan.nodes, {name: index for index, name in names.items()}).trimmed(names.values())
    columns = Program(inner).run(_whole_table(inner, entity, table))
    nodes = tuple(
        _as_source(node, entity, names[index]) if index in names else node for index, node in enumerate(plan.nodes)
    )
    return Plan(nodes, plan.features).trimmed(plan.features), FoldedTable(table, columns)


def _own(plan: Plan, entity: str, table: EntityTable) -> list[bool]:
    """Returns for each node whether it depends only on columns of the entity's table (and on constants)."""
    own: list[bool] = []
    for node in plan.nodes:
        if node.op == "source":
            own.append(node.params["entity"] == entity and node.params["column"] in table.columns)
        else:
            inputs = [own[argument] or plan.nodes[argument].level == CONSTANT for argument in node.args]
            own.append(node.level == LEVEL_OF[entity] and bool(inputs) and all(inputs))
    return own


def _with_parts(plan: Plan, own: list[bool]) -> Plan:
    """Splits some `cross` and `cosine` nodes to do part of their work ahead of time. The results keep the same bits.

    If a `cross` node does not depend only on the entity, the hashes of its strings become separate nodes. If exactly
    one input of a `cosine` node depends only on the entity, the squared length of that vector becomes a separate node.
    """
    nodes: list[Node] = []
    place: list[int] = []
    known: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(node: Node) -> int:
        key = node.op, node.args
        if node.op in ("hash_id", "dot") and not node.maps_lists:
            if key in known:
                return known[key]
            known[key] = len(nodes)
        nodes.append(node)
        return len(nodes) - 1

    for index, node in enumerate(plan.nodes):
        args = [place[argument] for argument in node.args]
        if node.op == "cross" and not own[index] and not node.maps_lists:
            for position, argument in enumerate(node.args):
                if plan.nodes[argument].type.kind == "string":
                    args[position] = add(_part(plan.nodes[argument], "hash_id", args[position]))
        if node.op == "cosine" and own[node.args[0]] != own[node.args[1]]:
            # If the table of users was folded first, the node already has a third input: the squared length of the
            # user's vector. The squared length of the item's vector replaces this input, because that saves more work.
            other, mine = args[:2] if own[node.args[1]] else args[1::-1]
            args = [other, mine, add(_part(nodes[mine], "dot", mine, mine))]
        shape = place[node.shape] if 0 <= node.shape < index else node.shape
        place.append(len(nodes))
        place[index] = add(dataclasses.replace(node, args=tuple(args), shape=shape))
    return Plan(tuple(nodes), {name: place[index] for name, index in plan.features.items()})


def _part(node: Node, op: str, *args: int) -> Node:
    """Returns a node that applies the operator `op` to the value of `node`. `args` are the positions of its inputs."""
    type_ = REGISTRY[op].rule((node.type,) * len(args), {})
    return dataclasses.replace(node, op=op, args=args, params={}, type=type_, shape=-1, maps_lists=False)


def _as_source(node: Node, entity: str, name: str) -> Node:
    params = {"entity": entity, "column": name, "type": node.type.to_json()}
    return dataclasses.replace(node, op="source", args=(), params=params, maps_lists=False)


def _whole_table(plan: Plan, entity: str, table: EntityTable) -> Frame:
    """Returns a frame whose requests or candidates are the table's rows, followed by one row for unknown ids."""
    num_rows = len(table.ids) + 1
    columns = {}
    for _, node in plan.sources():
        name, default = str(node.params["column"]), node.params.get("default")
        column = join_columns([table.columns[name], Column.of(node.type, [None])])
        columns[entity, name] = column if default is None else with_default(column, default)
    return Frame(
        num_requests=num_rows if entity == "user" else 1,
        num_candidates=num_rows,
        request_of=None,
        request_ms=None,
        event_times=np.zeros(0, dtype=np.int64),
        visible=no_events(1),
        columns=columns,
    )
