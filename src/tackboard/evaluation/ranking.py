"""Evaluates rankings of the full catalogue, and compares a model and its rivals in one table.

The judged events are those that the data's split holds out (judged_events.py). All events of a user before a judged
event are its history. Every item of the catalogue is ranked, and ties count against the target. A setting decides
whether items of the history are removed from the ranking; the result includes this setting. Judged events are ranked in
chunks, so memory does not grow with their number.

With a split by time, an item competes only after its first event. So no rival can rank an item whose first event is the
judged one. A model ranks items that training never saw after all others, because it learned nothing about them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, item_rows
from tackboard.core.config import check
from tackboard.core.errors import ConfigError
from tackboard.core.progress import Progress
from tackboard.data.loader import stored_batch
from tackboard.data.sequences import Sequences
from tackboard.evaluation.judged_events import JUDGED, Judged, JudgedEvents
from tackboard.features.column import ranges
from tackboard.metrics.ranks import RankingMetrics, ranks_of_targets

SIMPLE = ("popularity", "item-to-item")
"""The baselines that count training events of all times."""
MOST_CUTOFFS = 12
"""Most cutoffs of an evaluation: they are part of a result's file name, which has at most 255 letters."""
ScoreEvents = Callable[[JudgedEvents], "NDArray[np.floating] | torch.Tensor"]
"""A function that takes J judged events and returns scores over the catalogue [J, items], on any device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The settings of the evaluation of a run."""

    cutoffs: tuple[int, ...] = (1, 5, 10, 50)
    """The values of k in HR@k and NDCG@k."""
    filter_seen: bool = False
    """Whether items of the history are removed from the ranking. Use False if users often return to the same items."""
    chunk_users: int = 256
    """Number of judged events that are ranked at once. It limits memory."""
    judged: Judged = "first"
    """Events that are judged if data.split is time: each user's `first` or `last` positive event from the cut on, or
    `all` positive events from the cut on."""
    item_time: str = ""
    """Time attribute of the items, such as birth_ms. HIT@3 of a ranker is then also shown by the age of the items. The
    age is the time of the request minus this time. If empty, HIT@3 is not shown by age."""

    def __post_init__(self) -> None:
        is_list = 1 <= len(self.cutoffs) <= MOST_CUTOFFS and min(self.cutoffs) >= 1
        check(is_list, "evaluation.cutoffs", self.cutoffs, f"1 to {MOST_CUTOFFS} positive numbers")
        check(self.chunk_users >= 1, "evaluation.chunk_users", self.chunk_users, "1 or more")
        check(self.judged in JUDGED, "evaluation.judged", self.judged, ", ".join(JUDGED))


def rank_model(
    model: Any,
    sequences: Sequences,
    hashing: HashConfig,
    max_history: int,
    *,
    skip_newest: int = 0,
    known: NDArray[np.bool_] | None = None,
) -> ScoreEvents:
    """Returns a function that scores the catalogue for judged events, from the user's events before them.

    The newest `skip_newest` of these events are left out. If `known` [V] is given, all other items get the score −inf.
    """
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        items = model.encode_items(item_rows(sequences.catalogue, hashing).to(device))
    unknown = None if known is None else torch.from_numpy(~known).to(device)

    def score(judged: JudgedEvents) -> torch.Tensor:
        with torch.no_grad():
            batch = history_batch(sequences, judged, hashing, max_history, skip_newest=skip_newest).to(device)
            scores: torch.Tensor = (model.encode_users(batch) @ items.T).float()
            return scores if unknown is None else scores.masked_fill_(unknown, float("-inf"))

    return score


def history_batch(
    sequences: Sequences,
    judged: JudgedEvents,
    hashing: HashConfig,
    max_history: int,
    *,
    skip_newest: int = 0,
) -> SequenceBatch:
    """Returns the newest `max_history` events of the user before each judged event.

    The newest `skip_newest` of these events are left out and not counted. Features of the request are computed at the
    judged event, so they do not fit a history with skipped events.
    """
    if skip_newest and sequences.request:
        raise ConfigError(
            f"the newest {skip_newest} events are skipped, but the model reads {', '.join(sequences.request)}",
            allowed="features of the request belong to the whole history",
        )
    begins = sequences.offsets[:-1][judged.users]
    ends = np.maximum(begins, judged.events - skip_newest)
    starts = np.maximum(begins, ends - max_history)
    # A user without a held-out event has no event after the history. The request then has the time of the last event.
    requests = np.minimum(judged.events, sequences.offsets[1:][judged.users] - 1)
    return stored_batch(sequences, judged.users, starts, ends - starts, hashing, requests=requests)


@dataclasses.dataclass(frozen=True)
class Ranked:
    """How one rival ranked J judged events: the 0-based rank of each target, and the first items of each ranking."""

    ranks: NDArray[np.int64]
    top: NDArray[np.int64]
    """Positions in the catalogue of the first items, best first [J, k]; -1 if fewer items compete."""


