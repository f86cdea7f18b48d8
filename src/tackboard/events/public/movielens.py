"""This module reads MovieLens 100K and 1M, which are logs of ratings of films.

Rules: the action is the rating, `rating_1` to `rating_5`, and a field `rating` holds the rating as a number. Times in
the files are seconds. Ratings of one user in the same second keep the order of the file. This rule often decides which
film comes last, because in the 1M set three ratings in four have the same user and second as another rating.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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

RATINGS = tuple(f"rating_{stars}" for stars in range(1, 6))
_TERMS = "research use; no redistribution and no commercial use without permission (README of the archive)"
_RATING_COLUMNS = {"user": pa.int64(), "item": pa.int64(), "rating": pa.int64(), "time": pa.int64()}


def read_ml_1m(download: Download) -> PublicData:
    """Reads ratings.dat, movies.dat and users.dat. Fields are separated by `::`, and text is Latin-1."""
    users = table_of(
        _tabbed(download, "users.dat"),
        {"user": pa.int64(), "gender": pa.string(), "age": pa.int64(), "occupation": pa.int64(), "zip": pa.string()},
        "\t",
    )
    movies = table_of(
        _tabbed(download, "movies.dat"), {"item": pa.int64(), "title": pa.string(), "genres": pa.string()}, "\t"
    )
    genres = pc.split_pattern(movies["genres"], "|")
    return PublicData(
        events=_ratings(_tabbed(download, "ratings.dat")),
        items=movies.set_column(2, "genres", genres),
        users=users,
    )


def read_ml_100k(download: Download) -> PublicData:
    """Reads u.data, u.item, u.user and u.genre. Fields are separated by tabs or `|`. Genres are flags in u.item."""
    genres = [line.split("|")[0] for line in download.text("u.genre").splitlines() if line.strip()]
    rows = [line.split("|") for line in download.text("u.item", "latin-1").splitlines() if line]
    lists = [[genre for genre, flag in zip(genres, row[5:], strict=True) if flag == "1"] for row in rows]
    items = {
        "item": pa.array([int(row[0]) for row in rows], pa.int64()),
        "title": pa.array([row[1] for row in rows]),
        "release_date": pa.array([row[2] or None for row in rows], pa.string()),
        "genres": pa.array(lists, pa.list_(pa.string())),
    }
    users = table_of(
        _utf8(download, "u.user"),
        {"user": pa.int64(), "age": pa.int64(), "gender": pa.string(), "occupation": pa.string(), "zip": pa.string()},
        "|",
    )
    return PublicData(events=_ratings(_utf8(download, "u.data")), items=pa.table(items), users=users)


def _ratings(data: bytes) -> pa.Table:
    table = table_of(data, _RATING_COLUMNS, "\t")
    rating = numpy_column(table, "rating")
    return canonical_events(
        table["user"],
        table["item"],
        numpy_column(table, "time") * 1000,
        action=named(np.asarray(rating - 1), RATINGS),
        rating=table["rating"],
    )


def _utf8(download: Download, name: str) -> bytes:
    return download.text(name, "latin-1").encode()


def _tabbed(download: Download, name: str) -> bytes:
    return _utf8(download, name).replace(b"::", b"\t")


ML_1M = PublicDataset(
    name="ml-1m",
    title="MovieLens 1M: ratings of films, 2000 to 2003",
    files="ml-1m.zip, or its ratings.dat, movies.dat and users.dat",
    source="https://grouplens.org/datasets/movielens/1m/",
    terms=_TERMS,
    counts=PublishedCounts(users=6_040, items=3_706, events=1_000_209),
    read=read_ml_1m,
    note="three of four ratings have the same user and second as another rating; ties keep the order of ratings.dat",
)
ML_100K = PublicDataset(
    name="ml-100k",
    title="MovieLens 100K: ratings of films, 1997 and 1998",
    files="ml-100k.zip, or its u.data, u.item, u.user and u.genre",
    source="https://grouplens.org/datasets/movielens/100k/",
    terms=_TERMS,
    counts=PublishedCounts(users=943, items=1_682, events=100_000),
    read=read_ml_100k,
    note="ties keep the order of u.data",
)
