"""A writer of a training index that is killed, or whose disk fails, leaves none or a whole one; training goes on.

`train --dry-run` makes an index and nothing else.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core.manifest import verify_manifest
from tackboard.data.index import KIND
from tackboard.events.dataset import INDEX, open_dataset

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
RECIPE = f"{Path(__file__).parent / 'small_recipe.py'}:recipe"
QUICK = ("item_counts:after-fsync", "DIGEST:before-rename")


class World:
    """A dataset of its own, without an index."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.folder = nursery.folder / "indexed" / name
        shutil.copytree(
            nursery.folder / "datasets" / "small", self.folder, symlinks=True, ignore=shutil.ignore_patterns(INDEX)
        )
        self.place = self.folder / INDEX / open_dataset(self.folder, verify=False).path.name

    def look(self, **order: Any) -> Outcome:
        """A dry run; two looks of the same figures read the same index."""
        options = ["--set", f"data.dataset={self.folder}", "--dry-run", "--json"]
        return self.nursery.run(["train", RECIPE, *options], **order)

    def indexes(self) -> list[Path]:
        found = list(self.place.glob("[!.]*"))
        for path in found:
            verify_manifest(path, KIND)
        return found

    def finish(self, figures: str) -> None:
        """Whatever was left, the next look sees the same and leaves one whole index, perhaps beside an empty lock."""
        outcome = self.look()
        assert (outcome.code, outcome.log) == (0, figures)
        assert len(self.indexes()) == 1
        assert {path.suffix for path in self.place.glob(".*")} <= {".lock"}, "what a killed writer left is gone"


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> tuple[str, Counter[str]]:
    """What a dry run says, and the points that its writer passes."""
    record = nursery.folder / "index-points.txt"
    world = World(nursery, "undisturbed")
    outcome = world.look(points=str(record))
    assert outcome.code == 0, outcome.log
    (index,) = world.indexes()
    world.finish(outcome.log)
    points = Counter(line.replace(index.name, "DIGEST") for line in record.read_text().splitlines())
    assert set(QUICK) <= set(points)
    return outcome.log, points


def disturb(nursery: Nursery, undisturbed: tuple[str, Counter[str]], point: str, action: str) -> None:
    world = World(nursery, f"{action}-{point}")
    digest = next((nursery.folder / "indexed" / "undisturbed" / INDEX).glob("*/*")).name
    outcome = world.look(at=[point.replace("DIGEST", digest), 1], action=action)
    if action == "kill":
        assert outcome.code == KILLED, outcome.log
    else:
        assert (outcome.code, outcome.log) == (0, undisturbed[0]), "an index that cannot be kept is no error"
    assert len(world.indexes()) == (point in ("DIGEST:after-rename",))
    world.finish(undisturbed[0])


@pytest.mark.parametrize("point", QUICK)
@pytest.mark.parametrize("action", ["kill", "EROFS"])
def test_a_disturbed_writer_leaves_no_index_or_a_whole_one(
    nursery: Nursery, undisturbed: tuple[str, Counter[str]], point: str, action: str
) -> None:
    disturb(nursery, undisturbed, point, action)


@pytest.mark.slow
def test_every_point_of_the_writer(nursery: Nursery, undisturbed: tuple[str, Counter[str]]) -> None:
    for point in sorted(set(undisturbed[1]) - set(QUICK)):
        for action in ("kill", "ENOSPC"):
            disturb(nursery, undisturbed, point, action)
