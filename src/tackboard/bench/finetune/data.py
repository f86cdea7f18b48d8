"""Makes the datasets of `tackboard bench finetune`: one for pretraining, and one with requests that come later.

    a user's events   ├──────── pretraining ────────┤─ requests: training, validation and test, by user ─┤

The input is a synthetic world, or the files of a public dataset. Each dataset is one snapshot under WORK/datasets. A
request is a pseudo-request (data/pseudo_requests.py): its candidates are an item that the user chose, and items that
are drawn from the same hour or from the whole log. Pretraining reads no event of a user that happened at or after the
user's first request. `SOURCES` fixes where pretraining ends, how candidates are drawn, and the seed of the draw.

Decided: the parameters of the synthetic world (`WORLD`) were committed before any ranker was trained on it. Public
logs say neither when an item was born nor what it contains. So two proxies are computed: the birth of an item is the
time of its first event, and the content of an item is a vector from the co-engagement graph of the events that
pretraining may read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tackboard.bench.quality.data import find_bench, of_dataset, prepare, prepared_name
from tackboard.bench.transfer.data import Indices, user_offsets, write_beginning
from tackboard.core.files import staging_directory
from tackboard.core.progress import say
from tackboard.data.derived_attributes import VectorsConfig, add_attributes
from tackboard.data.pseudo_requests import PseudoRequestConfig, make_pseudo_requests
from tackboard.data.request_layout import read_requests
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.schema import numpy_column
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.events.synthetic.world_items import CONTENT_WIDTH, DAY_MS
from tackboard.features.column import ranges

WORLD = WorldConfig(seed=19, num_users=3000, num_items=3000, born_later_share=0.7)
"""The synthetic world. In the demo's world, 25% of the items are born during the period; here, 70% are."""
SPLIT_DAY = 30
"""In the synthetic world, the first requests come this many days after the start. The period has 60 days, and most
users leave before its end. The day was chosen by the number of requests and the ages of items, before any training."""
QUICK_USERS = 1000
"""Number of users of the synthetic world with `--quick`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneSource:
    """Where requests come from, and which comparisons are made on them."""

    name: str
    rules: Mapping[str, Any]
    """Settings of `PseudoRequestConfig`. Pretraining reads the events before `since_ms`. If `since_ms` is not set, it
    reads each user's events before the user's first request."""
    quick_stride: int = 1
    """With `--quick`, only every n-th user of a public dataset is kept; this is n."""
    parts: tuple[str, ...] = ("ways", "cold start", "labels")
    """The comparisons that this dataset can answer: see finetune_study.py."""
    note: str = ""
    """What a reader of the table must know about the requests."""

    @property
    def is_synthetic(self) -> bool:
        return self.name == "synthetic"

    @property
    def config(self) -> PseudoRequestConfig:
        return PseudoRequestConfig(**self.rules)


SOURCES = {
    source.name: source
    for source in (
        FinetuneSource(
            name="synthetic",
            rules={
                "candidates": 20,
                "since_ms": WORLD.start_ms + SPLIT_DAY * DAY_MS,
                "per_user": 8,
                "also": ("save",),
                "seed": 19,
            },
            note="The world is synthetic. Its items have births and noisy content vectors.",
        ),
        FinetuneSource(
            name="ml-1m",
            rules={"candidates": 100, "pool": "all", "per_user": 10, "seed": 19},
            quick_stride=20,
            parts=("ways",),
            note="Candidates are drawn from the whole log, because most hours hold the ratings of one or two users. So "
            "some candidates were first rated after the request, and results are not shown by item age.",
        ),
        FinetuneSource(
            name="kakao-brunch",
            rules={"candidates": 100, "since_ms": 1_550_793_600_000, "per_user": 2, "seed": 19},
            quick_stride=600,
            note="Each request is the reading of an article on or after 2019-02-22. The age of an article is the time "
            "since it was first read; this first reading stands in for the article's birth. Content vectors come from "
            "the co-engagement graph of earlier reads.",
        ),
    )
}


def find_source(name: str) -> FinetuneSource:
    """Returns the dataset with this name."""
    return of_dataset(name, SOURCES)


def names_of(source: FinetuneSource, *, quick: bool) -> tuple[str, str]:
    """Returns two names under WORK/datasets: of the dataset with requests, and of the dataset for pretraining."""
    name = f"{source.name}-requests{'-quick' if quick else ''}"
    return name, f"{name}-before"


def make_datasets(source: FinetuneSource, datasets: Path, files: Path | None, *, quick: bool) -> None:
    """Makes the datasets that are missing. `files` is the folder with the files of a public dataset."""
    requests, before = (datasets / name for name in names_of(source, quick=quick))
    if not requests.exists():
        say(f"preparing {requests.name}")
        with staging_directory(requests) as making:
            folder = _write_synthetic(making, quick=quick) if source.is_synthetic else None
            if folder is None:
                folder = _write_public(source, making, datasets, files, quick=quick)
            snapshot = make_pseudo_requests(open_dataset(folder), source.config, quiet=True).path
            if not requests.exists():
                os.rename(snapshot, requests)
    write_beginning(requests, pretraining_ends(source, requests), before)


def _write_synthetic(making: Path, *, quick: bool) -> Path:
    world = dataclasses.replace(WORLD, num_users=QUICK_USERS) if quick else WORLD
    return write_world(world, making, "synthetic").parent


def _write_public(source: FinetuneSource, making: Path, datasets: Path, files: Path | None, *, quick: bool) -> Path:
    """Writes a public dataset whose items have a birth and a content vector. Returns the folder of the dataset."""
    bench, rule, stride = find_bench(source.name), "file", source.quick_stride if quick else 1
    prepare(bench, (rule,), datasets, files, stride)
    plain = open_dataset(datasets / prepared_name(bench, rule, stride))
    events = plain.read_events().drop_columns(["user_id", "item_id"])
    items = plain.read_items(["item"])
    vectors = VectorsConfig(name="content", width=CONTENT_WIDTH, until_ms=source.config.since_ms)
    if source.config.since_ms is None:
        items = _with_vectors(source, making, events, items, vectors)
    folder = write_dataset(making, source.name, events, item_attributes=items, source=plain.manifest["source"]).parent
    left = vectors if vectors.name not in items.column_names else None
    add_attributes(open_dataset(folder), first_event="birth_ms", vectors=left, quiet=True)
    return folder


def _with_vectors(
    source: FinetuneSource, making: Path, events: pa.Table, items: pa.Table, vectors: VectorsConfig
) -> pa.Table:
    """Returns the items with vectors that are made from each user's events before the user's first request."""
    whole = write_dataset(making, "whole", events, item_attributes=items).parent
    snapshot = make_pseudo_requests(open_dataset(whole), source.config, quiet=True).path
    kept = ranges(user_offsets(snapshot)[:-1], pretraining_ends(source, snapshot))
    events = open_dataset(snapshot).read_events().take(pa.array(kept)).drop_columns(["user_id", "item_id"])
    before = write_dataset(making, "before", events, item_attributes=items).parent
    add_attributes(open_dataset(before), vectors=vectors, quiet=True)
    return open_dataset(before).read_items(["item", vectors.name])


def pretraining_ends(source: FinetuneSource, path: Path) -> Indices:
    """Returns an array [U]: for each user, how many of the user's first events are for pretraining. `path` is the
    dataset with requests."""
    dataset, offsets = open_dataset(path, verify=False), user_offsets(path)
    events = dataset.read_events(["user_id", "time_ms"])
    times, owners = numpy_column(events, "time_ms"), np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    first = np.full(len(offsets) - 1, source.config.since_ms or np.iinfo(np.int64).max, dtype=np.int64)
    if source.config.since_ms is None:
        requests = read_requests(dataset)
        users = numpy_column(events, "user_id")[offsets[:-1]]
        np.minimum.at(
            first, np.searchsorted(users, numpy_column(requests, "user_id")), numpy_column(requests, "time_ms")
        )
    return np.bincount(owners[times < first[owners]], minlength=len(first)).astype(np.int64)
