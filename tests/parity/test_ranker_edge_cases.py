"""Requests at the edge of what a ranker meets: each has scores, and they are those of the request alone.

The first table names batches by the lengths of histories and the numbers of candidates. For each batch and each way to
use a PinFM, a score must not depend on the other requests and candidates, and early fusion must equal appended
candidates. The second part writes a dataset with all of these requests, and scores it as `tackboard predict` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tackboard.batch import RequestBatch
from tackboard.batch.builder import make_requests
from tackboard.batch.items import distinct_items
from tackboard.checkpoint.store import find_checkpoint
from tackboard.core.config import apply_overrides
from tackboard.core.rundir import RunDirectory
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset
from tackboard.evaluation.prediction import open_for_prediction, predict
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.events.synthetic.world_items import CONTENT_WIDTH
from tackboard.export.exporter import export_bundle
from tackboard.features.column import Column, sequence_column
from tackboard.features.types import FLOAT, ID, INT, TIME, FeatureType
from tackboard.models.backbone import BackboneConfig
from tackboard.models.fusion import FusionConfig
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.ranker import ColdStartConfig, HeadConfig, Ranker, RankerConfig, RankerFeaturesConfig
from tackboard.models.recent_events import RecentEventsConfig
from tackboard.models.tables import TableConfig
from tackboard.recipes.demo import demo
from tackboard.recipes.finetune import finetune
from tackboard.scoring.scorer import Scorer
from tackboard.train.config import config_to_json
from tackboard.train.start import open_source
from tackboard.train.trainer import Trainer

WIDTH, NUM_ITEMS, MANY = 3, 50, 10_000
VOCABULARY = Vocabulary(actions=("click", "hide"), surfaces=("home",))
EARLY = FusionConfig(kind="early")
FUSIONS: dict[str, FusionConfig] = {
    "none": FusionConfig(kind="none"),
    "late-last": FusionConfig(kind="late-last"),
    "late-mean": FusionConfig(kind="late-mean"),
    "early": EARLY,
    "fixed length": dataclasses.replace(EARLY, fixed_length=4),
    "content and token": FusionConfig(kind="early", content="content", content_width=WIDTH, learnable_token=True),
}
CASES: dict[str, tuple[list[int], list[int]]] = {
    "users without history": ([0, 0, 5], [2, 3, 1]),
    "no user has a history": ([0, 0], [2, 3]),
    "one candidate": ([6], [1]),
    "one candidate each": ([6, 0, 3], [1, 1, 1]),
    "10,000 candidates": ([6, 2], [MANY, 3]),
    "all candidates of one user": ([4, 6, 0], [0, 7, 0]),
    "no candidate": ([3], [0]),
}
"""Name → events of each history, candidates of each request."""


def requests(lengths: list[int], counts: list[int], *, seed: int = 0) -> RequestBatch:
    """Requests with ages and content vectors of their candidates; every fifth candidate has no content."""
    random = np.random.default_rng(seed)
    num_events, num_candidates = sum(lengths), sum(counts)
    times = np.sort(random.integers(0, 10**9, num_events))
    history = sequence_column(
        np.array(lengths),
        item=Column.of(ID, random.integers(0, NUM_ITEMS, num_events)),
        action=Column.of(INT, random.integers(0, 2, num_events)),
        surface=Column.of(INT, np.zeros(num_events, dtype=np.int64)),
        time=Column.of(TIME, times),
        gap=Column.of(INT, random.integers(0, 20, num_events)),
    )
    assert history.fields is not None
    content = random.normal(size=(num_candidates, WIDTH)).astype(np.float32)
    content[::5] = 0.0
    candidates = random.integers(0, NUM_ITEMS, num_candidates)
    items = distinct_items(np.concatenate([history.fields["item"].values, candidates]), TABLES)
    return make_requests(
        history=history,
        items=items,
        request_of=np.repeat(np.arange(len(counts)), counts),
        features={
            "content": Column.of(FeatureType("vector", width=WIDTH), content),
            "age_days": Column.of(FLOAT, random.uniform(-1, 60, num_candidates)),
        },
    )


TABLES = TableConfig(num_hashes=2, num_rows=64, dim=8)


def ranker(name: str, **fusion: Any) -> Ranker:
    pinfm = PinFMConfig(tables=TABLES, width=16, max_history=8, num_positions=12, backbone=BackboneConfig(num_layers=2))
    torch.manual_seed(3)
    config = RankerConfig.on(
        pinfm,
        HeadConfig(labels=("click",), num_cross_layers=1, dropout=0.0),
        dataclasses.replace(FUSIONS[name], **fusion),
        recent=RecentEventsConfig(num_events=3, width=8, num_layers=1),
        features=RankerFeaturesConfig(vectors={"content": WIDTH}),
        cold_start=ColdStartConfig(age_feature="age_days"),
    )
    model = config.build(VOCABULARY)
    for parameter in model.parameters():  # Large enough that what a candidate reads decides its score.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def some(batch: RequestBatch, chosen: torch.Tensor) -> RequestBatch:
    """The same requests with some of their candidates."""
    features = {name: values[chosen] for name, values in batch.features.items()}  # type: ignore[index]
    return dataclasses.replace(
        batch, candidates=batch.candidates[chosen], request_of=batch.request_of[chosen], features=features
    )


def alone(batch: RequestBatch, request: int) -> RequestBatch:
    """One request of a batch by itself."""
    events = slice(int(batch.histories.offsets[request]), int(batch.histories.offsets[request + 1]))
    histories = dataclasses.replace(
        batch.histories,
        offsets=torch.tensor([0, events.stop - events.start]),
        users=batch.histories.users[request : request + 1],
        items=batch.histories.items[events],
        columns={name: values[events] for name, values in batch.histories.columns.items()},
        is_positive=batch.histories.is_positive[events],
    )
    own = some(batch, (batch.request_of == request).nonzero().squeeze(1))
    own = dataclasses.replace(own, histories=histories, request_ms=batch.request_ms[request : request + 1])
    return dataclasses.replace(own, request_of=torch.zeros_like(own.request_of))


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FUSIONS)
@torch.inference_mode()
def test_a_score_depends_on_its_own_request_only(name: str, case: str) -> None:
    model, batch = ranker(name), requests(*CASES[case])
    scores = model.scores(batch)
    assert scores.shape == (sum(CASES[case][1]),)
    assert scores.isfinite().all()
    for request in range(batch.num_requests):
        assert_equal(model.scores(alone(batch, request)), scores[batch.request_of == request])
    few = torch.arange(0, batch.num_candidates, max(1, batch.num_candidates // 7))
    for one in few:
        assert_equal(model.scores(some(batch, one[None])), scores[one][None])
    if batch.num_candidates > 10:
        assert scores.unique().numel() > 100, "scores tell candidates apart"


@pytest.mark.parametrize("case", [case for case in CASES if case != "no candidate"])
@pytest.mark.parametrize("name", ["early", "content and token"])
@torch.inference_mode()
def test_early_fusion_equals_appended_candidates(name: str, case: str) -> None:
    batch = requests(*CASES[case])
    if batch.num_candidates > MANY:  # Every candidate carries a whole sequence, so a part of them is enough.
        batch = some(batch, torch.arange(0, batch.num_candidates, 97))
    assert_equal(ranker(name).scores(batch), ranker(name, dcat=False).scores(batch))


@pytest.mark.parametrize("name", FUSIONS)
@torch.inference_mode()
def test_requests_of_one_user_with_one_history_score_alike(name: str) -> None:
    """Requests 0 and 2 are of one user at one time; request 1 is between them, of another user."""
    model, batch = ranker(name), requests([5, 2], [4, 3])
    events = torch.cat([torch.arange(7), torch.arange(5)])
    chosen = torch.cat([torch.arange(7), torch.arange(4)])
    histories = dataclasses.replace(
        batch.histories,
        offsets=torch.tensor([0, 5, 7, 12]),
        users=torch.tensor([1, 2, 1]),
        items=batch.histories.items[events],
        columns={column: values[events] for column, values in batch.histories.columns.items()},
        is_positive=batch.histories.is_positive[events],
    )
    twice = dataclasses.replace(
        some(batch, chosen),
        histories=histories,
        request_ms=torch.zeros(3, dtype=torch.int64),
        request_of=torch.tensor([0] * 4 + [1] * 3 + [2] * 4),
    )
    scores = model.scores(twice)
    assert_equal(scores[7:], scores[:4])
    assert_equal(scores[:7], model.scores(batch))


@pytest.mark.parametrize("name", FUSIONS)
@torch.inference_mode()
def test_users_without_history_are_told_apart_by_nothing_but_candidates(name: str) -> None:
    batch = requests([0, 0], [3, 3])
    chosen = torch.tensor([0, 1, 2, 0, 1, 2])
    same = dataclasses.replace(some(batch, chosen), request_of=torch.tensor([0, 0, 0, 1, 1, 1]))
    scores = ranker(name).scores(same)
    assert_equal(scores[3:], scores[:3])
    assert scores[:3].std() > 0


@pytest.mark.parametrize("days", [-1.0, 0.0, 3.0, 400.0])
@torch.inference_mode()
def test_scores_do_not_read_the_age(days: float) -> None:
    """An item that is born in the future has the age 0, and one without a birth -1 (recipes/ranking_features.py)."""
    model, batch = ranker("content and token"), requests([5, 2], [4, 3])
    aged = dataclasses.replace(batch, features={**batch.features, "age_days": torch.full((7,), days)})
    assert torch.equal(model.scores(aged), model.scores(batch))


@torch.inference_mode()
def test_without_content_the_token_is_that_of_the_id() -> None:
    model, batch = ranker("content and token"), requests([5, 2], [4, 3])
    without = dataclasses.replace(batch, features={**batch.features, "content": torch.zeros(7, WIDTH)})
    scores = model.scores(without)
    assert model.fusion is not None and model.fusion.content is not None
    model.fusion.content.weight.zero_()
    assert_equal(model.scores(without), scores)
    assert not torch.allclose(model.scores(batch), scores)


# ---- through files: tackboard predict ----

DAY, NOW = 86_400_000, 1_790_000_000_000
SHOWN: dict[int, list[int]] = {
    10: [1, 2],  # user 1 before any event
    11: [3],  # one candidate
    12: [4, 5, 6],  # the same user again: items of the future, and without features
    20: list(range(100, 100 + MANY)),  # user 2: 10,000 candidates
}
"""Request → items."""
BORN_LATER, UNKNOWN = 5, 6


def edge_dataset(root: Path) -> Path:
    """Two users; item 5 is born after all requests, and of item 6 and most others nothing is known."""
    asked = [(1, 10, 1), (1, 11, 3), (1, 12, 4), (2, 20, 100)]
    rows = [
        {
            "user": user,
            "item": item,
            "action": "save" if number % 2 else "click",
            "surface": "home",
            "time_ms": NOW + number * 60_000,
            "received_ms": NOW + number * 60_000,
            "order": number,
            "request": request,
        }
        for number, (user, request, item) in enumerate(asked)
    ]
    events = pa.Table.from_pylist(rows)
    for name in ("action", "surface"):
        place = events.schema.get_field_index(name)
        events = events.set_column(place, name, events[name].combine_chunks().dictionary_encode())
    shown = [
        {"request": request, "position": place, "item_id": item}
        for request, items in SHOWN.items()
        for place, item in enumerate(items)
    ]
    schema = pa.schema([("request", pa.int64()), ("position", pa.int32()), ("item_id", pa.int64())])
    known = [1, 2, 3, 4, BORN_LATER]
    births = [NOW - DAY] * 4 + [NOW + 30 * DAY]
    vectors = np.random.default_rng(1).normal(size=len(known) * CONTENT_WIDTH).astype(np.float32)
    items = pa.table(
        {
            "item": known,
            "birth_ms": births,
            "content": pa.FixedSizeListArray.from_arrays(pa.array(vectors), CONTENT_WIDTH),
        }
    )
    write_dataset(root, "edges", events, item_attributes=items, impressions=pa.Table.from_pylist(shown, schema=schema))
    labels = LabelConfig(labels=(Label("click", 3_600_000), Label("save", 3_600_000)))
    label_dataset(open_dataset(root / "edges"), labels, quiet=True)
    return root / "edges"


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pa.Table, Scorer, Path]]:
    """The scores of these requests by a ranker of `finetune-cold-start`, trained for one step."""
    folder = tmp_path_factory.mktemp("edges")
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    dataset = edge_dataset(folder)
    base = demo()
    small = dataclasses.replace(base.model, tables=TableConfig(num_hashes=2, num_rows=1024, dim=8), width=16)
    settings = [
        *("start.needs_run=false", "start.prefix=", "optimizer.multipliers={}"),
        *("training.steps=1", "training.num_threads=1"),
        *("model.recent.num_events=4", "model.recent.width=8"),
        *('data.labels=["click","save"]', 'model.head.labels=["click","save"]', "data.tokens_per_step=40000"),
        *("data.validation_share=0", "data.test_share=0", f"data.dataset={dataset}", "training.device=cpu"),
    ]
    config = apply_overrides(finetune("cold-start", dataclasses.replace(base, model=small)), settings)
    run = RunDirectory.create(folder, config.name, config_to_json(config))
    Trainer(config, run, open_source(config)).train(quiet=True)
    export_bundle(find_checkpoint(run.path), folder / "bundle", name="edges", version="1", tables="fp32")
    scorer = Scorer.load(folder / "bundle", num_threads=1)
    predict(open_for_prediction(open_dataset(dataset), scorer), scorer, folder / "bundle", folder / "out", quiet=True)
    yield pq.read_table(folder / "out" / "scores"), scorer, dataset
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("request_id", SHOWN)
def test_every_candidate_of_a_request_in_files_has_its_score(
    predicted: tuple[pa.Table, Scorer, Path], request_id: int
) -> None:
    rows = predicted[0].filter(pa.compute.equal(predicted[0]["request"], request_id))
    assert rows["item_id"].to_pylist() == SHOWN[request_id]
    scores = rows["score"].to_numpy()
    assert np.isfinite(scores).all()
    assert len(np.unique(scores)) > 0.8 * len(scores), "scores tell candidates apart"


def test_scores_in_files_are_those_of_each_candidate_alone(predicted: tuple[pa.Table, Scorer, Path]) -> None:
    """The features say what is known: age 0 before the birth, -1 without a birth, zeros without a content vector."""
    rows, scorer, dataset = predicted
    source = open_for_prediction(open_dataset(dataset), scorer)
    expected = {(row["request"], row["item_id"]): row["score"] for row in rows.to_pylist()}
    history = {name: [] for name in ("item", "action", "surface", "time_ms")}
    known = source.dataset.read_items().to_pydict()
    vectors = dict(zip(known["item_id"], known["content"], strict=True))
    for item in SHOWN[10]:
        request = scorer.reader.read(
            history, [item], request_ms=NOW, user=1, attributes={"candidate_content": [vectors[item]]}
        )
        assert scorer.score(request) == pytest.approx([expected[10, item]], rel=1e-4, abs=1e-5)
