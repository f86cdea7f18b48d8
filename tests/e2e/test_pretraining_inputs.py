"""Inputs at the edge of what a log or a request may hold, through the commands and a server: what happens is defined.

One log for all of it: a user of 3,000 events, one of a single event, items at both ends of 64 bits, lines in no order
of time. It is imported, trained on, evaluated, exported and served; once with hashed tables and the usual decoder, once
with a plain table (ids modulo its rows), HSTU and the request's time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tackboard.data.source import load_sequences

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

Tackboard = Callable[..., Answer]
INT64 = np.iinfo(np.int64)
ITEMS = [int(INT64.min), -7, -1, 0, 1, 2, 3, 5, 8, 13, 21, int(INT64.max)]
LONG, START_MS, MAX_HISTORY = 3_000, 1_700_000_000_000, 12
RECIPE = f'''
"""A run of seconds."""

from tackboard.data.loader import DataConfig
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.models.backbone import BackboneConfig
from tackboard.models.losses import LossConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig

TABLES = {{
    "mix": TableConfig(num_hashes=2, num_rows=64, dim=4),
    "modulo": TableConfig(num_hashes=1, num_rows=64, method="modulo", dim=4),
}}


def of(method: str) -> RunConfig:
    is_plain = method == "modulo"
    return RunConfig(
        name=method,
        data=DataConfig(
            dataset="datasets/log",
            positive_actions=("click",),
            max_length={MAX_HISTORY},
            tokens_per_step=640,
            uniform_negatives=100 if is_plain else 0,
        ),
        model=PinFMConfig(
            tables=TABLES[method],
            backbone=BackboneConfig(kind="hstu" if is_plain else "gpt", num_layers=1),
            loss=LossConfig(in_batch_negatives=not is_plain),
            width=8,
            max_history={MAX_HISTORY},
            request_time=is_plain,
        ),
        training=TrainingConfig(steps=5, checkpoint_every=5, num_threads=1, device="cpu"),
        evaluation=EvaluationConfig(cutoffs=(1, 5, {len(ITEMS)})),
    )


def mix() -> RunConfig:
    return of("mix")


def modulo() -> RunConfig:
    return of("modulo")
'''
COLUMNS = ["--user", "user", "--item", "item", "--time", "time", "--action", "action", "--surface", "surface"]
Line = tuple[int, int, int, str, str]
"""User, item, time in ms, action, surface."""


def log_lines(*, long: int = LONG) -> list[Line]:
    """User 0 has `long` events, user 1 a single one, the others 9 each; every item is somebody's target."""
    lines = [
        (0, ITEMS[number * number % 11], START_MS + 60_000 * number, "hide" if number % 5 == 0 else "click", "home")
        for number in range(LONG - long, LONG - 1)
    ]
    lines.append((0, ITEMS[3], START_MS + 60_000 * LONG, "click", "home"))
    lines.append((1, ITEMS[4], START_MS, "click", "search"))
    for user in range(2, 2 + len(ITEMS)):
        lines += [
            (user, ITEMS[(user + place) % len(ITEMS)], START_MS + 1000 * place**3, "click", "search")
            for place in range(9)
        ]
    return lines


def import_log(tackboard: Tackboard, folder: Path, name: str, lines: list[Line]) -> Path:
    text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    (folder / f"{name}.csv").write_text("user,item,time,action,surface\n" + text)
    answer = tackboard("init", f"{name}.csv", *COLUMNS, "--name", name, "--recipe", f"{name}.py", cwd=folder)
    assert answer.code == 0, answer.err
    return folder / "datasets" / name


