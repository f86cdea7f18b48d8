from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.dataset import open_dataset
from tackboard.events.public.archive import Download
from tackboard.events.public.publisher import (
    PublicData,
    PublicDataset,
    PublishedCounts,
    canonical_events,
    import_public,
    named,
    table_of,
)
from tackboard.events.schema import check_events


def read_pairs(download: Download) -> PublicData:
    table = table_of(download.read("pairs.tsv"), {"u": pa.int64(), "i": pa.string(), "t": pa.int64()}, "\t")
    return PublicData(events=canonical_events(table["u"], table["i"], table["t"].to_numpy()))


PAIRS = PublicDataset(
    name="pairs",
    title="Pairs",
    files="pairs.tsv",
    source="the publisher",
    terms="none",
    counts=PublishedCounts(users=2, items=2, events=4),
    read=read_pairs,
    note="made up",
)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("1\ta\t5\n2\tb\t5\n1\tb\t5\n1\tb\t5\n")
    return path


def test_every_row_is_kept_and_ties_keep_the_publishers_order(pairs: Path, tmp_path: Path) -> None:
    path, _ = import_public(PAIRS, [pairs], tmp_path / "datasets")
    dataset = open_dataset(path)
    assert dataset.name == "pairs"
    assert dataset.manifest["source"]["note"] == "made up"
    rows = dataset.read_events().to_pylist()
    found = [(row["user"], row["item"], row["order"]) for row in rows]
    assert found == [(1, "a", 0), (1, "b", 2), (1, "b", 3), (2, "b", 1)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1\ta\t5\n2\tb\t5\n", "2 users, 2 items and 2 events, not 2 users, 2 items and 4 events"),
        ("1\ta\t5\nx\tb\t5\n", "not pairs as published: ArrowInvalid"),
        ("1\ta\n", "not pairs as published"),
    ],
)
def test_other_files_are_refused_and_nothing_is_written(pairs: Path, tmp_path: Path, content: str, words: str) -> None:
    pairs.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        import_public(PAIRS, [pairs], tmp_path / "datasets")
    assert "needed: pairs.tsv\ndownload it from the publisher" in str(caught.value)
    assert not (tmp_path / "datasets").exists()


def test_a_missing_file_and_a_bad_name(pairs: Path, tmp_path: Path) -> None:
    other = pairs.rename(tmp_path / "other.tsv")
    with pytest.raises(DataError, match="holds no file pairs.tsv"):
        import_public(PAIRS, [other], tmp_path / "datasets")
    with pytest.raises(UsageError, match="dataset name"):
        import_public(PAIRS, [other], tmp_path / "datasets", "../x")
    (tmp_path / "pairs.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match="pairs.zip is damaged") as caught:
        import_public(PAIRS, [tmp_path / "pairs.zip"], tmp_path / "datasets")
    assert caught.value.fix == "download it from the publisher"


def test_canonical_events_are_canonical() -> None:
    events = canonical_events(
        np.array([1, 2], dtype=np.int32), pa.array(["a", "a"]), [5, 6], action=named(np.array([1, 0]), ("x", "y")),
        surface=pa.array(["home", "home"]), rating=pa.array([1, 2], pa.int64()),
    )  # fmt: skip
    check_events(events)
    assert events["action"].to_pylist() == ["y", "x"]
    assert events["order"].to_pylist() == [0, 1]
    for code in (2, -1):
        with pytest.raises(DataError, match=f"the code {code} has no name"):
            named(np.array([0, code]), ("x", "y"))
