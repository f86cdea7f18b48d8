"""Tables for people and for the results folder say what was measured, and what was not."""

from pathlib import Path
from typing import Any

from tackboard.bench.loader.report import report
from tackboard.bench.report import table_lines, write_result

FIGURES = {
    "examples_per_cpu_s": 123_456, "examples_per_cpu_s_runs": [123_456], "tokens_per_cpu_s": 5_000_000,
    "cpu_seconds_per_epoch": 0.3, "wall_seconds_per_epoch": 0.4, "setup_cpu_seconds": 0.5,
}  # fmt: skip
MEMORY = {"peak_bytes": 300 << 20, "above_idle_bytes": 100 << 20, "cpu_seconds": 1.5}


def a_result() -> dict[str, Any]:
    codecs = {"zstd": {"ours": {"bytes": 10, "bytes_per_candidate": 3.56, "times_smaller": 9.06}}}
    return {
        "bench": "loader",
        "quick": False,
        "repeats": 3,
        "rivals": {"ray": "2.60.0"},
        "left_out": ["hugging_face_torch"],
        "checked": False,
        "dataset": {"name": "made up", "num_examples": 4_000, "num_events": 200_000},
        "larger_dataset": {"num_events": 2_000_000},
        "setting": {"max_length": 64, "tokens_per_step": 4096, "num_hashes": 8, "window_buckets": 16},
        "contenders": {"tackboard": FIGURES, "arrow": {"differs": ["items differs"]}, "ray": {"failed": "no memory"}},
        "ladder": {"streamed": FIGURES, "product": FIGURES},
        "workers": {"tackboard": {"0": 1.25, "2": 0.75}},
        "memory": {"1": {"tackboard": MEMORY}, "10": {"tackboard": MEMORY, "ray": {"failed": "no memory"}}},
        "mixing": {"num_buckets": 256, "windows": {"16": {"spread": 6.98, "neighbours": 16.0}}},
        "layouts": {"worlds": {"few": {"candidates_per_request": 4.3, "mean_history": 39.8, "codecs": codecs}}},
        "aims": [{"aim": "faster", "value": 1.5, "met": False}],
        "others_share": 0.0,
        "disturbed": False,
        "hardware": {"cpu": "some CPU", "usable_cores": 2, "memory_bytes": 2**32},
        "python": "3.11.7",
        "packages": {"numpy": "2.4.6", "absent": None},
        "commit": "abc",
        "date": "2026-11-15",
    }


def test_table() -> None:
    text = "\n".join(table_lines(report(a_result())))
    for expected in (
        "123,456", "batches differ", "failed", "arrow: items differs", "ray: no memory", "1.25", "0.75", "300", "100",
        "2,000,000 events", "6.98", "9.06", "NOT met: 1.5, faster", "left out in this run: hugging_face_torch",
        "not compared on a dataset of this size",
    ):  # fmt: skip
        assert expected in text, expected


def test_absent_rivals_and_a_quick_run_are_said() -> None:
    quick = {"rivals": "not installed: make rivals", "ladder": {}, "workers": {}, "left_out": [], "checked": True}
    lines = table_lines(report(a_result() | quick))
    assert "rivals: not installed: make rivals" in lines
    assert not any("step by step" in line or "left out" in line for line in lines)


def test_result_file(tmp_path: Path) -> None:
    path = write_result(report(a_result()), tmp_path / "results", "vm2")
    assert path.name == "loader_vm2_202611.md"
    result = a_result()
    result["dataset"]["name"] = "logs"
    other = write_result(report(result), tmp_path / "results", "vm2")
    assert other.name == "loader-logs_vm2_202611.md" and "--data datasets/logs" in other.read_text()
    written = path.read_text()
    for expected in ("commit abc", "some CPU", "ray 2.60.0", "| tackboard | 123,456 |", "## Ours, step by step"):
        assert expected in written, expected
