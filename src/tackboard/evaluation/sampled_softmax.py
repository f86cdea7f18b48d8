"""Evaluates a model on held-out users of a stream, and compares it with popularity and with an exact oracle.

The protocol: the history of a test user is all events but the last, and the last event's item is the target. The
choices are a sample of items, which the law of the stream (`StreamLaw`) draws by popularity. All users and all runs
have the same sample. Users whose target is not in the sample are left out. For all other users, the probability of a
target is the true probability of the item given the history, scaled so that the probabilities of the sample sum to 1.
So no predictor has a smaller expected log-loss than the oracle. Each rival is a softmax over the sample:

    popularity   each item's exact share of all events
    model        its scores, such as cosines divided by the learned temperature
    oracle       the exact probability given the user's events (`StreamLaw.next_topics`)

The share of the gap that a model closes is (popularity − model) / (popularity − oracle), in mean log-loss. HR@k and
NDCG@k rank the same choices; ties count against the target. Popularity has many ties, because all topics are equally
popular.

Shapes: U users, S items of the sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig
from tackboard.batch.builder import make_request
from tackboard.core.errors import DataError
from tackboard.core.progress import Progress
from tackboard.data.sequences import Sequences
from tackboard.data.stream import StreamSource
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.ranking import ScoreEvents, rank_model
from tackboard.features.column import offsets_of, ranges
from tackboard.features.entity_tables import find_ids
from tackboard.metrics.ranks import RankingMetrics, ranks_of_targets

LOG_LOSS = "log_loss"


def evaluate_stream(
    model: Any,
    source: StreamSource,
    hashing: HashConfig,
    max_history: int,
    *,
    num_items: int,
    cutoffs: tuple[int, ...],
    chunk_users: int = 256,
    max_users: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Returns log-loss, HR@k and NDCG@k of the three rivals over a sample of `num_items` items.

    At most `max_users` test users are read. Users whose target is not in the sample are then left out.
    """
    source = source.over(source.law.sample_items(num_items))
    sequences = source.test_sequences(max_users)
    targets_U = find_ids(source.catalogue, sequences.item_ids[sequences.targets])
    users = np.flatnonzero(targets_U >= 0)
    judged = JudgedEvents(users, sequences.targets[users])
    if len(users) == 0:
        raise DataError(
            f"no target of {len(sequences.user_ids):,} test users is in the sample of {len(source.catalogue):,} items",
            fix="evaluate more users or more items: data.law.num_test_users, data.evaluated_items",
        )
    rows, seconds = [], 0.0
    for name, score in stream_rivals(model, sequences, hashing, max_history).items():
        started, metrics, losses = time.perf_counter(), RankingMetrics(cutoffs), []
        with Progress(f"scoring by {name}", total=len(users), unit="users", quiet=quiet) as progress:
            for begin in range(0, len(users), chunk_users):
                chunk = judged.take(slice(begin, begin + chunk_users))
                scores_US = torch.as_tensor(score(chunk))
                losses.append(log_losses(scores_US, targets_U[chunk.users]))
                metrics.update(ranks_of_targets(scores_US, targets_U[chunk.users]))
                progress.advance(len(chunk))
        found = {LOG_LOSS: float(np.concatenate(losses).mean())} | metrics.result()
        rows.append({"name": name} | {key: round(value, 6) for key, value in found.items()})
        seconds = time.perf_counter() - started if name == "model" else seconds
    return {
        "protocol": "last event of held-out users, softmax over a fixed sample that holds the target",
        "filter_seen": False,
        "num_users": len(users),
        "num_items": len(source.catalogue),
        "rows": rows,
        "users_per_s": round(len(users) / max(1e-9, seconds), 1),
        "gap_closed": loss_gap_closed(rows),
    }


def stream_rivals(model: Any, sequences: Sequences, hashing: HashConfig, max_history: int) -> dict[str, ScoreEvents]:
    """Returns each rival by name, as a function that takes judged events and returns scores over the catalogue.

    The softmax of these scores gives the rival's probabilities.
    """
    assert isinstance(sequences.source, StreamSource)
    law, catalogue = sequences.source.law, sequences.catalogue
    log_shares_S = law.log_share(catalogue)
    log_ranks_S, topics_S = law.log_rank_share(catalogue), law.topics_of_items(catalogue)
    products = rank_model(model, sequences, hashing, max_history)
    first = JudgedEvents(np.zeros(1, dtype=np.int64), sequences.train_ends[:1])
    scale = _scale_of_scores(model, sequences, torch.as_tensor(products(first))[0], hashing, max_history)

    def popularity(judged: JudgedEvents) -> NDArray[np.float32]:
        return np.broadcast_to(log_shares_S, (len(judged), len(log_shares_S))).copy()

    def oracle(judged: JudgedEvents) -> NDArray[np.float64]:
        lengths = judged.lengths(sequences)
        events = ranges(sequences.offsets[:-1][judged.users], lengths)
        next_UT = law.next_topics(sequences.item_ids[events], offsets_of(lengths))
        scores_US: NDArray[np.float64] = np.log(next_UT).take(topics_S, axis=1)
        scores_US += log_ranks_S
        return scores_US

    def of_model(judged: JudgedEvents) -> torch.Tensor:
        return torch.as_tensor(products(judged)) * scale

    rivals: dict[str, Callable[[JudgedEvents], Any]] = {
        "popularity": popularity,
        "model": of_model,
        "oracle": oracle,
    }
    return rivals


def log_losses(scores_US: torch.Tensor, targets_U: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns −log of the softmax of each row of scores at its target [U]."""
    places = torch.from_numpy(targets_U).to(scores_US.device)[:, None]
    own_U = scores_US.gather(1, places)[:, 0].double()
    losses: NDArray[np.float64] = (torch.logsumexp(scores_US.double(), dim=1) - own_U).cpu().numpy()
    return losses


def loss_gap_closed(rows: list[dict[str, Any]]) -> float | None:
    """Returns the share of the gap in log-loss between popularity and the oracle that the model closes.

    Returns None if there is no gap.
    """
    losses = {row["name"]: row[LOG_LOSS] for row in rows}
    gap = losses["popularity"] - losses["oracle"]
    return round((losses["popularity"] - losses["model"]) / gap, 4) if gap > 0 else None


@torch.no_grad()
def _scale_of_scores(
    model: Any, sequences: Sequences, products_S: torch.Tensor, hashing: HashConfig, max_history: int
) -> float:
    """Returns the factor that turns inner products of a model's vectors into its scores, such as 1 / temperature.

    `products_S` holds the first user's inner products with the catalogue. The factor is measured on two items, because
    only the model's `scores` applies it, and each model may have its own factor.
    """
    ends = torch.stack([products_S.argmin(), products_S.argmax()]).cpu()
    distance = float(products_S[ends[1]] - products_S[ends[0]])
    length = min(max_history, int(sequences.train_ends[0] - sequences.offsets[0]))
    history = sequences.histories(sequences.train_ends[:1] - length, np.array([length]))
    request = make_request(history=history, candidates=sequences.catalogue[ends.numpy()], hashing=hashing)
    low, high = model.scores(request.to(products_S.device)).tolist()
    return (high - low) / distance if distance else 1.0
