"""A tiny study: a small world, small models and few steps; and a log in the form of Kakao Brunch, made up."""

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.bench.finetune import data, finetune_study
from tackboard.bench.finetune.finetune_study import FinetuneOptions, FinetunePlan, plan, prepare_plan
from tackboard.bench.quality.cells import Work
from tackboard.bench.quality.data import BENCHES
from tackboard.events.public import listing
from tackboard.events.public.kakao_brunch import HOUR_MS, START_MS
from tackboard.events.public.publisher import PublishedCounts

TINY = (
    *(
        "model.width=8",
        "model.tables.num_hashes=4",
        "model.tables.dim=2",
        "model.tables.num_rows=64",
        "model.backbone.num_layers=1",
    ),
    *("data.tokens_per_step=2048", "training.steps=2", "training.checkpoint_every=2"),
)


@pytest.fixture
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the world, the models and the runs of --quick tiny."""
    monkeypatch.setattr(data, "WORLD", dataclasses.replace(data.WORLD, num_items=120))
    monkeypatch.setattr(data, "QUICK_USERS", 150)
    ranker = ("model.recent.num_events=2", "model.recent.width=4", "data.tokens_per_step=2048")
    sizes = finetune_study.FinetuneSizes(recipe="", pretraining=TINY, ranker=ranker, steps={"third": 2, "all": 2})
    monkeypatch.setattr(finetune_study, "QUICK", sizes)


@pytest.fixture
def tiny_study(tiny_sizes: None, torch_settings: None, tmp_path: Path) -> Callable[..., tuple[Work, FinetunePlan]]:
    """A function that prepares a tiny study and returns its folder and its plan."""

    def prepare(dataset: str = "synthetic", files: Path | None = None) -> tuple[Work, FinetunePlan]:
        options = FinetuneOptions(dataset=dataset, quick=True)
        work = Work.open(tmp_path / f"work-{dataset}")
        prepare_plan(options, work, files)
        return work, plan(options)

    return prepare


@pytest.fixture
def fake_brunch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the compact form of Kakao Brunch: 60 users, 40 articles, reads from 2018-10 to 2019-02."""
    folder = tmp_path / "downloads" / "kakao-brunch"
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    first, last = _hour("2018-10-01"), _hour("2019-02-27")
    users, items, hours = np.repeat(np.arange(60), 20), random.integers(0, 40, 1200), random.integers(first, last, 1200)
    hours[::20] = _hour("2019-02-23") + random.integers(0, 48, 60)  # Everybody reads after the split.
    order = np.lexsort((hours, users))
    columns = {"user": users[order], "item": items[order], "hour": hours[order]}
    pq.write_table(pa.table({name: pa.array(column, pa.int32()) for name, column in columns.items()}),
                   folder / "reads.parquet")  # fmt: skip
    names = "".join(f"@author{item % 7}_{item}\n" for item in range(40))
    (folder / "items.txt.zst").write_bytes(pa.Codec("zstd").compress(names.encode(), asbytes=True))
    counts = PublishedCounts(users=60, items=len(np.unique(items)), events=1200)
    public = dataclasses.replace(listing.DATASETS["kakao-brunch"], counts=counts)
    monkeypatch.setitem(listing.DATASETS, "kakao-brunch", public)
    monkeypatch.setitem(BENCHES, "kakao-brunch", dataclasses.replace(BENCHES["kakao-brunch"], max_length=12))
    source = dataclasses.replace(data.SOURCES["kakao-brunch"], quick_stride=1)
    monkeypatch.setitem(data.SOURCES, "kakao-brunch", source)
    return folder.parent


def _hour(day: str) -> int:
    time = datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp() * 1000
    return int((time - START_MS) // HOUR_MS)
