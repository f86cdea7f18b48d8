"""This module reads Deskdrop, a log of what employees of CI&T did with articles in twelve months of 2016 and 2017.

Rules: the action is eventType in lower case (view, like, bookmark, comment_created, follow). Times in the file are
seconds. The session id becomes a field `session` and not the column `request`, because a session is not a request. The
fields `user_agent`, `region` and `country` are missing where the file has empty text. Events of one user at the same
time keep the file's order.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tackboard.events.public.archive import Download
from tackboard.events.public.publisher import PublicData, PublicDataset, PublishedCounts, canonical_events, table_of
from tackboard.events.schema import encode, numpy_column

_COLUMNS = {
    "timestamp": pa.int64(),
    "eventType": pa.string(),
    "contentId": pa.int64(),
    "personId": pa.int64(),
    "sessionId": pa.int64(),
    "userAgent": pa.string(),
    "userRegion": pa.string(),
    "userCountry": pa.string(),
}


def read_deskdrop(download: Download) -> PublicData:
    """Reads users_interactions.csv."""
    table = table_of(download.read("users_interactions.csv"), _COLUMNS, ",", header=True)
    texts = {
        field: encode(pc.if_else(pc.equal(table[column], ""), pa.scalar(None, pa.string()), table[column]))
        for field, column in (("user_agent", "userAgent"), ("region", "userRegion"), ("country", "userCountry"))
    }
    events = canonical_events(
        table["personId"],
        table["contentId"],
        numpy_column(table, "timestamp") * 1000,
        action=encode(pc.replace_substring(pc.utf8_lower(table["eventType"]), " ", "_")),
        session=table["sessionId"],
        **texts,
    )
    return PublicData(events=events)


DESKDROP = PublicDataset(
    name="deskdrop",
    title="CI&T Deskdrop: views, likes, bookmarks, comments and follows of articles",
    files="users_interactions.csv, or an archive that holds it",
    source="https://www.kaggle.com/datasets/gspmoreira/articles-sharing-reading-from-cit-deskdrop",
    terms="ODbL 1.0, contents DbCL 1.0",
    counts=PublishedCounts(users=1_895, items=2_987, events=72_312),
    read=read_deskdrop,
    note="ties keep the order of the file",
)
