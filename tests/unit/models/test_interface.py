"""What a model and its config must have, and what a model that retrieves gets from its vectors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tackboard.batch import HashConfig, RequestBatch, SequenceBatch
from tackboard.batch.builder import make_batch, make_request
from tackboard.core.errors import ConfigError, UsageError
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.column import Column, sequence_column
from tackboard.features.language import Events, FeatureSet
from tackboard.features.standard import features_for_model
from tackboard.features.types import ID
from tackboard.models.interface import LossOutput, ModelConfig, RetrievalModel, build_model, can_retrieve

VOCABULARY = Vocabulary(actions=("click",), surfaces=("home",))
HASHING = HashConfig(num_hashes=1, num_rows=64, method="modulo")


class Incomplete(nn.Module):
    def loss(self, batch: Any) -> None: ...


class Ranker(nn.Module):
    def loss(self, batch: RequestBatch) -> None: ...
    def scores(self, batch: RequestBatch) -> None: ...


class Retriever(RetrievalModel):
    """A user is the sum of the items; an item is (1, id, id²)."""

    def loss(self, batch: SequenceBatch) -> LossOutput:
        return LossOutput(torch.zeros(()), {})

    def encode_users(self, batch: SequenceBatch) -> torch.Tensor:
        items = self.encode_items(batch.item_rows)[batch.items]
        rows = torch.repeat_interleave(torch.arange(batch.num_rows), batch.lengths())
        return torch.zeros(batch.num_rows, 3).index_add(0, rows, items)

    def encode_items(self, item_rows: torch.Tensor) -> torch.Tensor:
        ids = item_rows[:, 0].float() / 8
        return torch.stack([torch.ones_like(ids), ids, ids**2], dim=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    model: Any
    max_history: int = 5

    def build(self, vocabulary: Vocabulary) -> Any:
        return self.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingConfig(Config):
    reads: tuple[str, ...] = ("history.item", "history.gap", "num_before")


def reads_of(config: ModelConfig, own: FeatureSet | None = None) -> FeatureSet:
    return features_for_model(config.reads, VOCABULARY, config.max_history, own)


def test_a_model_reads_what_its_config_says_or_the_standard_columns() -> None:
    assert reads_of(Config(model=None)).reads() == [
        "history.item",
        "history.action",
        "history.surface",
        "history.time",
    ]
    own = FeatureSet("own", num_before=Events().count(), unread=Events().distinct(Events().item))
    features = reads_of(ReadingConfig(model=None), own)
    assert features.reads() == ["history.item", "history.gap", "num_before"]
    assert features.plan.trimmed(["history"]).newest_events == 5
    with pytest.raises(UsageError, match="the model reads num_before, which is not a standard feature"):
        reads_of(ReadingConfig(model=None))


def test_a_model_without_the_methods_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Incomplete lacks scores"):
        build_model(Config(model=Incomplete()), VOCABULARY)
    with pytest.raises(ConfigError, match="lacks loss"):
        build_model(Config(model=object()), VOCABULARY)
    with pytest.raises(ConfigError, match="object is not the config of a model"):
        build_model(object(), VOCABULARY)  # type: ignore[arg-type]


def test_only_a_model_with_vectors_can_retrieve() -> None:
    assert not can_retrieve(build_model(Config(model=Ranker()), VOCABULARY))
    assert can_retrieve(build_model(Config(model=Retriever()), VOCABULARY))


def test_many_requests_are_scored_as_each_alone() -> None:
    histories = [[3, 5], [], [9, 9, 2]]
    candidates = [[7], [3, 2], [9, 1, 4]]
    model = Retriever()
    alone = [
        model.scores(
            make_request(
                history=sequence_column(np.array([len(history)]), item=Column.of(ID, history)),
                request={},
                candidates=np.array(chosen),
                hashing=HASHING,
            )
        )
        for history, chosen in zip(histories, candidates, strict=True)
    ]
    together = make_batch(
        history=sequence_column(
            np.array([len(history) for history in histories]), item=Column.of(ID, [i for h in histories for i in h])
        ),
        hashing=HASHING,
    )
    flat = [item for chosen in candidates for item in chosen]
    ids, places = np.unique([*together.item_ids.tolist(), *flat], return_inverse=True)
    rows = torch.from_numpy(ids)[:, None]
    num_known = len(together.item_ids)
    batch = RequestBatch(
        histories=dataclasses.replace(
            together,
            items=torch.from_numpy(places[:num_known])[together.items],
            item_ids=torch.from_numpy(ids),
            item_rows=rows,
        ),
        request_ms=torch.zeros(3, dtype=torch.int64),
        request_of=torch.tensor([0, 1, 1, 2, 2, 2]),
        candidates=torch.from_numpy(places[num_known:]),
        positions=torch.zeros(6, dtype=torch.int64),
        weights=torch.ones(6),
        labels={},
        known={},
        features={},
    )
    assert torch.allclose(model.scores(batch), torch.cat(alone))
    assert batch.num_tokens == 11


def test_a_model_pulls_in_batches_and_not_the_log_or_the_language() -> None:
    """Who reads PinFM reads models and batches: about 5 thousand lines, with every backbone."""
    code = (
        "import sys; import tackboard.models.pinfm; "
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('tackboard') and m.__file__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(name) for name in done.stdout.split()]
    folders = {path.parent.name for path in files}
    assert not folders & {"events", "features", "data", "train", "checkpoint"}
    lines = {path: len(path.read_text().splitlines()) for path in files}
    assert sum(lines.values()) < 5_100
