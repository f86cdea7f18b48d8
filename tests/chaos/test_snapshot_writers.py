"""A job that makes a snapshot and is stopped at any point leaves the old or the new snapshot.

The jobs are a backfill, labels, pseudo-requests, attributes, an import and a retention. A job is killed, or its disk
fails. `make test` stops each job at a few points, `make test-slow` at all of them; the next run always ends well.
Forgetting is stopped too: a user is on the list or not, and no import brings back a listed user.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tackboard.core.manifest import verify_manifest
from tackboard.data.derived_attributes import read_attributes
from tackboard.data.pseudo_requests import read_pseudo_requests
from tackboard.data.request_layout import read_labels, read_requests
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.events.privacy.forgetting import read_forgotten, remains_in
from tackboard.features.stored_features import read_features_table

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
SPEC = str(Path(__file__).parents[2] / "examples" / "features.py")
SEALED = ("SNAPSHOT:before-rename", "SNAPSHOT:after-rename", "latest:before-rename", "latest:after-rename")
WRITES = ("before-write", "after-write", "after-fsync", "after-rename")
NUM_OLD, NUM_NEW = 20, 300
USERS = (3, 17, 60)
QUICK_MOVES = {("after-rename", "kill"), ("after-write", "ENOSPC")}
SETTINGS = ["num_users=60", "num_items=80", "num_topics=5", "median_events=12", "max_events=30"]


class Job:
    """A dataset of its own that a job makes a snapshot of."""

    points: ClassVar[tuple[str, ...]] = ()
    """Points that the job is known to pass."""
    quick: ClassVar[tuple[str, ...]] = ()
    """Points at which `make test` kills the job."""
    promoted: ClassVar[tuple[str, ...]] = ("latest:after-rename",)
    """Points after which `latest` is the new snapshot."""
    num_snapshots: ClassVar[int | None] = 2
    """Snapshots after the second start: a complete one is taken up, not made again."""
    arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.folder = nursery.folder / type(self).__name__ / name
        self.prepare()
        self.old = open_dataset(self.folder).path

    def prepare(self) -> None:
        shutil.copytree(self.nursery.folder / "datasets" / "small", self.folder, symlinks=True)

    def run(self, **order: Any) -> Outcome:
        arguments = [str(self.folder) if word == "FOLDER" else word for word in self.arguments]
        return self.nursery.run(arguments, **order)

    def check_new(self, latest: Dataset) -> None:
        """Fails unless the new snapshot holds everything."""
        raise NotImplementedError

    def check(self) -> bool:
        """Every snapshot verifies to the last byte; whether `latest` is the new one."""
        for path in self.folder.glob("[0-9]*"):
            verify_manifest(path, "dataset")
        latest = open_dataset(self.folder)
        if latest.path != self.old:
            self.check_new(latest)
        return latest.path != self.old

    def finish(self) -> None:
        """A second start, undisturbed."""
        outcome = self.run()
        assert outcome.code == 0, outcome.log
        assert self.check()
        assert self.num_snapshots in (None, len(list(self.folder.glob("[0-9]*"))))
        assert {path.name for path in self.folder.glob(".*")} <= {".lock"}, "the next writer takes over a lock file"


class Backfill(Job):
    arguments = ("features", "backfill", SPEC, "--data", "FOLDER")
    points = ("features.parquet:before-write", "features.parquet:after-group", "features.json:after-write", *SEALED)
    quick = ("features.parquet:after-group", "SNAPSHOT:before-rename", "latest:after-rename")

    def check_new(self, latest: Dataset) -> None:
        assert len(read_features_table(latest, ["favourites"])["favourites"]) == latest.num_events


class Label(Job):
    arguments = ("data", "label", "FOLDER", "--label", "save=7d", "--label", "click=30m", "--negatives", "2")
    points = ("requests.parquet:after-group", "layout.json:after-write", "labels.json:after-write", *SEALED)
    quick = ("requests.parquet:after-group", "labels.json:after-write", "SNAPSHOT:after-rename")

    def check_new(self, latest: Dataset) -> None:
        labels, requests = read_labels(latest.path), read_requests(latest)
        assert labels is not None and labels.counts.requests == requests.num_rows == latest.num_events
        assert latest.layout.offsets["requests"][-1] == requests.num_rows


class Attributes(Job):
    arguments = ("data", "attributes", "FOLDER", "--first-event", "first_event_ms", "--vectors", "near", "--width", "4")
    points = ("items.parquet:before-write", "items.parquet:after-write", "attributes.json:after-write", *SEALED)
    quick = ("items.parquet:after-write", "attributes.json:after-write", "latest:before-rename")

    def check_new(self, latest: Dataset) -> None:
        assert set(read_attributes(latest.path)) == {"first_event_ms", "near"}
        assert latest.read_items(["first_event_ms", "near"]).num_rows == latest.num_items


class Pseudo(Job):
    arguments = ("data", "pseudo-requests", "FOLDER", "--candidates", "5", "--per-user", "2")
    points = ("requests.parquet:after-group", "layout.json:after-write", "pseudo_requests.json:after-write", *SEALED)
    quick = ("requests.parquet:after-group", "pseudo_requests.json:after-write", "SNAPSHOT:after-rename")

    def check_new(self, latest: Dataset) -> None:
        made, requests = read_pseudo_requests(latest.path), read_requests(latest)
        assert made is not None and made.counts.requests == requests.num_rows == 2 * latest.num_users


class Import(Job):
    """A log that was imported once and has grown since."""

    num_snapshots = None
    promoted = ("latest:after-rename", *(f"recipe.py:{move}" for move in WRITES))
    points = ("layout.json:after-write", "events.parquet:after-fsync", "items.parquet:after-fsync", *SEALED)
    quick = ("layout.json:after-write", "events.parquet:after-fsync", "latest:before-rename")

    def prepare(self) -> None:
        self.root = self.folder
        self.folder = self.root / "datasets" / "shop"
        self.root.mkdir(parents=True)
        self.write(NUM_OLD)
        outcome = self.run()
        assert outcome.code == 0, outcome.log
        self.write(NUM_NEW)

    def write(self, count: int) -> None:
        rows = "".join(f"u{n % 7},i{n % 11},{1_700_000_000 + n}\n" for n in range(count))
        (self.root / "log.csv").write_text("user,item,time\n" + rows)

    def run(self, **order: Any) -> Outcome:
        columns = ["--user", "user", "--item", "item", "--time", "time", "--name", "shop"]
        places = ["--out", str(self.root / "datasets"), "--recipe", str(self.root / "recipe.py"), "--force"]
        return self.nursery.run(["init", str(self.root / "log.csv"), *columns, *places], **order)

    def check_new(self, latest: Dataset) -> None:
        assert latest.num_events == NUM_NEW


class Retain(Job):
    """Users who were forgotten, in a folder of datasets of its own, and no runs."""

    num_snapshots = 1
    points = ("events.parquet:after-group", "users.parquet:after-write", "statistics.json:before-describe", *SEALED)
    promoted = ("latest:after-rename", "SNAPSHOT:before-removal", "SNAPSHOT:during-removal")
    quick = ("events.parquet:after-group", "SNAPSHOT:after-rename", "SNAPSHOT:during-removal")

    def prepare(self) -> None:
        self.folder = self.folder / "small"
        super().prepare()
        (self.folder.parent / "runs").mkdir()
        if type(self) is Retain:
            assert self.forget().code == 0

    def forget(self, **order: Any) -> Outcome:
        users = [word for user in USERS for word in ("--user", str(user))]
        return self.nursery.run(["data", "forget", *users, "--data", str(self.folder)], **order)

    def run(self, **order: Any) -> Outcome:
        runs = str(self.folder.parent / "runs")
        return self.nursery.run(
            ["data", "retain", str(self.folder), "--days", "60", "--prune", "--runs", runs], **order
        )

    def check_new(self, latest: Dataset) -> None:
        for table in (latest.read_events(["user_id"]), latest.read_users(["user_id"])):
            assert set(USERS).isdisjoint(table["user_id"].to_pylist())
        assert remains_in(latest.path, read_forgotten(self.folder)).num_users == 0

    def import_again(self, **order: Any) -> Outcome:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        place = ["--name", "small", "--out", str(self.folder.parent), "--seed", "5"]
        return self.nursery.run(["data", "synth", *place, *settings], **order)

    def come_back(self) -> None:
        """An import of the same users does not bring them back."""
        again = self.import_again()
        assert again.code == 0, again.log
        assert self.check() and open_dataset(self.folder).num_users == 57


class Forget(Retain):
    """The same users before they are forgotten."""


JOBS: tuple[type[Job], ...] = (Backfill, Label, Attributes, Pseudo, Import, Retain)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: job.__name__)
def job(request: pytest.FixtureRequest) -> type[Job]:
    return request.param


@pytest.fixture(scope="module")
def points(nursery: Nursery, job: type[Job]) -> list[str]:
    """The points that an undisturbed job passes."""
    record = nursery.folder / f"{job.__name__}-points.txt"
    undisturbed = job(nursery, "undisturbed")
    outcome = undisturbed.run(points=str(record))
    assert outcome.code == 0, outcome.log
    assert undisturbed.check()
    return sorted(Counter(record.read_text().splitlines()))


def disturb(nursery: Nursery, job: type[Job], point: str, action: str) -> None:
    trial = job(nursery, f"{action}-{point}")
    outcome = trial.run(at=[point, 1], action=action)
    assert outcome.code == (KILLED if action == "kill" else 2), f"{point}: {outcome.log}"
    assert trial.check() == (point in job.promoted)
    if action != "kill":
        assert "Traceback" not in outcome.log and 1 <= len(outcome.error_lines) <= 3
        # A snapshot whose removal failed is removed by the next run.
        left = [path for path in trial.folder.glob(".*") if ".gone-" not in path.name]
        assert not left, "what is given up is removed at once"
    trial.finish()


def test_a_killed_job_leaves_a_whole_snapshot(nursery: Nursery, job: type[Job], points: list[str]) -> None:
    assert set(job.points) <= set(points)
    for point in job.quick:
        disturb(nursery, job, point, "kill")


def test_a_failing_disk_leaves_a_whole_snapshot(nursery: Nursery, job: type[Job]) -> None:
    disturb(nursery, job, job.quick[0], "ENOSPC")


@pytest.mark.parametrize("job", [Backfill, Label], indirect=True)
def test_a_file_that_the_kernel_will_not_let_grow(nursery: Nursery, job: type[Job]) -> None:
    # A real refused write inside Arrow.
    trial = job(nursery, "limit")
    outcome = trial.run(max_file_bytes=2048)
    assert outcome.code == 2, outcome.log
    assert "File too large" in outcome.error_lines[0]
    assert not trial.check() and not list(trial.folder.glob(".*"))
    trial.finish()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ["kill", "EROFS"])
def test_every_point_of_the_writer(nursery: Nursery, job: type[Job], points: list[str], action: str) -> None:
    for point in points:
        if action != "kill" or point not in job.quick:
            disturb(nursery, job, point, action)


@pytest.mark.parametrize(
    ("move", "action"),
    [
        pytest.param(move, action, marks=() if (move, action) in QUICK_MOVES else pytest.mark.slow)
        for move in WRITES
        for action in ("kill", "ENOSPC")
    ],
)
def test_forgetting_that_is_stopped_leaves_a_whole_list(nursery: Nursery, move: str, action: str) -> None:
    world = Forget(nursery, f"forget-{action}-{move}")
    outcome = world.forget(at=[f"forgotten.json:{move}", 1], action=action)
    assert outcome.code == (KILLED if action == "kill" else 2), outcome.log
    assert len(read_forgotten(world.folder)) == (2 * len(USERS) if move == "after-rename" else 0), "all or none"
    assert not world.check()
    assert world.forget().code == 0
    world.finish()
    world.come_back()


def test_an_import_that_was_killed_before_it_was_promoted_brings_nobody_back(nursery: Nursery) -> None:
    world = Retain(nursery, "overtaken")
    # Killed with its snapshot complete but not promoted.
    assert world.import_again(at=["SNAPSHOT:after-rename", 1], action="kill").code == KILLED
    assert not world.check()
    world.come_back()
