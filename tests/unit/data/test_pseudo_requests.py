"""Requests made from events: beside a plain loop, and nothing that a request should not know."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.batch import HashConfig
from tackboard.core import files
from tackboard.core.errors import ConfigError, DataError, UsageError
from tackboard.core.keyed_random import bits, uniform
from tackboard.data import pseudo_requests
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.pseudo_requests import (
    PseudoRequestConfig,
    PseudoRequests,
    make_pseudo_requests,
    read_pseudo_requests,
)
from tackboard.data.request_layout import LABELS, PSEUDO, label_dataset, read_labels, read_requests
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.events.dataset import open_dataset
from tackboard.events.privacy.retention import retain
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world

HOUR_MS = 3_600_000
START_MS = 480_000 * HOUR_MS
NUM_USERS, NUM_ITEMS = 60, 40
CONFIG = PseudoRequestConfig(candidates=4, per_user=3, seed=7)
Row = tuple[Any, ...]


def log(num_users: int = NUM_USERS) -> list[Row]:
    """Reads in six hours, in steps of five minutes; popular items are read far more often, some twice at a time."""
    rows: list[Row] = []
    for user in range(num_users):
        for number in range(4 + user % 5):
            draw = uniform(11, user, number, np.arange(3))
            item, step = int(draw[0] ** 3 * NUM_ITEMS), int(draw[1] * 72)
            action = "skip" if draw[2] < 0.2 else "read"
            rows += [(user, item, action, "home", START_MS + step * 300_000)] * (2 if draw[2] > 0.9 else 1)
    return rows


@pytest.fixture
def folder(make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log in several buckets."""
    monkeypatch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 50)
    return make_dataset(tmp_path, log())


def make(folder: Path, config: PseudoRequestConfig = CONFIG) -> PseudoRequests:
    return make_pseudo_requests(open_dataset(folder), config, quiet=True)


def requests_in(folder: Path) -> list[dict[str, Any]]:
    return read_requests(open_dataset(folder)).to_pylist()


