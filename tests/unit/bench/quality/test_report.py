"""Tables for people: text, Markdown with charts beside it, and what is not finished."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tackboard.bench.quality.report import charts, report
from tackboard.bench.report import table_lines, write_result


@pytest.fixture
def result() -> dict[str, Any]:
    lines = [{"name": f"m{number}", "x": [1, 2], "y": [0.1, 0.2]} for number in range(7)]
    return {
        "bench": "quality",
        "study": "compare",
        "dataset": "ml-1m",
        "quick": False,
        "data": {"num_users": 6_040, "num_items": 3_883, "num_events": 1_000_209, "last_tied_share": 0.4212},
        "ties": ["file"],
        "protocol": {"filter_seen": True, "max_users": 0},
        "note": "All ratings are positives.",
        "table": {
            "sections": [
                {"title": "Test", "header": ["", "hr@10"], "rows": [["popularity", "0.0500"], ["PinFM", "0.3500"]]},
                {"title": "Nothing", "header": ["a"], "rows": []},
            ],
            "notes": ["Chosen on validation."],
            "figures": {},
            "charts": [
                {"kind": "dots", "name": "hr10", "title": "HR@10", "rows": [{"name": "PinFM", "values": [0.35, 0.36]}],
                 "marks": {"HSTU-large": 0.3294}},
                {"kind": "lines", "name": "curves", "title": "while training", "x_label": "steps", "lines": lines},
            ],
        },
        "num_left": 0,
        "failures": [],
        "devices": ["NVIDIA H200"],
        "commits": ["abc"],
        "command": ["bench", "quality", "--data", "/home/me/my files"],
        "hardware": {"cpu": "EPYC", "usable_cores": 2, "memory_bytes": 2**34},
        "python": "3.12",
        "packages": {"torch": "2.11"},
        "commit": "abc+",
        "date": "2026-11-15",
    }  # fmt: skip


def is_image(text: str) -> bool:
    """Whether a viewer of images knows it: outside of a page an SVG needs its namespace."""
    return ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"


def test_lines(result: dict[str, Any]) -> None:
    lines = table_lines(report(result))
    assert lines[0] == "compare on ml-1m: 6,040 users, 3,883 items, 1,000,209 events."
    assert "without the items of the history" in lines[1] and "42.1% of users" in lines[1]
    assert lines[3:7] == ["Test", "             hr@10", "popularity  0.0500", "PinFM       0.3500"]
    assert lines[-1] == "Chosen on validation." and "Nothing" not in lines
    quick = table_lines(report({**result, "quick": True}))
    assert quick[0].startswith("QUICK, says nothing about quality")
    sampled = table_lines(report({**result, "protocol": {"filter_seen": False, "max_users": 20_000}}))
    assert "with the items of the history" in sampled[1] and "20,000 users, drawn once" in sampled[1]


def test_what_is_not_finished_is_said(result: dict[str, Any]) -> None:
    failure = {"cell": "m_seed0_test", "code": 4, "log": "work/logs/m.log", "reason": "error: diverged"}
    lines = table_lines(report({**result, "failures": [failure], "num_left": 3}))
    assert lines[-2] == "FAILED (4): m_seed0_test: error: diverged; see work/logs/m.log"
    assert lines[-1] == "3 cells are not finished: run the same command again to continue"
    lines = table_lines(report({**result, "num_left": 1, "commits": ["abc", "def"]}))
    assert lines[-1].startswith("1 cell is not finished")
    assert "Different versions of the code ran these cells: commits abc, def." in lines
    assert not any("versions" in line for line in table_lines(report(result)))


def test_markdown_with_charts(result: dict[str, Any], tmp_path: Path) -> None:
    path = write_result(report(result), tmp_path / "results", "h200")
    assert path.name == "quality-ml-1m-compare_h200_202611.md"
    text = path.read_text()
    assert "`tackboard bench quality --data 'my files'`, 2026-11-15, commit abc+.\n" in text
    assert (
        "Models were fitted on: NVIDIA H200. Commits of the cells: abc." in text
        and "EPYC, 2 usable cores, 16.0 GiB" in text
    )
    assert "|  | hr@10 |\n|---|--:|\n| popularity | 0.0500 |" in text
    for name in ("hr10", "curves-1", "curves-2"):
        file = f"quality-ml-1m-compare_h200_202611_{name}.svg"
        assert f"({file})" in text and is_image((path.parent / file).read_text())
    assert "HSTU-large 0.3294" in charts(result)["hr10"].markup
