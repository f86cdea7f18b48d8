"""A user's own file of features goes the whole way: train, resume, evaluate, export, score.

The log has late events, a field, a context and attributes that change; the model reads a feature of each kind. What it
reads is compared where it counts: the scores of an offline request are those that evaluation ranked by.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tackboard.checkpoint.trained import stored_parameters
from tackboard.core import keyed_random
from tackboard.core.hashing import string_id
from tackboard.models.stored_parameters import load_parameters

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

FEATURES = """\
from tackboard.features.language import Context, Events, FeatureSet, Int, Request, String, User, hours

events, user = Events(dwell_ms=Int(minimum=0)), User(country=String(), age=Int())
request, context = Request(), Context(device=String())
saves = events.where(events.action == "save")

features = FeatureSet(
    "shop",
    hour=request.time.hour("Europe/Berlin") / 12.0 - 1.0,
    busy=events.within(hours(2)).count().log1p(),
    decayed_dwell=saves.decayed_sum(events.dwell_ms.fill_missing(0), half_life=hours(1)).log1p() / 5.0,
    is_german=(user.country == "de").fill_missing(False),
    age=user.age.fill_missing(40) / 40.0 - 1.0,
    on_phone=(context.device == "phone").fill_missing(False),
    never_read=user.age,
)
"""
READ = ["hour", "busy", "decayed_dwell", "is_german", "age", "on_phone"]
START_S = 1_700_000_000
NUM_USERS, NUM_ITEMS, NUM_EVENTS = 12, 20, 240
SETTINGS = [
    "data.dataset=datasets/shop",
    "data.features=features.py",
    f"model.request_features={json.dumps(READ)}",
    'data.positive_actions=["click","save"]',
    "data.max_length=8",
    "data.tokens_per_step=128",
    "model.max_history=8",
    "model.width=8",
    "model.backbone.num_layers=1",
    "training.steps=4",
    "training.checkpoint_every=2",
    "training.num_threads=1",
    "training.device=cpu",
]
TRAIN = ["train", "recipe.py:recipe", *(word for setting in SETTINGS for word in ("--set", setting)), "--json"]


def log_rows() -> list[dict[str, Any]]:
    rows = []
    for row in range(NUM_EVENTS):
        draw = keyed_random.uniform(7, row, np.arange(6))
        moment = START_S + 300 * row
        rows.append(
            {
                "who": f"user {int(draw[0] * NUM_USERS)}",
                "what": f"thing {int(draw[1] * NUM_ITEMS)}",
                "when": moment,
                "seen": moment + (5000 if draw[5] < 0.1 else 0),  # some events are received an hour late
                "how": ("click", "save", "hide")[int(draw[2] * 3)],
                "where": "home" if draw[3] < 0.5 else "search",
                "dwell": "" if row % 9 == 0 else int(draw[4] * 10_000),
                "extra": json.dumps({"device": "phone" if row % 3 else "tv"}),
            }
        )
    return rows


def as_csv(rows: list[dict[str, Any]]) -> str:
    quoted = [",".join('"' + str(value).replace('"', '""') + '"' for value in row.values()) for row in rows]
    return "\n".join([",".join(rows[0]), *quoted]) + "\n"


@pytest.fixture(scope="module")
def shop(tackboard: Callable[..., Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, features.py, a run and a bundle; once trained, features.py is gone."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "log.csv").write_text(as_csv(log_rows()))
    users = [{"who": f"user {n}", "country": "de" if n % 2 else "fr", "age": 20 + n} for n in range(NUM_USERS - 1)]
    (folder / "users.csv").write_text(as_csv(users))
    (folder / "features.py").write_text(FEATURES)
    names = "--user who --item what --time when --received seen --action how --surface where --context extra"
    made = tackboard(
        "init", "--from", "log.csv", *names.split(), "--field", "dwell_ms=dwell", "--users", "users.csv",
        "--name", "shop", cwd=folder,
    )  # fmt: skip
    assert made.code == 0, made.err
    trained = tackboard(*TRAIN, cwd=folder)
    assert trained.code == 0, trained.err
    (folder / "trained.json").write_text(trained.out.splitlines()[-1])
    shutil.copytree(folder / "runs", folder / "runs_before", symlinks=True)
    # From here on nothing needs the file: what was trained with lies in the checkpoint.
    (folder / "features.py").rename(folder / "features.py.away")
    exported = tackboard("export", "runs/latest", "--out", "bundle", "--tables", "fp32", cwd=folder)
    assert exported.code == 0, exported.err
    return folder


def checkpoint_of(folder: Path) -> Path:
    return (folder / "runs" / "latest" / "checkpoints" / "latest").resolve()


def test_checkpoint_and_bundle_hold_what_is_read_and_nothing_else(shop: Path) -> None:
    stored = [json.loads((place / "features.json").read_text()) for place in (checkpoint_of(shop), shop / "bundle")]
    assert stored[0]["hash"] == stored[1]["hash"]
    assert set(stored[0]["features"]) == {"history", *READ}
    assert str(shop) not in json.dumps(stored)
    signature = json.loads((shop / "bundle" / "signature.json").read_text())
    assert signature["reads"][-len(READ) :] == READ
    assert signature["format_version"] == 3
    assert np.isfinite(json.loads((shop / "trained.json").read_text())["final_loss"])


def test_it_is_evaluated_without_the_file(shop: Path, tackboard: Callable[..., Answer]) -> None:
    answer = tackboard("evaluate", "runs/latest", "--json", cwd=shop)
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    baselines = {"popularity", "item-to-item", "recently seen", "recent, live"}
    assert {row["name"] for row in result["rows"]} == baselines | {"model"}
    assert result["num_users"] == NUM_USERS


def request_of(who: str) -> dict[str, Any]:
    """What a caller would send just before the user's last click or save: only what had arrived by then."""
    rows = [row for row in log_rows() if row["who"] == who]
    target = [row for row in rows if row["how"] != "hide"][-1]
    number = int(who.split()[1])
    attributes: dict[str, list[Any]] = {"context_device": [json.loads(target["extra"])["device"]]}
    if number < NUM_USERS - 1:
        attributes |= {"user_country": ["de" if number % 2 else "fr"], "user_age": [20 + number]}
    return {
        "history": [
            {
                "item": row["what"],
                "action": row["how"],
                "surface": row["where"],
                "time_ms": 1000 * row["when"],
                "dwell_ms": row["dwell"] if row["dwell"] != "" else None,
            }
            for row in rows
            if row["when"] < target["when"] and row["seen"] < target["when"]
        ],
        "candidates": [f"thing {number}" for number in range(NUM_ITEMS)],
        "request_time_ms": 1000 * target["when"],
        "user": who,
        "attributes": attributes,
    }


