"""This module reads RetailRocket, the log of a shop, as the authors of the model MB-IMN published it.

Rules: the files have the format of the model MBHT. A line holds a history and the item that the user buys next. Each
line becomes a separate user, such as `train-7` or `test-7`, because the publisher does not say which lines belong to
the same user. A long history comes as several lines of growing length, so the same events occur under several users.
Action 0 is `buy`, 1 is `cart`, 2 is `view`. Action 3 is not documented and becomes `type_3`. Each user's last event is
the `buy` of the item that is bought next. The publisher gives an order but no times, so times are made up.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tackboard.core.errors import DataError
from tackboard.events.public.archive import Download
from tackboard.events.public.publisher import (
    ORDER_ONLY_NOTE,
    PublicData,
    PublicDataset,
    PublishedCounts,
    canonical_events,
    named,
    order_only_times,
)

ACTIONS = ("buy", "cart", "view", "type_3")
HEADER = "session_id:token\titem_id_list:token_seq\titem_type_list:token_seq\titem_id:token"


def read_retailrocket(download: Download) -> PublicData:
    """Reads retail_beh.train.inter and retail_beh.test.inter."""
    users: list[str] = []
    items: list[int] = []
    actions: list[int] = []
    lengths: list[int] = []
    for part in ("train", "test"):
        name = f"retail_beh.{part}.inter"
        lines = download.text(name).splitlines()
        if not lines or lines[0] != HEADER:
            raise DataError(f"{name} does not begin with the columns {HEADER!r}")
        for number, line in enumerate(lines[1:], start=2):
            session, history, types, target = line.split("\t")
            line_items, line_actions = history.split(), types.split()
            if len(line_items) != len(line_actions):
                raise DataError(f"{name} line {number} has {len(line_items)} items and {len(line_actions)} types")
            users.append(f"{part}-{session}")
            items += [*map(int, line_items), int(target)]
            actions += [*map(int, line_actions), ACTIONS.index("buy")]
            lengths.append(len(line_items) + 1)
    codes = np.repeat(np.arange(len(users)), lengths)
    events = canonical_events(
        named(codes, users),
        pa.array(items, pa.int64()),
        order_only_times(lengths),
        action=named(np.array(actions), ACTIONS),
    )
    return PublicData(events=events)


RETAILROCKET = PublicDataset(
    name="retailrocket-mb",
    title="RetailRocket: views, carts and purchases in a shop",
    files="retail_beh.train.inter and retail_beh.test.inter, or an archive that holds them",
    source="https://github.com/tripiggyo1/MB-IMN (dataset/retail_beh)",
    terms="RetailRocket on Kaggle: CC BY-NC-SA 4.0, non-commercial",
    counts=PublishedCounts(users=32_690, items=31_239, events=524_244),
    read=read_retailrocket,
    note=f"each line is a user, and a long history comes as several lines of growing length; {ORDER_ONLY_NOTE}",
)
