"""This module reads the small version of Open Bandit, a log of fashion items that two policies showed.

Rules: the publisher gives no user ids, so each impression gets a new user and a new request. The user's attributes are
four hashed features. The action is `click` or `impression`. The surface is the campaign (all, men, women). Positions 1
to 3 become 0 to 2. Each campaign numbers its items from 0, so item 3 of `men` gets the id `men-3`. The fields are
`policy` (bts or random), `propensity`, and `affinity`, which is the user-item affinity of the shown item. Affinities of
other items are left out. The numeric item feature is kept as `feature_0`. The hashed item features are left out,
because they differ between the folders of the two policies. An event's time is the time of the impression, which the
files give in µs. Rows are sorted by policy, then by campaign, then by their order in the file.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from tackboard.core.errors import DataError
from tackboard.events.public.archive import Download
from tackboard.events.public.publisher import PublicData, PublicDataset, PublishedCounts, canonical_events, named
from tackboard.events.schema import numpy_column

POLICIES = ("bts", "random")
CAMPAIGNS = ("all", "men", "women")
_FEATURES = tuple(f"user_feature_{number}" for number in range(4))


def read_open_bandit(download: Download) -> PublicData:
    """Reads POLICY/CAMPAIGN/CAMPAIGN.csv for two policies and three campaigns, and item_context.csv for one policy."""
    parts = [_read_part(download, policy, campaign) for policy in POLICIES for campaign in CAMPAIGNS]
    table = pa.concat_tables(parts)
    num_rows = table.num_rows
    impressions = np.arange(num_rows)
    events = canonical_events(
        impressions,
        table["item"],
        table["timestamp"].cast(pa.int64()).to_numpy() // 1000,
        action=named(numpy_column(table, "click"), ("impression", "click")),
        surface=table["campaign"].combine_chunks(),
        request=pa.array(impressions),
        position=pc.subtract(table["position"], 1).cast(pa.int32()),
        policy=table["policy"].combine_chunks().dictionary_encode(),
        propensity=table["propensity_score"],
        affinity=table["affinity"],
    )
    users = {"user": pa.array(impressions)} | {name: table[name] for name in _FEATURES}
    return PublicData(events=events, items=_items(download), users=pa.table(users))


def _read_part(download: Download, policy: str, campaign: str) -> pa.Table:
    name = f"{policy}/{campaign}/{campaign}.csv"
    types = {name: pa.string() for name in _FEATURES} | {"timestamp": pa.timestamp("us", "UTC")}
    types |= {"item_id": pa.int64(), "position": pa.int64(), "click": pa.int64(), "propensity_score": pa.float64()}
    options = pyarrow.csv.ConvertOptions(column_types=types)
    table = pyarrow.csv.read_csv(pa.BufferReader(download.read(name)), convert_options=options)
    item = numpy_column(table, "item_id")
    affinities = [column for column in table.column_names if column.startswith("user-item_affinity_")]
    if len(item) and not 0 <= item.min() <= item.max() < len(affinities):
        raise DataError(f"{name} has an item without an affinity")
    matrix = np.column_stack([table[f"user-item_affinity_{n}"].to_numpy() for n in range(len(affinities))])
    shown = matrix[np.arange(len(item)), item].astype(np.float64)
    columns = {column: table[column] for column in ("timestamp", "position", "click", "propensity_score", *_FEATURES)}
    columns |= {
        "item": pa.array([f"{campaign}-{number}" for number in item.tolist()]),
        "campaign": pa.array([campaign] * len(item)),
        "policy": pa.array([policy] * len(item)),
        "affinity": pa.array(shown),
    }
    return pa.table(columns)


def _items(download: Download) -> pa.Table:
    tables = []
    for campaign in CAMPAIGNS:
        table = pyarrow.csv.read_csv(pa.BufferReader(download.read(f"{POLICIES[0]}/{campaign}/item_context.csv")))
        ids = [f"{campaign}-{number}" for number in table["item_id"].to_pylist()]
        columns = {"item": ids, "campaign": [campaign] * len(ids), "feature_0": table["item_feature_0"]}
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)


OPEN_BANDIT = PublicDataset(
    name="open-bandit-small",
    title="Open Bandit, small version: impressions and clicks under two policies",
    files="the folder obd/ of the repository (bts and random; all, men and women), or an archive that holds it",
    source="https://github.com/st-tech/zr-obp (obd/)",
    terms="CC BY 4.0; the repository is Apache-2.0",
    counts=PublishedCounts(users=60_000, items=160, events=60_000),
    read=read_open_bandit,
    note="there are no user ids: every impression gets its own user; fewer than 300 clicks",
)
