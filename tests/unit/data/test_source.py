"""Histories and the leave-last-out split, on a log small enough to check by eye."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core.errors import ConfigError, CorruptFileError, DataError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences, open_sequences
from tackboard.evaluation.judged_events import held_out_events
from tackboard.events.dataset import open_dataset
from tackboard.features.backfill import backfill
from tackboard.features.batch_executor import BatchExecutor, RequestRows
from tackboard.features.column import Column, differing_rows
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Context, Events, Int, Request, String, User, milliseconds, sequence
from tackboard.features.online_executor import OnlineExecutor
from tackboard.features.standard import features_for_model, request_features, standard_features
from tackboard.features.types import INT, STRING, TIME

LOG = [
    # user, item, action, surface, time: written out of order on purpose.
    (7, 12, "hide", "home", 3000),
    (7, 10, "click", "search", 1000),
    (7, 11, "save", "home", 2000),
    (2, 10, "hide", "home", 5000),
    (5, 13, "click", "home", 4000),
    (9, 10, "click", "home", 1000),
    (9, 10, "click", "home", 1000),
]


events, user, request, context = (
    Events(dwell_ms=Int()),
    User(age=Int(), country=String()),
    Request(),
    Context(device=String()),
)


def all_histories(sequences: Sequences) -> list[dict[str, list[Any]]]:
    """The feature `history` of each user's whole log."""
    found: list[dict[str, list[Any]]] = sequences.histories(
        sequences.offsets[:-1], np.diff(sequences.offsets)
    ).to_pylist()
    return found


def reading(own: FeatureSet, max_history: int = 8) -> Callable[[Vocabulary], FeatureSet]:
    """history.item and all features of `own`."""
    return lambda vocabulary: features_for_model(("history.item", *own.reads()), vocabulary, max_history, own)


