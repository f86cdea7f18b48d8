"""All histories of a dataset, flat in memory, and the split that training and evaluation share.

In: a dataset snapshot. Out: one array per field over all events, sorted by user and time, with offsets per user.
Leave-last-out: a user's target is the last event with a positive action; training sees only what came before it,
evaluation ranks the catalogue for it. Decided: events after the target (a trailing `hide`, say) are used by neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tackboard.core.config import suggest
from tackboard.core.errors import ConfigError, DataError
from tackboard.events.dataset import open_dataset
from tackboard.events.vocabulary import Vocabulary

COLUMNS = ["user_id", "item_id", "action", "surface", "time_ms"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Histories of U users, N events in all. `targets` holds each user's held-out event, or -1 where there is none."""

    path: Path
    snapshot: str
    id_type: str
    vocabulary: Vocabulary
    user_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    actions: NDArray[np.int64]
    surfaces: NDArray[np.int64]
    times_ms: NDArray[np.int64]
    is_positive: NDArray[np.bool_]
    catalogue: NDArray[np.int64]
    targets: NDArray[np.int64]

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
) -> Sequences:
    """Reads and verifies a dataset. `positive_actions` empty means all; `holdout` is `last` or `none`.

    `vocabulary` is that of the model that will read it, where there is one: its indices are not this dataset's.
    """
    source = open_dataset(Path(dataset))
    table = source.read_events(COLUMNS)
    if table.num_rows == 0:
        raise DataError(f"{dataset} holds no events")
    action_names, action_codes = _dictionary(table["action"])
    surface_names, surface_codes = _dictionary(table["surface"])
    own = Vocabulary.from_names(action_names, surface_names)
    positive = np.isin(own.action_indices(action_names), _positive_indices(own, positive_actions))
    vocabulary = vocabulary or own
    user_ids, starts = np.unique(table["user_id"].to_numpy(), return_index=True)
    item_ids = table["item_id"].to_numpy()
    is_positive = positive[action_codes]
    offsets = np.append(starts, table.num_rows).astype(np.int64)
    targets = last_positive(offsets, is_positive) if holdout == "last" else np.full(len(user_ids), -1, dtype=np.int64)
    items = source.read_items(["item_id"])["item_id"].to_numpy()
    return Sequences(
        path=Path(dataset),
        snapshot=source.path.name,
        id_type=source.item_type,
        vocabulary=vocabulary,
        user_ids=user_ids,
        offsets=offsets,
        item_ids=item_ids,
        actions=vocabulary.action_indices(action_names)[action_codes],
        surfaces=vocabulary.surface_indices(surface_names)[surface_codes],
        times_ms=table["time_ms"].to_numpy(),
        is_positive=is_positive,
        catalogue=np.unique(items),
        targets=targets,
    )


def snapshot_path(lineage: Mapping[str, Any]) -> Path:
    """The folder of the snapshot that `Sequences.lineage` recorded."""
    dataset = Path(lineage["dataset"])
    return dataset if dataset.name == lineage["snapshot"] else dataset / lineage["snapshot"]


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices start, start + 1, … of every run of events, end to end."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)


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
