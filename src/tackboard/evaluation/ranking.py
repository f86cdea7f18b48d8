"""Evaluates rankings of the full catalogue by leave-last-out, and compares a model and its rivals in one table.

The target is each user's last positive event, or for validation an earlier positive event; the result says which event.
All events before the target are the history. Every item of the catalogue is ranked, and ties count against the
target. A setting decides whether items of the history are removed from the ranking; the result includes this
setting. Users are ranked in chunks, so memory does not grow with the number of users.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig, SequenceBatch, item_rows
from tackboard.core.config import check
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.progress import Progress
from tackboard.data.loader import stored_batch
from tackboard.data.sequences import Sequences
from tackboard.evaluation.baselines import ItemToItem, Popularity
from tackboard.features.column import ranges
from tackboard.metrics.ranks import RankingMetrics, ranks_of_targets

ScoreUsers = Callable[[NDArray[np.int64]], "NDArray[np.floating] | torch.Tensor"]
"""A function that takes positions of users [U] and returns scores over the catalogue [U, items], on any device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The settings of the evaluation of a run."""

    cutoffs: tuple[int, ...] = (1, 5, 10, 50)
    """The values of k in HR@k and NDCG@k."""
    filter_seen: bool = False
    """Whether items of the history are removed from the ranking. Use False if users often return to the same items."""
    chunk_users: int = 256
    """Number of users ranked at once, which limits memory."""
    item_time: str = ""
    """Time attribute of the items, such as birth_ms. HIT@3 of a ranker is then also shown by the age of the items. The
    age is the time of the request minus this time. If empty, HIT@3 is not shown by age."""

    def __post_init__(self) -> None:
        check(bool(self.cutoffs) and min(self.cutoffs) >= 1, "evaluation.cutoffs", self.cutoffs, "positive numbers")
        check(self.chunk_users >= 1, "evaluation.chunk_users", self.chunk_users, "1 or more")


def rank_model(
    model: Any, sequences: Sequences, hashing: HashConfig, max_history: int, *, skip_newest: int = 0
) -> ScoreUsers:
    """Returns a function that scores the catalogue for users, from their events before the held-out event. The newest
    `skip_newest` of these events are left out."""
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        items = model.encode_items(item_rows(sequences.catalogue, hashing).to(device))

    def score(users: NDArray[np.int64]) -> torch.Tensor:
        with torch.no_grad():
            batch = history_batch(sequences, users, hashing, max_history, skip_newest=skip_newest).to(device)
            scores: torch.Tensor = (model.encode_users(batch) @ items.T).float()
            return scores

    return score


def history_batch(
    sequences: Sequences,
    users: NDArray[np.int64],
    hashing: HashConfig,
    max_history: int,
    *,
    skip_newest: int = 0,
) -> SequenceBatch:
    """Returns the newest `max_history` events before each user's held-out event.

    The newest `skip_newest` events before the held-out event are left out and not counted. Features of the request
    are computed at the held-out event, so they do not fit a history with skipped events.
    """
    if skip_newest and sequences.request:
        raise ConfigError(
            f"the newest {skip_newest} events are skipped, but the model reads {', '.join(sequences.request)}",
            allowed="features of the request belong to the whole history",
        )
    begins = sequences.offsets[:-1][users]
    ends = np.maximum(begins, sequences.train_ends[users] - skip_newest)
    starts = np.maximum(begins, ends - max_history)
    return stored_batch(sequences, users, starts, ends - starts, hashing)


def evaluate_rankings(
    sequences: Sequences,
    rivals: dict[str, ScoreUsers],
    *,
    cutoffs: tuple[int, ...],
    filter_seen: bool,
    chunk_users: int = 256,
    max_users: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Returns HR@k and NDCG@k of each of `rivals` over the first `max_users` of `evaluated_users`."""
    users = evaluated_users(sequences)[:max_users]
    rows, seconds = [], {}
    for name, score in rivals.items():
        started = time.perf_counter()
        with Progress(f"ranking by {name}", total=len(users), unit="users", quiet=quiet) as progress:
            ranks = target_ranks(
                score, sequences, users, filter_seen=filter_seen, chunk_users=chunk_users, advance=progress.advance
            )
        metrics = RankingMetrics(cutoffs)
        metrics.update(ranks)
        seconds[name] = time.perf_counter() - started
        rows.append({"name": name} | {key: round(value, 6) for key, value in metrics.result().items()})
    return {
        "protocol": f"{held_out_event(sequences.source.held_out)}, full catalogue, ties against the target",
        "held_out": sequences.source.held_out,
        "filter_seen": filter_seen,
        "num_users": len(users),
        "num_items": len(sequences.catalogue),
        "rows": rows,
        "users_per_s": round(len(users) / max(1e-9, seconds.get("model", sum(seconds.values()))), 1),
    }


