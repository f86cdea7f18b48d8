"""A label job that is killed, or whose disk fails, at whatever point leaves the old snapshot or the whole new one.

`make test` stops it at a few points, `make test-slow` at all of them; the next one always ends well.
"""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core.manifest import verify_manifest
from tackboard.data.requests import read_labels, read_requests
from tackboard.events.dataset import open_dataset

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
POINTS = [
    "requests.parquet:before-write",
    "requests.parquet:after-group",
    "layout.json:after-write",
    "labels.json:after-write",
    "MANIFEST.json:before-write",
    "SNAPSHOT:before-rename",
    "SNAPSHOT:after-rename",
    "latest:before-rename",
    "latest:after-rename",
]
QUICK = {"requests.parquet:after-group", "labels.json:after-write", "SNAPSHOT:after-rename", "latest:after-rename"}


class World:
    """A dataset of its own that labels are made for."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.folder = nursery.folder / "labels" / name
        shutil.copytree(nursery.folder / "datasets" / "small", self.folder, symlinks=True)
        self.old = open_dataset(self.folder).path

    def label(self, **order: Any) -> Outcome:
        options = ["--label", "save=7d", "--label", "click=30m", "--negatives", "2"]
        return self.nursery.run(["data", "label", str(self.folder), *options], **order)

    def check(self) -> bool:
        """Every snapshot verifies to the last byte; whether `latest` has the labels."""
        for path in self.folder.glob("[0-9]*"):
            verify_manifest(path, "dataset")
        latest = open_dataset(self.folder)
        if latest.path == self.old:
            return False
        labels, requests = read_labels(latest.path), read_requests(latest)
        assert labels is not None and labels.counts.requests == requests.num_rows == latest.num_events
        assert latest.layout.offsets["requests"][-1] == requests.num_rows
        return True

    def finish(self) -> None:
        """A second start, undisturbed."""
        outcome = self.label()
        assert outcome.code == 0, outcome.log
        assert self.check()
        assert len(list(self.folder.glob("[0-9]*"))) == 2, "a complete snapshot is taken up, not made again"
        assert {path.name for path in self.folder.glob(".*")} <= {".lock"}, "the next writer takes over a lock file"


@pytest.fixture(scope="module")
def points(nursery: Nursery) -> Counter[str]:
    """The points that an undisturbed label job passes."""
    record = nursery.folder / "label-points.txt"
    world = World(nursery, "undisturbed")
    outcome = world.label(points=str(record))
    assert outcome.code == 0, outcome.log
    assert world.check()
    return Counter(record.read_text().splitlines())


def parameters() -> list[Any]:
    return [pytest.param(point, marks=[] if point in QUICK else [pytest.mark.slow]) for point in POINTS]


def kill_and_go_on(nursery: Nursery, point: str) -> None:
    world = World(nursery, f"kill-{point}")
    outcome = world.label(at=[point, 1], action="kill")
    assert outcome.code == KILLED, f"{point}: {outcome.log}"
    assert world.check() == (point == "latest:after-rename")
    world.finish()


def fail_and_go_on(nursery: Nursery, point: str, fault: str) -> None:
    world = World(nursery, f"{fault}-{point}")
    outcome = world.label(at=[point, 1], action=fault)
    assert outcome.code == 2, outcome.log
    assert "Traceback" not in outcome.log
    assert 1 <= len(outcome.error_lines) <= 3
    assert world.check() == (point == "latest:after-rename")
    assert not list(world.folder.glob(".*")), "what is given up is removed at once"
    world.finish()


@pytest.mark.parametrize("point", parameters())
def test_a_killed_label_job_leaves_a_whole_snapshot(nursery: Nursery, point: str) -> None:
    kill_and_go_on(nursery, point)


def test_a_failing_disk_leaves_a_whole_snapshot(nursery: Nursery) -> None:
    fail_and_go_on(nursery, "requests.parquet:after-group", "ENOSPC")


def test_a_file_that_the_kernel_will_not_let_grow(nursery: Nursery) -> None:
    # A real refused write inside Arrow.
    world = World(nursery, "limit")
    outcome = world.label(max_file_bytes=2048)
    assert outcome.code == 2, outcome.log
    assert "File too large" in outcome.error_lines[0]
    assert not world.check() and not list(world.folder.glob(".*"))
    world.finish()


def test_the_points_are_those_of_the_writer(points: Counter[str]) -> None:
    assert set(POINTS) <= set(points)
    assert {f"{name}:after-fsync" for name in ("events.parquet", "requests.parquet", "labels.json")} <= set(points)


@pytest.mark.slow
def test_every_point_of_the_writer(nursery: Nursery, points: Counter[str]) -> None:
    for point in sorted(set(points) - set(POINTS)):
        kill_and_go_on(nursery, point)
    for point in sorted(points):
        fail_and_go_on(nursery, point, "EROFS")
