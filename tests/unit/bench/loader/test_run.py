"""The loader bench: what it measures without rivals, and that a rival with other batches gets no time."""

import json
from pathlib import Path
from typing import Any

import pytest

from tackboard.bench.loader import run as loader
from tackboard.bench.loader.run import CONTENDERS, Runner, aims, measure, memory_figures, report, speed_figures
from tackboard.bench.report import table_lines
from tackboard.core.errors import TackboardError
from tackboard.core.processes import Answer

RUN = {
    "num_examples": 1000, "num_tokens": 50_000, "cpu_seconds": 0.5, "wall_seconds": 0.6, "num_epochs": 2,
    "setup_cpu_seconds": 0.1,
}  # fmt: skip


@pytest.mark.slow
def test_without_rivals_only_ours_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(json.dumps(measure(tmp_path, quick=True, rivals_python=tmp_path / "none")))
    assert result["rivals"] == "not installed: make rivals"
    assert "make rivals" in capsys.readouterr().err
    assert list(result["contenders"]) == ["tackboard"]
    assert result["contenders"]["tackboard"]["examples_per_cpu_s"] > 0
    assert result["checked"] and result["aims"] == []
    for growth in ("1", "10"):
        assert result["memory"][growth]["tackboard"]["above_idle_bytes"] > 0
    assert result["larger_dataset"]["num_events"] == 10 * result["dataset"]["num_events"]
    assert result["layouts"]["worlds"] and result["mixing"]["windows"]["16"]["spread"] > 0


def test_figures_are_of_the_middle_run() -> None:
    found = speed_figures([RUN, RUN | {"cpu_seconds": 0.25}, RUN | {"cpu_seconds": 2.0}])
    assert found["examples_per_cpu_s"] == 2000
    assert found["examples_per_cpu_s_runs"] == [2000, 4000, 500]
    assert (found["tokens_per_cpu_s"], found["cpu_seconds_per_epoch"]) == (100_000, 0.25)
    assert speed_figures([RUN, {"failed": "x"}]) == {"failed": "x"}
    assert memory_figures(RUN | {"peak_bytes": 500, "idle_bytes": 200})["above_idle_bytes"] == 300


def result_with(ours: int, *, peak: int = 100, num_buckets: int = 31, **others: dict[str, Any]) -> dict[str, Any]:
    memory = {"1": {"tackboard": {"peak_bytes": 100}}, "10": {"tackboard": {"peak_bytes": peak}}}
    return {
        "contenders": {"tackboard": {"examples_per_cpu_s": ours}, **others},
        "memory": memory,
        "dataset": {"num_buckets": num_buckets},
        "setting": {"window_buckets": 16},
    }


def test_aims() -> None:
    slow, fast = {"examples_per_cpu_s": 100}, {"examples_per_cpu_s": 400}
    speed, growth = aims(result_with(1000, arrow=slow, ray=fast, hugging_face={"failed": "x"}))
    assert (speed["value"], speed["met"], growth["value"], growth["met"]) == (2.5, True, 1.0, True)
    assert "(ray)" in speed["aim"]
    speed, growth = aims(result_with(700, peak=120, ray=fast))
    assert not speed["met"] and not growth["met"]
    assert aims(result_with(700, num_buckets=3)) == []


def test_a_rival_with_other_batches_gets_no_time(loader_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(_runner: Runner, entry: Any, tasks: str, *, watch: bool = False) -> dict[str, Any]:
        asked.append((entry.module, tasks, watch))
        return RUN | {"most_tokens": 513 if entry.module == "ray" else 512}

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(
        loader.Reference, "differences", lambda _self, path: ["items differs"] if path.name.startswith("arrow") else []
    )
    entries = {name: CONTENDERS[name] for name in ("tackboard", "arrow", "ray")}
    found = Runner(loader_folder, Path("python")).speed(entries, 2)
    assert found["tackboard"]["examples_per_cpu_s"] == 2000
    assert found["arrow"] == {"differs": ["items differs"]}
    assert found["ray"] == {"differs": ["a step has 513 events, more than tokens_per_step"]}
    assert [tasks for _, tasks, _ in asked] == ["speed,check"] * 3 + ["speed"]
    assert asked[3] == ("tackboard", "speed", False)
    monkeypatch.setattr(loader.Reference, "differences", lambda _self, _path: ["items differs"])
    with pytest.raises(TackboardError, match="our own batches differ from those of make_batch: items differs"):
        Runner(loader_folder, Path("python")).speed(entries, 1)


def test_a_process_that_fails(loader_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ask", lambda *_a, **_k: Answer(1, errors="Traceback\nValueError: no"))
    runner = Runner(loader_folder, Path("python"))
    assert runner.run(CONTENDERS["ray"], "speed") == {"failed": "ValueError: no"}
    with pytest.raises(TackboardError, match="own side of the loader bench failed: ValueError: no"):
        runner.run(CONTENDERS["tackboard"], "speed")


# ---- for people ----

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
        "of this size are not compared",
    ):  # fmt: skip
        assert expected in text, expected


def test_absent_rivals_and_a_quick_run_are_said() -> None:
    quick = {"rivals": "not installed: make rivals", "ladder": {}, "workers": {}, "left_out": [], "checked": True}
    lines = table_lines(report(a_result() | quick))
    assert "rivals: not installed: make rivals" in lines
    assert not any("step by step" in line or "left out" in line for line in lines)


def test_the_theme_names_the_users_dataset() -> None:
    result = a_result()
    assert report(result).theme == "loader" and report(result).versions == "Rivals: ray 2.60.0."
    result["dataset"]["name"] = "logs"
    assert report(result).theme == "loader-logs" and report(result).command.endswith("--data datasets/logs")
