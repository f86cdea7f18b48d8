"""A trainer on a cluster of two raylets, run by test_cluster.py in a network of its own: what it saw, as JSON.

Every batch that comes is compared with the one that `TrainingSteps` makes in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

from tackboard.batch import HashConfig, SequenceBatch
from tackboard.core.errors import TackboardError
from tackboard.data import cluster
from tackboard.data.cluster import ClusterSteps
from tackboard.data.loader import DataConfig, TrainingSteps
from tackboard.data.request_loader import RequestConfig, RequestSteps
from tackboard.data.source import open_sequences
from tackboard.core.vocabulary import Vocabulary
from tackboard.features.feature_set import FeatureSet
from tackboard.features.language import Events, Item, Request, Time
from tackboard.features.standard import features_for_model

events, request, item = Events(), Request(), Item(birth_ms=Time())
WORKER, COORDINATOR = "MapWorker", "SplitCoordinator"
NODE = {"num_cpus": 1, "object_store_memory": 200_000_000, "include_dashboard": False}
HASHING = HashConfig(num_hashes=2, num_rows=64)


def features(vocabulary: Vocabulary) -> FeatureSet:
    """All standard columns, and two features of the request."""
    own = FeatureSet("own", minute=request.time.minute_of_day("UTC"), num_before=events.count())
    return features_for_model(("history", "minute", "num_before"), vocabulary, 16, own)


def open_steps(dataset: Path) -> TrainingSteps:
    config = DataConfig(dataset=str(dataset), max_length=16, tokens_per_step=128, window_buckets=2)
    return TrainingSteps(open_sequences(dataset, features=features), config, HASHING, seed=7)


def open_requests(dataset: Path) -> RequestSteps:
    """Labelled requests, with a feature of the request and a feature of each candidate."""
    config = RequestConfig(dataset=str(dataset), max_history=16, tokens_per_step=512, window_buckets=2)
    own = FeatureSet("own", num_before=events.count(), age=request.time.seconds_since(item.birth_ms).fill_missing(0.0))

    def chosen(vocabulary: Vocabulary) -> FeatureSet:
        return features_for_model(("history", "num_before", "age"), vocabulary, 16, own, of_requests=True)

    return config.steps(config.open(chosen), HASHING, seed=7)


def differences(one: Any, other: Any) -> list[str]:
    """Names of the tensors that differ in type, shape or a bit, or stand in another order."""

    def flat(value: Any, place: str = "") -> list[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            return [(place, value)]
        parts = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return [found for name, part in parts.items() for found in flat(part, f"{place}.{name}")]

    return [
        name
        for (name, left), (twin, right) in zip(flat(one), flat(other), strict=True)
        if name != twin or left.dtype != right.dtype or not torch.equal(left, right)
    ]


def compare(batches: Iterable[tuple[int, Any]], local: TrainingSteps | RequestSteps) -> dict[str, Any]:
    """The numbers of the steps that came, in that order, and of those that were not what this process makes."""
    came, different = [], []
    for step, batch in batches:
        came.append(step)
        if differences(batch, local[step]):
            different.append(step)
    return {"steps": came, "different": different, "pid": os.getpid()}


def processes(name: str) -> dict[int, int]:
    """Each process of this cluster that Ray has given the name → its raylet."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(name in word for word in process.cmdline()):
                found[process.pid] = process.ppid()
    return found


