"""A backfill, a label job or an import that is killed, or whose disk fails, leaves the old or the whole new snapshot.

`make test` stops each job at a few points, `make test-slow` at all of them; the next run of the job always ends well.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tackboard.core import keyed_random
from tackboard.core.manifest import verify_manifest
from tackboard.data.requests import read_labels, read_requests
from tackboard.events.dataset import Dataset, open_dataset
from tackboard.features.stored import read_features_table

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
SPEC = str(Path(__file__).parents[2] / "examples" / "features.py")
SEALED = ("SNAPSHOT:before-rename", "SNAPSHOT:after-rename", "latest:before-rename", "latest:after-rename")
NUM_OLD, NUM_NEW = 20, 300


class Job:
    """A dataset of its own that a job makes a snapshot of."""

    points: ClassVar[tuple[str, ...]] = ()
    """Points that the job is known to pass."""
    quick: ClassVar[tuple[str, ...]] = ()
    """Points at which `make test` kills the job."""
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
        if not isinstance(self, Import):
            assert len(list(self.folder.glob("[0-9]*"))) == 2, "a complete snapshot is taken up, not made again"
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


class Import(Job):
    """A log that was imported once and has grown since."""

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


JOBS: tuple[type[Job], ...] = (Backfill, Label, Import)


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
    assert trial.check() == (point == "latest:after-rename" or point.startswith("recipe.py"))
    if action != "kill":
        assert "Traceback" not in outcome.log and 1 <= len(outcome.error_lines) <= 3
        assert not list(trial.folder.glob(".*")), "what is given up is removed at once"
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


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_an_import_killed_at_a_random_instant(nursery: Nursery, number: int) -> None:
    shop = Import(nursery, f"random-{number}")
    shop.run(after_s=0.3 * keyed_random.uniform(30, number).item())
    shop.check()
    shop.finish()