def test_leave_last_out_by_hand(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    sequences = load_sequences(make_dataset(tmp_path, LOG), ("click", "save"))
    assert sequences.user_ids.tolist() == [2, 5, 7, 9]
    assert sequences.offsets.tolist() == [0, 1, 2, 5, 7]
    assert sequences.item_ids.tolist() == [10, 13, 10, 11, 12, 10, 10]
    assert sequences.source.vocabulary.actions == ("click", "hide", "save")
    assert all_histories(sequences) == [
        {"item": [10], "action": [2], "surface": [1], "time": [5000], "gap": [0]},
        {"item": [13], "action": [1], "surface": [1], "time": [4000], "gap": [0]},
        {
            "item": [10, 11, 12],
            "action": [1, 3, 2],
            "surface": [2, 1, 1],
            "time": [1000, 2000, 3000],
            "gap": [0, 1, 1],
        },
        {"item": [10, 10], "action": [1, 1], "surface": [1, 1], "time": [1000, 1000], "gap": [0, 0]},
    ]
    assert sequences.is_positive.tolist() == [False, True, True, True, False, True, True]
    # User 2 has no positive; user 7's trailing hide is used by neither; users 5 and 9 end on their target.
    assert sequences.targets.tolist() == [-1, 1, 3, 6]
    assert sequences.train_ends.tolist() == [1, 1, 3, 6]
    assert sequences.catalogue.tolist() == [10, 11, 12, 13]
    assert sequences.source.dataset.item_type == "int64"
    assert sequences.source.lineage()["num_events"] == 7


def test_the_event_before_the_last_can_be_held_out(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """To validate: the last positive event and all that follows the target is seen by nobody."""
    dataset = make_dataset(tmp_path, LOG)
    sequences = load_sequences(dataset, ("click", "save"), held_out=2)
    # User 5 has a single positive: it will be tested, so it is not trained on either.
    assert sequences.targets.tolist() == [-1, 1, 2, 5]
    assert sequences.train_ends.tolist() == [1, 1, 2, 5]
    assert held_out_events(load_sequences(dataset, held_out=2)).users.tolist() == [2]


def test_the_time_since_the_event_before_goes_with_the_history_also_where_it_was_stored(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    """A backfill stores what was received strictly before; user 9's second event has the first in its history."""
    dataset = make_dataset(tmp_path, LOG)
    expected = [-1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 0.0]

    def reads(vocabulary: Vocabulary) -> FeatureSet:
        return features_for_model(("history.item", "since_last"), vocabulary, 8)

    assert load_sequences(dataset, features=reads).request["since_last"].values.tolist() == expected
    backfill(open_dataset(dataset), request_features(), quiet=True)
    source = open_sequences(dataset, features=reads)
    assert (source._stored, source._computed) == ([], [])  # neither read nor computed as other features are
    assert source.read().request["since_last"].values.tolist() == expected


def test_where_nothing_is_held_out_everything_is_training(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    sequences = load_sequences(make_dataset(tmp_path, LOG), held_out=0)
    assert sequences.targets.tolist() == [-1] * 4
    assert sequences.train_ends.tolist() == [1, 2, 5, 7]
    assert sequences.is_positive.all()  # no positive actions named: all are
    with pytest.raises(DataError, match="no user to evaluate"):
        held_out_events(sequences)
    with pytest.raises(ConfigError, match="held_out = -1"):
        load_sequences(sequences.source.path, held_out=-1)


def test_a_models_vocabulary_decides_the_indices_but_not_what_is_positive(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    vocabulary = Vocabulary(actions=("buy", "save"), surfaces=("search",))
    sequences = load_sequences(make_dataset(tmp_path, LOG), ("click", "save"), vocabulary=vocabulary)
    assert sequences.source.vocabulary is vocabulary
    histories = all_histories(sequences)
    assert [history["action"] for history in histories] == [[0], [0], [0, 2, 0], [0, 0]]
    assert [history["surface"] for history in histories] == [[0], [0], [1, 0, 0], [0, 0]]
    assert sequences.is_positive.tolist() == [False, True, True, True, False, True, True]
    assert load_sequences(tmp_path / "tiny", vocabulary=vocabulary).is_positive.all()


def test_a_snapshot_can_be_named_and_is_verified(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    dataset = make_dataset(tmp_path, LOG)
    snapshot = (dataset / "latest").resolve()
    assert open_sequences(snapshot).snapshot == open_sequences(dataset).snapshot == snapshot.name
    data = bytearray((snapshot / "events.parquet").read_bytes())
    data[len(data) // 2] ^= 4
    (snapshot / "events.parquet").write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"events\.parquet"):
        load_sequences(dataset)


def test_an_unknown_positive_action_gets_a_suggestion(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="did you mean click"):
        load_sequences(make_dataset(tmp_path, LOG), ("clik",))


def test_request_features_see_only_what_was_received_before(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Every event is a request at its own time; an event that came late is not seen until it came."""
    log = [(1, item, "click", "home", 1000 * item) for item in range(1, 6)] + [(2, 9, "click", "home", 2500)]
    received = [1000, 4500, 3000, 4000, 5000, 2500]  # the second event of user 1 arrives after the fourth
    own = FeatureSet(
        "own",
        n=events.count(),
        seconds=request.time.seconds_since(events.last(events.time)).fill_missing(-1.0),
    )
    sequences = load_sequences(make_dataset(tmp_path, log, received_ms=received), features=reading(own))
    assert sequences.offsets.tolist() == [0, 5, 6]
    assert sequences.item_ids.tolist() == [1, 2, 3, 4, 5, 9]
    # At 1000 nothing, at 2000 the first, at 3000 still the first alone, at 4000 two of three, at 5000 all four.
    assert sequences.request["n"].to_pylist() == [0, 1, 1, 2, 4, 0]
    assert sequences.request["seconds"].to_pylist() == [-1.0, 1.0, 2.0, 1.0, 1.0, -1.0]


def test_request_features_of_an_event_are_those_a_server_computes_at_that_moment(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    log = [(1 + row % 2, row, "click" if row % 3 else "save", "home", 60_000 * row) for row in range(20)]
    own = FeatureSet(
        "own",
        minute=request.time.minute_of_day("Europe/Berlin"),
        clicks=events.where(events.action == "click").within(milliseconds(400_000)).count(),
        decayed=events.decayed_sum(events.dwell_ms.fill_missing(0), half_life=milliseconds(100_000)).log1p(),
        age=user.age.fill_missing(-1),
        is_phone=(context.device == "phone").fill_missing(False),
    )
    dataset = make_dataset(
        tmp_path,
        log,
        fields={
            "dwell_ms": pa.array([None if row == 7 else 100 * row for row in range(20)], pa.int64()),
            "context": pa.array([f'{{"device": "{"phone" if row % 4 else "tv"}"}}' for row in range(20)]),
        },
        user_attributes=pa.table({"user": [1, 1], "age": [30, 31], "valid_from_ms": [0, 600_000]}),
    )
    sequences = load_sequences(dataset, features=reading(own))
    executor = OnlineExecutor(sequences.source.features.plan.trimmed(own.reads()))
    users = np.repeat(sequences.user_ids, np.diff(sequences.offsets))
    starts = np.repeat(sequences.offsets[:-1], np.diff(sequences.offsets))
    for event in range(20):
        moment = int(sequences.events.times[event])
        before = np.arange(starts[event], event)
        row = moment // 60_000
        age = [None] if users[event] == 2 else [30 if moment < 600_000 else 31]
        online = executor.compute(
            history={name: column.take(before) for name, column in sequences.events.columns.items()}
            | {"time": Column.of(TIME, sequences.events.times[before].tolist())},
            request_ms=moment,
            user={"age": Column.of(INT.with_nullable(True), age)},
            context={"device": Column.of(STRING.with_nullable(True), ["phone" if row % 4 else "tv"])},
        )
        for name in own.reads():
            stored = sequences.request[name].take(np.array([event]))
            assert len(differing_rows(stored, online[name])) == 0, (name, event)
    assert len(set(sequences.request["clicks"].to_pylist())) > 2


def test_only_the_columns_that_are_read_are_held(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    dataset = make_dataset(tmp_path, LOG, fields={"dwell_ms": pa.array(range(7), pa.int64())})
    own = FeatureSet("own", n=events.count())
    items = load_sequences(dataset, features=lambda v: features_for_model(["history.item"], v, 8))
    assert items.source.trimming == {
        "read": ["item"],
        "skipped": ["action", "surface", "time", "received", "dwell_ms"],
        "bytes": 7 * 8,
        "bytes_saved": 7 * 8 * 5,
    }
    assert set(items.events.columns) == {"item"}
    assert items.request == {}
    gaps = load_sequences(dataset, features=lambda v: features_for_model(["history.item", "history.gap"], v, 8))
    assert gaps.source.trimming["read"] == ["item", "time"]
    counted = load_sequences(dataset, features=reading(own))
    assert counted.source.trimming["read"] == ["item", "time", "received"]
    assert counted.source.trimming["skipped"] == ["action", "surface", "dwell_ms"]
    assert set(load_sequences(dataset).source.trimming["read"]) == {"item", "action", "surface", "time"}


def test_a_history_that_drops_events_is_refused(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    dataset = make_dataset(tmp_path, LOG)
    few = load_sequences(dataset, features=lambda vocabulary: standard_features(vocabulary, 2))
    assert len(few.histories(np.array([2]), np.array([2]))) == 1
    clicks = events.where(events.action == "click")
    some = FeatureSet("own", history=sequence(item=clicks.collect(clicks.item)))
    for sequences in (few, load_sequences(dataset, features=lambda _vocabulary: some)):
        with pytest.raises(ConfigError, match="leaves out events that training would predict") as caught:
            sequences.histories(np.array([2]), np.array([3]))
        assert "events.newest(n)" in caught.value.allowed


def test_a_history_that_needs_the_time_of_the_request_is_refused(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    young = events.within(milliseconds(1000))
    own = FeatureSet("own", history=sequence(item=young.collect(events.item)))
    with pytest.raises(ConfigError, match="history depends on the time of the request") as caught:
        load_sequences(make_dataset(tmp_path, LOG), features=lambda _vocabulary: own)
    assert "training reads ranges of events" in caught.value.allowed


def test_what_the_data_does_not_have_is_named_with_the_feature(
    tmp_path: Path, make_dataset: Callable[..., Path]
) -> None:
    dataset = make_dataset(tmp_path, LOG)
    for own, column in (
        (FeatureSet("own", dwell=events.sum(events.dwell_ms)), "events.dwell_ms"),
        (FeatureSet("own", age=user.age.fill_missing(0)), "user.age"),
    ):
        with pytest.raises(DataError, match=f"{column} is not in the data") as caught:
            load_sequences(dataset, features=reading(own))
        assert f"feature {own.reads()[0]} (" in caught.value.got
        assert "test_source.py:" in caught.value.got


def test_what_a_backfill_has_computed_is_read_and_not_computed_again(
    tmp_path: Path, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path, LOG)
    own = FeatureSet(
        "own", n=events.count(), hour=request.time.hour("UTC"), young=events.within(milliseconds(1500)).count()
    )
    computed = load_sequences(dataset, features=reading(own))
    changed = FeatureSet(
        "own", n=events.count(), hour=request.time.hour("UTC"), young=events.within(milliseconds(1)).count()
    )
    backfill(open_dataset(dataset), changed, quiet=True)
    asked: list[list[str]] = []
    honest = BatchExecutor.compute

    def compute(self: BatchExecutor, rows: RequestRows) -> dict[str, Column]:
        asked.append(list(self.plan.features))
        return honest(self, rows)

    monkeypatch.setattr(BatchExecutor, "compute", compute)
    sequences = load_sequences(dataset, features=reading(own))
    assert asked == [["young"]]  # the only one whose definition differs from what lies there
    assert set(sequences.request) == set(computed.request) == {"n", "hour", "young"}
    for name, column in computed.request.items():
        assert len(differing_rows(sequences.request[name], column)) == 0
    asked.clear()
    load_sequences(dataset, features=reading(changed))
    assert asked == []


def test_some_buckets_are_a_part_of_the_whole(bucketed_dataset: Path, tmp_path: Path) -> None:
    """Events, computed features and stored features of a few buckets are those of the same users in the whole."""
    own = FeatureSet("own", n=events.count(), hour=request.time.hour("UTC"))
    dataset = tmp_path / "copy"
    shutil.copytree(bucketed_dataset, dataset, symlinks=True)
    for _ in range(2):
        source = open_sequences(dataset, ("click", "save"), features=reading(own))
        assert source.num_buckets > 5
        whole, chosen = source.read(), [1, 2, 4]
        part = source.read(chosen)
        users = np.flatnonzero(np.isin(source.dataset.layout.buckets_of(whole.user_ids), chosen))
        rows = np.concatenate([np.arange(whole.offsets[user], whole.offsets[user + 1]) for user in users])
        assert part.user_ids.tolist() == whole.user_ids[users].tolist()
        assert part.item_ids.tolist() == whole.item_ids[rows].tolist()
        assert part.is_positive.tolist() == whole.is_positive[rows].tolist()
        assert (part.targets - part.offsets[:-1]).tolist() == (whole.targets - whole.offsets[:-1])[users].tolist()
        for name, column in part.request.items():
            assert len(differing_rows(column, whole.request[name].take(rows))) == 0
        if not source._stored:  # The second time they are read, not computed.
            backfill(open_dataset(dataset), own, quiet=True)
    assert set(source._stored) == {"hour", "n"}
