"""Writes the request-grouped layout: a new snapshot of a dataset, with labelled requests in requests.parquet.

    requests.parquet   one row per request: request, user_id, time_ms, surface, and its candidates in lists of
                       equal length: item_id, position, weight, label_<action> (1, 0, null = not known yet)
    labels.json        the rules, the SHA-256 of the files that the labels were made from, and the counts
    layout.json        gets the entry `requests`: the rows of requests.parquet that belong to each bucket

The history of a user is stored once in events.parquet, however many requests and candidates refer to it. Requests are
sorted by (user_id, time_ms, request), so that a bucket's requests belong to the users of the same bucket of events.
Decided: the history of a request is assembled when the request is read, and never stored per request.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.core.documents import blaming, read_document
from tackboard.core.errors import DataError
from tackboard.core.files import reach, write_json_atomic
from tackboard.core.progress import Progress
from tackboard.data.labels import Label, LabelConfig, LabelCounts, LabelJobCounts, label_bucket, requests_schema
from tackboard.events.checks.measures import newest_time
from tackboard.events.dataset import EVENTS, REQUESTS, Dataset
from tackboard.events.impressions import IMPRESSIONS, Impressions, check_action, open_impressions
from tackboard.events.layout import FILE_NAME as LAYOUT
from tackboard.events.layout import Layout
from tackboard.events.staging import check_newest, derive_snapshot

LABELS = "labels.json"
PSEUDO = "pseudo_requests.json"
"""File that says how requests were made from events, if the log has no impressions (pseudo_requests.py)."""
VERSION = 1
FIELDS = {
    "version": int,
    "labels": dict[str, int],
    "shown": str | None,
    "negatives": int | None,
    "seed": int,
    "inputs": dict[str, str],
    "end_ms": int,
    "counts.labels": dict[str, dict[str, int]],
}
"""Fields of labels.json and their types."""


@dataclasses.dataclass(frozen=True)
class Labelled:
    """The result of a label job: the snapshot, the rules, the end of the log and the counts."""

    path: Path
    config: LabelConfig
    end_ms: int
    counts: LabelJobCounts


def label_dataset(dataset: Dataset, config: LabelConfig, *, quiet: bool = False) -> Labelled:
    """Makes a new snapshot of `dataset` with labelled requests, and points `latest` at the new snapshot.

    `dataset` must be the newest snapshot. If `dataset` already has exactly these labels, no snapshot is made. Labels
    that were made by other rules are replaced. Wrong rules raise UsageError, and a dataset without impressions raises
    DataError. After an error or a kill, the old snapshot stays in use.
    """
    check_newest(dataset)
    for label in config.labels:
        check_action(dataset, label.action, f"--label {label.action}")
    inputs = _inputs(dataset)
    stored = read_labels(dataset.path)
    if stored is not None and stored.config == config and _stored(dataset.path)["inputs"] == inputs:
        return stored
    rules = _rules(config)
    with contextlib.closing(open_impressions(dataset, config.shown)) as impressions:

        def fill(staging: Path) -> tuple[str, ...]:
            end_ms, num_future = newest_time(dataset, "received_ms")
            with Progress("labelling", total=dataset.num_events, unit="events", quiet=quiet) as progress:
                layout, counts = _write_rows(dataset, config, impressions, end_ms, staging / REQUESTS, progress)
            counts.events_in_future = num_future
            layout.write(staging)
            content = {"version": VERSION, **rules, "inputs": inputs, "end_ms": end_ms}
            write_json_atomic(staging / LABELS, content | {"counts": dataclasses.asdict(counts)})
            return written

        written = (REQUESTS, LABELS, LAYOUT)
        path = derive_snapshot(dataset, "labels", rules, replaced=(*written, PSEUDO), fill=fill)
    result = read_labels(path)
    assert result is not None
    return result


def read_labels(snapshot: Path) -> Labelled | None:
    """Reads labels.json of a snapshot folder; returns None if the snapshot has no labels."""
    content = _stored(snapshot)
    if not content:
        return None
    with blaming(snapshot / LABELS):
        labels = tuple(Label(action, window_ms) for action, window_ms in content["labels"].items())
        counted = {action: LabelCounts(**count) for action, count in content["counts"]["labels"].items()}
        return Labelled(
            path=snapshot,
            config=LabelConfig(labels=labels, **{key: content[key] for key in ("shown", "negatives", "seed")}),
            end_ms=content["end_ms"],
            counts=LabelJobCounts(**{**content["counts"], "labels": counted}),
        )


def _stored(snapshot: Path) -> dict[str, Any]:
    path = snapshot / LABELS
    content = read_document(path, FIELDS) if path.exists() else {}
    if content.get("version", 0) > VERSION:
        raise DataError(f"{path} has version {content['version']}", allowed=f"allowed: up to {VERSION}")
    return content


def _rules(config: LabelConfig) -> dict[str, Any]:
    windows = {label.action: label.window_ms for label in config.labels}
    return {"labels": windows, "shown": config.shown, "negatives": config.negatives, "seed": config.seed}


def _inputs(dataset: Dataset) -> dict[str, str]:
    """Returns the SHA-256 of the files that labels are made from."""
    return {str(e["name"]): str(e["sha256"]) for e in dataset.manifest["files"] if e["name"] in (EVENTS, IMPRESSIONS)}


def _write_rows(
    dataset: Dataset, config: LabelConfig, impressions: Impressions, end_ms: int, path: Path, progress: Progress
) -> tuple[Layout, LabelJobCounts]:
    """Writes requests.parquet bucket by bucket. The requests of a bucket are one or several row groups."""
    reach(f"{REQUESTS}:before-write")
    stored = pq.read_schema(dataset.events_path)
    names = ["item_id", "time_ms", "request", "action", "surface"]
    if config.shown is not None and "position" in stored.names:
        names.append("position")
    counts = LabelJobCounts(labels={label.action: LabelCounts() for label in config.labels})
    num_rows: list[int] = []
    with pq.ParquetWriter(path, requests_schema(config.labels, stored.field("request").type)) as writer:
        for bucket, events in enumerate(dataset.event_chunks(names)):
            num_rows.append(0)
            for shown, done in impressions.of_bucket(bucket, events):
                requests = label_bucket(config, shown, done, end_ms, counts)
                if requests.num_rows:
                    writer.write_table(requests, row_group_size=requests.num_rows)
                num_rows[-1] += requests.num_rows
                reach(f"{REQUESTS}:after-group")
                progress.advance(done.num_rows)
    reach(f"{REQUESTS}:after-write")
    counts.impressions_without_request = impressions.without_request
    counts.impressions_without_user = impressions.without_user
    if not counts.requests:
        raise DataError(
            f"no impression of {dataset.path} has a request and a user",
            allowed=f"without a request: {impressions.without_request:,}; without a user: {impressions.without_user:,}",
            fix="check the columns given to `tackboard init` by --request and --user",
        )
    offsets = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int64)
    layout = dataset.layout
    return Layout(layout.first_users, {**layout.offsets, "requests": offsets}), counts


def read_requests(dataset: Dataset) -> pa.Table:
    """Reads all of requests.parquet. A dataset without labels raises DataError."""
    path = dataset.path / REQUESTS
    if not path.exists():
        raise DataError(
            f"{dataset.path} has no labelled requests", fix=f"tackboard data label {dataset.path} --label ACTION=WINDOW"
        )
    return pq.read_table(path)
