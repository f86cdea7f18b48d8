"""The evaluation of a stream: by hand on a small sample, and the oracle ahead of everybody."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig
from tackboard.core.errors import DataError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.stream import StreamConfig, StreamSource
from tackboard.evaluation.judged_events import JudgedEvents
from tackboard.evaluation.sampled_softmax import evaluate_stream, log_losses, loss_gap_closed, stream_rivals
from tackboard.events.synthetic.stream_law import StreamLawConfig
from tackboard.features.standard import features_for_model
from tackboard.models.interface import build_model
from tackboard.models.pinfm import PinFMConfig
from tackboard.models.tables import TableConfig

LAW = StreamLawConfig(num_items=600, num_topics=6, mean_events=8, max_events=16, num_users=500, num_test_users=300)
CONFIG = PinFMConfig(tables=TableConfig(num_hashes=2, num_rows=64, dim=4), width=8, max_history=6, num_time_buckets=0)


def open_stream() -> StreamSource:
    return StreamConfig(law=LAW).open(lambda names: features_for_model(CONFIG.reads, names, 16))


def fresh_model(source: StreamSource) -> Any:
    torch.manual_seed(0)
    return build_model(CONFIG, source.vocabulary)


def evaluate(source: StreamSource, **settings: Any) -> dict[str, Any]:
    given = {"num_items": 200, "cutoffs": (10,), "quiet": True} | settings
    return evaluate_stream(fresh_model(source), source, CONFIG.tables, CONFIG.max_history, **given)


def test_the_table_equals_a_plain_loop() -> None:
    source = open_stream()
    result = evaluate(source, chunk_users=7)
    law, sample = source.law, source.law.sample_items(200)
    chances = {"popularity": [], "oracle": []}  # type: dict[str, list[float]]
    for user in range(500, 800):
        length = int(law.num_events(np.array([user]))[0])
        items = law.items_of(np.array([user]), np.array([0, length]))
        if length < 2 or items[-1] not in sample:
            continue
        place = sample.tolist().index(items[-1])
        shares = np.exp(law.log_share(sample).astype(np.float64))
        forecast = law.next_topics(items[:-1], np.array([0, length - 1]))[0]
        truth = np.exp(law.log_rank_share(sample)) * forecast[law.topics_of_items(sample)]
        chances["popularity"].append(shares[place] / shares.sum())
        chances["oracle"].append(truth[place] / truth.sum())
    found = {row["name"]: row["log_loss"] for row in result["rows"]}
    assert result["num_users"] == len(chances["oracle"]) and result["num_items"] == 200
    for name, each in chances.items():
        assert found[name] == pytest.approx(-np.log(each).mean(), abs=2e-6)
    assert found["oracle"] < found["popularity"] < found["model"]
    assert result["gap_closed"] == loss_gap_closed(result["rows"]) < 0
    assert evaluate(source, chunk_users=1000)["rows"] == result["rows"]


def test_the_models_scores_are_those_of_its_loss() -> None:
    source = open_stream().over(np.arange(0, 600, 3))
    model, sequences = fresh_model(source), source.test_sequences(5)
    judged = JudgedEvents(np.arange(5), sequences.targets[:5])
    scores = stream_rivals(model, sequences, CONFIG.tables, CONFIG.max_history)["model"](judged)
    assert torch.as_tensor(scores).abs().max() <= 1 / CONFIG.loss.initial_temperature + 1e-3
    with torch.no_grad():
        model.log_inverse_temperature += math.log(2.0)
    doubled = stream_rivals(model, sequences, CONFIG.tables, CONFIG.max_history)["model"](judged)
    assert torch.allclose(torch.as_tensor(doubled), 2 * torch.as_tensor(scores), rtol=1e-4)


def test_log_losses_of_rows() -> None:
    scores = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    assert log_losses(scores, np.array([1, 0])) == pytest.approx([math.log(2.0), math.log(4 / 3)], abs=1e-6)


def test_fewer_users_and_no_target_at_all() -> None:
    source = open_stream()
    assert evaluate(source, max_users=20)["num_users"] <= 20
    with pytest.raises(DataError, match="no target of"):
        evaluate(source, max_users=1, num_items=2)
    assert loss_gap_closed([{"name": name, "log_loss": 1.0} for name in ("popularity", "model", "oracle")]) is None


def test_a_vocabulary_and_hashing_of_the_model_are_used() -> None:
    source = open_stream()
    assert source.vocabulary == Vocabulary(actions=("event",), surfaces=("default",))
    other = HashConfig(num_hashes=2, num_rows=32)
    rows = evaluate_stream(
        fresh_model(source), source, other, 6, num_items=50, cutoffs=(10,), max_users=30, quiet=True
    )["rows"]
    assert [row["name"] for row in rows] == ["popularity", "model", "oracle"]
