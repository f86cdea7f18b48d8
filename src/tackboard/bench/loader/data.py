"""Makes up a dataset for `tackboard bench loader`, and writes the files that the rivals of our loader read.

This module takes a made-up dataset or the user's dataset, and writes a folder for the rivals:

    examples.parquet   one row per training segment (a piece of one user's history), with its events in list columns;
                       one row group per bucket (a group of users)
    examples.arrow     the same rows without compression, as Hugging Face `datasets` keeps them in its cache
    items.npz          for every item: its id, its rows in the embedding tables, and the log of its share of positives
    setting.json       the setting of all contenders, and the names of actions and surfaces

Decided: these files already hold the values that our loader computes while it reads (the split, the segments, actions
as numbers, the table rows and shares of all items). The time to write the files is not counted. So if a rival is slow,
a lack of preparation is not the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.batch import HashConfig, item_rows
from tackboard.core import keyed_random
from tackboard.core.files import write_text_atomic
from tackboard.core.hashing import mix64
from tackboard.core.vocabulary import DEFAULT_READS
from tackboard.data.index import index_training
from tackboard.data.loader import DataConfig
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.data.step_plan import cut_segments
from tackboard.events.dataset import write_dataset
from tackboard.events.schema import NAMES
from tackboard.features.column import offsets_of, ranges
from tackboard.features.standard import features_for_model

ACTIONS = ("click", "hide", "save", "view")
ACTION_SHARES = (0.25, 0.04, 0.09, 0.62)
POSITIVE = ("click", "save")
SURFACES = ("home", "related", "search")
START_MS = 1_790_000_000_000
MEAN_GAP_MS = 1_800_000
SIGMA = 1.4
"""Standard deviation of log(events per user). With this value, 10% of the users have more than half of the events."""
EXAMPLE_COLUMNS = ("item", "action", "surface", "time", "is_positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Names the dataset and describes the batches that every contender has to make."""

    dataset: str
    positive_actions: tuple[str, ...]
    max_length: int = 64
    tokens_per_step: int = 4096
    window_buckets: int = 8
    num_buckets: int = 1
    """Number of buckets of the dataset. `prepare` sets `num_buckets`, `actions` and `surfaces`."""
    actions: tuple[str, ...] = ()
    surfaces: tuple[str, ...] = ()
    num_hashes: int = 8
    num_rows: int = 1_000_000
    seed: int = 1

    @property
    def hashing(self) -> HashConfig:
        """Settings of the hash functions that turn items into table rows."""
        return HashConfig(num_hashes=self.num_hashes, num_rows=self.num_rows)

    @property
    def config(self) -> DataConfig:
        """This setting as a config of our loader."""
        return DataConfig(
            dataset=self.dataset,
            positive_actions=self.positive_actions,
            max_length=self.max_length,
            tokens_per_step=self.tokens_per_step,
            window_buckets=self.window_buckets,
        )

    def window_rows(self, num_examples: int) -> int:
        """Converts `window_buckets` to a number of examples, for rivals that have no buckets.

        A window is the part of the data that is in memory and shuffled together.
        """
        return max(1, -(-num_examples * self.window_buckets // self.num_buckets))

    def open(self) -> SequenceSource:
        """Opens the dataset as our loader does, with the default features of a model."""
        standard = functools.partial(features_for_model, DEFAULT_READS, max_history=self.max_length)
        return open_sequences(self.dataset, self.positive_actions, features=standard)

    @classmethod
    def read(cls, folder: Path) -> Setting:
        """Reads the setting that `prepare` wrote."""
        content: dict[str, Any] = json.loads((folder / "setting.json").read_text(encoding="utf-8"))
        for name in ("positive_actions", "actions", "surfaces"):
            content[name] = tuple(content[name])
        return cls(**content)


def made_up_events(num_events: int, num_items: int, mean_length: int, seed: int) -> pa.Table:
    """Makes up events, sorted by user and time. A few users and a few items have most of the events."""
    num_users = max(1, num_events // mean_length)
    weights = np.exp(SIGMA * keyed_random.normal(seed, 1, np.arange(num_users)))
    bounds = np.append(0, np.round(np.cumsum(weights) * (num_events / weights.sum()))).astype(np.int64)
    bounds[-1] = num_events
    lengths = np.diff(bounds)
    users = np.repeat(np.arange(num_users, dtype=np.int64), lengths)
    draws = keyed_random.bits(seed, 2, np.arange(num_events))
    # One random number of 64 bits gives three draws: 32 bits for the item, 16 for the action and 8 for the surface.
    item_draw = (draws >> np.uint64(32)).astype(np.float64) * 2.0**-32
    action_draw = ((draws >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.float64) * 2.0**-16
    surfaces = ((draws >> np.uint64(8)) & np.uint64(0xFF)).astype(np.int32) % len(SURFACES)
    ranks = np.minimum((np.exp(item_draw * np.log(num_items + 1)) - 1).astype(np.int64), num_items - 1)
    # The ids of items are random, like real ids, and do not reveal the popularity of an item.
    names = (mix64(np.arange(num_items, dtype=np.int64), 7) >> np.uint64(2)).view(np.int64)
    gaps = ((mix64(draws.view(np.int64), 3) >> np.uint64(32)) % np.uint64(2 * MEAN_GAP_MS)).astype(np.int64)
    elapsed = np.cumsum(gaps)
    times = START_MS + elapsed - np.repeat(elapsed[np.minimum(bounds[:-1], num_events - 1)], lengths)
    actions = np.searchsorted(np.cumsum(ACTION_SHARES)[:-1], action_draw, side="right").astype(np.int32)

    def named(codes: Any, words: tuple[str, ...]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(words)).cast(NAMES)

    return pa.table(
        {
            "user": users,
            "item": names[ranks],
            "action": named(actions, ACTIONS),
            "surface": named(surfaces, SURFACES),
            "time_ms": times,
            "received_ms": times,
            "order": np.arange(num_events, dtype=np.int64),
        }
    )


def write_made_up(root: Path, name: str, *, num_events: int, num_items: int, mean_length: int, seed: int) -> Path:
    """Writes a made-up dataset and returns the path of its snapshot."""
    return write_dataset(root, name, made_up_events(num_events, num_items, mean_length, seed))


def prepare(setting: Setting, folder: Path) -> dict[str, Any]:
    """Writes the files for the rivals into `folder`, one bucket at a time. Returns counts and sizes of the data."""
    folder.mkdir(parents=True, exist_ok=True)
    source = setting.open()
    index = index_training(source, setting.max_length)
    np.savez(
        folder / "items.npz",
        item_ids=source.catalogue,
        log_q=index.frequencies.log_share(source.catalogue),
        rows=item_rows(source.catalogue, setting.hashing).numpy(),
    )
    num_examples = _write_examples(setting, source, folder)
    known = {
        "dataset": str(source.dataset.path.resolve()),
        "num_buckets": source.num_buckets,
        "actions": source.vocabulary.actions,
        "surfaces": source.vocabulary.surfaces,
    }
    write_text_atomic(folder / "setting.json", json.dumps(dataclasses.asdict(setting) | known))
    return {
        "num_events": source.dataset.num_events,
        "num_users": source.dataset.num_users,
        "num_items": source.dataset.num_items,
        "num_buckets": source.num_buckets,
        "num_examples": num_examples,
        "num_tokens": int(index.bucket_tokens.sum()),
        "events_bytes": source.dataset.events_path.stat().st_size,
        "examples_bytes": (folder / "examples.parquet").stat().st_size,
    }


def _write_examples(setting: Setting, source: SequenceSource, folder: Path) -> int:
    """Writes the examples of each bucket as one row group, and returns the number of examples."""
    schema = examples_of(setting, source, 0).schema
    num_examples = 0
    with (
        pq.ParquetWriter(folder / "examples.parquet", schema) as parquet,
        pa.ipc.new_stream(folder / "examples.arrow", schema) as arrow,
    ):
        for bucket in range(source.num_buckets):
            table = examples_of(setting, source, bucket)
            if table.num_rows:
                parquet.write_table(table, row_group_size=table.num_rows)
                arrow.write_table(table)
            num_examples += table.num_rows
    return num_examples


def examples_of(setting: Setting, source: SequenceSource, bucket: int) -> pa.Table:
    """Returns the training segments of a bucket: a column `user_id` and a list column for each of EXAMPLE_COLUMNS."""
    sequences = source.read([bucket])
    segments = cut_segments(sequences.offsets[:-1], sequences.train_ends, setting.max_length)
    fields = dict(sequences.histories(segments.starts, segments.lengths).fields or {})
    values = {name: fields[name].values for name in ("item", "action", "surface", "time")}
    values["is_positive"] = sequences.is_positive[ranges(segments.starts, segments.lengths)]
    offsets = pa.array(offsets_of(segments.lengths), type=pa.int32())
    lists = {name: pa.ListArray.from_arrays(offsets, pa.array(values[name])) for name in EXAMPLE_COLUMNS}
    return pa.table({"user_id": sequences.user_ids[segments.users], **lists})
