"""Keeps what a model has computed from users' histories, so that a user's next request need not compute it again.

In early fusion, candidates read keys and values of the history's tokens. A token depends on its event and on earlier
events of the same window, never on candidates or later events. But the token may know the time until the next event,
or until the request. So if two histories of a user begin with the same events, the keys and values of these events are
the same, except those of the last of these events. Only the rest is computed:

    kept        ▷ a b c          the history of an earlier request was a b c d
    request     ▷ a b c d e      d and e are computed; d again, because the token of d may have depended on the time of
                                 the earlier request

A kept history is compared with the history of a request event by event, in every column that the model reads. So late
events, corrected events and moved windows never give wrong scores, and neither do two users with the same id. The cache
belongs to one scorer, so another version of a model never reads it. Nothing is written to disk.

Like the scorer, the cache serves one call at a time; `counts` and `num_bytes` may be read from other threads. This
module imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tackboard.core.errors import UsageError
from tackboard.features.column import Column

if TYPE_CHECKING:  # Only the types are needed here, and importing them imports torch.
    from tackboard.batch import SequenceBatch
    from tackboard.models.decoder import KeptTokens
    from tackboard.scoring.scorer import Scorer

USED_WHOLE = ("extended", "unchanged")
OUTCOMES = (*USED_WHOLE, "late", "moved", "not_kept", "without_user", "without_history")
"""What happened to a request, in this order: newer events extended the kept context; the kept context had all events;
an event arrived late or was corrected, so only the tokens before it were used; the window begins with another event;
nothing was kept for the user; the request names no user; the user has no events."""
ENTRY_BYTES = 1024
"""Memory of an entry besides its arrays, roughly."""

Events = dict[str, NDArray[np.generic]]


class KeptContext(NamedTuple):
    """The tokens of a user's history, and the columns of the events from which they were computed."""

    events: Events
    tokens: KeptTokens
    num_bytes: int


class ContextCache:
    """Holds the contexts of the users who asked last, in at most `max_bytes` of memory, and uses them to score."""

    def __init__(self, scorer: Scorer, max_bytes: int) -> None:
        """Raises UsageError if the scorer's model has no contexts to keep."""
        if not getattr(scorer.model, "can_keep_contexts", False):
            raise UsageError(
                f"the model of bundle {scorer.signature.name} has no contexts to keep",
                allowed="allowed: a ranker with model.fusion.kind=early and model.fusion.dcat=true",
                fix="leave out --context-cache-mib",
            )
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._scorer = scorer
        self._kept: OrderedDict[int, KeptContext] = OrderedDict()
        self._counts = dict.fromkeys(OUTCOMES, 0)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def counts(self) -> dict[str, int]:
        """The number of requests by outcome."""
        return dict(self._counts)

    def clear(self) -> None:
        """Forgets all contexts and counts."""
        self._kept.clear()
        self.num_bytes = 0
        self._counts = dict.fromkeys(OUTCOMES, 0)

    def score_features(
        self, features: Mapping[str, Column], candidate_items: NDArray[np.int64], user_id: int | None
    ) -> NDArray[np.float32]:
        """Returns what `Scorer.score_features` returns, within rounding."""
        batch = self._scorer.batch_of(features, candidate_items)
        if user_id is None or not batch.histories.num_events:
            self._counts["without_user" if user_id is None else "without_history"] += 1
            return self._scorer.score_batch(batch)
        events = _events(batch.histories)
        tokens, outcome = self._find(user_id, events)
        scores, context = self._scorer.score_after(batch, tokens)
        self._counts[outcome] += 1
        if outcome != "unchanged":
            self._keep(user_id, events, context)
        return scores

    def _find(self, user_id: int, events: Events) -> tuple[KeptTokens | None, str]:
        """Returns the kept tokens that a history can use, and the outcome."""
        kept = self._kept.get(user_id)
        if kept is None:
            return None, "not_kept"
        self._kept.move_to_end(user_id)
        num_common, num_kept = _num_common(kept.events, events), kept.tokens.num_tokens
        if not num_common:
            return None, "moved"
        if num_common == len(events["item"]):
            outcome = "unchanged"
        else:
            outcome = "extended" if num_common == num_kept else "late"
        # The start token and all common events but the last, whose token may know the time until the next event.
        return kept.tokens.first(num_common), outcome

    def _keep(self, user_id: int, events: Events, tokens: KeptTokens) -> None:
        num_bytes = ENTRY_BYTES + tokens.num_bytes + sum(values.nbytes for values in events.values())
        if (old := self._kept.pop(user_id, None)) is not None:
            self.num_bytes -= old.num_bytes
        if num_bytes > self.max_bytes:
            return
        self._kept[user_id] = KeptContext(events, tokens, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes


def share_extended(counts: Mapping[str, int]) -> float:
    """Returns the share of the requests for which all of a kept context was used; 0 without requests."""
    total = sum(counts.values())
    return sum(counts.get(outcome, 0) for outcome in USED_WHOLE) / total if total else 0.0


def _events(histories: SequenceBatch) -> Events:
    """Returns the columns of a batch's only history, with the ids of its items."""
    columns = {name: values.numpy() for name, values in histories.columns.items()}
    return columns | {"item": histories.item_ids[histories.items].numpy()}


def _num_common(one: Events, other: Events) -> int:
    """Returns how many events are the same at the beginning of two histories."""
    length = min(len(one["item"]), len(other["item"]))
    is_same = np.ones(length, dtype=np.bool_)
    for name, values in one.items():
        is_same &= (values[:length] == other[name][:length]).reshape(length, -1).all(axis=1)
    return length if is_same.all() else int(is_same.argmin())