def held_out_event(held_out: int) -> str:
    """Says in words which event is ranked. `held_out` is 1 for a user's last positive event, 2 for the one before."""
    if held_out == 1:
        return "leave-last-out"
    return f"validation: the last positive event but {({2: 'one', 3: 'two'}).get(held_out, held_out - 1)}"


def evaluated_users(sequences: Sequences) -> NDArray[np.int64]:
    """Returns the positions of users with a held-out event and a history. Raises DataError if there are none.

    A user with fewer than `held_out` positive events is left out, because the target of validation could then be the
    same event as the target of the test.
    """
    targets = sequences.targets
    counts = np.append(0, np.cumsum(sequences.is_positive))
    from_target = counts[sequences.offsets[1:]] - counts[targets]
    has_target = (targets >= 0) & (from_target >= sequences.source.held_out)
    users = np.flatnonzero(has_target & (targets > sequences.offsets[:-1]))
    if len(users) == 0:
        raise DataError(
            f"{sequences.source.path} has no user to evaluate",
            allowed="a user needs as many positive events as data.held_out, and an event before the held-out event",
        )
    return users


def target_ranks(
    score: ScoreUsers,
    sequences: Sequences,
    users: NDArray[np.int64],
    *,
    filter_seen: bool,
    chunk_users: int = 256,
    skip_newest: int = 0,
    advance: Callable[[int], None] = lambda _count: None,
) -> NDArray[np.int64]:
    """Returns the 0-based rank of each user's held-out item in the whole catalogue [U].

    If `score` skips the newest events of a history, `skip_newest` must have the same value here. Otherwise the removal
    of seen items would reveal the skipped events.
    """
    targets = np.searchsorted(sequences.catalogue, sequences.item_ids[sequences.targets[users]])
    ranks = np.empty(len(users), dtype=np.int64)
    for begin in range(0, len(users), chunk_users):
        chunk = slice(begin, begin + chunk_users)
        # Ranks are computed on the device of the scores, because copying a gigabyte of scores would be slow.
        scores = torch.as_tensor(score(users[chunk]))
        if filter_seen:
            _remove_seen(scores, sequences, users[chunk], targets[chunk], skip_newest)
        ranks[chunk] = ranks_of_targets(scores, targets[chunk])
        advance(len(users[chunk]))
    return ranks


def baselines(sequences: Sequences) -> dict[str, ScoreUsers]:
    """Returns the baselines with which every model is compared."""
    return {"popularity": Popularity(sequences).score, "item-to-item": ItemToItem(sequences).score}


def gap_closed(rows: list[dict[str, Any]], metric: str = "hr@10") -> float | None:
    """Returns the share of the gap between the better baseline and the oracle that the model closes. Returns None
    if there is no gap, or if `rows` lacks the model, the oracle, both baselines or the metric."""
    by_name = {row["name"]: row for row in rows}
    if not {"model", "oracle"} <= set(by_name) or metric not in by_name["model"]:
        return None
    baselines = [by_name[name][metric] for name in ("popularity", "item-to-item") if name in by_name]
    if not baselines:
        return None
    floor, ceiling = max(baselines), by_name["oracle"][metric]
    return round((by_name["model"][metric] - floor) / (ceiling - floor), 4) if ceiling > floor else None


def better_baseline(rows: list[dict[str, Any]], metric: str = "hr@10") -> str | None:
    """Returns the name of the best baseline if it ranks better than the model, else None."""
    figures = {row["name"]: row[metric] for row in rows if metric in row}
    ahead = {name: figure for name, figure in figures.items() if name not in ("model", "oracle")}
    best = max(ahead, key=lambda name: ahead[name], default=None)
    return best if best and "model" in figures and ahead[best] > figures["model"] else None


def _remove_seen(
    scores: torch.Tensor,
    sequences: Sequences,
    users: NDArray[np.int64],
    targets: NDArray[np.int64],
    skip_newest: int = 0,
) -> None:
    """Ranks items of the history last, except the target itself, which keeps its score even if it was seen before."""
    lengths = np.maximum(0, sequences.train_ends[users] - skip_newest - sequences.offsets[:-1][users])
    history = sequences.item_ids[ranges(sequences.offsets[:-1][users], lengths)]
    rows, seen = np.repeat(np.arange(len(users)), lengths), np.searchsorted(sequences.catalogue, history)
    others = seen != targets[rows]
    places = (torch.from_numpy(rows[others]).to(scores.device), torch.from_numpy(seen[others]).to(scores.device))
    scores.index_put_(places, torch.full((), float("-inf"), dtype=scores.dtype, device=scores.device))
