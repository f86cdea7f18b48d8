"""All histories of a dataset, flat in memory, and the split that training and evaluation share.

In: a dataset snapshot and the features that a model reads. Out: the columns behind them over all events, sorted by user
and time, with offsets per user; columns that the model does not read are not loaded.
Leave-last-out: a user's target is the last event with a positive action; training sees only what came before it,
evaluation ranks the catalogue for it. Decided: events after the target (a trailing `hide`, say) are used by neither.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.config import suggest
from tackboard.core.errors import ConfigError, DataError
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.vocabulary import Vocabulary
from tackboard.features.batch_executor import BatchExecutor, Rows
from tackboard.features.column import Column, offsets_of, ranges
from tackboard.features.execution import Program
from tackboard.features.feature_set import FeatureSet, read_features
from tackboard.features.frame import Frame
from tackboard.features.standard import HISTORY, check_finite, standard_features
from tackboard.features.stored import read_features_table
from tackboard.features.tables import EntityTable, EventTable, load_tables, read_context
from tackboard.features.views import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Histories of U users, N events in all. `targets` holds each user's held-out event, or -1 where there is none.

    `events` are the columns that `features` reads, `request` the features of the request just before each event [N].
    """

    path: Path
    snapshot: str
    id_type: str
    user_type: str
    vocabulary: Vocabulary
    user_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    is_positive: NDArray[np.bool_]
    catalogue: NDArray[np.int64]
    targets: NDArray[np.int64]
    features: FeatureSet
    events: EventTable
    request: Mapping[str, Column]
    trimming: Mapping[str, Any]

    @functools.cached_property
    def _history(self) -> Program:
        return Program(self.features.plan.trimmed([HISTORY]))

    def histories(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Column:
        """The feature `history` of runs of events: `lengths` events from index `starts` on, as if nothing came before.

        A run must stay whole, because training predicts its events: a `history` that drops some raises ConfigError.
        """
        chosen, offsets = ranges(starts, lengths), offsets_of(lengths)
        frame = Frame(
            num_requests=len(starts),
            num_candidates=0,
            request_of=None,
            request_ms=None,
            event_times=self.events.times[chosen],
            visible=View(None, offsets[:-1], offsets[1:], np.arange(len(starts)), offsets),
            columns={("event", name): column.take(chosen) for name, column in self.events.columns.items()},
        )
        column = self._history.run(frame)[HISTORY]
        kept = next(iter((column.fields or {}).values())).offsets
        if kept is None or not np.array_equal(kept, offsets):
            raise ConfigError(
                "the feature history leaves out events that training would predict",
                allowed="allowed: all columns of events.newest(n), with n of data.max_length or more",
            )
        return column

    @property
    def train_ends(self) -> NDArray[np.int64]:
        """Where each user's training events end [U], as an index into the events."""
        return np.where(self.targets >= 0, self.targets, self.offsets[1:])

    def training_events(self) -> NDArray[np.int64]:
        """Indices of the events that training may see, user after user."""
        return ranges(self.offsets[:-1], self.train_ends - self.offsets[:-1])

    def lineage(self) -> dict[str, Any]:
        """What a checkpoint records about where its data came from."""
        return {"dataset": str(self.path), "snapshot": self.snapshot, "num_events": len(self.item_ids)}


def load_sequences(
    dataset: str | Path,
    positive_actions: tuple[str, ...] = (),
    holdout: str = "last",
    vocabulary: Vocabulary | None = None,
    features: Callable[[Vocabulary], FeatureSet] = standard_features,
) -> Sequences:
    """Reads and verifies a dataset. `positive_actions` empty means all; `holdout` is `last` or `none`.

    `vocabulary` is that of the model that will read it, where there is one: its indices are not this dataset's.
    `features` gives what that model reads, for a vocabulary.
    """
    source = open_dataset(Path(dataset))
    table = source.read_events(["user_id", "action"])
    if table.num_rows == 0:
        raise DataError(f"{dataset} holds no events")
    own = Vocabulary(actions=tuple(source.actions), surfaces=tuple(source.surfaces))
    action_names, action_codes = _dictionary(table["action"])
    positive = np.isin(own.action_indices(action_names), _positive_indices(own, positive_actions))
    feature_set = features(vocabulary or own)
    if feature_set.plan.trimmed([HISTORY]).needs_request_time:
        raise ConfigError(
            "the feature history depends on the time of the request",
            allowed="allowed: events.newest(n); training reads runs of events, which have no such time",
        )
    user_ids, starts = np.unique(table["user_id"].to_numpy(), return_index=True)
    is_positive = positive[action_codes]
    offsets = np.append(starts, table.num_rows).astype(np.int64)
    targets = last_positive(offsets, is_positive) if holdout == "last" else np.full(len(user_ids), -1, dtype=np.int64)
    timed = len(feature_set.plan.features) > 1
    events, users, items = load_tables(source, feature_set.plan, timed=timed)
    if events is None:
        raise ConfigError("the feature history is not made of events", allowed="allowed: events.newest(n)")
    return Sequences(
        path=Path(dataset),
        snapshot=source.path.name,
        id_type=source.item_type,
        user_type=source.user_type,
        vocabulary=vocabulary or own,
        user_ids=user_ids,
        offsets=offsets,
        item_ids=events.columns["item"].values,
        is_positive=is_positive,
        catalogue=np.unique(source.read_items(["item_id"])["item_id"].to_numpy()),
        targets=targets,
        features=feature_set,
        events=events,
        request=_request_features(source, feature_set, events, users, items),
        trimming=_trimming(source, events, timed=timed),
    )


def _request_features(
    source: Dataset,
    features: FeatureSet,
    events: EventTable,
    users: EntityTable | None,
    items: EntityTable | None,
) -> dict[str, Column]:
    """Every feature of the request, at the time of each event, from what was received strictly before it.

    What a backfill of this snapshot has computed by the same definition is read, not computed again.
    """
    hashes = features.feature_hashes()
    stored = read_features(source.path)
    kept = stored.feature_hashes() if stored is not None else {}
    read = [name for name in hashes if name != HISTORY and kept.get(name) == hashes[name]]
    columns = read_features_table(source, read) if read else {}
    names = [name for name in hashes if name != HISTORY and name not in columns]
    if not names:
        return columns
    plan = features.plan.trimmed(names)
    rows = Rows(
        user_ids=np.repeat(events.user_ids, np.diff(events.offsets)),
        request_ms=events.times,
        context=read_context(source, plan),
    )
    columns |= BatchExecutor(plan, events=events, users=users, items=items).compute(rows)
    check_finite(features, columns)
    return columns


def _trimming(source: Dataset, events: EventTable, *, timed: bool) -> dict[str, Any]:
    """Which columns of the events are held in memory, which are not, and the bytes of both."""
    names = ["item", "action", "surface", "time", "received", *source.fields]
    read = [name for name in names if name in events.columns or (timed and name in ("time", "received"))]
    sizes = {name: events.columns[name].values.itemsize if name in events.columns else 8 for name in names}
    return {
        "read": read,
        "skipped": [name for name in names if name not in read],
        "bytes": sum(sizes[name] for name in read) * source.num_events,
        "bytes_saved": sum(sizes[name] for name in names if name not in read) * source.num_events,
    }


def snapshot_path(lineage: Mapping[str, Any]) -> Path:
    """The folder of the snapshot that `Sequences.lineage` recorded."""
    dataset = Path(lineage["dataset"])
    return dataset if dataset.name == lineage["snapshot"] else dataset / lineage["snapshot"]


def last_positive(offsets: NDArray[np.int64], is_positive: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index of each user's last positive event [U], or -1."""
    positions = np.where(is_positive, np.arange(len(is_positive), dtype=np.int64), -1)
    newest = np.maximum.reduceat(positions, offsets[:-1])
    return np.where(newest >= offsets[:-1], newest, -1)


def _positive_indices(vocabulary: Vocabulary, names: tuple[str, ...]) -> NDArray[np.int64]:
    for name in names:
        if name not in vocabulary.actions:
            close = suggest(name, vocabulary.actions)
            raise ConfigError(
                f"data.positive_actions names {name!r}",
                allowed=f"actions in the dataset: {', '.join(vocabulary.actions)}",
                fix=f"did you mean {close}?" if close else "",
            )
    return vocabulary.action_indices(names or vocabulary.actions)


def _dictionary(column: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int64]]:
    """Distinct names of a string column and the position of each row's name among them."""
    combined = column.combine_chunks()
    encoded = combined if pa.types.is_dictionary(combined.type) else combined.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().chunk(0)
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
