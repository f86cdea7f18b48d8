"""What depends on one entity's attributes alone is computed once per entity, not once per row.

A title in lower case, the hash of a brand, the logarithm of a price: for an item they are the same in every request.
`fold` computes such expressions over the whole table of items (or users) and leaves a plan that reads their values
like columns. A row's value is computed from that row alone, so computing before or after the lookup gives the same
bits; an id that the table does not know reads one further row, in which everything is missing.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tackboard.features.column import Column, join_columns
from tackboard.features.execution import Program
from tackboard.features.frame import Frame
from tackboard.features.plan import CANDIDATE, CONSTANT, REQUEST, Node, Plan
from tackboard.features.tables import EntityTable, Lookup, with_default
from tackboard.features.types import type_from_json
from tackboard.features.views import Positions, no_events

LEVEL_OF = {"item": CANDIDATE, "user": REQUEST}


class FoldedTable:
    """Computed columns of an entity's table, with a last row for ids that it does not know."""

    def __init__(self, table: EntityTable, columns: dict[str, Column]) -> None:
        self._table = table
        self.columns = columns

    def lookup(self, ids: Positions, times: Positions | None) -> Lookup:
        """A function of (column, default) that gives the column for each id at its time; a default is in it already."""
        places = self._table.places(ids, times)
        places = np.where(places >= 0, places, len(self._table.ids))
        return lambda name, _default: self.columns[name].take(places)


def fold(plan: Plan, entity: str, table: EntityTable) -> tuple[Plan, FoldedTable]:
    """The plan that is left when everything that depends on `entity` alone is computed, and what was computed."""
    level = LEVEL_OF[entity]
    own: list[bool] = []
    for node in plan.nodes:
        if node.op == "source":
            own.append(node.params["entity"] == entity and node.params["column"] in table.columns)
        else:
            inputs = [own[argument] or plan.nodes[argument].level == CONSTANT for argument in node.args]
            own.append(node.level == level and bool(inputs) and all(inputs))
    edge = {plan.features[name] for name in plan.features if own[plan.features[name]]}
    for index, node in enumerate(plan.nodes):
        if not own[index]:
            edge |= {argument for argument in node.args if own[argument]}
    if not edge:
        return plan, FoldedTable(table, {})
    # A column is named after a feature that reads it, for the errors that a value of the table may bring about.
    names = {index: f"{plan.readers(index)[0]}@{index}" for index in sorted(edge)}
    inner = Plan(plan.nodes, {name: index for index, name in names.items()}).trimmed(names.values())
    columns = Program(inner).run(_whole_table(inner, entity, table))
    nodes = tuple(
        _as_source(node, entity, names[index]) if index in names else node for index, node in enumerate(plan.nodes)
    )
    return Plan(nodes, plan.features).trimmed(plan.features), FoldedTable(table, columns)


def _as_source(node: Node, entity: str, name: str) -> Node:
    params = {"entity": entity, "column": name, "type": node.type.to_json()}
    return dataclasses.replace(node, op="source", args=(), params=params, maps_lists=False)


def _whole_table(plan: Plan, entity: str, table: EntityTable) -> Frame:
    """Every row of the table and one in which everything is missing, as requests or candidates."""
    num_rows = len(table.ids) + 1
    columns = {}
    for _, node in plan.sources():
        name, default = str(node.params["column"]), node.params.get("default")
        column = join_columns([table.columns[name], Column.of(type_from_json(node.params["type"]), [None])])
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
