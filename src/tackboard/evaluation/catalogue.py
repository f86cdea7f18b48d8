"""Judges a retrieval model: ranks the whole catalogue for each judged event, beside all baselines.

This module takes a model, the histories that it is judged on and the events that it was trained on. It returns one
result: the table of rivals (HR@k, NDCG@k, MRR, recall, coverage, novelty, repeat share), the slices, and the share
of judged events on items that training never saw. The settings of the result are part of its name, so results with
different settings do not overwrite each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.batch import HashConfig
from tackboard.core import keyed_random
from tackboard.data.config import PartOfUsers
from tackboard.data.sequences import Sequences
from tackboard.data.time_split import shown_instant
from tackboard.evaluation.baselines import DRAW_STREAM, TrainingEvents, all_baselines, validation_events
from tackboard.evaluation.judged_events import JudgedEvents, first_seen, judged_events
from tackboard.evaluation.live_counts import LiveCounts
from tackboard.evaluation.live_head import LiveFeatures, fit_live_head
from tackboard.evaluation.ranking import (
    SIMPLE,
    EvaluationConfig,
    Ranked,
    evaluate_rankings,
    gap_closed,
    held_out_event,
    rank_model,
)
from tackboard.evaluation.slices import SeenItems, sliced_rows, slicings_of
from tackboard.evaluation.truth import oracle
from tackboard.metrics.top_lists import coverage, novelty, repeat_share

TOP = 10
"""Recall, coverage, novelty and repeat share look at this number of top items; slices too, if it is a cutoff."""


def judge_catalogue(
    model: Any,
    sequences: Sequences,
    hashing: HashConfig,
    max_history: int,
    settings: EvaluationConfig,
    *,
    trained: Sequences | None = None,
    part: PartOfUsers | None = None,
    max_users: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Returns the result. `trained` holds the histories of the dataset of training (default: `sequences`).

    `part` says which of the users training read. At most `max_users` users are judged. The judged events are ranked
    in the order of their times.
    """
    split = sequences.source.time_split
    training = TrainingEvents.of(trained or sequences, part, sequences.catalogue)
    judged = _chosen(judged_events(sequences, settings.judged), sequences, max_users)
    appears_ms = first_seen(sequences)
    known = np.bincount(training.items, minlength=training.num_items) > 0
    by_time = None if split is None else appears_ms
    live = LiveCounts.of(sequences)
    found = all_baselines(sequences, training, live, filter_seen=settings.filter_seen, appears_ms=by_time)
    rivals = dict(found.rivals)
    rivals["model"] = rank_model(model, sequences, hashing, max_history, known=None if split is None else known)
    head = None
    if split is not None and split.has_slice:
        features = LiveFeatures(sequences, live, appears_ms, known)
        head = fit_live_head(features, rivals["model"], validation_events(sequences, training)[0])
        if head is not None:
            rivals["model, live"] = head.scores(features, rivals["model"])
    if (truth := oracle(sequences)) is not None:
        rivals["oracle"] = truth
    table, ranked = evaluate_rankings(
        sequences,
        rivals,
        judged,
        cutoffs=settings.cutoffs,
        filter_seen=settings.filter_seen,
        chunk_users=settings.chunk_users,
        appears_ms=by_time,
        top=TOP,
        quiet=quiet,
    )
    seen = SeenItems(sequences)
    _add_figures(table["rows"], ranked, sequences, judged, training, by_time, seen)
    cutoff = TOP if TOP in settings.cutoffs else settings.cutoffs[0]
    slices = sliced_rows(slicings_of(sequences, judged, known, appears_ms, seen), ranked, cutoff)
    never_seen = ~known[judged.items(sequences)]
    return {
        "protocol": f"{_protocol(sequences, settings)}, full catalogue, ties against the target",
        "name": result_name(sequences, settings, max_users),
        "split": "last" if split is None else "time",
        "judged": "last" if split is None else settings.judged,
        "held_out": sequences.source.held_out,
        **({} if split is None else {"cut_ms": split.cut_ms, "until_ms": split.until_ms}),
        **table,
        "windows_h": found.window_h,
        "live_head": None if head is None else dataclasses.asdict(head),
        "never_seen_share": round(float(never_seen.mean()), 6),
        "slices": slices,
        # Leave-last-out counts only the baselines of earlier versions, so published shares of the gap stay the same.
        "gap_closed": gap_closed(table["rows"], names=SIMPLE if split is None else found.rivals),
    }


def _chosen(judged: JudgedEvents, sequences: Sequences, max_users: int | None) -> JudgedEvents:
    """Returns the events of at most `max_users` users, in the order of time.

    With a split by time, the users are drawn by their ids, because the first users may differ from the others.
    """
    users = np.unique(judged.users)
    if max_users is not None and len(users) > max_users:
        if sequences.source.time_split is not None:
            draw = keyed_random.bits(0, DRAW_STREAM, sequences.user_ids[users])
            users = users[np.argsort(draw, kind="stable")]
        judged = judged.take(np.flatnonzero(np.isin(judged.users, users[:max_users])))
    return judged.take(np.argsort(sequences.events.times[judged.events], kind="stable"))


def result_name(sequences: Sequences, settings: EvaluationConfig, max_users: int | None) -> str:
    """Returns the part of a result's file name that says how the model was judged."""
    source = sequences.source
    words = ["last" if source.held_out == 1 else f"last-but-{source.held_out - 1}"]
    if source.time_split is not None:
        words = [f"{settings.judged}-from-{shown_instant(source.time_split.cut_ms).replace(':', '')}"]
    words += ["new-items" if settings.filter_seen else "all-items", "at-" + "-".join(map(str, settings.cutoffs))]
    return "_".join([*words, *([] if max_users is None else [f"{max_users}-users"]), f"of-{source.snapshot[:40]}"])


def _protocol(sequences: Sequences, settings: EvaluationConfig) -> str:
    split = sequences.source.time_split
    if split is None:
        return held_out_event(sequences.source.held_out)
    which = "all positive events" if settings.judged == "all" else f"each user's {settings.judged} positive event"
    return f"{which} from {shown_instant(split.cut_ms)} on, training before {shown_instant(split.until_ms)}"


def _add_figures(
    rows: Sequence[dict[str, Any]],
    ranked: Mapping[str, Ranked],
    sequences: Sequences,
    judged: JudgedEvents,
    training: TrainingEvents,
    appears_ms: NDArray[np.int64] | None,
    seen: SeenItems,
) -> None:
    """Adds MRR, recall and the figures of the top items to each rival's row."""
    counts = training.counts()
    num_items = len(sequences.catalogue)
    if appears_ms is not None and len(judged):
        num_items = int((appears_ms < sequences.events.times[judged.events].max()).sum())
    users = np.unique(judged.users, return_inverse=True)[1]
    per_user = np.bincount(users)
    for row in rows:
        found = ranked[row["name"]]
        hits = np.bincount(users, weights=found.ranks < TOP) / per_user
        row |= {
            "mrr": round(float((1.0 / (found.ranks + 1)).mean()), 6),
            f"recall@{TOP}": round(float(hits.mean()), 6),
            f"coverage@{TOP}": round(coverage(found.top, num_items), 6),
            f"novelty@{TOP}": round(novelty(found.top, counts), 3),
            f"repeats@{TOP}": round(repeat_share(found.top, seen.before(judged, found.top)), 6),
        }
