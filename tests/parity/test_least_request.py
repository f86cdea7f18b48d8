"""A server that is sent the least that the documentation allows ranks as `evaluate` does.

What a request leaves out means what the importer writes when a log leaves it out (docs/serving.md has the table). Each
case imports a log, trains and exports by the commands a user types, and lets the server rank the whole catalogue for
every held-out user; the table must be that of `evaluate`, figure by figure. The last case does so on MovieLens-100K.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tackboard.core import keyed_random
from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.evaluation.judged_events import JudgedEvents, held_out_events
from tackboard.evaluation.ranking import evaluate_rankings
from tackboard.scoring.client import ScoringClient
from tackboard.scoring.scorer import Scorer
from tackboard.serve.server import ServeConfig, Server

Program = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
from tackboard.data.loader import DataConfig
from tackboard.evaluation.judged_events import JudgedEvents, held_out_events
from tackboard.evaluation.ranking import EvaluationConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig
from tackboard.train.config import RunConfig, TrainingConfig


def recipe() -> RunConfig:
    return RunConfig(
        name="least",
        data=DataConfig(dataset="datasets/least", max_length=12, tokens_per_step=256),
        model=PinFMConfig(tables=TableConfig(num_hashes=2, num_rows=64, dim=8), width=16, max_history=12),
        evaluation=EvaluationConfig(cutoffs=(1, 2, 3, 5, 10, 20)),
        training=TrainingConfig(steps=20, num_threads=1, device="cpu"),
    )
"""
LOG_COLUMNS = {"action": "how", "surface": "where"}
CASES = {
    # name: (columns of the log beside user, item and time; settings; what a request's history holds)
    "no surface": (("action",), (), ("item", "action", "time_ms")),
    "no action": (("surface",), (), ("item", "surface", "time_ms")),
    "neither": ((), (), ("item", "time_ms")),
    "items alone": ((), ("model.num_time_buckets=0",), ("item",)),
}


def log_text() -> str:
    """A log of 40 users over 60 items."""
    lines = ["who,what,when,how,where"]
    for row in range(600):
        draw = (keyed_random.uniform(41, row, np.arange(4)) * [40, 60, 2, 2]).astype(int)
        how, where = ("view", "save")[draw[2]], ("home", "search")[draw[3]]
        lines.append(f"{draw[0]},{draw[1]},{1_700_000_000 + 60 * row},{how},{where}")
    return "\n".join(lines) + "\n"


@contextmanager
def served(bundle: Path) -> Iterator[ScoringClient]:
    """A client of a real server on a bundle, in a thread of this process."""
    ready = threading.Event()
    server = Server(Scorer.load(bundle, num_threads=1), ServeConfig(port=0), on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert ready.wait(30), "the server did not become ready"
        yield ScoringClient(server.url)
    finally:
        server.drain()
        thread.join(30)


def asked(
    client: ScoringClient, sequences: Sequences, fields: Sequence[str]
) -> Callable[[JudgedEvents], NDArray[np.float32]]:
    """Scores of the catalogue for users of `sequences`, by a request each that holds only `fields` of their events."""
    events = sequences.source.dataset.read_events(["item_id", "action", "surface", "time_ms"])
    columns = {"item": events["item_id"].to_pylist()} | {
        name: events[name].to_pylist() for name in ("action", "surface", "time_ms")
    }

    def score(judged: JudgedEvents) -> NDArray[np.float32]:
        rows = []
        for user, event in zip(judged.users, judged.events, strict=True):
            history = slice(sequences.offsets[user], event)
            given = {name: columns[name][history] for name in fields}
            rows.append(client.score(given, sequences.catalogue.tolist(), binary=True))
        return np.array(rows)

    return score


def assert_same_table(
    folder: Path, tackboard: Program, fields: Sequence[str], *, users: int, cutoffs: tuple[int, ...]
) -> dict[str, float]:
    """The row of `evaluate`, proven to be that of requests which hold only `fields`."""
    evaluated = tackboard("evaluate", "runs/latest", "--json", "--max-users", str(users), cwd=folder)
    assert evaluated.code == 0, evaluated.err
    (expected,) = [row for row in json.loads(evaluated.out)["rows"] if row["name"] == "model"]
    exported = tackboard("export", "runs/latest", "--out", "bundle", "--tables", "fp32", cwd=folder)
    assert exported.code == 0, exported.err
    sequences = load_sequences(next((folder / "datasets").iterdir()), ())
    with served(folder / "bundle") as client:
        scores = asked(client, sequences, fields)
        judged = held_out_events(sequences).take(slice(0, users))
        found, _ = evaluate_rankings(
            sequences, {"model": scores}, judged, cutoffs=cutoffs, filter_seen=False, quiet=True
        )
    expected = {name: expected[name] for name in found["rows"][0]}
    assert found["rows"][0] == expected
    return {name: value for name, value in expected.items() if name != "name"}


@pytest.mark.parametrize("case", CASES)
def test_the_least_request_is_ranked_as_evaluated(case: str, tackboard: Program, tmp_path: Path) -> None:
    columns, settings, fields = CASES[case]
    (tmp_path / "log.csv").write_text(log_text())
    (tmp_path / "tiny.py").write_text(RECIPE)
    options = [word for name in columns for word in (f"--{name}", LOG_COLUMNS[name])]
    for arguments in (
        ["init", "--from", "log.csv", "--user", "who", "--item", "what", "--time", "when", "--name", "least", *options],
        ["train", "tiny.py:recipe", *(word for setting in settings for word in ("--set", setting))],
    ):
        answer = tackboard(*arguments, cwd=tmp_path)
        assert answer.code == 0, answer.err
    table = assert_same_table(tmp_path, tackboard, fields, users=40, cutoffs=(1, 2, 3, 5, 10, 20))
    assert table["hr@20"] > 0.1, "the model has learnt something that could differ"


@pytest.mark.slow
def test_the_least_request_of_movielens_is_ranked_as_evaluated(tackboard: Program, tmp_path: Path) -> None:
    archive = Path(os.environ.get("TACKBOARD_DATA") or ROOT.parent / "shared" / "data") / "ml-100k" / "ml-100k.zip"
    if not archive.exists():
        pytest.skip(f"no {archive}: set TACKBOARD_DATA to the folder of your downloads")
    (tmp_path / "recipe.py").write_text(
        "from tackboard.recipes.pretrain import pretrain_recipe\n\n\ndef recipe():\n"
        "    return pretrain_recipe(dataset='datasets/ml-100k', num_items=1682, num_events=100_000)\n"
    )
    for arguments in (
        ["data", "import", "ml-100k", str(archive)],
        ["train", "recipe.py:recipe", "--set", "training.steps=60", "--set", "training.num_threads=1"],
    ):
        answer = tackboard(*arguments, cwd=tmp_path)
        assert answer.code == 0, answer.err
    table = assert_same_table(tmp_path, tackboard, ("item", "action", "time_ms"), users=200, cutoffs=(1, 5, 10, 50))
    assert table["hr@50"] > 0.1
