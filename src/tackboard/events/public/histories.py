"""This module reads the sequences of items that four papers made from Amazon reviews 2014 and Last.fm.

Rules: there is one action, `event`. The files of S3-Rec and TiCoSeRec have one line per user, `user item item …`, with
the oldest item first. The files of SASRec and BERT4Rec have one line per event, `user item`. TiCoSeRec also has a file
of times in the same layout, with a time in place of each item. These times are in seconds, but exact only to the day.
The other papers give no times, so times are made up from the order. S3-Rec describes each item by numbers, which become
a list `attributes`. Events at the same time keep the order of the file. Each paper numbered its items in its own way,
so item 7 of one dataset is not item 7 of another dataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable

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
    order_only_times,
)

_AMAZON_TERMS = "Amazon review data (McAuley): research use; the repository states no licence for the data"


def read_s3rec(stem: str) -> Callable[[Download], PublicData]:
    """Returns a function that reads `stem`.txt and `stem`_item2attributes.json."""

    def read(download: Download) -> PublicData:
        lines = _lines(download, f"{stem}.txt")
        attributes = json.loads(download.text(f"{stem}_item2attributes.json"))
        items = {
            "item": pa.array([int(item) for item in attributes], pa.int64()),
            "attributes": pa.array(list(attributes.values()), pa.list_(pa.int64())),
        }
        return PublicData(events=_of_lines(lines, None), items=pa.table(items))

    return read


def read_ticoserec(stem: str) -> Callable[[Download], PublicData]:
    """Returns a function that reads `stem`_item.txt and `stem`_time.txt."""

    def read(download: Download) -> PublicData:
        lines, times = _lines(download, f"{stem}_item.txt"), _lines(download, f"{stem}_time.txt")
        shapes = [[(line[0], len(line)) for line in rows] for rows in (lines, times)]
        if shapes[0] != shapes[1]:
            raise DataError(f"{stem}_item.txt and {stem}_time.txt do not have the same users and lengths")
        seconds = np.array([time for line in times for time in line[1:]], dtype=np.int64)
        return PublicData(events=_of_lines(lines, seconds * 1000))

    return read


def read_pairs(name: str) -> Callable[[Download], PublicData]:
    """Returns a function that reads a file of lines `user item`. In the file, the lines of a user are adjacent."""

    def read(download: Download) -> PublicData:
        pairs = np.array([line.split() for line in download.text(name).splitlines()], dtype=np.int64)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise DataError(f"{name} is not made of lines `user item`")
        starts = np.flatnonzero(np.append(True, pairs[1:, 0] != pairs[:-1, 0]))
        lengths = np.diff(np.append(starts, len(pairs)))
        return PublicData(events=canonical_events(pairs[:, 0], pairs[:, 1], order_only_times(lengths)))

    return read


def _lines(download: Download, name: str) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in download.text(name).splitlines() if line.strip()]


def _of_lines(lines: list[list[int]], time_ms: np.ndarray | None) -> pa.Table:
    lengths = np.array([len(line) - 1 for line in lines])
    users = np.repeat(np.array([line[0] for line in lines], dtype=np.int64), lengths)
    items = np.array([item for line in lines for item in line[1:]], dtype=np.int64)
    return canonical_events(users, items, order_only_times(lengths) if time_ms is None else time_ms)


def _sequences(
    name: str,
    title: str,
    files: str,
    repository: str,
    counts: PublishedCounts,
    read: Callable[[Download], PublicData],
    note: str = ORDER_ONLY_NOTE,
    terms: str = _AMAZON_TERMS,
) -> PublicDataset:
    source = f"https://github.com/{repository} (data/)"
    return PublicDataset(
        name=name, title=title, files=files, source=source, terms=terms, counts=counts, read=read, note=note
    )


def _s3rec(name: str, title: str, stem: str, counts: PublishedCounts, terms: str = _AMAZON_TERMS) -> PublicDataset:
    files = f"{stem}.txt and {stem}_item2attributes.json, or an archive that holds them"
    return _sequences(name, title, files, "RUCAIBox/CIKM2020-S3Rec", counts, read_s3rec(stem), terms=terms)


def _ticoserec(name: str, title: str, stem: str, counts: PublishedCounts) -> PublicDataset:
    files = f"{stem}_item.txt and {stem}_time.txt, or an archive that holds them"
    note = "times are whole days; events of one day keep the file's order; other copies may have another order"
    return _sequences(name, title, files, "KingGugu/TiCoSeRec", counts, read_ticoserec(stem), note)


def _pairs(name: str, title: str, file: str, repository: str, counts: PublishedCounts) -> PublicDataset:
    return _sequences(name, title, f"{file}, or an archive that holds it", repository, counts, read_pairs(file))


_BEAUTY, _SPORTS = PublishedCounts(22_363, 12_101, 198_502), PublishedCounts(35_598, 18_357, 296_337)
_TOYS, _LASTFM = PublishedCounts(19_412, 11_924, 167_597), PublishedCounts(1_090, 3_646, 52_551)
SEQUENCES = (
    _s3rec("amazon-beauty-s3rec", "Amazon Beauty 5-core, with item attributes", "Beauty", _BEAUTY),
    _s3rec("amazon-sports-s3rec", "Amazon Sports 5-core, with item attributes", "Sports_and_Outdoors", _SPORTS),
    _s3rec("amazon-toys-s3rec", "Amazon Toys and Games 5-core, with item attributes", "Toys_and_Games", _TOYS),
    _s3rec("lastfm-s3rec", "Last.fm artists, with item attributes", "LastFM", _LASTFM, terms="none stated"),
    _ticoserec("amazon-beauty-ticoserec", "Amazon Beauty 5-core, with times", "Beauty", _BEAUTY),
    _ticoserec("amazon-sports-ticoserec", "Amazon Sports 5-core, with times", "Sports", _SPORTS),
    _pairs(
        "amazon-video-sasrec",
        "Amazon Video Games as SASRec filtered it",
        "Video.txt",
        "kang205/SASRec",
        PublishedCounts(31_013, 23_715, 287_107),
    ),
    _pairs(
        "amazon-beauty-bert4rec",
        "Amazon Beauty as BERT4Rec filtered it",
        "beauty.txt",
        "FeiSun/BERT4Rec",
        PublishedCounts(40_226, 54_542, 353_962),
    ),
)
