from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Program = Callable[..., Any]


def test_a_table_and_a_page(tackboard: Program, tiny_dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages" / "tiny.html"
    answer = tackboard("data", "stats", tiny_dataset, "--out", out)
    assert answer.code == 0
    lines = dict(line.split("  ", 1) for line in answer.out.splitlines() if "  " in line)
    assert lines["events"].strip().startswith("137, ")
    assert lines["users"].strip() == "14"
    assert answer.out.endswith(f"page: {out}\n")
    assert out.read_text().startswith("<!doctype html>")


def test_one_json_object(tackboard: Program, tiny_dataset: Path) -> None:
    answer = tackboard("data", "stats", tiny_dataset, "--json")
    assert answer.code == 0 and len(answer.out.splitlines()) == 1
    assert (answer.json()["num_events"], answer.json()["page"]) == (137, None)


@pytest.mark.parametrize("out", ["file/x.html", "/proc/x.html"])
def test_a_page_that_cannot_be_written(tackboard: Program, tiny_dataset: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    answer = tackboard("data", "stats", tiny_dataset, "--out", tmp_path / out)
    assert answer.code == 2 and f"error: --out {tmp_path / out}: " in answer.err
