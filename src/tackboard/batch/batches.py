"""Defines the batches that models read: histories as tensors, and requests with candidates as tensors.

A batch of B histories holds N events, packed end to end, and the M distinct items of these events. An event refers to
its item by the item's position in the list of distinct items. So the embedding rows of an item are looked up only once,
however often the item occurs. The row numbers are computed when the batch is built, never inside `forward`.

    offsets  [B+1]  0 ────── 3 ───────────── 7      two histories, of 3 and of 4 events
    items    [N]    0  1  0    2  1  3  2           positions in the distinct items
    item_ids [M]    i₀ i₁ i₂ i₃                     M = 4
    item_rows [M, k]                                one row in each of the k sub-tables
    sampled  [K]    1  3                            items drawn at random as negatives; they may occur in events too

A feature is a tensor with one entry for each history, event, request or candidate. An entry is a number, an id, a time,
or a vector of width w (then the shape is [·, w]). If the entries are lists, whose lengths may differ, the feature is a
`Jagged`. This module does not depend on logs or on the definitions of features, so models do not depend on them either.
`builder` makes batches.

Shapes: B rows (histories), N packed events, M distinct items, k hash functions; U requests, C candidates.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch

from tackboard.batch.row_layout import RowLayout
from tackboard.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Jagged:
    """Holds one list per row, packed end to end: the list of row i is values[offsets[i] : offsets[i + 1]]."""

    values: torch.Tensor
    offsets: torch.Tensor

    def lengths(self) -> torch.Tensor:
        """Returns the number of elements of each row's list."""
        return self.offsets[1:] - self.offsets[:-1]

    def take(self, rows: torch.Tensor) -> Jagged:
        """Returns the lists of `rows`, in the order of `rows`; a row may occur more than once."""
        lengths = self.lengths().index_select(0, rows)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        total = int(offsets[-1])
        shift = self.offsets.index_select(0, rows) - offsets[:-1]
        places = torch.repeat_interleave(shift, lengths, output_size=total)
        places += torch.arange(total, device=places.device)
        return Jagged(self.values.index_select(0, places), offsets)


Feature = torch.Tensor | Jagged
"""The values of one feature in a batch."""


def take_rows(feature: Feature, rows: torch.Tensor) -> Feature:
    """Returns the values of `rows`, in the order of `rows`; a row may occur more than once."""
    return feature.take(rows) if isinstance(feature, Jagged) else feature.index_select(0, rows)


