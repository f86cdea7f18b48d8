"""Leave-last-out ranking: the table by hand, independent of chunks, equal to what a server would score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tackboard.batch import HashConfig
from tackboard.checkpoint.store import find_checkpoint, load_checkpoint
from tackboard.checkpoint.trained import stored_parameters
from tackboard.core.errors import ConfigError, DataError
from tackboard.core.keyed_random import uniform
from tackboard.core.rundir import RunDirectory
from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.evaluation.baselines import TrainingEvents, simple_baselines
from tackboard.evaluation.judged_events import JudgedEvents, first_seen, held_out_events, judged_events
from tackboard.evaluation.ranking import (
    MOST_CUTOFFS,
    EvaluationConfig,
    better_baseline,
    evaluate_rankings,
    gap_closed,
    held_out_event,
    history_batch,
    rank_events,
    rank_model,
    target_ranks,
)
from tackboard.models.description import restore_config
from tackboard.models.interface import build_model
from tackboard.models.stored_parameters import load_parameters
from tackboard.scoring.request import ScoreRequest
from tackboard.scoring.scorer import Scorer
from tackboard.train.config import RunConfig

pytestmark = pytest.mark.usefixtures("torch_settings")


def evaluate(
    sequences: Sequences, rivals: dict[str, Any], judged: JudgedEvents | None = None, **settings: Any
) -> dict[str, Any]:
    judged = held_out_events(sequences) if judged is None else judged
    options = {"cutoffs": (1, 3), "filter_seen": False, "quiet": True, **settings}
    return evaluate_rankings(sequences, rivals, judged, **options)[0]


def baselines(sequences: Sequences) -> dict[str, Any]:
    return simple_baselines(sequences, TrainingEvents.of(sequences))


def before_targets(sequences: Sequences, users: NDArray[np.int64]) -> JudgedEvents:
    """What follows the training events of some users: the held-out event, or the end of the history."""
    return JudgedEvents(users, sequences.train_ends[users])


def trained_model(run: RunDirectory, sequences: Sequences) -> tuple[Any, Any]:
    checkpoint = load_checkpoint(find_checkpoint(run.path))
    config = restore_config(checkpoint.state["model"])
    model = build_model(config, sequences.source.vocabulary)
    load_parameters(model, stored_parameters(checkpoint), checkpoint.path)
    return model, config


def test_the_table_by_hand(hand_made: Sequences) -> None:
    """Popularity gives A 3, B 1, C 1, D 0; the targets are C, B (tied with each other) and A."""
    result = evaluate(hand_made, baselines(hand_made))
    counts = (result["num_users"], result["num_events"], result["num_items"], result["filter_seen"])
    assert counts == (3, 3, 4, False)
    popularity = result["rows"][0]
    assert popularity["name"] == "popularity"
    assert popularity["hr@1"] == pytest.approx(1 / 3, abs=1e-6)
    assert popularity["hr@3"] == 1.0
    assert popularity["ndcg@3"] == pytest.approx((0.5 + 0.5 + 1) / 3, abs=1e-6)


def test_seen_items_leave_the_ranking_but_a_seen_target_stays(hand_made: Sequences) -> None:
    filtered = evaluate(hand_made, baselines(hand_made), filter_seen=True)
    assert filtered["filter_seen"] is True
    assert filtered["rows"][0]["hr@1"] == 1.0  # A and B are gone for user 1, A and C for user 2

    def favours_a(judged: JudgedEvents) -> NDArray[np.float32]:
        return np.tile(np.array([9, 1, 2, 3], dtype=np.float32), (len(judged), 1))

    repeated = hand_made.item_ids.copy()
    repeated[hand_made.targets[0]] = repeated[0]  # user 1 comes back to A
    again = dataclasses.replace(hand_made, item_ids=repeated)
    first = held_out_events(again).take(slice(0, 1))
    assert evaluate(again, {"model": favours_a}, first, filter_seen=True)["rows"][0]["hr@1"] == 1.0


def test_filtering_never_changes_the_scores_of_the_next_rival(hand_made: Sequences) -> None:
    alone = evaluate(hand_made, {"item-to-item": baselines(hand_made)["item-to-item"]}, filter_seen=True)
    assert evaluate(hand_made, baselines(hand_made), filter_seen=True)["rows"][1] == alone["rows"][0]


def test_a_model_is_ranked_by_the_scores_a_server_would_give(
    tiny_sequences: Sequences, trained_run: RunDirectory, tiny_bundle: Path
) -> None:
    model, config = trained_model(trained_run, tiny_sequences)
    users = np.arange(len(tiny_sequences.user_ids))
    ranked = rank_model(model, tiny_sequences, config.tables, config.max_history)(before_targets(tiny_sequences, users))
    scorer = Scorer.load(tiny_bundle, num_threads=1)
    data = tiny_sequences
    for user in users:
        events = np.arange(max(data.offsets[user], data.train_ends[user] - 8), data.train_ends[user])
        history = {name: column.take(events) for name, column in data.events.columns.items()}
        request = ScoreRequest(history=history, candidate_items=data.catalogue)
        # Products of vectors rank; what a server gives is these over the temperature.
        scale = float(model.log_inverse_temperature.detach().exp())
        assert scorer.score(request) == pytest.approx(scale * ranked[user].numpy(), abs=1e-4)


def test_a_history_is_the_newest_events_before_the_target(hand_made: Sequences) -> None:
    batch = history_batch(hand_made, before_targets(hand_made, np.array([0, 3, 1])), HashConfig(), max_history=2)
    assert batch.lengths().tolist() == [2, 0, 2]
    assert batch.item_ids[batch.items].tolist() == [11, 10, 10, 12]
    assert batch.times_ms.tolist() == [2, 3, 1, 2]
    assert batch.users.tolist() == [1, 4, 2]
    assert not batch.is_positive.any()


def test_a_history_can_end_earlier(hand_made: Sequences) -> None:
    """To rank from further back; a history that has fewer events is empty then."""
    users = np.flatnonzero(hand_made.targets >= 0)
    judged = before_targets(hand_made, users)
    whole = history_batch(hand_made, judged, HashConfig(), 100)
    for skipped in (1, 2, 50):
        earlier = history_batch(hand_made, judged, HashConfig(), 100, skip_newest=skipped)
        for row in range(len(users)):
            before = whole.item_ids[whole.items[whole.offsets[row] : whole.offsets[row + 1]]].tolist()
            after = earlier.item_ids[earlier.items[earlier.offsets[row] : earlier.offsets[row + 1]]].tolist()
            assert after == before[: max(0, len(before) - skipped)]


def test_a_target_that_a_later_test_asks_for_is_not_validated_on(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    """With held_out=2 a user of one positive event has only the one that the test will ask for."""
    log = [
        (1, 10, "hide", "home", 1),
        (1, 11, "click", "home", 2),  # the only click: tested, never validated on
        (2, 10, "hide", "home", 1),
        (2, 11, "click", "home", 2),
        (2, 12, "click", "home", 3),
        (3, 10, "click", "home", 1),  # the second to last without a history
        (3, 12, "click", "home", 2),
        (4, 10, "hide", "home", 1),
    ]
    dataset = make_dataset(tmp_path, log)
    validation, test = (load_sequences(dataset, ("click",), held_out=number) for number in (2, 1))
    judged = [held_out_events(data) for data in (validation, test)]
    assert validation.user_ids[judged[0].users].tolist() == [2]
    assert test.user_ids[judged[1].users].tolist() == [1, 2, 3]
    asked = [found.events.tolist() for found in judged]
    assert asked == [data.targets[found.users].tolist() for data, found in zip((validation, test), judged, strict=True)]
    assert not set(asked[0]) & set(asked[1])
    assert validation.train_ends.tolist() == [1, 3, 5, 8]  # Nothing of user 1 from the only click on.
    with pytest.raises(DataError, match="no user to evaluate"):
        held_out_events(load_sequences(dataset, ("click",), held_out=3))
    assert [held_out_event(number) for number in (1, 2, 3, 4)] == [
        "leave-last-out",
        "validation: the last positive event but one",
        "validation: the last positive event but two",
        "validation: the last positive event but 3",
    ]


@pytest.mark.parametrize("filter_seen", [True, False])
@pytest.mark.parametrize("chunk_users", [1, 3, 100])
def test_ranks_equal_a_plain_loop(tiny_sequences: Sequences, filter_seen: bool, chunk_users: int) -> None:
    """Few different scores, so that ties are many; arrays and tensors alike, however they lie in memory."""
    data, judged = tiny_sequences, held_out_events(tiny_sequences).take(slice(None, None, -1))
    users = judged.users
    scores = (5 * uniform(3, np.arange(len(data.user_ids))[:, None], np.arange(len(data.catalogue)))).astype(np.float32)
    scores = scores.round()
    expected = []
    for user in users:
        target = int(data.item_ids[data.targets[user]])
        seen = set(data.item_ids[data.offsets[user] : data.train_ends[user]].tolist()) if filter_seen else set()
        own = scores[user][data.catalogue.tolist().index(target)]
        others = [
            score
            for item, score in zip(data.catalogue.tolist(), scores[user], strict=True)
            if item != target and item not in seen
        ]
        expected.append(sum(bool(score >= own) for score in others))
    rivals: list[Any] = [
        lambda chosen: scores[chosen.users],
        lambda chosen: torch.from_numpy(scores[chosen.users]),
        lambda chosen: np.asfortranarray(scores[chosen.users]),  # as NumPy lays out a choice of columns
    ]
    for given in rivals:
        advanced: list[int] = []
        ranks = target_ranks(
            given, data, judged, filter_seen=filter_seen, chunk_users=chunk_users, advance=advanced.append
        )
        assert ranks.tolist() == expected
        assert sum(advanced) == len(users)
        assert max(advanced) <= chunk_users


def test_nobody_to_evaluate_is_an_error(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    sequences = load_sequences(make_dataset(tmp_path, [(1, 5, "click", "home", 1)], name="single"))
    with pytest.raises(DataError, match="no user to evaluate"):
        evaluate(sequences, {})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"popularity": 0.1, "item-to-item": 0.2, "model": 0.3, "oracle": 0.6}, 0.25),
        ({"popularity": 0.3, "item-to-item": 0.2, "model": 0.2, "oracle": 0.5}, -0.5),
        ({"popularity": 0.3, "model": 0.2, "oracle": 0.3}, None),  # nothing to close
        ({"popularity": 0.1, "item-to-item": 0.2, "model": 0.3}, None),
        ({"model": 0.2, "oracle": 0.3}, None),
    ],
)
def test_gap_closed(values: dict[str, float], expected: float | None) -> None:
    assert gap_closed([{"name": name, "hr@10": value} for name, value in values.items()]) == expected


def test_a_baseline_that_wins_is_named() -> None:
    rows = [
        {"name": "popularity", "hr@10": 0.1},
        {"name": "item-to-item", "hr@10": 0.3},
        {"name": "oracle", "hr@10": 1},
    ]
    assert better_baseline([*rows, {"name": "model", "hr@10": 0.2}]) == "item-to-item"
    assert better_baseline([*rows, {"name": "model", "hr@10": 0.3}]) is None
    assert better_baseline(rows) is None
    assert better_baseline([{"name": "model", "hr@5": 0.2}, {"name": "popularity", "hr@5": 0.4}]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"cutoffs": ()},
        {"cutoffs": (5, 0)},
        {"cutoffs": tuple(range(1, MOST_CUTOFFS + 2))},
        {"chunk_users": 0},
        {"judged": "some"},
    ],
)
def test_impossible_evaluation_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.{next(iter(wrong))}"):
        EvaluationConfig(**wrong)  # type: ignore[arg-type]


def test_a_history_that_ends_earlier_is_filtered_where_it_ends(tiny_sequences: Sequences) -> None:
    """A scorer that puts the skipped events first has the target behind them: they are not known to be seen."""
    data = tiny_sequences
    users = np.flatnonzero(data.targets - data.offsets[:-1] >= 4)
    skipped = 2

    def score(chosen: JudgedEvents) -> NDArray[np.float64]:
        scores = np.zeros((len(chosen), len(data.catalogue)))
        for row, user in enumerate(chosen.users):
            nearer = data.item_ids[data.targets[user] - skipped : data.targets[user]]
            scores[row, np.searchsorted(data.catalogue, data.item_ids[data.targets[user]])] = 1.0
            scores[row, np.searchsorted(data.catalogue, nearer)] = 2.0
        return scores

    ranks = target_ranks(score, data, before_targets(data, users), filter_seen=True, skip_newest=skipped)
    for rank, user in zip(ranks, users, strict=True):
        target = int(data.targets[user])
        nearer, older = (
            set(data.item_ids[target - skipped : target]),
            data.item_ids[data.offsets[user] : target - skipped],
        )
        if data.item_ids[target] not in nearer:
            assert rank == len(nearer - set(older))


@pytest.mark.parametrize("filter_seen", [True, False])
def test_items_compete_after_their_first_event(by_time: Callable[..., Sequences], filter_seen: bool) -> None:
    """Ranks and first items equal a plain loop; places that no item can take are -1."""
    data = by_time(1)
    judged, appears_ms = judged_events(data, "all"), first_seen(data)
    scores = (6 * uniform(3, np.arange(len(judged))[:, None], np.arange(len(data.catalogue)))).astype(np.float32)
    table = dict(zip(judged.events.tolist(), scores, strict=True))

    def score(chosen: JudgedEvents) -> NDArray[np.float32]:
        return np.stack([table[event] for event in chosen.events.tolist()])

    found = rank_events(
        score, data, judged, filter_seen=filter_seen, chunk_users=7, appears_ms=appears_ms, top=len(data.catalogue)
    )
    num_first = 0
    for row, (user, event) in enumerate(zip(judged.users, judged.events, strict=True)):
        seen = set(data.item_ids[data.offsets[user] : event].tolist()) if filter_seen else set()
        target = int(data.item_ids[event])
        rivals = {
            place: scores[row, place]
            for place, item in enumerate(data.catalogue.tolist())
            if appears_ms[place] < data.events.times[event] and (item == target or item not in seen)
        }
        own = rivals.pop(data.catalogue.tolist().index(target), None)
        if own is None:
            num_first += 1  # Nobody can rank the item of its own first event.
            assert found.ranks[row] == len(data.catalogue) - 1
            assert judged.items(data)[row] not in found.top[row]
            continue
        assert found.ranks[row] == sum(bool(value >= own) for value in rivals.values())
        num_rivals = 1 + len(rivals)
        shown = scores[row, found.top[row, :num_rivals]]
        assert (np.diff(shown) <= 0).all() and set(found.top[row, :num_rivals]) == {*rivals, judged.items(data)[row]}
        assert (found.top[row, num_rivals:] == -1).all()
    assert (found.top == -1).any() and num_first


def test_items_that_training_never_saw_rank_behind_all_others(
    by_time: Callable[..., Sequences], tiny_config: Callable[..., RunConfig]
) -> None:
    data, config = by_time(2), tiny_config().model
    judged, known = judged_events(data, "all"), data.source.known.items > 0
    model = build_model(config, data.source.vocabulary)
    score = rank_model(model, data, config.tables, config.max_history, known=known)
    found = rank_events(score, data, judged, filter_seen=False, top=len(data.catalogue))
    is_known = known[judged.items(data)]
    assert 0 < is_known.sum() < len(judged) and 0 < known.sum() < len(known)
    assert (found.ranks[~is_known] == len(data.catalogue) - 1).all()
    assert (found.ranks[is_known] < known.sum()).all()
    assert set(found.top.ravel()) == {*np.flatnonzero(known), -1}
    everything = rank_model(model, data, config.tables, config.max_history)
    same = rank_events(everything, data, judged, filter_seen=False).ranks
    assert (found.ranks[is_known] <= same[is_known]).all() and (same[~is_known] < len(data.catalogue) - 1).any()
