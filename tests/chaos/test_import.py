"""An import that is killed at whatever point leaves the old snapshot or the whole new one.

`make test` kills it at a few points, `make test-slow` at all of them and at random instants; the next import ends well.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core import keyed_random
from tackboard.core.manifest import verify_manifest
from tackboard.events.dataset import open_dataset

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
QUICK = ["layout.json:after-write", "events.parquet:after-fsync", "SNAPSHOT:before-rename", "latest:before-rename"]
NUM_OLD, NUM_NEW = 20, 300


class Shop:
    """A folder with a log that was imported once and has grown since."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.folder = nursery.folder / "imports" / name
        self.log = self.folder / "log.csv"
        self.folder.mkdir(parents=True)
        self.write(NUM_OLD)
        outcome = self.import_log()
        assert outcome.code == 0, outcome.log
        self.write(NUM_NEW)

    def write(self, count: int) -> None:
        rows = "".join(f"u{n % 7},i{n % 11},{1_700_000_000 + n}\n" for n in range(count))
        self.log.write_text("user,item,time\n" + rows)

    def import_log(self, **order: Any) -> Outcome:
        arguments = ["init", str(self.log), "--user", "user", "--item", "item", "--time", "time", "--name", "shop"]
        places = ["--out", str(self.folder / "datasets"), "--recipe", str(self.folder / "recipe.py"), "--force"]
        return self.nursery.run([*arguments, *places], **order)

    def check(self) -> bool:
        """Every snapshot verifies to the last byte; whether `latest` is the new one."""
        for path in (self.folder / "datasets" / "shop").glob("[0-9]*"):
            verify_manifest(path, "dataset")
        num_events = open_dataset(self.folder / "datasets" / "shop").num_events
        assert num_events in (NUM_OLD, NUM_NEW)
        return num_events == NUM_NEW

    def finish(self) -> None:
        """A second start, undisturbed."""
        outcome = self.import_log()
        assert outcome.code == 0, outcome.log
        assert self.check()
        assert not list((self.folder / "datasets" / "shop").glob(".*"))


@pytest.fixture(scope="module")
def points(nursery: Nursery) -> Counter[str]:
    """The points that an undisturbed import passes."""
    record = nursery.folder / "import-points.txt"
    shop = Shop(nursery, "undisturbed")
    outcome = shop.import_log(points=str(record))
    assert outcome.code == 0, outcome.log
    assert shop.check()
    return Counter(record.read_text().splitlines())


def kill_and_go_on(nursery: Nursery, point: str) -> None:
    shop = Shop(nursery, f"kill-{point}")
    outcome = shop.import_log(at=[point, 1], action="kill")
    assert outcome.code == KILLED, f"{point}: {outcome.log}"
    moved = point == "latest:after-rename" or point.startswith("recipe.py")
    assert shop.check() == moved
    shop.finish()


@pytest.mark.parametrize("point", QUICK)
def test_a_killed_import_leaves_a_whole_snapshot(nursery: Nursery, points: Counter[str], point: str) -> None:
    assert point in points
    kill_and_go_on(nursery, point)


@pytest.mark.slow
def test_every_point_of_the_writer(nursery: Nursery, points: Counter[str]) -> None:
    assert {f"{name}.parquet:after-fsync" for name in ("events", "items", "users")} <= set(points)
    for point in sorted(set(points) - set(QUICK)):
        kill_and_go_on(nursery, point)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_a_random_instant(nursery: Nursery, number: int) -> None:
    shop = Shop(nursery, f"random-{number}")
    shop.import_log(after_s=0.3 * keyed_random.uniform(30, number).item())
    shop.check()
    shop.finish()