def evaluate_rankings(
    sequences: Sequences,
    rivals: dict[str, ScoreEvents],
    judged: JudgedEvents,
    *,
    cutoffs: tuple[int, ...],
    filter_seen: bool,
    chunk_users: int = 256,
    appears_ms: NDArray[np.int64] | None = None,
    top: int = 0,
    quiet: bool = False,
) -> tuple[dict[str, Any], dict[str, Ranked]]:
    """Ranks the judged events by each of `rivals`. Returns a table of HR@k and NDCG@k, and the `Ranked` of each rival.

    `appears_ms` and `top` are those of `rank_events`.
    """
    rows, seconds, ranked = [], {}, {}
    for name, score in rivals.items():
        started = time.perf_counter()
        with Progress(f"ranking by {name}", total=len(judged), unit="events", quiet=quiet) as progress:
            ranked[name] = rank_events(
                score,
                sequences,
                judged,
                filter_seen=filter_seen,
                chunk_users=chunk_users,
                appears_ms=appears_ms,
                top=top,
                advance=progress.advance,
            )
        metrics = RankingMetrics(cutoffs)
        metrics.update(ranked[name].ranks)
        seconds[name] = time.perf_counter() - started
        rows.append({"name": name} | {key: round(value, 6) for key, value in metrics.result().items()})
    table = {
        "filter_seen": filter_seen,
        "num_users": len(np.unique(judged.users)),
        "num_events": len(judged),
        "num_items": len(sequences.catalogue),
        "rows": rows,
        "users_per_s": round(len(judged) / max(1e-9, seconds.get("model", sum(seconds.values()))), 1),
    }
    return table, ranked


def held_out_event(held_out: int) -> str:
    """Says in words which event is ranked. `held_out` is 1 for a user's last positive event, 2 for the one before."""
    if held_out == 1:
        return "leave-last-out"
    return f"validation: the last positive event but {({2: 'one', 3: 'two'}).get(held_out, held_out - 1)}"


def target_ranks(
    score: ScoreEvents, sequences: Sequences, judged: JudgedEvents, *, filter_seen: bool, **settings: Any
) -> NDArray[np.int64]:
    """Returns the 0-based rank of each judged event's item in the whole catalogue [J]; see `rank_events`."""
    return rank_events(score, sequences, judged, filter_seen=filter_seen, **settings).ranks


def rank_events(
    score: ScoreEvents,
    sequences: Sequences,
    judged: JudgedEvents,
    *,
    filter_seen: bool,
    chunk_users: int = 256,
    skip_newest: int = 0,
    appears_ms: NDArray[np.int64] | None = None,
    top: int = 0,
    advance: Callable[[int], None] = lambda _count: None,
) -> Ranked:
    """Ranks the catalogue for each judged event, and returns the rank of its item and the first `top` items.

    If `score` skips the newest events of a history, `skip_newest` must have the same value here. Otherwise the removal
    of seen items would reveal the skipped events. If `appears_ms` [V] is given, an item competes only for events
    after the item's time.
    """
    targets = judged.items(sequences)
    ranks = np.empty(len(judged), dtype=np.int64)
    best = np.empty((len(judged), min(top, len(sequences.catalogue))), dtype=np.int64)
    appears = None if appears_ms is None else torch.from_numpy(appears_ms)
    for begin in range(0, len(judged), chunk_users):
        chunk = slice(begin, begin + chunk_users)
        events = judged.take(chunk)
        # Ranks are computed on the device of the scores, because copying a gigabyte of scores would be slow.
        scores = torch.as_tensor(score(events))
        if appears is not None:
            times = torch.from_numpy(sequences.events.times[events.events])
            scores.masked_fill_((appears >= times[:, None]).to(scores.device), float("-inf"))
        if filter_seen:
            _remove_seen(scores, sequences, events, targets[chunk], skip_newest)
        ranks[chunk] = ranks_of_targets(scores, targets[chunk])
        if top:
            values, places = scores.topk(best.shape[1], dim=1)
            best[chunk] = places.masked_fill(values == float("-inf"), -1).cpu().numpy()
        advance(len(events))
    return Ranked(ranks, best)


def gap_closed(rows: list[dict[str, Any]], metric: str = "hr@10", *, names: Collection[str] = SIMPLE) -> float | None:
    """Returns the share of the gap between the best of the baselines `names` and the oracle that the model closes.

    Returns None if there is no gap, if `rows` lacks the model, the oracle or the metric, or if it has none of `names`.
    """
    by_name = {row["name"]: row for row in rows}
    if not {"model", "oracle"} <= set(by_name) or metric not in by_name["model"]:
        return None
    baselines = [by_name[name][metric] for name in names if name in by_name]
    if not baselines:
        return None
    floor, ceiling = max(baselines), by_name["oracle"][metric]
    return round((by_name["model"][metric] - floor) / (ceiling - floor), 4) if ceiling > floor else None


def better_baseline(rows: list[dict[str, Any]], metric: str = "hr@10") -> str | None:
    """Returns the name of the best baseline if it ranks better than the model, else None."""
    figures = {row["name"]: row[metric] for row in rows if metric in row}
    ahead = {name: figure for name, figure in figures.items() if name != "oracle" and not name.startswith("model")}
    best = max(ahead, key=lambda name: ahead[name], default=None)
    return best if best and "model" in figures and ahead[best] > figures["model"] else None


def _remove_seen(
    scores: torch.Tensor,
    sequences: Sequences,
    judged: JudgedEvents,
    targets: NDArray[np.int64],
    skip_newest: int = 0,
) -> None:
    """Ranks items of the history last, except the target itself, which keeps its score even if it was seen before."""
    lengths = np.maximum(0, judged.lengths(sequences) - skip_newest)
    history = sequences.item_ids[ranges(sequences.offsets[:-1][judged.users], lengths)]
    rows, seen = np.repeat(np.arange(len(judged)), lengths), np.searchsorted(sequences.catalogue, history)
    others = seen != targets[rows]
    places = (torch.from_numpy(rows[others]).to(scores.device), torch.from_numpy(seen[others]).to(scores.device))
    scores.index_put_(places, torch.full((), float("-inf"), dtype=scores.dtype, device=scores.device))