def plainly(rows: list[Row], config: PseudoRequestConfig) -> list[dict[str, Any]]:
    """The same requests, one after another, for events that were received when they happened."""
    rows = [row for row in rows if not config.actions or row[2] in config.actions] if config.actions else rows
    found = []
    for user in sorted({row[0] for row in rows}):
        mine = sorted((row for row in rows if row[0] == user), key=lambda row: row[4])
        distinct = list(dict.fromkeys((time, item) for _, item, _, _, time in mine if time >= (config.since_ms or 0)))
        if not config.repeats:
            firsts = {row[1]: row[4] for row in sorted(ALL, key=lambda row: -row[4]) if row[0] == user}
            distinct = [(time, item) for time, item in distinct if firsts[item] == time]
        for time, true in distinct[-config.per_user :] if config.per_user else distinct:
            hours = [time // HOUR_MS] if config.pool == "hour" else [row[4] // HOUR_MS for row in rows]
            pool = sorted(row[1] for row in rows if row[4] // HOUR_MS in set(hours))
            owned = {row[1] for row in ALL if row[0] == user}
            others: list[int] = []
            for draw in range(4 * config.candidates):
                share = float(uniform(config.seed, 81, user, time, true, draw)[0])
                item = pool[int(share * len(pool))]
                if item not in owned and item not in others and len(others) < config.candidates:
                    others.append(item)
            waits = {
                item: -np.log1p(-uniform(config.seed, 82, user, time, true, item)[0]) / count
                for item, count in Counter(pool).items()
                if item not in owned and item not in others
            }
            others += sorted(waits, key=lambda item: waits[item])[: config.candidates - len(others)]
            shown = sorted([true, *others], key=lambda item: int(bits(config.seed, 83, user, time, true, item)[0]))
            found.append({"user_id": user, "time_ms": time, "item_id": shown, "true": true})
    return found


ALL = log()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pool": "all"},
        {"candidates": 30},
        {"per_user": None, "since_ms": START_MS + 3 * HOUR_MS},
        {"actions": ("read",), "per_user": 1},
        {"seed": 8},
        {"repeats": True},
        {"repeats": True, "actions": ("read",), "since_ms": START_MS + 3 * HOUR_MS},
    ],
    ids=str,
)
def test_requests_equal_a_plain_loop(folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    monkeypatch.setattr(pseudo_requests, "DRAWS_AT_ONCE", 100)
    config = dataclasses.replace(CONFIG, **change)
    counts = make(folder, config).counts
    rows, expected = requests_in(folder), plainly(ALL, config)
    assert [{key: row[key] for key in ("user_id", "time_ms", "item_id")} for row in rows] == [
        {key: row[key] for key in ("user_id", "time_ms", "item_id")} for row in expected
    ]
    for row, plain in zip(rows, expected, strict=True):
        assert row["label_next"] == [int(item == plain["true"]) for item in row["item_id"]]
        assert set(row["position"]) == {None} and set(row["weight"]) == {1.0} and row["surface"] == "home"
    missing = [config.candidates + 1 - len(row["item_id"]) for row in rows]
    assert counts.requests == len(rows) and counts.candidates == sum(len(row["item_id"]) for row in rows)
    assert counts.candidates_missing == sum(missing) and counts.requests_short == sum(count > 0 for count in missing)
    assert counts.events_repeated > 0
    earlier = {(user, item): min(row[4] for row in ALL if row[:2] == (user, item)) for user, item, *_ in ALL}
    kept = sum(earlier[row["user_id"], row["true"]] < row["time_ms"] for row in expected)
    assert counts.repeats_kept == kept and (kept > 0) == config.repeats == (counts.repeats_left_out == 0)


def test_a_single_action_may_have_a_label_of_its_own(folder: Path) -> None:
    result = make(folder, dataclasses.replace(CONFIG, also=("read", "skip")))
    assert read_pseudo_requests(result.path) == result
    did = {}
    for user, item, action, _, time in ALL:
        did.setdefault((user, item, time), action)
    found = Counter()
    for row in requests_in(folder):
        for place, item in enumerate(row["item_id"]):
            is_true, action = bool(row["label_next"][place]), did.get((row["user_id"], item, row["time_ms"]))
            labels = {name: row[f"label_{name}"][place] for name in ("read", "skip")}
            assert labels == {name: int(is_true and name == action) for name in labels}
            found.update(name for name, label in labels.items() if label)
    assert found["read"] > 0 and found["skip"] > 0


@pytest.mark.parametrize("actions", [("read", "skip"), ("skip", "read")])
def test_events_of_one_instant_make_one_request_with_all_their_actions(
    make_dataset: Callable[..., Path], tmp_path: Path, actions: tuple[str, str]
) -> None:
    mine = [(1, 1, action, "home", START_MS) for action in actions]
    others = [(user, user, "read", "home", START_MS + user) for user in (2, 3)]
    folder = make_dataset(tmp_path, [*mine, *others])
    make(folder, dataclasses.replace(CONFIG, also=("read", "skip")))
    (row,) = [row for row in requests_in(folder) if row["user_id"] == 1]
    place = row["item_id"].index(1)
    assert [row[f"label_{name}"][place] for name in ("next", "read", "skip")] == [1, 1, 1]


def test_the_whole_log_is_one_pool_also_before_1970(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    rows = [(user, user, "read", "home", (user - 2) * HOUR_MS) for user in range(5)]
    folder = make_dataset(tmp_path, rows)
    result = make(folder, dataclasses.replace(CONFIG, pool="all"))
    assert (result.counts.requests, result.counts.candidates_missing) == (5, 0)


def test_no_candidate_is_in_the_history(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    # Late events and clocks that are ahead: the order of the requests is not the order of the events.
    rows = [(user, item, "read", "home", time) for user, item, _, _, time in ALL]
    shifts = (uniform(5, np.arange(len(rows)), 0) - 0.5) * 4 * HOUR_MS
    received = [row[4] + int(shift) for row, shift in zip(rows, shifts, strict=True)]
    folder = make_dataset(tmp_path, rows, received_ms=received)

    def num_in_histories() -> list[int]:
        config = RequestConfig(dataset=str(folder), max_history=64, validation_share=0.0, test_share=0.0)
        batch = RequestSteps(RequestSource(config), config, HashConfig(num_hashes=1, num_rows=64), seed=0)[0]
        histories, counts = batch.histories, [0, 0]
        for request in range(batch.num_requests):
            seen = histories.items[histories.offsets[request] : histories.offsets[request + 1]].tolist()
            mine = batch.request_of == request
            for item, label in zip(batch.candidates[mine].tolist(), batch.labels["next"][mine].tolist(), strict=True):
                counts[int(label)] += item in seen
        return counts

    make(folder)
    assert num_in_histories() == [0, 0], "membership in the history says nothing about the label"
    make(folder, dataclasses.replace(CONFIG, repeats=True))
    negatives, positives = num_in_histories()
    assert negatives == 0 < positives, "with repeats, an item of the history is always the true item"


def test_requests_of_version_1_had_repeats(folder: Path) -> None:
    path = make(folder, dataclasses.replace(CONFIG, repeats=True)).path / PSEUDO
    content = files.read_json(path)
    del content["rules"]["repeats"], content["counts"]["repeats_kept"], content["counts"]["repeats_left_out"]
    files.write_json_atomic(path, content | {"version": 1})
    old = read_pseudo_requests(path.parent)
    assert old is not None and old.config == dataclasses.replace(CONFIG, repeats=True)


def test_a_pool_with_too_few_items_gives_all_it_has(folder: Path) -> None:
    counts = make(folder, dataclasses.replace(CONFIG, candidates=39)).counts
    assert counts.requests_short == counts.requests
    owned: dict[int, set[int]] = {}
    for user, item, *_ in ALL:
        owned.setdefault(user, set()).add(item)
    for row in requests_in(folder):
        of_hour = {item for _, item, _, _, time in ALL if time // HOUR_MS == row["time_ms"] // HOUR_MS}
        assert len(row["item_id"]) == 1 + len(of_hour - owned[row["user_id"]])


def test_others_are_drawn_by_their_frequency(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    # A thousand users read item 0; in the same hour, item 1 has 60 reads, item 2 has 30 and item 3 has 10.
    rows = [(user, 0, "read", "home", START_MS) for user in range(1000)]
    rows += [(5000 + n, 1 if n < 60 else 2 if n < 90 else 3, "read", "home", START_MS) for n in range(100)]
    folder = make_dataset(tmp_path, rows)
    make(folder, PseudoRequestConfig(candidates=1, per_user=1))
    drawn = Counter(sum(row["item_id"]) for row in requests_in(folder) if row["user_id"] < 5000)
    assert [abs(drawn[item] - share) < 60 for item, share in ((1, 600), (2, 300), (3, 100))] == [True] * 3
    make(folder, PseudoRequestConfig(candidates=2, per_user=1))
    # Successive draws: P(3 is left out) = 0.6 · 30/40 + 0.3 · 60/70.
    left_out = Counter(6 - sum(row["item_id"]) for row in requests_in(folder) if row["user_id"] < 5000)
    assert abs(left_out[3] / 1000 - (0.6 * 0.75 + 0.3 * 6 / 7)) < 0.05


def test_the_place_of_the_true_item_is_uniform(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    rows = [(user, user % 40, "read", "home", START_MS) for user in range(2000)]
    folder = make_dataset(tmp_path, rows)
    make(folder, PseudoRequestConfig(candidates=9, per_user=1))
    places = np.bincount([row["label_next"].index(1) for row in requests_in(folder)], minlength=10)
    assert places.sum() == 2000
    assert ((places - 200.0) ** 2 / 200.0).sum() < 27.9, "chi-squared with 9 degrees of freedom, p = 0.001"


def test_only_the_same_hour_and_the_user_shape_the_candidates(
    make_dataset: Callable[..., Path], tmp_path: Path, folder: Path
) -> None:
    def candidates(folder: Path) -> dict[tuple[int, int, int], list[int]]:
        make(folder)
        rows = [row for row in requests_in(folder) if row["user_id"] < 900]
        return {
            (row["user_id"], row["time_ms"], row["item_id"][row["label_next"].index(1)]): row["item_id"] for row in rows
        }

    before = candidates(folder)
    other_hours = [(900 + n, n % NUM_ITEMS, "read", "home", START_MS + (6 + n) * HOUR_MS) for n in range(20)]
    assert candidates(make_dataset(tmp_path, [*ALL, *other_hours], "other")) == before
    same_hour = [(900 + n, 39, "read", "home", START_MS + 4 * HOUR_MS - 1) for n in range(200)]
    after = candidates(make_dataset(tmp_path, [*ALL, *same_hour], "third"))
    changed = {key[1] // HOUR_MS for key in before if after[key] != before[key]}
    assert changed == {START_MS // HOUR_MS + 3}, "the pool holds later events of its hour, and of no other"


def test_the_true_event_and_its_instant_are_not_in_the_history(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [(1, item, "read", "home", START_MS + (item // 3) * HOUR_MS) for item in range(12)]
    rows += [(2, 50 + item, "read", "home", START_MS + (item // 3) * HOUR_MS) for item in range(12)]
    # The clock of user 2 is ahead: events are received before they happen.
    received = [row[4] if row[0] == 1 else row[4] - 7 for row in rows]
    folder = make_dataset(tmp_path, rows, received_ms=received)
    make(folder, PseudoRequestConfig(candidates=3, per_user=5))
    config = RequestConfig(dataset=str(folder), max_history=32)
    config = dataclasses.replace(config, validation_share=0.0, test_share=0.0)
    batch = RequestSteps(RequestSource(config), config, HashConfig(num_hashes=1, num_rows=64), seed=0)[0]
    assert batch.num_requests == 10
    ids, offsets = batch.histories.item_ids, batch.histories.offsets.tolist()
    for request in range(batch.num_requests):
        mine = batch.request_of == request
        (true,) = ids[batch.candidates[mine]][batch.labels["next"][mine] == 1].tolist()
        seen = ids[batch.histories.items[offsets[request] : offsets[request + 1]]].tolist()
        first = true // 50 * 50
        assert sorted(seen) == list(range(first, true - (true - first) % 3)), "the events of earlier instants only"


def test_readers_take_them_for_labelled_requests(folder: Path) -> None:
    old = open_dataset(folder)
    result = make(folder)
    dataset = open_dataset(folder)
    assert dataset.path == result.path and result == read_pseudo_requests(dataset.path)
    layout, table = dataset.layout, read_requests(dataset)
    users = table["user_id"].to_numpy()
    assert layout.num_buckets > 3
    for bucket in range(layout.num_buckets):
        first, last = layout.rows_of("requests", bucket)
        assert (layout.buckets_of(users[first:last]) == bucket).all()
    for name in ("events.parquet", "items.parquet", "users.parquet"):
        assert (old.path / name).stat().st_ino == (dataset.path / name).stat().st_ino
    config = RequestConfig(dataset=str(folder), max_history=8, validation_share=0.0, test_share=0.0)
    with pytest.raises(ConfigError, match=r"labels in the dataset: next\ntackboard data pseudo-requests … --also buy"):
        RequestSource(dataclasses.replace(config, labels=("buy",)))
    source = RequestSource(config)
    steps = RequestSteps(source, config, HashConfig(num_hashes=1, num_rows=64), seed=0)
    assert source.labels == ["next"]
    batches = [batch for _, batch in steps.iterate(range(steps.plan.first_step(1)))]
    assert sum(batch.num_candidates for batch in batches) == result.counts.candidates
    assert sum(float(batch.labels["next"].sum()) for batch in batches) == result.counts.requests
    assert retain(dataset, 0.1).path != dataset.path, "retention knows the new file"


def test_again_makes_nothing_and_labels_and_pseudo_requests_replace_each_other(tmp_path: Path) -> None:
    write_world(WorldConfig(num_users=12, num_items=80, num_topics=5, median_events=8.0, max_events=12), tmp_path, "w")
    folder = tmp_path / "w"
    rules = LabelConfig(labels=(Label("click", 1000),))
    label_dataset(open_dataset(folder), rules, quiet=True)
    first = make(folder)
    assert make(folder).path == first.path and not (first.path / LABELS).exists()
    assert make(folder, dataclasses.replace(CONFIG, seed=1)).path != first.path
    stored = read_requests(open_dataset(folder))
    assert "label_click" not in stored.column_names
    of_events = dict(open_dataset(folder).read_events(["request", "item_id"]).to_pydict())
    items = dict(zip(of_events["request"], of_events["item_id"], strict=True))
    for row in stored.to_pylist():
        assert row["item_id"][row["label_next"].index(1)] == items[row["request"]], "the request of the event"
    labelled = label_dataset(open_dataset(folder), rules, quiet=True).path
    assert not (labelled / PSEUDO).exists() and read_labels(labelled) is not None
    assert read_pseudo_requests(labelled) is None


def test_a_stop_leaves_the_old_snapshot_or_a_complete_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = open_dataset(folder).path
    points = (("requests.parquet:after-group", 1), ("pseudo_requests.json:after-write", 1), ("latest:before-rename", 2))
    for wanted, left in points:

        def stop(point: str, wanted: str = wanted) -> None:
            if point == wanted:
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(files, "observer", stop)
        with pytest.raises(OSError, match="Input/output"):
            make(folder)
        assert open_dataset(folder).path == old and len(list(folder.glob("[0-9]*"))) == left
    monkeypatch.setattr(files, "observer", None)
    complete = next(path for path in folder.glob("[0-9]*") if path != old)
    assert make(folder).path == complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": 0}, "--candidates is 0"),
        ({"pool": "day"}, "--from is 'day'"),
        ({"per_user": 0}, "--per-user is 0"),
        ({"per_user": None}, "no events were chosen"),
        ({"label": "the next"}, "--label 'the next' is not a name"),
        ({"actions": ("buy",)}, "no event of tiny has the action 'buy'"),
        ({"also": ("buy",)}, "no event of tiny has the action 'buy'"),
        ({"also": ("read", "read")}, "--also names read, read"),
        ({"actions": ("read",), "also": ("skip",)}, "--also names 'skip', but --action leaves its events out"),
        ({"also": ("to read",)}, "--also 'to read' is not a name"),
    ],
)
def test_what_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(folder, dataclasses.replace(CONFIG, **change))


def test_a_time_after_the_log_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="no event of .* became a request"):
        make(folder, dataclasses.replace(CONFIG, since_ms=START_MS + 900 * HOUR_MS))
