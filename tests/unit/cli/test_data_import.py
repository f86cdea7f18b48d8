from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.events.public import deskdrop
from tackboard.events.public.listing import DATASETS
from tackboard.events.public.publisher import Counts

ROWS = "timestamp,eventType,contentId,personId,sessionId,userAgent,userRegion,userCountry\n1470000000,VIEW,5,6,7,,,\n"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of one row in the format of Deskdrop, which is all of it here."""
    import dataclasses

    one = dataclasses.replace(deskdrop.DESKDROP, counts=Counts(1, 1, 1))
    monkeypatch.setitem(DATASETS, "deskdrop", one)
    (tmp_path / "users_interactions.csv").write_text(ROWS)
    return tmp_path


def test_files_become_a_dataset(tackboard: Callable[..., Any], small: Path) -> None:
    file, out = small / "users_interactions.csv", small / "datasets"
    answer = tackboard("data", "import", "deskdrop", file, "--out", out)
    assert answer.code == 0, answer.err
    assert "events                  1" in answer.out.splitlines()
    assert "actions      view" in answer.out.splitlines()
    found = tackboard("data", "import", "deskdrop", file, "--out", out, "--name", "mine", "--json").json()
    assert Path(found["dataset"]).parent == out / "mine"
    assert found["statistics"]["num_events"] == 1
    assert found["terms"] == "ODbL 1.0, contents DbCL 1.0"


def test_the_list_says_what_to_download_and_on_what_terms(tackboard: Callable[..., Any]) -> None:
    answer = tackboard("data", "import", "--list")
    assert answer.code == 0
    for public in DATASETS.values():
        assert f"{public.name}: {public.title}" in answer.out.splitlines()
    assert "  files  ml-1m.zip, or its ratings.dat, movies.dat and users.dat" in answer.out.splitlines()
    listed = tackboard("data", "import", "--list", "--json").json()["datasets"]
    assert [entry["name"] for entry in listed] == list(DATASETS)
    assert listed[1]["counts"] == {"users": 6040, "items": 3706, "events": 1_000_209}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no dataset was named"),
        (["ml-1n"], 2, "did you mean ml-1m?"),
        (["deskdrop"], 2, "needed: users_interactions.csv"),
        (["deskdrop", "gone.zip"], 2, "gone.zip does not exist"),
        (["ml-1m", "users_interactions.csv"], 3, "these files are not ml-1m as published"),
    ],
)
def test_mistakes(
    tackboard: Callable[..., Any],
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(small)
    answer = tackboard("data", "import", *arguments)
    assert answer.code == code
    assert words in answer.err
    assert len(answer.err.splitlines()) <= 3
    assert json.dumps(sorted(path.name for path in small.iterdir())) == '["users_interactions.csv"]'
