"""A writer of a training index that is killed, or whose disk fails, leaves none or a whole one; training goes on.

`train --dry-run` makes an index of counts, then the positions of items, then the measures of the log.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tackboard.core.manifest import read_manifest, verify_manifest
from tackboard.data.positions import KIND as POSITIONS
from tackboard.data.stored_counts import KIND as COUNTS
from tackboard.events.dataset import INDEX, open_dataset

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

MEASURES = "measures"
WORDS = {COUNTS: "COUNTS", POSITIONS: "POSITIONS", MEASURES: "MEASURES"}
ORDER = tuple(WORDS)
KILLED = -9
RECIPE = f"{Path(__file__).parent / 'small_recipe.py'}:recipe"
QUICK = ("item_counts:after-fsync", "COUNTS:before-rename", "POSITIONS:before-rename", "MEASURES:before-rename")


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

    def kept(self) -> dict[str, str]:
        """The name of each whole folder, by its kind."""
        return self.kept_in(self.folder)

    @staticmethod
    def kept_in(folder: Path) -> dict[str, str]:
        names = {}
        for path in folder.glob(f"{INDEX}/*/[!.]*"):
            manifest = verify_manifest(path, read_manifest(path)["kind"])
            names[MEASURES if "num_repeats" in manifest else manifest["kind"]] = path.name
        return names

    def finish(self, figures: str) -> None:
        """Whatever was left, the next look sees the same and leaves all folders whole, perhaps beside empty locks."""
        outcome = self.look()
        assert (outcome.code, outcome.log) == (0, figures)
        assert set(self.kept()) == set(ORDER)
        assert {path.suffix for path in self.place.glob(".*")} <= {".lock"}, "what a killed writer left is gone"


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> tuple[str, Counter[str]]:
    """What a dry run says, and the points that its writer passes."""
    record = nursery.folder / "index-points.txt"
    world = World(nursery, "undisturbed")
    outcome = world.look(points=str(record))
    assert outcome.code == 0, outcome.log
    kept = world.kept()
    world.finish(outcome.log)
    text = record.read_text()
    for kind, word in WORDS.items():
        text = text.replace(kept[kind], word)
    points = Counter(text.splitlines())
    assert set(QUICK) <= set(points)
    return outcome.log, points


def disturb(nursery: Nursery, undisturbed: tuple[str, Counter[str]], point: str, action: str) -> None:
    world = World(nursery, f"{action}-{point}")
    names = World.kept_in(world.folder.parent / "undisturbed")
    place = point
    for kind, word in WORDS.items():
        place = place.replace(word, names[kind])
    outcome = world.look(at=[place, 1], action=action)
    if action == "kill":
        assert outcome.code == KILLED, outcome.log
    else:
        assert (outcome.code, outcome.log) == (0, undisturbed[0]), "an index that cannot be kept is no error"
    disturbed = POSITIONS if point.startswith(("item_positions:", "POSITIONS:")) else COUNTS
    disturbed = MEASURES if point.startswith("MEASURES:") else disturbed
    expected = set(ORDER[: ORDER.index(disturbed)]) if action == "kill" else set(ORDER) - {disturbed}
    assert set(world.kept()) == expected | ({disturbed} if point == f"{WORDS[disturbed]}:after-rename" else set())
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