class Batch:
    """The methods of a batch that the trainer calls."""

    num_examples_known: ClassVar[int | None] = None
    """The number of examples, if it was counted before the batch was copied to a device."""
    num_padding: ClassVar[int] = 0
    """The number of events at the end that are padding (`padding.pad_batch`). Data code never pads, so the number is
    not a field of the batch."""
    targets: ClassVar[Any] = None
    """What a model's `prepare` computed from this batch, as a dataclass with tensors; None before `prepare`. The data
    code knows nothing of targets, so they are not a field of the batch."""

    def with_targets(self, targets: Any) -> Self:
        """Returns the same batch with the targets of a model."""
        return self._with(targets=targets)

    def with_padding(self, num_padding: int) -> Self:
        """Returns the same batch, with the note that its last `num_padding` events are padding."""
        return self._with(num_padding=num_padding)

    def _with(self, **values: Any) -> Self:
        changed = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    @property
    def num_tokens(self) -> int:
        """The size of the batch: the number of events in histories plus the number of candidates."""
        raise NotImplementedError

    def num_examples(self) -> int:
        """Returns the number of positives or labels that a loss learns from."""
        raise NotImplementedError

    def has_targets(self) -> bool:
        """Returns whether a loss can learn from the batch."""
        return self.num_examples() > 0

    def to(self, device: torch.device) -> Self:
        """Returns the same batch on `device`. The copy knows its number of examples without asking the device."""
        moved: Self = _mapped(self, lambda tensor: tensor.to(device, non_blocking=True))
        object.__setattr__(moved, "num_examples_known", self.num_examples())
        return moved

    def pin_memory(self) -> Self:
        """Returns the same batch in pinned memory, from which a GPU can copy without the CPU."""
        return _mapped(self, torch.Tensor.pin_memory)

    def cloned(self) -> Self:
        """Returns the same batch with memory of its own, including its targets and padding."""
        copied: Self = _mapped(self, torch.Tensor.clone)
        object.__setattr__(copied, "num_examples_known", self.num_examples())
        return copied

    def tensors(self) -> list[torch.Tensor]:
        """Returns every tensor of the batch; the tensors of histories come first."""
        found: list[torch.Tensor] = []
        _mapped(self, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found


@dataclasses.dataclass(frozen=True)
class SequenceBatch(Batch):
    """Holds B histories as tensors; see the picture in the module's docstring.

    `columns` holds, by name, the columns of the history other than the item, each [N]. `request` holds the features of
    the request: one value per history [B], or one value per event [N] if a loss predicts every event from the events
    before it. `sampled` [K] holds the positions of items drawn uniformly from the catalogue, in ascending order and
    without repeats. The scalar `sample_rate` is the probability that an item of the catalogue is drawn.
    """

    offsets: torch.Tensor
    users: torch.Tensor
    items: torch.Tensor
    columns: dict[str, torch.Tensor]
    request: dict[str, Feature]
    is_positive: torch.Tensor
    item_ids: torch.Tensor
    item_rows: torch.Tensor
    item_log_q: torch.Tensor
    sampled: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    sample_rate: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(()))

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_events(self) -> int:
        return len(self.items)

    @property
    def actions(self) -> torch.Tensor:
        """The action of each event, as its position in the vocabulary [N]."""
        return self.column("action")

    @property
    def surfaces(self) -> torch.Tensor:
        """The surface of each event, as its position in the vocabulary [N]."""
        return self.column("surface")

    @property
    def times_ms(self) -> torch.Tensor:
        return self.column("time")

    def column(self, name: str) -> torch.Tensor:
        """Returns a column of the history [N]. The batch has only the columns in `reads` of the model's config."""
        if name not in self.columns:
            carried = ", ".join(f"history.{column}" for column in ("item", *self.columns))
            raise ConfigError(
                f"the model reads history.{name}, which the batch does not carry",
                allowed=f"carried: {carried}",
                fix=f"add history.{name} to `reads` of the model's config",
            )
        return self.columns[name]

    def of_request(self, name: str) -> torch.Tensor:
        """Returns a feature of the request: [B, …], or [N, …] if every event has its own request. Lists are refused."""
        feature = self.request[name]
        if isinstance(feature, Jagged):
            raise ConfigError(f"the model reads {name} as a number, but it is a list", fix="read it as `Jagged`")
        return feature

    def lengths(self) -> torch.Tensor:
        """Returns the number of events of each history [B]."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def num_tokens(self) -> int:
        return self.num_events - self.num_padding

    def num_examples(self) -> int:
        """Returns the number of positive events."""
        return int(self.is_positive.sum()) if self.num_examples_known is None else self.num_examples_known


@dataclasses.dataclass(frozen=True)
class RequestBatch(Batch):
    """Holds U requests, each with one history, and the C candidates of these requests.

        histories.offsets  0 ───── 5 ──── 8         two requests
        request_of [C]     0 0 0 0 1 1 1            the request of each candidate, in ascending order
        candidates [C]                              positions among histories.item_ids

    Each history is stored once. `expand` works on the device: it repeats results of a history for each candidate.
    `labels` are 0 or 1; a loss must leave out labels that are not `known` yet. `features` holds the features of
    candidates [C], and `histories.request` holds the features of requests [U]. `of_candidates` returns a feature of
    either kind for each candidate.

    Eight fields are filled only in batches of labelled requests. In a batch of a server, `request_ms` is 0,
    `positions` are -1, `weights` are 1, `labels` and `known` are empty, `histories.users` and `histories.item_log_q`
    are 0 and `histories.is_positive` is False. So scores must not depend on these fields.
    """

    histories: SequenceBatch
    request_ms: torch.Tensor
    request_of: torch.Tensor
    candidates: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    labels: dict[str, torch.Tensor]
    known: dict[str, torch.Tensor]
    features: dict[str, Feature]

    @property
    def num_requests(self) -> int:
        return self.histories.num_rows

    @property
    def num_candidates(self) -> int:
        return len(self.candidates)

    @property
    def num_tokens(self) -> int:
        return self.histories.num_events + self.num_candidates

    def num_examples(self) -> int:
        """Returns the number of known labels of candidates."""
        if self.num_examples_known is not None:
            return self.num_examples_known
        return sum(int(known.sum()) for known in self.known.values())

    def candidate_rows(self) -> torch.Tensor:
        """Returns the table rows of each candidate [C, k]."""
        return self.histories.item_rows.index_select(0, self.candidates)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats the values of requests [U, …] for each of their candidates [C, …]."""
        return values.index_select(0, self.request_of)

    def of_candidates(self, name: str) -> Feature:
        """Returns a feature for each candidate [C, …]: its own feature, or the repeated feature of its request."""
        if name in self.features:
            return self.features[name]
        if name not in self.histories.request:
            raise ConfigError(
                f"the model reads {name}, which the batch does not carry",
                allowed=f"carried: {', '.join([*self.features, *self.histories.request]) or 'no feature'}",
                fix=f"add {name} to `reads` of the model's config",
            )
        return take_rows(self.histories.request[name], self.request_of)


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a batch of the same class, with `change` applied to every tensor."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, RowLayout):
        return batch.mapped(change)
    if isinstance(batch, dict):
        return {name: _mapped(feature, change) for name, feature in batch.items()}
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return batch
    parts = {field.name: _mapped(getattr(batch, field.name), change) for field in dataclasses.fields(batch)}
    mapped: Any = type(batch)(**parts)
    if not isinstance(batch, Batch):
        return mapped
    mapped = mapped.with_padding(batch.num_padding) if batch.num_padding else mapped
    return mapped if batch.targets is None else mapped.with_targets(_mapped(batch.targets, change))
