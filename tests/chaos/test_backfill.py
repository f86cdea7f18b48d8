"""A backfill that is killed, or whose disk fails, at whatever point leaves the old snapshot or the whole new one.

`make test` stops it at a few points, `make test-slow` at all of them; the next backfill always ends well.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core.manifest import verify_manifest
from tackboard.events.dataset import open_dataset
from tackboard.features.stored import read_features_table

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
SPEC = str(Path(__file__).parents[2] / "examples" / "features.py")
POINTS = [
    "features.parquet:before-write",
    "features.parquet:after-group",
    "features.json:after-write",
    "MANIFEST.json:before-write",
    "SNAPSHOT:before-rename",
    "SNAPSHOT:after-rename",
    "latest:before-rename",
    "latest:after-rename",
]
QUICK = {"features.parquet:after-group", "SNAPSHOT:before-rename", "SNAPSHOT:after-rename", "latest:after-rename"}


class World:
    """A dataset of its own that backfills are tried on."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.folder = nursery.folder / "backfills" / name
        shutil.copytree(nursery.folder / "datasets" / "small", self.folder, symlinks=True)
        self.old = open_dataset(self.folder).path

    def backfill(self, **order: Any) -> Outcome:
        return self.nursery.run(["features", "backfill", SPEC, "--data", str(self.folder)], **order)

    def check(self) -> bool:
        """Every snapshot verifies to the last byte; whether `latest` has the features."""
        for path in self.folder.glob("[0-9]*"):
            verify_manifest(path, "dataset")
        latest = open_dataset(self.folder)
        if latest.path == self.old:
            return False
        assert len(read_features_table(latest, ["favourites"])["favourites"]) == latest.num_events
        return True

    def finish(self) -> None:
        """A second start, undisturbed."""
        outcome = self.backfill()
        assert outcome.code == 0, outcome.log
        assert self.check()
        assert len(list(self.folder.glob("[0-9]*"))) == 2, "a complete snapshot is taken up, not made again"
        assert {path.name for path in self.folder.glob(".*")} <= {".lock"}, "the next writer takes over a lock file"


@pytest.fixture(scope="module")
def points(nursery: Nursery) -> Counter[str]:
    """The points that an undisturbed backfill passes."""
    record = nursery.folder / "backfill-points.txt"
    world = World(nursery, "undisturbed")
    outcome = world.backfill(points=str(record))
    assert outcome.code == 0, outcome.log
    assert world.check()
    return Counter(record.read_text().splitlines())


def parameters() -> list[Any]:
    return [pytest.param(point, marks=[] if point in QUICK else [pytest.mark.slow]) for point in POINTS]


def kill_and_go_on(nursery: Nursery, point: str) -> None:
    world = World(nursery, f"kill-{point}")
    outcome = world.backfill(at=[point, 1], action="kill")
    assert outcome.code == KILLED, f"{point}: {outcome.log}"
    assert world.check() == (point == "latest:after-rename")
    world.finish()


def fail_and_go_on(nursery: Nursery, point: str, fault: str) -> None:
    world = World(nursery, f"{fault}-{point}")
    outcome = world.backfill(at=[point, 1], action=fault)
    assert outcome.code == 2, outcome.log
    assert "Traceback" not in outcome.log
    assert 1 <= len(outcome.error_lines) <= 3
    assert world.check() == (point == "latest:after-rename")
    assert not list(world.folder.glob(".*")), "what is given up is removed at once"
    world.finish()


@pytest.mark.parametrize("point", parameters())
def test_a_killed_backfill_leaves_a_whole_snapshot(nursery: Nursery, point: str) -> None:
    kill_and_go_on(nursery, point)


@pytest.mark.parametrize(
    ("point", "fault"), [("features.parquet:after-group", "ENOSPC"), ("latest:before-rename", "EIO")]
)
def test_a_failing_disk_leaves_a_whole_snapshot(nursery: Nursery, point: str, fault: str) -> None:
    fail_and_go_on(nursery, point, fault)


def test_a_file_that_the_kernel_will_not_let_grow(nursery: Nursery) -> None:
    # A real refused write inside Arrow.
    world = World(nursery, "limit")
    outcome = world.backfill(max_file_bytes=2048)
    assert outcome.code == 2, outcome.log
    assert "File too large" in outcome.error_lines[0]
    assert not world.check() and not list(world.folder.glob(".*"))
    world.finish()


def test_the_points_are_those_of_the_writer(points: Counter[str]) -> None:
    assert set(POINTS) <= set(points)
    assert {f"{name}:after-fsync" for name in ("events.parquet", "features.parquet", "features.json")} <= set(points)


@pytest.mark.slow
def test_every_point_of_the_writer(nursery: Nursery, points: Counter[str]) -> None:
    for point in sorted(set(points) - set(POINTS)):
        kill_and_go_on(nursery, point)
    for point in sorted(points):
        fail_and_go_on(nursery, point, "EROFS")
