"""This module generates a synthetic world from its config and writes it as a dataset.

In addition to the canonical tables, the snapshot holds impressions.parquet (what requests showed) and truth.json (the
complete config, from which the oracle can be computed). Item attributes are topic, style, birth_ms and content.
The content is a noisy vector that depends on topic and style.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tackboard.core.config import to_dict
from tackboard.events.dataset import write_dataset
from tackboard.events.schema import named
from tackboard.events.synthetic.world import WorldEvents, generate, keep_distinct
from tackboard.events.synthetic.world_config import ACTIONS, FIRST_USER_ID, REQUESTS_PER_USER, SURFACES, WorldConfig
from tackboard.events.synthetic.world_items import CONTENT_WIDTH, WorldItems


def write_world(config: WorldConfig, root: Path, name: str, *, quiet: bool = True) -> Path:
    """Generates the world and writes it as dataset `name` under `root`. Returns the snapshot's path."""
    catalogue = WorldItems(config)
    events = generate(config, catalogue, quiet=quiet)
    return write_dataset(
        root,
        name,
        event_table(config, catalogue, events),
        item_attributes=item_table(config, catalogue),
        impressions=impression_table(catalogue, events),
        truth=to_dict(config),
        source={"kind": "synthetic world", "seed": config.seed},
    )


def event_table(config: WorldConfig, catalogue: WorldItems, events: WorldEvents) -> pa.Table:
    """Returns the canonical columns of a world's events, ordered by (user, event index)."""
    arrival = np.argsort(events.received, kind="stable")
    order = np.empty_like(arrival)
    order[arrival] = np.arange(len(arrival))
    return pa.table(
        {
            "user": FIRST_USER_ID + events.user,
            "item": catalogue.ids[events.item],
            "action": named(events.action, ACTIONS),
            "surface": named(events.surface, SURFACES),
            "time_ms": config.start_ms + events.time,
            "received_ms": config.start_ms + events.received,
            "order": order.astype(np.int64),
            "request": _requests(events),
            "position": events.position.astype(np.int32),
        }
    )


def item_table(config: WorldConfig, catalogue: WorldItems) -> pa.Table:
    """Returns item, topic, style, birth_ms and content of every item, even of items born after the last event."""
    content = pa.array(catalogue.content(config).ravel())
    columns = {
        "item": catalogue.ids,
        "topic": catalogue.topic,
        "style": catalogue.style,
        "birth_ms": config.start_ms + catalogue.birth,
        "content": pa.FixedSizeListArray.from_arrays(content, CONTENT_WIDTH),
    }
    return pa.table(columns)


def impression_table(catalogue: WorldItems, events: WorldEvents) -> pa.Table:
    """Returns the items that each request showed, including the event's item, as (request, position, item_id)."""
    num_events, num_others = events.candidates.shape
    kept = keep_distinct(events.item, events.candidates)
    # The other items take the remaining positions, in the order in which they were drawn.
    place = np.cumsum(kept, axis=1) - 1
    place += place >= events.position[:, None]
    items = np.concatenate([events.item[:, None], events.candidates], axis=1)
    places = np.concatenate([events.position[:, None], place], axis=1)
    shown = np.concatenate([np.ones((num_events, 1), dtype=bool), kept], axis=1)
    request = np.repeat(_requests(events)[:, None], num_others + 1, axis=1)[shown]
    position = places[shown]
    order = np.lexsort((position, request))
    columns = {
        "request": request[order],
        "position": position[order].astype(np.int32),
        "item_id": catalogue.ids[items[shown]][order],
    }
    return pa.table(columns)


def _requests(events: WorldEvents) -> np.ndarray:
    return (FIRST_USER_ID + events.user) * REQUESTS_PER_USER + events.index