def offline(shop: Path, tackboard: Callable[..., Answer], request: dict[str, Any]) -> Answer:
    (shop / "request.json").write_text(json.dumps(request))
    return tackboard("score", "request.json", "--offline", "--bundle", "bundle", "--json", cwd=shop)


def scores_of(answer: Answer) -> dict[str, float]:
    assert answer.code == 0, answer.err
    return {entry["item"]: entry["score"] for entry in json.loads(answer.out)["ranked"]}


def late_users() -> set[str]:
    """Users of whom an event was still on its way when their last click or save happened."""
    found = set()
    for who in {row["who"] for row in log_rows()}:
        rows = [row for row in log_rows() if row["who"] == who]
        target = [row for row in rows if row["how"] != "hide"][-1]
        if any(row["when"] < target["when"] <= row["seen"] for row in rows):
            found.add(who)
    return found


def test_offline_scores_are_those_that_evaluation_ranks_by(shop: Path, tackboard: Callable[..., Answer]) -> None:
    from tackboard.checkpoint.store import load_checkpoint
    from tackboard.core.vocabulary import Vocabulary
    from tackboard.data.source import load_sequences
    from tackboard.evaluation.judged_events import JudgedEvents
    from tackboard.evaluation.ranking import rank_model
    from tackboard.features.feature_set import read_features
    from tackboard.models.interface import build_model
    from tackboard.train.config import config_from_json

    checkpoint = load_checkpoint(checkpoint_of(shop))
    config = config_from_json(checkpoint.state["config"])
    vocabulary = Vocabulary.from_dict(checkpoint.state["vocabulary"])
    features = read_features(checkpoint.path)
    assert features is not None
    sequences = load_sequences(
        shop / "datasets" / "shop",
        config.data.positive_actions,
        vocabulary=vocabulary,
        features=lambda _vocabulary: features,
    )
    model = build_model(config.model, vocabulary)
    load_parameters(model, stored_parameters(checkpoint), checkpoint.path)
    rank = rank_model(model, sequences, config.model.tables, config.model.max_history)
    late, compared = late_users(), 0
    for user, user_id in enumerate(sequences.user_ids.tolist()):
        who = next(f"user {number}" for number in range(NUM_USERS) if string_id(f"user {number}") == user_id)
        if who in late:
            continue  # Evaluation's history is a run of stored events; what a server saw of it was less.
        judged = JudgedEvents(np.array([user]), sequences.train_ends[[user]])
        ranked = rank(judged)[0] * model.log_inverse_temperature.exp().item()  # A ranking needs no scale.
        scores = scores_of(offline(shop, tackboard, request_of(who)))
        expected = [scores[item] for item in sorted(scores, key=string_id) if string_id(item) in sequences.catalogue]
        assert ranked == pytest.approx(expected, abs=1e-4)
        compared += 1
    assert compared >= NUM_USERS // 2


