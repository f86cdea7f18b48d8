"""A ranker is trained on the batches that it scores: features of every type, tensor by tensor.

A labelled dataset with attributes of users and items that change, contexts and late events. A model of requests reads
ids, times, numbers, vectors, id lists and number lists of user, item, context and events. Its training batches come
from the dataset; the scorer builds the same requests from what a caller would send, as of the time of the request.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tackboard.batch import Feature, Jagged, RequestBatch
from tackboard.batch.batches import Batch
from tackboard.bundle.signature import Signature
from tackboard.core import keyed_random
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.cluster import StepWorker, _for_workers, batch_from_bytes, batch_to_bytes, tasks_of
from tackboard.data.labels import Label, LabelConfig
from tackboard.data.request_layout import label_dataset, read_requests
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps, RequestWindow
from tackboard.events.dataset import open_dataset, write_dataset
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Bool, Context, Events, Float, Id, Int, Item, List, Request, Time, User, Vector
from tackboard.features.standard import features_for_model
from tackboard.models.interface import LossOutput, ModelConfig, build_model
from tackboard.models.tables import TableConfig
from tackboard.ops.row_ids import row_ids
from tackboard.scoring.scorer import Scorer

MAX_HISTORY, NUM_USERS, NUM_ITEMS, NUM_REQUESTS = 5, 7, 15, 60
MINUTE, HOUR = 60_000, 3_600_000
START = 1_700_000_000_000
CHANGE = START + 30 * MINUTE
"""When every attribute takes its second value."""
ONLY_TRAINING_KNOWS = ("request_ms", "positions", "weights", "labels.", "known.", "users", "is_positive", "item_log_q")


def draw(*key: int) -> float:
    return float(keyed_random.uniform(77, *key)[0])


def numbers(count: int, *key: int) -> list[float]:
    return [round(draw(*key, place), 3) - 0.5 for place in range(count)]


def attributes_of(kind: int, id_: int, time_ms: int) -> dict[str, Any]:
    """One value of every type, for a user, an item or a request; lists may be empty, values may be missing."""
    key = (kind, id_, int(time_ms >= CHANGE))
    ids = [int(draw(*key, 1, place) * 2**40) for place in range(int(draw(*key, 2) * 4))]
    return {
        "group": None if draw(*key, 3) < 0.3 else int(draw(*key, 4) * 2**60),
        "tags": None if draw(*key, 5) < 0.2 else ids,
        "bids": None if draw(*key, 6) < 0.2 else numbers(int(draw(*key, 7) * 4), *key, 8),
        "look": None if draw(*key, 9) < 0.2 else numbers(3, *key, 10),
        "price": None if draw(*key, 11) < 0.2 else draw(*key, 12) * 100,
        "born": START - int(draw(*key, 13) * 10**9),
        "ok": draw(*key, 14) < 0.5,
        "sizes": [int(value * 10) for value in numbers(int(draw(*key, 15) * 3), *key, 16)],
    }


TYPES = {
    "group": pa.int64(), "tags": pa.list_(pa.int64()), "bids": pa.list_(pa.float64()), "price": pa.float64(),
    "look": pa.list_(pa.float32(), 3), "born": pa.int64(), "ok": pa.bool_(), "sizes": pa.list_(pa.int64()),
}  # fmt: skip
DECLARED = {
    "group": Id, "tags": List(Id), "bids": List(Float), "look": Vector(3), "price": Float, "born": Time, "ok": Bool,
    "sizes": List(Int),
}  # fmt: skip
FILLED = {"group": -1, "tags": [], "bids": [], "look": 0.25, "price": 0.0, "born": 0, "ok": False, "sizes": []}
KINDS = {"user": 0, "item": 1, "context": 2}


def own_features() -> FeatureSet:
    user, item, context = User(**DECLARED), Item(**DECLARED), Context(**DECLARED)
    events, request = Events(), Request()
    named = {
        f"{kind}_{name}": getattr(entity, name).fill_missing(value)
        for kind, entity in (("user", user), ("item", item), ("context", context))
        for name, value in FILLED.items()
    }
    last = events.newest(3)
    return FeatureSet(
        "ads",
        **named,
        last_items=last.collect(events.item),
        last_times=last.collect(events.time),
        now=request.time,
        seen=events.newest(MAX_HISTORY).matching(events.item, item.id).count(),
    )


READS = ("history.item", "history.action", "history.gap", *own_features().plan.features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdRankerConfig(ModelConfig):
    """A model of requests."""

    batch_type: ClassVar[type[Batch]] = RequestBatch

    @property
    def reads(self) -> tuple[str, ...]:
        return READS

    def build(self, vocabulary: Vocabulary) -> nn.Module:
        del vocabulary
        return AdRanker()


class AdRanker(nn.Module):
    """Adds a vector for every feature of a candidate; keeps the batches that it scored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)
        self.scale, self.project = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 4))
        self.head = nn.Linear(4, 1)
        self.scored: list[RequestBatch] = []

    def vectors(self, feature: Feature) -> torch.Tensor:
        if isinstance(feature, Jagged):
            rows = torch.repeat_interleave(feature.lengths())
            total = torch.zeros(len(feature.lengths()), 4, device=rows.device)
            return total.index_add(0, rows, self.vectors(feature.values))
        if feature.dtype == torch.int64:
            return self.table(row_ids(feature, 1, 64, seed=3)[:, 0])
        return feature @ self.project if feature.dim() == 2 else feature.float()[:, None] * self.scale

    def logits(self, batch: RequestBatch) -> torch.Tensor:
        events = Jagged(batch.histories.item_ids[batch.histories.items], batch.histories.offsets)
        total = batch.expand(self.vectors(events)) + self.table(batch.candidate_rows()[:, 0])
        names = [*batch.histories.request, *batch.features]
        return self.head(total + sum(self.vectors(batch.of_candidates(name)) for name in names)).squeeze(1)

    def loss(self, batch: RequestBatch) -> LossOutput:
        known = batch.known["click"]
        losses = nn.functional.binary_cross_entropy_with_logits(self.logits(batch)[known], batch.labels["click"][known])
        return LossOutput(losses, {})

    def scores(self, batch: RequestBatch) -> torch.Tensor:
        self.scored.append(batch)
        return self.logits(batch).sigmoid()


