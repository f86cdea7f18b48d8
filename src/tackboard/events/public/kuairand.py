"""This module reads a sample of KuaiRand-27K: liked and hated videos, with at least 15 events per user and per video.

Rules: the action is `like` (label 1) or `hate` (label 0). Times are ms. Other signals become fields. `is_click`,
`is_follow`, `is_comment`, `is_forward`, `is_profile_enter` and `long_view` are 0 or 1. `play_time_ms`, `duration_ms`
and `comment_stay_ms` are in ms. The sample has no surface, because it lacks KuaiRand's column `tab`. Events of one user
at the same time keep the order of the file.
"""

from __future__ import annotations

import pyarrow as pa

from tackboard.events.public.archive import Download
from tackboard.events.public.publisher import (
    PublicData,
    PublicDataset,
    PublishedCounts,
    canonical_events,
    named,
    table_of,
)
from tackboard.events.schema import numpy_column

FILE = "processed_standard_kcore_15"
_SIGNALS = ("is_click", "is_follow", "is_comment", "is_forward", "is_profile_enter", "long_view")
_FIELDS = {name: name for name in (*_SIGNALS, "play_time_ms", "duration_ms")} | {"comment_stay_ms": "comment_stay_time"}
"""Maps the name of each field to the publisher's column."""


def read_kuairand(download: Download) -> PublicData:
    """Reads the file processed_standard_kcore_15, whose values are separated by commas or tabs."""
    ending = "tsv" if download.has(f"{FILE}.tsv") else "csv"
    names = ("user_id", "video_id", "time_ms", "label", *_FIELDS.values())
    data = download.read(f"{FILE}.{ending}")
    delimiter = "\t" if b"\t" in data.split(b"\n", 1)[0] else ","
    table = table_of(data, dict.fromkeys(names, pa.int64()), delimiter, header=True)
    events = canonical_events(
        table["user_id"],
        table["video_id"],
        numpy_column(table, "time_ms"),
        action=named(numpy_column(table, "label"), ("hate", "like")),
        **{field: table[column] for field, column in _FIELDS.items()},
    )
    return PublicData(events=events)


KUAIRAND = PublicDataset(
    name="kuairand-sample",
    title="KuaiRand-27K, liked and hated videos, 15-core",
    files=f"{FILE}.tsv or {FILE}.csv, or an archive that holds it",
    source="https://github.com/alessandrosocc/predict_explicit_negative_feedback_kuairand (processed_data/)",
    terms="CC BY-SA 4.0 (KuaiRand)",
    counts=PublishedCounts(users=664, items=9_359, events=41_828),
    read=read_kuairand,
    note="heavily selected: only videos that the user liked or hated",
)