@pytest.fixture(scope="module")
def folder(tackboard: Tackboard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """datasets/log, imported from lines in no order of time, and recipes.py."""
    folder = tmp_path_factory.mktemp("edges")
    lines = log_lines()
    order = np.random.default_rng(0).permutation(len(lines))
    import_log(tackboard, folder, "log", [lines[place] for place in order])
    (folder / "recipes.py").write_text(RECIPE)
    return folder


@dataclass
class Trained:
    """A run, its bundle, and a server of it."""

    tackboard: Tackboard
    folder: Path
    method: str
    url: str = ""

    @property
    def run(self) -> Path:
        return next((self.folder / "runs").glob(f"*_{self.method}_*"))

    def evaluate(self, *arguments: str) -> dict[str, Any]:
        answer = self.tackboard("evaluate", str(self.run), *arguments, "--json", cwd=self.folder)
        assert answer.code == 0, answer.err
        found: dict[str, Any] = json.loads(answer.out)
        return found

    def score(
        self, history: list[dict[str, Any]], *, asked_ms: int | None = None, how: tuple[str, ...] = ()
    ) -> list[float]:
        """Scores of all ITEMS, by the server unless `how` says otherwise."""
        moment = {"request_time_ms": asked_ms or START_MS + 10**9} if self.method == "modulo" else {}
        request = {"history": history, "candidates": ITEMS, **moment}
        (self.folder / "request.json").write_text(json.dumps(request))
        how = how or ("--url", self.url)
        answer = self.tackboard("score", "request.json", *how, "--json", cwd=self.folder)
        assert answer.code == 0, answer.err
        scores = {entry["item"]: entry["score"] for entry in json.loads(answer.out)["ranked"]}
        assert np.isfinite(list(scores.values())).all()
        return [scores[item] for item in ITEMS]


@pytest.fixture(scope="module", params=["mix", "modulo"])
def trained(
    folder: Path, tackboard: Tackboard, serving: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[Trained]:
    method = request.param
    made = Trained(tackboard, folder, method)
    answer = tackboard("train", f"recipes.py:{method}", "--json", cwd=folder)
    assert answer.code == 0, answer.err
    assert np.isfinite(json.loads(answer.out.splitlines()[-1])["final_loss"])
    answer = tackboard("export", str(made.run), "--out", f"bundle-{method}", cwd=folder)
    assert answer.code == 0, answer.err
    with serving(folder / f"bundle-{method}") as made.url:
        yield made


def history(length: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "item": ITEMS[number * 5 % 11],
            "action": "click",
            "surface": "home",
            "time_ms": START_MS + 7000 * number,
        }
        | changes
        for number in range(length)
    ]


def test_a_log_whose_times_go_backwards_is_the_log_in_order_of_time(
    folder: Path, tackboard: Tackboard, tmp_path: Path
) -> None:
    """Events are sorted by user and time when they are imported."""
    ordered = import_log(tackboard, tmp_path, "ordered", sorted(log_lines(), key=lambda line: (line[2], line[0])))
    one, other = (load_sequences(path, ("click",)) for path in (folder / "datasets" / "log", ordered))
    assert one.offsets.tolist() == other.offsets.tolist()
    assert np.diff(one.offsets)[one.user_ids.tolist().index(0)] == LONG
    for name in ("user_ids", "item_ids", "targets", "is_positive"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert np.array_equal(one.events.times, other.events.times)


def test_a_user_of_3000_events_is_evaluated_by_the_newest_and_one_of_a_single_event_not_at_all(
    trained: Trained,
) -> None:
    """The long user's older events change no rank; every item is ranked, those at the ends of 64 bits too."""
    if not (trained.folder / "datasets" / "tail").exists():
        import_log(trained.tackboard, trained.folder, "tail", log_lines(long=MAX_HISTORY + 1))
    whole, tail = trained.evaluate(), trained.evaluate("--dataset", "datasets/tail")
    assert whole["num_items"] == tail["num_items"] == len(ITEMS)
    assert whole["num_users"] == tail["num_users"] == 1 + len(ITEMS)
    model, again = ({row["name"]: row for row in found["rows"]}["model"] for found in (whole, tail))
    assert model == again
    assert model[f"hr@{len(ITEMS)}"] == 1.0  # Nobody's target is outside the ranking.


def test_a_user_of_3000_events_is_trained_on_in_segments_all_of_them(trained: Trained) -> None:
    """Five steps are an epoch here: every event before a target, once."""
    lines = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["tokens"]) == (5, LONG - 1 + 8 * len(ITEMS))


@pytest.mark.parametrize("length", [0, 1, LONG])
def test_a_history_of_any_length_is_scored_the_same_with_a_server_and_without(trained: Trained, length: int) -> None:
    """Without events too: a model has a vector for a user of whom nothing is known."""
    scores = trained.score(history(length))
    assert len(set(scores)) > len(ITEMS) // 2
    assert scores == trained.score(history(length), how=("--url", trained.url, "--binary"))
    offline = ("--offline", "--bundle", f"bundle-{trained.method}")
    assert scores == pytest.approx(trained.score(history(length), how=offline), abs=1e-5)


def test_of_a_history_of_3000_events_the_newest_count(trained: Trained) -> None:
    whole = history(LONG)
    asked = whole[-1]["time_ms"] + 5000
    scores = trained.score(whole, asked_ms=asked)
    assert scores == trained.score(whole[-MAX_HISTORY:], asked_ms=asked)
    assert scores != trained.score(whole[:MAX_HISTORY], asked_ms=asked)


def test_a_history_whose_times_go_backwards_is_sorted(trained: Trained) -> None:
    events = history(6)
    assert trained.score(events[::-1]) == trained.score(events)
    moved = trained.score([event | {"time_ms": -event["time_ms"]} for event in events])  # before 1970
    assert moved != trained.score(events)


def test_a_request_dated_before_its_newest_event_is_one_at_that_event(trained: Trained) -> None:
    """Clocks differ: no time has passed, and none is missing."""
    events = history(6)
    newest = events[-1]["time_ms"]
    scores = trained.score(events, asked_ms=newest)
    assert scores == trained.score(events, asked_ms=newest - 1) == trained.score(events, asked_ms=1)
    later = trained.score(events, asked_ms=newest + 10**8)
    assert (later != scores) == (trained.method == "modulo")  # The other model does not read the request's time.


def test_actions_and_surfaces_unseen_in_training_are_all_the_same_unknown_one(trained: Trained) -> None:
    """In a request as in a log that is evaluated; not an error, since products grow buttons before models do."""
    known = trained.score(history(5))
    unknown = trained.score(history(5, action="buy"))
    assert unknown != known
    assert unknown == trained.score(history(5, action="")) == trained.score(history(5, action="é" * 300))
    elsewhere = trained.score(history(5, surface="watch"))
    assert elsewhere == trained.score(history(5, surface="tv")) != known


def test_a_log_with_actions_and_surfaces_unseen_in_training_is_evaluated(trained: Trained) -> None:
    """Its other events are read as unknown ones; whatever they are called, the ranks are the same."""
    rows = []
    for action, surface in (("buy", "watch"), ("reject", "tv")):
        name = f"new-{action}"
        if not (trained.folder / "datasets" / name).exists():
            lines = [
                (user, item, time, "click" if place % 3 == 2 else action, surface)
                for place, (user, item, time, _, _) in enumerate(log_lines(long=30))
            ]
            import_log(trained.tackboard, trained.folder, name, lines)
        found = trained.evaluate("--dataset", f"datasets/{name}")
        assert found["num_users"] > len(ITEMS) // 2
        rows.append(found["rows"])
    assert rows[0] == rows[1]
    assert all(np.isfinite(value) for row in rows[0] for name, value in row.items() if name != "name")


def test_a_log_without_the_positive_actions_of_the_training_is_refused(trained: Trained, tmp_path: Path) -> None:
    """There is nothing to predict, and taking other actions for positive ones would be a guess."""
    lines = [(user, item, time, "watch", surface) for user, item, time, _, surface in log_lines(long=30)]
    import_log(trained.tackboard, tmp_path, "other", lines)
    answer = trained.tackboard(
        "evaluate", str(trained.run), "--dataset", str(tmp_path / "datasets" / "other"), cwd=tmp_path
    )
    assert answer.code == 2
    assert "data.positive_actions names 'click'" in answer.err
    assert "actions in the dataset: watch" in answer.err
    assert len(answer.err.splitlines()) <= 3


@pytest.mark.parametrize("item", [INT64.min, INT64.max])
def test_ids_at_the_ends_of_64_bits_are_ids_like_others(trained: Trained, item: int) -> None:
    """As candidates they have scores of their own, and in a history they change those of all."""
    scores = trained.score(history(5))
    assert len({scores[ITEMS.index(other)] for other in (int(item), 1, 2)}) == 3
    assert trained.score([*history(5)[:-1], history(5)[-1] | {"item": int(item)}]) != scores
