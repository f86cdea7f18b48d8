"""A stream as numbered steps: every step has its size, stands alone, and no test user is in any of them."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.checkpoint.trained import FIELDS
from tackboard.core.config import from_dict, to_dict
from tackboard.core.errors import ConfigError, UsageError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.loader import stored_batch
from tackboard.data.stream import StreamConfig, StreamSource, StreamSteps
from tackboard.events.dataset import Dataset
from tackboard.events.synthetic.stream_law import StreamLawConfig
from tackboard.features.feature_set import FeatureSet
from tackboard.features.standard import request_features, standard_features

LAW = StreamLawConfig(num_items=600, num_topics=6, mean_events=8, max_events=16, num_users=500, num_test_users=40)
HASHING = HashConfig(num_hashes=3, num_rows=64)


def config(**changes: Any) -> StreamConfig:
    return StreamConfig(**{"law": LAW, "tokens_per_step": 64, "validation_share": 0.1} | changes)


def open_stream(wanted: StreamConfig | None = None) -> StreamSource:
    return (wanted or config()).open(lambda names: standard_features(names, 16))


def steps_of(wanted: StreamConfig, part: Any = "train", seed: int = 3) -> StreamSteps:
    return wanted.steps(open_stream(wanted), HASHING, seed, part=part)


def same(one: SequenceBatch, other: SequenceBatch) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_steps_have_their_size_and_stand_alone() -> None:
    steps = steps_of(config(uniform_negatives=5))
    batches = [steps[number] for number in range(4)]
    assert {batch.num_events for batch in batches} == {64}
    assert all(int(batch.lengths().min()) >= 1 and int(batch.lengths().max()) <= 16 for batch in batches)
    assert same(steps_of(config(uniform_negatives=5))[3], batches[3])
    users = torch.cat([batch.users for batch in batches])
    assert len(torch.unique(users)) == len(users)
    # The next epoch has the same histories, but draws other negatives.
    again = steps[steps.plan.first_step(1)]
    assert torch.equal(again.users, batches[0].users) and not torch.equal(again.sampled, batches[0].sampled)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_workers_change_nothing(num_workers: int) -> None:
    steps = steps_of(config(uniform_negatives=5))
    numbers = [0, 1, 2, 5, steps.plan.steps_per_epoch + 1]
    found = list(pickle.loads(pickle.dumps(steps)).iterate(numbers, num_workers))
    assert [number for number, _ in found] == numbers
    assert all(same(batch, steps[number]) for number, batch in found)


def test_a_batch_equals_the_slow_one_of_stored_events() -> None:
    steps = steps_of(config())
    batch, source = steps[2], steps.source
    sequences = source.histories_of(batch.users.numpy(), batch.lengths().numpy())
    starts, lengths = sequences.offsets[:-1], np.diff(sequences.offsets)
    slow = stored_batch(sequences, np.arange(len(starts)), starts, lengths, HASHING, frequencies=source.law)  # type: ignore[arg-type]
    assert same(batch, slow)
    assert set(batch.columns) == {"action", "surface", "time", "gap"} and set(batch.actions.tolist()) == {1}
    ids = batch.item_ids.numpy()
    assert np.array_equal(batch.item_log_q.numpy(), source.law.log_share(ids))


def test_parts_share_no_user() -> None:
    users = {}
    for part in ("train", "validation", "test"):
        steps = steps_of(config(), part)
        users[part] = {user for number in range(steps.plan.first_step(1)) for user in steps[number].users.tolist()}
    assert max(users["train"]) < 450 <= min(users["validation"]) <= max(users["validation"]) < 500
    assert min(users["test"]) == 500
    held_out = open_stream().test_sequences()
    assert min(held_out.user_ids) >= 500 and len(held_out.user_ids) <= 40
    assert np.diff(held_out.offsets).min() >= 2 and len(open_stream().test_sequences(3).user_ids) == 3


def test_the_source_says_what_a_checkpoint_records() -> None:
    source = open_stream()
    lineage = source.lineage()
    assert lineage["dataset"] == "stream" and lineage["law"] == to_dict(LAW)
    assert {name.partition(".")[2] for name in FIELDS if name.startswith("lineage.")} <= set(lineage)
    other = config(law=dataclasses.replace(LAW, seed=1))
    assert open_stream(other).snapshot != source.snapshot == open_stream().snapshot
    assert len(source.catalogue) == source.dataset.num_items == 600
    assert source.dataset.num_events == 4000 and source.dataset.item_type == source.dataset.user_type == "int64"
    assert source.vocabulary == Vocabulary(actions=("event",), surfaces=("default",))
    assert from_dict(StreamConfig, to_dict(config())) == config()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"dataset": "datasets/demo"}, "data.dataset"),
        ({"features": "own.py"}, "data.features"),
        ({"ray_address": "auto"}, "data.ray_address"),
        ({"tokens_per_step": 31}, "data.tokens_per_step"),
        ({"uniform_negatives": -1}, "data.uniform_negatives"),
        ({"evaluated_items": 1}, "data.evaluated_items"),
    ],
)
def test_settings_that_a_stream_cannot_have_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(**wrong)


def test_too_few_users_and_other_data_and_other_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fill one step"):
        steps_of(config(validation_share=0.0), "validation")
    for other in (Path("datasets/demo"), Dataset(Path("datasets/demo"), {}, {})):
        with pytest.raises(UsageError, match="datasets/demo is a dataset"):
            config().open(lambda names: standard_features(names, 16), dataset=other)
    source = open_stream()
    assert config().open(lambda names: standard_features(names, 16), dataset=source.dataset).snapshot == source.snapshot

    def with_request(names: Vocabulary) -> FeatureSet:
        return standard_features(names, 16).merged(request_features())

    with pytest.raises(ConfigError, match="only histories"):
        config().open(with_request)
