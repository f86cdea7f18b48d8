"""`tackboard features docs`: the page, the reference, and what is said about wrong arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tackboard.features.reference import BEGIN, END, reference

Program = Callable[..., Any]
SPEC = """
from tackboard.features.language import Events, FeatureSet, Request

events, request = Events(), Request()
features = FeatureSet("home", hour=request.time.hour().described("<script>"), all=events.count())
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_features.py"
    path.write_text(SPEC)
    return path


def test_a_page_with_models(tackboard: Program, spec: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "signature.json").write_text(json.dumps({"name": "pin", "version": "3", "reads": ["hour"]}))
    answer = tackboard("features", "docs", spec, "--models", bundle, "--models", bundle)
    assert answer.code == 0
    assert answer.out == "features.html: 2 features, 2 sources, 2 models\n"
    html = (tmp_path / "features.html").read_text()
    assert "pin 3" in html and "my_features.py:5" in html and "<script" not in html
    assert tackboard("features", "docs", spec, "--out", tmp_path / "other.html").code == 0
    assert "no model was named" in (tmp_path / "other.html").read_text()


def test_the_reference_is_printed_or_put_into_a_page(tackboard: Program, spec: Path, tmp_path: Path) -> None:
    assert tackboard("features", "docs", "--reference").out == reference()
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert "renewed" in tackboard("features", "docs", "--reference", "--out", page).out
    assert reference() in page.read_text()
    assert "up to date" in tackboard("features", "docs", "--reference", "--out", page).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no features were named"),
        (["absent.py"], "absent.py is not a file"),
        (["my_features.py", "--models", "absent"], "absent is not a folder"),
        (["my_features.py", "--models", "."], "holds no model"),
        (["my_features.py", "--out", "absent/page.html"], "absent is not a folder"),
        (["my_features.py", "--reference"], "takes no features"),
        (["--reference", "--out", "absent.md"], "absent.md is not a file"),
    ],
)
def test_wrong_use_is_explained_and_writes_nothing(
    tackboard: Program, spec: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    answer = tackboard("features", "docs", *arguments)
    assert answer.code == 2
    assert message in answer.err
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before
