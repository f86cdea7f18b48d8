"""This module reads Kakao Brunch, a log of the articles that users read from October 2018 to February 2019.

Rules: there is one action, `read`. The files give times only by the hour, in Korean time (UTC+9), so a time is the
beginning of an hour. Two forms of the data can be read. The hourly form, from the competition, is a folder `read` with
one file per hour, such as `2018100100_2018100101`. A line has a user and then the articles in the order of reading, and
ids are text. The compact form is reads.parquet (user, item, hour since 2018-10-01) with items.txt.zst, whose first line
names item 0. In the compact form, ids are integers, and an item's attributes are `article` and `author`. Reads of one
user in the same hour keep the publisher's order. One read in five repeats the previous read. The repeats are kept.
"""

from __future__ import annotations

import array
import datetime
import itertools
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.core.errors import DataError
from tackboard.core.progress import Progress
from tackboard.events.public.archive import Download
from tackboard.events.public.publisher import PublicData, PublicDataset, PublishedCounts, canonical_events, named

START_MS = 1_538_319_600_000
"""The time 2018-10-01 00:00 in Korea."""
HOUR_MS = 3_600_000
_HOURLY = re.compile(r"(\d{10})_\d{10}")


def read_brunch(download: Download) -> PublicData:
    """Reads the compact form if reads.parquet is given, else the hourly files."""
    if (path := download.find("reads.parquet")) is not None:
        return _read_compact(download, pq.read_table(path, columns=["user", "item", "hour"]))
    hourly = sorted(name for name in download.names() if _HOURLY.fullmatch(name.rpartition("/")[2]))
    if not hourly:
        raise DataError(f"{download.title} holds neither reads.parquet nor files such as 2018100100_2018100101")
    return _read_hourly(download, hourly)


def _read_compact(download: Download, table: pa.Table) -> PublicData:
    hour = table["hour"].to_numpy()
    events = canonical_events(
        table["user"], table["item"], START_MS + hour.astype(np.int64) * HOUR_MS, action=_reads(len(hour))
    )
    articles = download.text("items.txt").splitlines()
    items = {
        "item": pa.array(np.arange(len(articles))),
        "article": pa.array(articles),
        "author": pa.array([_author(article) for article in articles]),
    }
    return PublicData(events=events, items=pa.table(items))


def _read_hourly(download: Download, names: list[str]) -> PublicData:
    users: dict[str, int] = {}
    articles: dict[str, int] = {}
    user_codes, item_codes, times = array.array("i"), array.array("i"), array.array("q")
    with Progress("reading", total=len(names), unit="hours", quiet=len(names) < 100) as progress:
        for name in names:
            time_ms = _time_of(name)
            for line in download.text(name).splitlines():
                user, *read = line.split()
                user_codes.extend(itertools.repeat(users.setdefault(user, len(users)), len(read)))
                item_codes.extend(articles.setdefault(article, len(articles)) for article in read)
                times.extend(itertools.repeat(time_ms, len(read)))
            progress.advance()
    events = canonical_events(
        named(np.frombuffer(user_codes, dtype=np.int32), list(users)),
        named(np.frombuffer(item_codes, dtype=np.int32), list(articles)),
        np.frombuffer(times, dtype=np.int64),
        action=_reads(len(times)),
    )
    items = {"item": pa.array(list(articles)), "author": pa.array([_author(article) for article in articles])}
    return PublicData(events=events, items=pa.table(items))


def _time_of(name: str) -> int:
    """Returns the time, in ms UTC, of an hourly file. The name of the file begins with the hour in Korean time."""
    match = _HOURLY.fullmatch(name.rpartition("/")[2])
    assert match is not None
    korea = datetime.timezone(datetime.timedelta(hours=9))
    return int(datetime.datetime.strptime(match[1], "%Y%m%d%H").replace(tzinfo=korea).timestamp()) * 1000


def _reads(num_rows: int) -> pa.DictionaryArray:
    return named(np.zeros(num_rows, dtype=np.int32), ["read"])


def _author(article: str) -> str:
    return article.removeprefix("@").rpartition("_")[0]


KAKAO_BRUNCH = PublicDataset(
    name="kakao-brunch",
    title="Kakao Brunch: 22 million reads of articles, 2018 and 2019",
    files="the folder read/ of hourly files, or reads.parquet and items.txt.zst",
    source="https://arena.kakao.com (article recommendation for Brunch)",
    terms="competition data; terms unknown to us: for local use only, no redistribution",
    counts=PublishedCounts(users=306_050, items=505_840, events=22_105_708),
    read=read_brunch,
    note="times are whole hours; reads of one hour keep the publisher's order",
)
