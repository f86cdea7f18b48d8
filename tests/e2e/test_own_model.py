"""A model from a user's own file goes the whole way: train, resume, evaluate, export, score, serve."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tackboard.batch import SequenceBatch
from tackboard.batch.builder import make_batch
from tackboard.core.user_code import load_code
from tackboard.data.loader import TrainingSteps
from tackboard.data.source import open_sequences
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import ID, INT, TIME
from tackboard.models.interface import build_model
from tackboard.models.losses import next_item_loss
from tackboard.train.config import features_for

if TYPE_CHECKING:
    from conftest import Answer
else:
    Answer = Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_model.py"
REQUEST = {
    "history": [
        {"item": 100_000 + number, "action": "click", "surface": "home", "time_ms": 1_736_200_000_000 + 60_000 * number}
        for number in range(5)
    ],
    "candidates": [100_000 + number for number in range(40)],
}


@pytest.fixture(scope="module")
def own(workspace: Path, tackboard: Callable[..., Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's run and bundle, and a request for it."""
    folder = tmp_path_factory.mktemp("own")
    settings = [f"data.dataset={workspace / 'datasets' / 'tiny'}", "training.steps=6", "model.tables.dim=4"]
    options = [word for setting in settings for word in ("--set", setting)]
    trained = tackboard("train", f"{EXAMPLE}:recipe", *options, "--json", cwd=folder)
    assert trained.code == 0, trained.err
    assert np.isfinite(json.loads(trained.out.splitlines()[-1])["final_loss"])
    exported = tackboard("export", "runs/latest", "--out", "bundle", cwd=folder)
    assert exported.code == 0, exported.err
    (folder / "request.json").write_text(json.dumps(REQUEST))
    return folder


def scores_of(answer: Answer) -> dict[int, float]:
    assert answer.code == 0, answer.err
    return {entry["item"]: entry["score"] for entry in json.loads(answer.out)["ranked"]}


def test_it_is_evaluated_beside_the_baselines(own: Path, tackboard: Callable[..., Answer]) -> None:
    answer = tackboard("evaluate", "runs/latest", "--json", cwd=own)
    assert answer.code == 0, answer.err
    assert {"model", "oracle"} <= {row["name"] for row in json.loads(answer.out)["rows"]}


def test_a_bundle_holds_no_code_and_no_path(own: Path) -> None:
    assert not list((own / "bundle").rglob("*.py"))
    signature = (own / "bundle" / "signature.json").read_text()
    assert '"own_model.py:DecayedSumConfig"' in signature
    assert str(ROOT) not in signature


def test_scoring_needs_the_code(own: Path, tackboard: Callable[..., Answer]) -> None:
    offline = ["score", "request.json", "--offline", "--bundle", "bundle", "--json"]
    refused = tackboard(*offline, cwd=own)
    assert refused.code == 2
    assert "--code own_model.py" in refused.err and len(refused.err.splitlines()) <= 3
    scores = scores_of(tackboard(*offline, "--code", str(EXAMPLE), cwd=own))
    assert set(scores) == set(REQUEST["candidates"])
    assert len(set(scores.values())) > 30


def test_an_error_in_the_users_code_names_its_line(
    workspace: Path, tackboard: Callable[..., Answer], tmp_path: Path
) -> None:
    source = EXAMPLE.read_text().replace("weights @ events", "weights @ events.T")
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "weights @ events.T" in text)
    (tmp_path / "mine.py").write_text(source)
    settings = ["--set", f"data.dataset={workspace / 'datasets' / 'tiny'}", "--set", "model.tables.dim=4"]
    answer = tackboard("train", "mine.py:recipe", "--fast-dev-run", *settings, cwd=tmp_path)
    assert answer.code == 2
    (error, *more) = [line for line in answer.err.splitlines() if not line.startswith("training")]
    assert error.startswith(f"error: {tmp_path / 'mine.py'}:{line} raised RuntimeError")
    assert len(more) <= 2 and "Traceback" not in answer.err


@pytest.fixture(scope="module")
def url(own: Path, serving: Callable[..., Any]) -> Iterator[str]:
    with serving(own / "bundle", EXAMPLE) as address:
        yield address


@pytest.mark.parametrize("wire", [[], ["--binary"]], ids=["json", "binary"])
def test_the_server_gives_the_offline_scores(
    own: Path, url: str, wire: list[str], tackboard: Callable[..., Answer]
) -> None:
    served = scores_of(tackboard("score", "request.json", "--url", url, "--json", *wire, cwd=own))
    offline = ["score", "request.json", "--offline", "--bundle", "bundle", "--code", str(EXAMPLE), "--json"]
    expected = scores_of(tackboard(*offline, cwd=own))
    largest = max(abs(score) for score in expected.values())
    assert served.keys() == expected.keys()
    assert max(abs(served[item] - expected[item]) for item in expected) <= 1e-5 * largest


@pytest.fixture(scope="module")
def steps(workspace: Path) -> TrainingSteps:
    config = load_code(EXAMPLE).recipe()
    source = open_sequences(workspace / "datasets" / "tiny", ("click", "save", "share"), features=features_for(config))
    return TrainingSteps(source, config.data, config.model.tables, seed=0)


def prefixes_of(batch: SequenceBatch, steps: TrainingSteps) -> SequenceBatch:
    """For each positive event, in order, the events of its history before it, as a batch of their own."""
    offsets, positive = batch.offsets.tolist(), batch.is_positive.tolist()
    spans = [
        (begin, event) for begin, end in itertools.pairwise(offsets) for event in range(begin, end) if positive[event]
    ]
    events = np.concatenate([np.arange(begin, event) for begin, event in spans])
    history = sequence_column(
        np.array([event - begin for begin, event in spans]),
        item=Column(ID, batch.item_ids[batch.items].numpy()[events]),
        action=Column(INT, batch.actions.numpy()[events]),
        surface=Column(INT, batch.surfaces.numpy()[events]),
        time=Column(TIME, batch.times_ms.numpy()[events]),
    )
    return make_batch(history=history, users=np.arange(len(spans)), hashing=steps.hashing)


@torch.no_grad()
def test_training_scores_with_the_vector_that_serving_computes(steps: TrainingSteps) -> None:
    # Causality: the loss of an event, computed from `encode_users` of what came before it, is the loss of training.
    torch.manual_seed(3)
    model: Any = build_model(load_code(EXAMPLE).recipe().model, steps.source.vocabulary)
    batch = steps[0]
    assert bool((~batch.is_positive).any()), "the batch holds events that are no positives too"
    users = model.encode_users(prefixes_of(batch, steps))
    items = model.encode_items(batch.item_rows)
    expected = next_item_loss(users, items, batch, model.scale, correct_popularity=True, mask_same_user=True)
    assert float(model.loss(batch).loss) == pytest.approx(float(expected), rel=1e-5)


@torch.no_grad()
def test_an_empty_history_has_a_vector(steps: TrainingSteps) -> None:
    model: Any = build_model(load_code(EXAMPLE).recipe().model, steps.source.vocabulary)
    columns = dict.fromkeys(("item", "action", "surface", "time"), Column.of(INT, []))
    batch = make_batch(history=sequence_column(np.zeros(1, dtype=np.int64), **columns), hashing=steps.hashing)
    vector = model.encode_users(batch)
    assert vector.shape == (1, model.tables.width)
    assert float(vector.norm()) == pytest.approx(1.0, rel=1e-5)


def test_the_example_is_short() -> None:
    source = EXAMPLE.read_text()
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            told |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [text for number, text in enumerate(source.splitlines(), 1) if text.strip() and number not in told]
    assert len(lines) <= 60
