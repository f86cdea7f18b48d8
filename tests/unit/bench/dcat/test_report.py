"""The report of a measurement: every line and ratio is in a table, and the chart is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tackboard.bench.dcat.report import report
from tackboard.bench.report import table_lines, write_result


def test_the_report_names_every_line_and_ratio(dcat_result: dict[str, Any], tmp_path: Path) -> None:
    made = report(dcat_result)
    text = "\n".join(table_lines(made))
    assert all(text.count(f"\n{words}") == 6 for words in dcat_result["lines"].values()), (
        "equality, 3 of serving, 2 of training"
    )
    for title in ("Serving, 1:1\n", "Serving, 1:40\n", "Training, 1:16\n", "What a fixed length changes"):
        assert title in text
    path = write_result(made, tmp_path, "here")
    written = path.read_text(encoding="utf-8")
    assert "`tackboard bench dcat --quick`" in written
    assert len(list(tmp_path.glob("*_times.svg"))) == 1


def test_gpu_memory_is_shown_if_it_was_measured(dcat_result: dict[str, Any]) -> None:
    assert "GPU memory" not in "\n".join(table_lines(report(dcat_result)))
    line = dict(dcat_result["training"][0])
    line["end_to_end"] = [entry | {"gpu_peak_bytes": 2_000_000} for entry in line["end_to_end"]]
    text = "\n".join(table_lines(report(dcat_result | {"training": [line]})))
    assert "GPU memory, MB: 2, 2, 2, 2" in text
