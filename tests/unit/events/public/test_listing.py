"""Names, and the real files where somebody has them: they are downloaded by hand and are no part of this project."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tackboard.core.errors import UsageError
from tackboard.events.checks.advice import advise
from tackboard.events.checks.turnover import measure_turnover
from tackboard.events.dataset import open_dataset
from tackboard.events.public.listing import DATASETS, find_public
from tackboard.events.public.publisher import import_public

FILES = {
    "ml-100k": ["ml-100k/ml-100k.zip"],
    "ml-1m": ["ml-1m/ml-1m.zip"],
    "amazon-beauty-s3rec": ["amazon-seq/s3rec.zip"],
    "amazon-sports-s3rec": ["amazon-seq/s3rec.zip"],
    "amazon-toys-s3rec": ["amazon-seq/s3rec.zip"],
    "lastfm-s3rec": ["amazon-seq/s3rec.zip"],
    "amazon-beauty-ticoserec": ["amazon-seq/ticoserec_item_time.zip"],
    "amazon-sports-ticoserec": ["amazon-seq/ticoserec_item_time.zip"],
    "amazon-video-sasrec": ["amazon-seq/sasrec_video_bert4rec_beauty.zip"],
    "amazon-beauty-bert4rec": ["amazon-seq/sasrec_video_bert4rec_beauty.zip"],
    "retailrocket-mb": ["retailrocket-mb/retail_beh.zip"],
    "deskdrop": ["deskdrop/users_interactions.csv.zip"],
    "open-bandit-small": ["open-bandit-small/obd_small.zip"],
    "kuairand-sample": ["kuairand-sample/kuairand27k_like_hate_kcore15.zip"],
    "kakao-brunch": ["kakao-brunch/reads.parquet", "kakao-brunch/items.txt.zst"],
}
QUICK = {"ml-100k", "deskdrop"}
LIMIT_BYTES = 8 << 30
IMPORT = "import sys; from tackboard.cli.main import run; sys.argv[0] = 'tackboard'; run()"


def test_names_are_found_and_typos_answered() -> None:
    assert set(FILES) == set(DATASETS)
    assert find_public("ml-1m").counts.events == 1_000_209
    with pytest.raises(UsageError, match="did you mean ml-100k"):
        find_public("ml-100")
    for dataset in DATASETS.values():
        assert all((dataset.title, dataset.files, dataset.source, dataset.terms, dataset.note)), dataset.name


def found(public_data: Path, name: str) -> list[Path]:
    paths = [public_data / path for path in FILES[name]]
    missing = [path for path in paths if not path.exists()]
    if missing:
        pytest.skip(f"{missing[0]} is absent: download it to run this test")
    return paths


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FILES if name != "kakao-brunch"],
)
def test_the_real_files(name: str, public_data: Path, tmp_path: Path) -> None:
    path, _ = import_public(find_public(name), found(public_data, name), tmp_path)
    dataset = open_dataset(path)
    assert dataset.num_events == DATASETS[name].counts.events
    assert dataset.num_users == DATASETS[name].counts.users


@pytest.mark.slow
def test_22_million_reads_are_imported_within_8_gib(public_data: Path, tmp_path: Path) -> None:
    paths = [str(path) for path in found(public_data, "kakao-brunch")]
    command = [sys.executable, "-c", IMPORT, "data", "import", "kakao-brunch", *paths, "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    assert open_dataset(tmp_path / "kakao-brunch").num_events == 22_105_708
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < LIMIT_BYTES


@pytest.mark.parametrize(
    ("name", "filter_seen", "split", "is_fast"),
    [
        ("deskdrop", False, "time", True),
        pytest.param("ml-1m", True, "last", False, marks=pytest.mark.slow),
        pytest.param("kakao-brunch", False, "time", False, marks=pytest.mark.slow),
    ],
)
def test_advice_for_the_real_files(
    name: str, filter_seen: bool, split: str, is_fast: bool, public_data: Path, tmp_path: Path
) -> None:
    """Articles come and go, and are read again; a film is rated once, and films stay."""
    path, _ = import_public(find_public(name), found(public_data, name), tmp_path)
    advice = advise(measure_turnover(open_dataset(path)))
    assert (advice.filter_seen.value, advice.split.value, bool(advice.retraining)) == (filter_seen, split, is_fast)
