"""A killed `tackboard predict` goes on with the missing parts, and ends in the bytes of a job that was not killed."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tackboard.core.manifest import verify_manifest

if TYPE_CHECKING:
    from conftest import Nursery, Outcome
else:
    Nursery = Outcome = Any

KILLED = -9
RECIPE = f"{Path(__file__).parent / 'small_recipe.py'}:recipe"
QUICK = ("inputs.json:after-rename", "part-00001.parquet:after-fsync", "part-00002.parquet:after-rename")


class Job:
    """One folder of predictions."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self.nursery = nursery
        self.out = nursery.folder / "predicted" / name

    def run(self, **order: Any) -> Outcome:
        """`tackboard predict`, disturbed as `order` says (see driver.py)."""
        options = ["--bundle", "ranking", "--out", str(self.out), "--device", "cpu"]
        return self.nursery.run(["predict", "datasets/asked", *options], **order)

    def files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.out)): p.read_bytes() for p in self.out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> tuple[dict[str, bytes], Counter[str]]:
    """The files of a job that nobody killed, and the points that its writer passes."""
    shutil.copytree(nursery.folder / "datasets" / "small", nursery.folder / "datasets" / "asked", symlinks=True)
    for arguments in (
        ["data", "label", "datasets/asked", "--label", "click=1h"],
        ["train", RECIPE, "--runs", "ranked", "--set", "training.steps=2"],
        ["export", "ranked/latest", "--out", "ranking"],
    ):
        outcome = nursery.run(arguments)
        assert outcome.code == 0, outcome.log
    job, record = Job(nursery, "undisturbed"), nursery.folder / "prediction-points.txt"
    outcome = job.run(points=str(record))
    assert outcome.code == 0, outcome.log
    points = Counter(record.read_text().splitlines())
    assert set(QUICK) <= set(points) and len(list((job.out / "scores").iterdir())) > 3
    return job.files(), points


def disturb(nursery: Nursery, undisturbed: tuple[dict[str, bytes], Counter[str]], point: str, action: str) -> None:
    """Stops a job at `point`; whatever is there bears its final name only if it is whole, and the next job ends."""
    whole, _ = undisturbed
    job = Job(nursery, f"{action}-{point}")
    outcome = job.run(at=[point, 1], action=action)
    assert outcome.code == (KILLED if action == "kill" else 2), outcome.log
    for name, content in job.files().items():
        if not Path(name).name.startswith("."):
            assert content == whole[name]
    kept = {path.name: path.stat().st_mtime_ns for path in job.out.glob("scores/part-*")}
    outcome = job.run()
    assert outcome.code == 0, outcome.log
    assert job.files() == whole, "with nothing left of the killed writer"
    verify_manifest(job.out, "predictions")
    assert kept == {name: (job.out / "scores" / name).stat().st_mtime_ns for name in kept}, (
        "a part that was there is kept"
    )
    assert all(pq.read_metadata(path).num_rows for path in job.out.glob("scores/part-*"))


@pytest.mark.parametrize("point", QUICK)
def test_a_killed_job_goes_on(nursery: Nursery, undisturbed: tuple[dict[str, bytes], Counter[str]], point: str) -> None:
    disturb(nursery, undisturbed, point, "kill")


def test_a_full_disk_is_said_and_the_job_goes_on(
    nursery: Nursery, undisturbed: tuple[dict[str, bytes], Counter[str]]
) -> None:
    disturb(nursery, undisturbed, "part-00001.parquet:after-write", "ENOSPC")


@pytest.mark.slow
def test_every_point_of_the_writer(nursery: Nursery, undisturbed: tuple[dict[str, bytes], Counter[str]]) -> None:
    for point in sorted(set(undisturbed[1]) - set(QUICK)):
        if not point.startswith("part-") or point.startswith("part-00000"):  # The parts are written alike.
            disturb(nursery, undisturbed, point, "kill")
