"""What a worker of a cluster makes and what arrives, without a cluster; tests/dist/test_cluster.py starts one."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from tackboard.batch import HashConfig, RequestBatch, SequenceBatch
from tackboard.core.errors import DataError, UsageError
from tackboard.data import cluster
from tackboard.data.cluster import StepWorker, batch_from_bytes, batch_to_bytes, join_cluster, tasks_of
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.request_loader import RequestConfig, RequestSource, RequestSteps
from tackboard.data.source import open_sequences
from tackboard.events.dataset import open_dataset

CONFIG = DataConfig(dataset="tiny", max_length=8, tokens_per_step=40, window_buckets=2)


@pytest.fixture
def steps(bucketed_dataset: Path) -> TrainingSteps:
    return TrainingSteps(open_sequences(bucketed_dataset), CONFIG, HashConfig(num_hashes=2, num_rows=16), seed=3)


def tensors(batch: SequenceBatch) -> list[tuple[str, torch.dtype, object]]:
    found = []
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        named = value.items() if isinstance(value, dict) else [("", value)]
        found += [(f"{field.name}.{name}", tensor.dtype, tensor.tolist()) for name, tensor in named]
    return found


def test_a_batch_survives_the_journey(steps: TrainingSteps) -> None:
    batch = steps[0]
    odd = {"zeta": torch.rand(batch.num_events, 3), "alpha": torch.rand(batch.num_events) > 0.5, "a/b": torch.ones(2)}
    batch = dataclasses.replace(batch, request=odd)
    arrived = batch_from_bytes(batch_to_bytes(batch))
    assert tensors(arrived) == tensors(batch)
    assert list(arrived.request) == ["zeta", "alpha", "a/b"]
    assert arrived.item_rows.shape == batch.item_rows.shape


def test_an_empty_share_survives_the_journey(steps: TrainingSteps) -> None:
    steps.rank, steps.world_size = 99, 100
    empty = steps[0]
    assert empty.num_events == 0
    arrived = batch_from_bytes(batch_to_bytes(empty))
    assert tensors(arrived) == tensors(empty)
    assert arrived.item_rows.shape == empty.item_rows.shape == (0, 2)


def test_a_task_is_the_steps_of_a_window(steps: TrainingSteps) -> None:
    numbers = [step for step in range(steps.plan.first_step(3)) if step != 4]
    tasks = tasks_of(steps, numbers)
    assert [step for task in tasks for step in task] == numbers
    windows = [{steps.plan.locate(step)[:2] for step in task} for task in tasks]
    assert {len(found) for found in windows} == {1}
    assert len(tasks) == len(set.union(*windows)) == 3 * steps.plan.num_windows > 6
    assert tasks_of(steps, []) == []


@pytest.mark.parametrize("block_bytes", [1, 1 << 30])
def test_a_worker_makes_every_share_and_reads_each_window_once(
    steps: TrainingSteps, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(cluster, "BLOCK_BYTES", block_bytes)
    numbers = list(range(steps.plan.first_step(1)))
    before = steps.source.counters.num_rows
    worker = StepWorker(None, world_size=3)
    worker.open(steps)
    blocks = [
        block for task in tasks_of(steps, numbers) for block in worker(pa.table({"step": pa.array(task, pa.int64())}))
    ]
    assert steps.source.counters.num_rows - before == steps.source.dataset.num_events
    assert {block.num_rows for block in blocks} == {1}
    assert [block["rank"][0].as_py() for block in blocks] == [0, 1, 2] * (len(blocks) // 3)
    assert len(blocks) == 3 * (len(numbers) if block_bytes == 1 else steps.plan.num_windows)
    for rank in range(3):
        share = copy.copy(steps)
        share.rank, share.world_size = rank, 3
        mine = [block for block in blocks if block["rank"][0].as_py() == rank]
        assert [step for block in mine for step in block["steps"][0].as_py()] == numbers
        came = [batch_from_bytes(data) for block in mine for data in block["tensors"][0].as_py()]
        assert [tensors(batch) for batch in came] == [tensors(share[step]) for step in numbers]


def test_a_worker_makes_every_share_of_requests_and_reads_each_window_once(labelled_dataset: Path) -> None:
    config = RequestConfig(dataset=str(labelled_dataset), max_history=8, tokens_per_step=400, window_buckets=2)
    source = RequestSource(config)
    steps = RequestSteps(source, config, HashConfig(num_hashes=2, num_rows=16), seed=3)
    numbers = list(range(steps.plan.first_step(1)))
    assert steps.plan.num_windows > 1
    read, asked = source.counters.num_rows, source.request_counters.num_rows
    worker = StepWorker(None, world_size=2)
    worker.open(steps)
    tasks = [pa.table({"step": pa.array(task, pa.int64())}) for task in tasks_of(steps, numbers)]
    blocks = [block for task in tasks for block in worker(task)]
    assert source.counters.num_rows - read == source.dataset.num_events
    num_requests = steps.source.dataset.layout.offsets["requests"][-1]
    assert source.request_counters.num_rows - asked == num_requests, "each request was decoded once for both ranks"
    for rank in range(2):
        share = copy.copy(steps)
        share.rank, share.world_size = rank, 2
        mine = [block for block in blocks if block["rank"][0].as_py() == rank]
        came = [data for block in mine for data in block["tensors"][0].as_py()]
        assert came == [batch_to_bytes(share[step]) for step in numbers]
        arrived = batch_from_bytes(came[0])
        assert isinstance(arrived, RequestBatch) and batch_to_bytes(arrived) == came[0]
        assert arrived.num_candidates > arrived.num_requests > 0


def test_a_worker_does_not_read_another_snapshot(steps: TrainingSteps, tmp_path: Path) -> None:
    dataset = steps.source.dataset
    moved = copy.copy(steps)
    moved.source = copy.copy(steps.source)
    moved.source.dataset = dataclasses.replace(dataset, path=tmp_path / "absent")
    with pytest.raises(DataError, match=r"worker on .*absent.* missing(.|\n)*every machine"):
        StepWorker(None, 1).open(moved)
    shutil.copytree(dataset.path, tmp_path / "copy")
    moved.source.dataset = dataclasses.replace(dataset, path=tmp_path / "copy")
    StepWorker(None, 1).open(moved)
    assert open_dataset(tmp_path / "copy").manifest == dataset.manifest
    moved.source.dataset = dataclasses.replace(dataset, manifest={**dataset.manifest, "name": "other"})
    with pytest.raises(DataError, match="not the snapshot that the trainer reads"):
        StepWorker(None, 1).open(moved)


def test_without_ray_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="make install GROUP=ray"):
        join_cluster("auto")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_an_address_where_no_cluster_is_is_named_at_once(address: str) -> None:
    pytest.importorskip("ray", reason="make install GROUP=ray")
    with pytest.raises(UsageError, match=rf"data\.ray_address = {address}(.|\n)*ray start --head"):
        join_cluster(address)