def wait_for_workers(wanted: Callable[[dict[int, int]], bool]) -> dict[int, int]:
    """The worker processes and their raylets, as soon as they are as wanted, or after a while as they are."""
    until = time.monotonic() + 30
    while not wanted(found := processes(WORKER)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


class Scenes:
    def __init__(self, dataset: Path, asked: Path, address: str) -> None:
        self.dataset, self.asked, self.address = dataset, asked, address
        self.local = open_steps(dataset)
        self.epoch = self.local.plan.steps_per_epoch
        self.remote = ClusterSteps(open_steps(dataset), address)

    def one_trainer(self) -> dict[str, Any]:
        """Two epochs."""
        numbers = list(range(self.local.plan.first_step(2)))
        seen = compare(self.remote.iterate(numbers, num_workers=2), self.local)
        return seen | {"expected": numbers, "tasks": len(cluster.tasks_of(self.local, numbers))}

    def resumed(self) -> dict[str, Any]:
        """Broken off, then from the middle of an epoch on, without a step that was skipped, by one worker."""
        for step, _ in self.remote.iterate(range(self.local.plan.first_step(30)), num_workers=2):
            if step == self.epoch // 2 + 3:
                break
        numbers = [number for number in range(self.epoch // 2, self.local.plan.first_step(2)) if number != step]
        return compare(self.remote.iterate(numbers, num_workers=0), self.local) | {"expected": numbers}

    def two_trainers(self) -> dict[str, Any]:
        """Trainers in processes of their own, each with its share."""

        @ray.remote(num_cpus=0)
        def train(share: Any, rank: int, dataset: Path) -> dict[str, Any]:
            local = open_steps(dataset)
            local.rank, local.world_size = rank, 2
            return compare(share, local) | {"num_bytes": share.num_bytes}

        numbers = list(range(self.local.plan.first_step(2)))
        shares = self.remote.split(numbers, 2, world_size=2)
        seen = ray.get([train.remote(share, rank, self.dataset) for rank, share in enumerate(shares)])
        return {"expected": numbers, "ranks": seen}

    def requests(self) -> dict[str, Any]:
        """Batches of labelled requests, for two trainers."""

        @ray.remote(num_cpus=0)
        def train(share: Any, rank: int, dataset: Path) -> dict[str, Any]:
            local = open_requests(dataset)
            local.rank, local.world_size = rank, 2
            return compare(share, local) | {"num_bytes": share.num_bytes}

        steps = open_requests(self.asked)
        numbers = list(range(steps.plan.first_step(2)))
        shares = ClusterSteps(open_requests(self.asked), self.address).split(numbers, 2, world_size=2)
        seen = ray.get([train.remote(share, rank, self.asked) for rank, share in enumerate(shares)])
        return {"expected": numbers, "ranks": seen, "tasks": len(cluster.tasks_of(steps, numbers))}

    def killed(self) -> dict[str, Any]:
        """One of two workers dies of SIGKILL when the first batch has come; another takes its place."""
        numbers = list(range(self.local.plan.first_step(80)))
        before: dict[int, int] = {}
        after: dict[int, int] = {}

        def disturbed() -> Iterable[tuple[int, SequenceBatch]]:
            for step, batch in self.remote.iterate(numbers, num_workers=2):
                if not before:
                    before.update(wait_for_workers(lambda found: len(found) == 2))
                    os.kill(next(iter(before)), signal.SIGKILL)
                    after.update(wait_for_workers(lambda found: bool(set(found) - set(before))))
                yield step, batch

        seen = compare(disturbed(), self.local)
        return seen | {
            "expected": numbers,
            "raylets": sorted(before.values()),
            "new_workers": len(set(after) - set(before)),
        }

    def lost(self) -> dict[str, Any]:
        """What runs the plan of the work dies, which nothing replaces."""

        def consume() -> None:
            for number, _ in enumerate(self.remote.iterate(range(self.local.plan.first_step(100)), num_workers=2)):
                if number == 0:
                    for pid in processes(COORDINATOR):
                        os.kill(pid, signal.SIGKILL)

        return {"error": error_of(consume)}

    def unseen(self) -> dict[str, Any]:
        """The workers do not find the snapshot."""
        away = self.dataset.with_name("away")
        self.dataset.rename(away)
        try:
            return {"error": error_of(lambda: list(self.remote.iterate(range(3), num_workers=1)))}
        finally:
            away.rename(self.dataset)

    def too_many(self) -> dict[str, Any]:
        """More workers than CPUs, which Ray would wait for without end."""
        return {"error": error_of(lambda: self.remote.iterate(range(3), num_workers=3))}

    def nothing(self) -> dict[str, Any]:
        """No step at all."""
        return compare(self.remote.iterate([], num_workers=1), self.local)


def error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except TackboardError as error:
        return [type(error).__name__, error.got, error.allowed, error.fix]
    return []


def main(dataset: Path, asked: Path, answers: Path, folder: str) -> None:
    raylets = Cluster(initialize_head=True, head_node_args=NODE | {"temp_dir": folder})
    raylets.add_node(**NODE)
    try:
        scenes = Scenes(dataset, asked, raylets.address)
        for scene in (
            scenes.one_trainer,
            scenes.resumed,
            scenes.two_trainers,
            scenes.requests,
            scenes.killed,
            scenes.lost,
            scenes.unseen,
            scenes.too_many,
            scenes.nothing,
        ):
            started = time.perf_counter()
            found = scene() | {"trainer": os.getpid(), "seconds": time.perf_counter() - started}
            with answers.open("a") as file:
                file.write(json.dumps({scene.__name__: found}) + "\n")
    finally:
        ray.shutdown()
        raylets.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