def test_each_feature_reaches_the_scores(shop: Path, tackboard: Callable[..., Answer]) -> None:
    request = request_of("user 3")
    before = scores_of(offline(shop, tackboard, request))
    changes: dict[str, dict[str, Any]] = {
        "hour": {"request_time_ms": request["request_time_ms"] + 86_400_000 * 30 + 3_600_000 * 6},
        "dwell": {"history": [event | {"dwell_ms": 10**9} for event in request["history"]]},
        "country": {"attributes": request["attributes"] | {"user_country": ["fr"]}},
        "age": {"attributes": request["attributes"] | {"user_age": [None]}},
        "device": {"attributes": {k: v for k, v in request["attributes"].items() if k != "context_device"}},
    }
    phone = request["attributes"]["context_device"] == ["phone"]
    for name, change in changes.items():
        if name == "device" and not phone:
            change = {"attributes": request["attributes"] | {"context_device": ["phone"]}}
        after = scores_of(offline(shop, tackboard, request | change))
        assert max(abs(before[item] - after[item]) for item in before) > 1e-5, name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"request_time_ms": None}, "request_time_ms is missing"),
        ({"attributes": {"user_contry": ["de"]}}, "the request has the unknown attribute 'user_contry'"),
        ({"attributes": {"user_age": ["old"]}}, "user_age 0 is a string"),
        ({"history": [{"item": "thing 1", "time_ms": 5, "dwell": 3}]}, "history has the unknown field 'dwell'"),
        ({"history": [{"item": "thing 1"}]}, "history lacks time_ms"),
        ({"history": [{"item": "thing 1", "time_ms": 5, "dwell_ms": -1}]}, "history dwell_ms is out of range"),
    ],
)
def test_mistakes_in_a_request(
    shop: Path, tackboard: Callable[..., Answer], change: dict[str, Any], expected: str
) -> None:
    answer = offline(shop, tackboard, request_of("user 3") | change)
    assert answer.code == 2
    assert expected in answer.err
    assert len(answer.err.splitlines()) <= 3
    assert "thing" not in answer.err and "user 3" not in answer.err


def test_a_run_is_not_resumed_with_other_features(shop: Path, tackboard: Callable[..., Answer], tmp_path: Path) -> None:
    """The settings are the same, only what the file says has changed."""
    shutil.copytree(shop / "datasets", tmp_path / "datasets", symlinks=True)
    shutil.copytree(shop / "runs_before", tmp_path / "runs", symlinks=True)
    shutil.copy(shop / "recipe.py", tmp_path / "recipe.py")
    run = str((tmp_path / "runs" / "latest").resolve())
    # A comment and other lines are not another computation.
    (tmp_path / "features.py").write_text("# The shop's.\n\n" + FEATURES)
    again = tackboard(*TRAIN, "--resume", run, cwd=tmp_path)
    assert again.code == 0, again.err
    assert json.loads(again.out.splitlines()[-1])["step"] == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "features.py").write_text(FEATURES.replace("hours(2)", "hours(3)"))
    for name in ("datasets", "runs", "recipe.py"):
        (tmp_path / "other" / name).symlink_to(tmp_path / name)
    refused = tackboard(*TRAIN, "--resume", run, cwd=tmp_path / "other")
    assert refused.code == 2
    assert "was started with other features" in refused.err
    assert len([line for line in refused.err.splitlines() if line]) <= 4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (['model.request_features=["hours"]'], "did you mean hour?"),
        (['model.request_features=["never_read"]'], "may be missing"),
        (["data.features=absent.py"], "absent.py is not a file"),
        (["data.features="], "the model reads hour, which is not a standard feature"),
    ],
)
def test_features_that_cannot_be_are_told_before_a_run_is_left_behind(
    shop: Path, tackboard: Callable[..., Answer], tmp_path: Path, settings: list[str], expected: str
) -> None:
    for name in ("datasets", "recipe.py"):
        (tmp_path / name).symlink_to(shop / name)
    (tmp_path / "features.py").write_text(FEATURES)
    answer = tackboard(*TRAIN, *(word for setting in settings for word in ("--set", setting)), cwd=tmp_path)
    assert answer.code == 2
    assert expected in answer.err
    assert len(answer.err.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()