CONFIG = AdRankerConfig(tables=TableConfig(num_hashes=2, num_rows=64, dim=8), max_history=MAX_HISTORY)


def features(vocabulary: Vocabulary, stride: int) -> FeatureSet:
    own = own_features()
    return features_for_model(READS, vocabulary, MAX_HISTORY, own, of_requests=True, anchor_stride=stride)


def all_events() -> list[dict[str, Any]]:
    """Two events of every request, the second without a context; every seventh is received 20 minutes late."""
    rows = []
    for number in range(2 * NUM_REQUESTS):
        request = number // 2
        time_ms = START + request * MINUTE + number % 2 * 1000
        context = attributes_of(KINDS["context"], request, START)
        rows.append(
            {
                "user": request % NUM_USERS,
                "item": int(draw(3, number) * NUM_ITEMS),
                "action": "click" if draw(4, number) < 0.5 else "view",
                "surface": "home",
                "time_ms": time_ms,
                "received_ms": time_ms + (20 * MINUTE if number % 7 == 0 else 300),
                "order": number,
                "request": request,
                "context": None if number % 2 or request % 5 == 0 else json.dumps(context),
            }
        )
    return rows


EVENTS = all_events()


def versions(kind: str, count: int) -> pa.Table:
    rows = [
        {kind: id_, "valid_from_ms": since, **attributes_of(KINDS[kind], id_, since)}
        for id_ in range(count)
        for since in (0, CHANGE)
    ]
    schema = pa.schema([(kind, pa.int64()), ("valid_from_ms", pa.int64()), *TYPES.items()])
    return pa.Table.from_pylist(rows, schema=schema)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ads")
    events = pa.Table.from_pylist(EVENTS)
    for name in ("action", "surface"):
        events = events.set_column(
            events.schema.get_field_index(name), name, events[name].combine_chunks().dictionary_encode()
        )
    shown = [
        {"request": request, "position": place, "item_id": int(draw(6, request, place) * NUM_ITEMS)}
        for request in range(NUM_REQUESTS)
        for place in range(1 + request % 4)
    ]
    schema = pa.schema([("request", pa.int64()), ("position", pa.int32()), ("item_id", pa.int64())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tackboard.events.dataset.ROWS_PER_BUCKET", 50)
        write_dataset(
            root,
            "ads",
            events,
            item_attributes=versions("item", NUM_ITEMS),
            user_attributes=versions("user", NUM_USERS - 1),  # one user of whom nothing is known
            impressions=pa.Table.from_pylist(shown, schema=schema),
        )
    label_dataset(open_dataset(root / "ads"), LabelConfig(labels=(Label("click", HOUR),)), quiet=True)
    return root / "ads"


@pytest.fixture(scope="module", params=[1, 3])
def stride(request: pytest.FixtureRequest) -> int:
    """Of the anchors at which histories begin; with 1 there are none."""
    return int(request.param)


@pytest.fixture(scope="module")
def source(dataset: Path, stride: int) -> RequestSource:
    return RequestSource(
        RequestConfig(validation_share=0.0, test_share=0.0, dataset=str(dataset), max_history=MAX_HISTORY),
        features=functools.partial(features, stride=stride),
    )


@pytest.fixture(scope="module")
def alone(source: RequestSource) -> dict[tuple[int, int], RequestBatch]:
    """The training batch of each request by itself, by user and time."""

    def deal(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(len(lengths)), np.arange(len(lengths) + 1)

    buckets = np.arange(source.dataset.layout.num_buckets)
    window = RequestWindow(source, buckets, deal, CONFIG.tables, lambda table: np.full(len(table.times), True))
    batches = [window.batch(place) for place in range(NUM_REQUESTS)]
    return {(int(batch.histories.users[0]), int(batch.request_ms[0])): batch for batch in batches}


@pytest.fixture(scope="module")
def scorer(stride: int) -> Scorer:
    torch.manual_seed(0)
    vocabulary = Vocabulary(actions=("click", "view"), surfaces=("home",))
    signature = Signature(
        format_version=2,
        name="ads",
        version="1",
        id_type="int64",
        actions=vocabulary.actions,
        surfaces=vocabulary.surfaces,
        max_history=MAX_HISTORY,
        model={},
        tables={},
        lineage={},
        user_type="int64",
        reads=READS,
    )
    # As a bundle would hold it: read back from JSON.
    stored = FeatureSet.from_json(features(vocabulary, stride).to_json())
    return Scorer(signature, build_model(CONFIG, vocabulary).eval(), CONFIG.tables, stored)


def ask(scorer: Scorer, row: dict[str, Any]) -> np.ndarray:
    """The scores of a request of requests.parquet, from what a caller knows and sends at that time."""
    user, now_ms = row["user_id"], row["time_ms"]
    known = [event for event in EVENTS if event["user"] == user and event["received_ms"] < now_ms]
    context = attributes_of(KINDS["context"], row["request"], START) if row["request"] % 5 else {}
    sent = {f"context_{name}": [value] for name, value in context.items()}
    if user < NUM_USERS - 1:
        sent |= {f"user_{name}": [value] for name, value in attributes_of(KINDS["user"], user, now_ms).items()}
    about = [attributes_of(KINDS["item"], item, now_ms) for item in row["item_id"]]
    sent |= {f"candidate_{name}": [each[name] for each in about] for name in TYPES}
    request = scorer.reader.read(
        {name: [event[name] for event in known] for name in ("item", "action", "surface", "time_ms")},
        row["item_id"],
        request_ms=now_ms,
        user=user,
        attributes=sent,
    )
    return scorer.score(request)


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch by its path, in order."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    parts = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    for key, part in parts.items():
        yield from named_tensors(part, f"{name}.{key}" if name else key)


def compared(batch: RequestBatch) -> dict[str, torch.Tensor]:
    """What scores may depend on."""
    found = dict(named_tensors(batch))
    return {
        name: tensor
        for name, tensor in found.items()
        if not name.removeprefix("histories.").startswith(ONLY_TRAINING_KNOWS)
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def test_what_training_reads_is_what_the_scorer_builds(
    dataset: Path, alone: dict[tuple[int, int], RequestBatch], scorer: Scorer, stride: int
) -> None:
    rows = read_requests(open_dataset(dataset)).to_pylist()
    assert len(rows) == len(alone) == NUM_REQUESTS
    model = scorer.model
    for row in rows:
        trained = alone[row["user_id"], row["time_ms"]]
        scores = ask(scorer, row)
        assert_same(compared(trained), compared(model.scored[-1]))
        with torch.inference_mode():
            assert np.array_equal(model.scores(trained).numpy(), scores)
    # All of that is there, and not by chance empty.
    lengths = [batch.histories.num_events for batch in alone.values()]
    assert min(lengths) == 0
    assert max(lengths) == MAX_HISTORY
    is_full = [sum(e["user"] == user and e["received_ms"] < now for e in EVENTS) >= MAX_HISTORY for user, now in alone]
    assert {length for length, full in zip(lengths, is_full, strict=True) if full} == {5, 4, 3}.intersection(
        range(MAX_HISTORY - stride + 1, MAX_HISTORY + 1)
    )
    for name in READS[3:]:
        found = [batch.of_candidates(name) for batch in alone.values()]
        lists = [feature for feature in found if isinstance(feature, Jagged)]
        values = torch.cat([feature.values if isinstance(feature, Jagged) else feature for feature in found])
        assert len(values.unique()) > 1, name
        if lists:
            assert len(lists) == NUM_REQUESTS
            assert {0, 1, 2} <= {int(length) for feature in lists for length in feature.lengths()}, name
        assert len(values.shape) == (2 if name.endswith("look") else 1)


def test_every_feature_lies_where_its_level_says(alone: dict[tuple[int, int], RequestBatch]) -> None:
    batch = next(iter(alone.values()))
    assert set(batch.features) == {*(f"item_{name}" for name in TYPES), "seen"}
    assert set(batch.histories.request) == set(READS[3:]) - set(batch.features)
    kinds = {"group": torch.int64, "born": torch.int64, "price": torch.float32, "ok": torch.bool, "look": torch.float32}
    for name, tensor in named_tensors(batch.features):
        inner, *_ = name.removeprefix("item_").split(".")
        expected = {"tags": torch.int64, "bids": torch.float32, "sizes": torch.int64, "seen": torch.int64, **kinds}
        assert tensor.dtype == (torch.int64 if name.endswith("offsets") else expected[inner]), name


def test_several_requests_are_the_single_ones(
    source: RequestSource, alone: dict[tuple[int, int], RequestBatch], scorer: Scorer
) -> None:
    config = RequestConfig(
        validation_share=0.0, test_share=0.0, dataset="", max_history=MAX_HISTORY, tokens_per_step=64, window_buckets=2
    )
    steps = RequestSteps(source, config, CONFIG.tables, seed=1)
    met = 0
    for number in range(steps.plan.steps_per_epoch):
        batch = steps[number]
        assert batch.num_requests > 1
        with torch.inference_mode():
            scores = scorer.model.scores(batch)
        for row in range(batch.num_requests):
            single = alone[int(batch.histories.users[row]), int(batch.request_ms[row])]
            assert_same(part_of(batch, row), part_of(single, 0))
            with torch.inference_mode():
                mine = scores[batch.request_of == row]
                assert torch.allclose(mine, scorer.model.scores(single), rtol=1e-5, atol=1e-6)
            met += 1
    assert met == NUM_REQUESTS


def part_of(batch: RequestBatch, row: int) -> dict[str, torch.Tensor]:
    """Everything of one request of a batch; items by their ids and rows."""
    histories, mine = batch.histories, torch.nonzero(batch.request_of == row).flatten()
    events = slice(int(histories.offsets[row]), int(histories.offsets[row + 1]))
    items, candidates = histories.items[events], batch.candidates[mine]
    parts: dict[str, Any] = {
        "items": histories.item_ids[items],
        "item_rows": histories.item_rows[items],
        "candidates": histories.item_ids[candidates],
        "candidate_rows": batch.candidate_rows()[mine],
        "columns": {name: column[events] for name, column in histories.columns.items()},
        "of_candidates": {
            name: feature.take(mine) if isinstance(feature, Jagged) else feature[mine]
            for name in (*histories.request, *batch.features)
            for feature in [batch.of_candidates(name)]
        },
        "positions": batch.positions[mine],
        "weights": batch.weights[mine],
        "labels": batch.labels["click"][mine],
        "known": batch.known["click"][mine],
    }
    return dict(named_tensors(parts))


def test_every_tensor_moves_and_travels(alone: dict[tuple[int, int], RequestBatch]) -> None:
    for batch in list(alone.values())[:10]:
        assert len(batch.tensors()) == len(dict(named_tensors(batch)))
        moved = batch.to(torch.device("meta"))
        assert {tensor.device.type for _, tensor in named_tensors(moved)} == {"meta"}
        assert_same(dict(named_tensors(batch_from_bytes(batch_to_bytes(batch)))), dict(named_tensors(batch)))


def test_a_worker_of_a_cluster_makes_the_same_batches(source: RequestSource) -> None:
    config = RequestConfig(
        validation_share=0.0, test_share=0.0, dataset="", max_history=MAX_HISTORY, tokens_per_step=64, window_buckets=2
    )
    steps = RequestSteps(source, config, CONFIG.tables, seed=1)
    numbers = list(range(steps.plan.first_step(1)))
    worker = StepWorker(None, world_size=2)
    worker.open(pickle.loads(pickle.dumps(_for_workers(steps))))
    came: dict[int, list[bytes]] = {0: [], 1: []}
    for task in tasks_of(steps, numbers):
        for block in worker(pa.table({"step": pa.array(task, pa.int64())})):
            came[block["rank"][0].as_py()] += block["tensors"][0].as_py()
    for rank, sent in came.items():
        share = RequestSteps(source, config, CONFIG.tables, seed=1, rank=rank, world_size=2)
        for number, data in zip(numbers, sent, strict=True):
            assert_same(dict(named_tensors(batch_from_bytes(data))), dict(named_tensors(share[number])))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on a machine with one")
def test_every_tensor_is_pinned_and_copied_to_a_gpu(alone: dict[tuple[int, int], RequestBatch], scorer: Scorer) -> None:
    batch = max(alone.values(), key=lambda each: each.num_tokens)
    pinned = batch.pin_memory()
    assert all(tensor.is_pinned() for _, tensor in named_tensors(pinned) if tensor.numel())
    there = pinned.to(torch.device("cuda"))
    assert {tensor.device.type for _, tensor in named_tensors(there)} == {"cuda"}
    torch.cuda.synchronize()
    assert_same(dict(named_tensors(there.to(torch.device("cpu")))), dict(named_tensors(batch)))


def test_a_loss_reaches_the_tables_through_every_feature(source: RequestSource, scorer: Scorer) -> None:
    config = RequestConfig(
        validation_share=0.0, test_share=0.0, dataset="", max_history=MAX_HISTORY, tokens_per_step=200, window_buckets=8
    )
    batch = RequestSteps(source, config, CONFIG.tables, seed=1)[0]
    assert batch.has_targets()
    scorer.model.loss(batch).loss.backward()
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in scorer.model.parameters())
    scorer.model.zero_grad()
