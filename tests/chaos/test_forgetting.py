"""Forgetting and retention that are killed, or whose disk fails, at whatever point: old or new, never torn.

A user is on the list or not; `latest` is the old snapshot or the whole new one without them; a snapshot is there or
gone. The command that is run again ends well, and no import brings back a user who is on the list. `make test` takes a
few points, `make test-slow` all of them.
"""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core.manifest import verify_manifest
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.privacy.forgetting import read_forgotten, remains_in

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
USERS = (3, 17, 60)
SETTINGS = ["num_users=60", "num_items=80", "num_topics=5", "median_events=12", "max_events=30"]
FORGET_POINTS = [f"forgotten.json:{move}" for move in ("before-write", "after-write", "after-fsync", "after-rename")]
RETAIN_POINTS = [
    "events.parquet:before-write",
    "events.parquet:after-group",
    "users.parquet:after-write",
    "impressions.parquet:after-write",
    "statistics.json:before-describe",
    "layout.json:after-write",
    "MANIFEST.json:before-write",
    "SNAPSHOT:before-rename",
    "SNAPSHOT:after-rename",
    "latest:before-rename",
    "latest:after-rename",
    "SNAPSHOT:before-removal",
    "SNAPSHOT:during-removal",
]
PROMOTED = ("latest:after-rename", "SNAPSHOT:before-removal", "SNAPSHOT:during-removal")
QUICK = {
    "forgotten.json:after-rename",
    "events.parquet:after-group",
    "SNAPSHOT:after-rename",
    "SNAPSHOT:during-removal",
}


class World:
    """A dataset of its own, in a folder of datasets of its own, and no runs."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.root = nursery.folder / "forgetting" / name
        self.folder = self.root / "small"
        shutil.copytree(nursery.folder / "datasets" / "small", self.folder, symlinks=True)
        (self.root / "runs").mkdir()
        self.old = open_dataset(self.folder)

    def forget(self, **order: Any) -> Outcome:
        users = [word for user in USERS for word in ("--user", str(user))]
        return self.nursery.run(["data", "forget", *users, "--data", str(self.folder)], **order)

    def retain(self, **order: Any) -> Outcome:
        arguments = ["data", "retain", str(self.folder), "--days", "60", "--prune", "--runs", str(self.root / "runs")]
        return self.nursery.run(arguments, **order)

    def import_again(self, **order: Any) -> Outcome:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        arguments = ["data", "synth", "--name", "small", "--out", str(self.root), "--seed", "5", *settings]
        return self.nursery.run(arguments, **order)

    def latest(self) -> Dataset:
        """The newest snapshot; this one and every other verifies to the last byte."""
        for path in self.folder.glob("[0-9]*"):
            verify_manifest(path, "dataset")
        return open_dataset(self.folder)

    def is_clean(self) -> bool:
        """Whether the newest snapshot holds none of the users."""
        latest = self.latest()
        held = set(USERS) & set(latest.read_events(["user_id"])["user_id"].to_pylist())
        assert bool(held) == bool(set(USERS) & set(latest.read_users(["user_id"])["user_id"].to_pylist()))
        return not held

    def finish(self) -> None:
        """Everything once more, undisturbed."""
        for outcome in (self.forget(), self.retain()):
            assert outcome.code == 0, outcome.log
        assert self.is_clean() and not self.old.path.exists()
        assert len(list(self.folder.glob("[0-9]*"))) == 1
        assert not list(self.folder.glob(".*"))

    def come_back(self) -> None:
        """An import of the same users."""
        again = self.import_again()
        assert again.code == 0, again.log
        assert self.is_clean(), "an import brought a forgotten user back"
        assert self.latest().num_users == 57


@pytest.fixture(scope="module")
def points(nursery: Nursery) -> dict[str, Counter[str]]:
    """The points that undisturbed commands pass."""
    world = World(nursery, "undisturbed")
    passed = {}
    for name, command in (("forget", world.forget), ("retain", world.retain)):
        record = nursery.folder / f"{name}-points.txt"
        outcome = command(points=str(record))
        assert outcome.code == 0, outcome.log
        passed[name] = Counter(record.read_text().splitlines())
    world.come_back()
    return passed


def parameters(names: list[str]) -> list[Any]:
    return [pytest.param(point, marks=[] if point in QUICK else [pytest.mark.slow]) for point in names]


def disturb_forgetting(nursery: Nursery, point: str, action: str) -> None:
    world = World(nursery, f"forget-{action}-{point}")
    outcome = world.forget(at=[point, 1], action=action)
    assert outcome.code == (KILLED if action == "kill" else 2), outcome.log
    listed = read_forgotten(world.folder)
    assert len(listed) in (0, 2 * len(USERS)), "all or none"
    assert bool(len(listed)) == (point == "forgotten.json:after-rename")
    assert world.latest().path == world.old.path
    world.finish()
    world.come_back()


def disturb_retention(nursery: Nursery, point: str, action: str) -> None:
    world = World(nursery, f"retain-{action}-{point}")
    assert world.forget().code == 0
    outcome = world.retain(at=[point, 1], action=action)
    assert outcome.code == (KILLED if action == "kill" else 2), outcome.log
    assert "Traceback" not in outcome.log
    assert world.is_clean() == (point in PROMOTED)
    assert remains_in(world.latest().path, read_forgotten(world.folder)).num_users == 3 * (point not in PROMOTED)
    world.finish()


@pytest.mark.parametrize("point", parameters(FORGET_POINTS))
def test_a_killed_command_leaves_a_whole_list(nursery: Nursery, point: str) -> None:
    disturb_forgetting(nursery, point, "kill")


@pytest.mark.parametrize("point", parameters(RETAIN_POINTS))
def test_a_killed_retention_leaves_whole_snapshots(nursery: Nursery, point: str) -> None:
    disturb_retention(nursery, point, "kill")


def test_a_failing_disk(nursery: Nursery) -> None:
    disturb_forgetting(nursery, "forgotten.json:after-write", "ENOSPC")
    disturb_retention(nursery, "events.parquet:after-group", "EIO")


def test_an_import_that_was_killed_before_it_was_promoted_brings_nobody_back(nursery: Nursery) -> None:
    world = World(nursery, "overtaken")
    assert world.forget().code == 0
    # Killed with its snapshot complete but not promoted.
    assert world.import_again(at=["SNAPSHOT:after-rename", 1], action="kill").code == KILLED
    assert world.latest().path == world.old.path
    world.come_back()


def test_the_points_are_those_of_the_commands(points: dict[str, Counter[str]]) -> None:
    assert set(FORGET_POINTS) <= set(points["forget"])
    assert set(RETAIN_POINTS) <= set(points["retain"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_point_of_retention(nursery: Nursery, points: dict[str, Counter[str]]) -> None:
    for point in sorted(set(points["retain"]) - set(RETAIN_POINTS)):
        disturb_retention(nursery, point, "kill")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disk_that_fails_at_every_point_of_retention(nursery: Nursery, points: dict[str, Counter[str]]) -> None:
    for point in sorted(set(points["retain"])):
        disturb_retention(nursery, point, "EROFS")
