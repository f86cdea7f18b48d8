"""Checks whether a dataset has the columns that a feature set reads, and raises an error for the first problem.

Every column that the features read must exist and have the declared type. Its values must be within the declared range
in every row, even in rows that no feature would use. A context key that the features read must occur in at least one
event. The check computes no feature and reads the events chunk by chunk.
"""

from __future__ import annotations

from tackboard.events.dataset import Dataset
from tackboard.features.contexts import context_columns, context_sources
from tackboard.features.entity_tables import EventTable, load_entities, stored_event_columns
from tackboard.features.execution import Program
from tackboard.features.feature_set import FeatureSet


def check_data(features: FeatureSet, dataset: Dataset) -> None:
    """Raises a DataError that names the feature, its code line and the column if `dataset` does not fit `features`."""
    plan = features.plan
    program = Program(plan)
    tables = dict(zip(("user", "item"), load_entities(dataset, plan), strict=True))
    for index, node in plan.sources():
        table = tables.get(str(node.params["entity"]))
        if table is not None and node.params["column"] in table.columns:
            program.check_range(table.columns[node.params["column"]], index)
    contexts = context_sources(plan)
    columns = stored_event_columns(dataset, plan)
    if contexts and not dataset.has_context:
        raise plan.missing_source(contexts[0][0])
    if contexts:
        columns.append("context")
    in_events = [
        (index, str(node.params["column"])) for index, node in plan.sources() if node.params["entity"] == "event"
    ]
    never_seen = {index for index, _ in contexts}
    for chunk in dataset.event_chunks(columns) if in_events or contexts else ():
        events = EventTable.from_arrow(chunk, plan)
        for index, name in in_events:
            program.check_range(events.columns[name], index)
        if not contexts:
            continue
        said = context_columns(plan, chunk["context"])
        for index, node in contexts:
            column = said[str(node.params["column"])]
            program.check_range(column, index)
            if column.mask.any():
                never_seen.discard(index)
    if never_seen:
        raise plan.missing_source(min(never_seen))
