"""The features bench: what it measures without rivals, what it says of them, and that a wrong rival gets no time."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tackboard.bench.features import run as features
from tackboard.bench.features.run import aims, batch_figures, differences, measure, online_figures, report
from tackboard.bench.report import table_lines, write_result
from tackboard.bench.turns import judged
from tackboard.core.errors import TackboardError
from tackboard.core.processes import Answer

FIGURES = {"us_median": 500.0, "us_p99": 900.0, "us_cpu_median": 480.0, "repeats": 400}
BATCH = {
    "rows_per_cpu_s": 1_000_000, "rows_per_cpu_s_median": 900_000, "cpu_seconds": 0.2, "wall_seconds": 0.2, "repeats": 7
}  # fmt: skip


def result_with(**online: Any) -> dict[str, Any]:
    """A measurement with round numbers."""
    part = {"num_candidates": 1000, "num_events": 200, "num_requests": 20}
    result: dict[str, Any] = {
        "bench": "features",
        "quick": False,
        "num_features": 40,
        "num_aggregations": 8,
        "tolerance": 1e-12,
        "rivals": {"polars": "2.1.0"},
        "batch": {
            "num_rows": 200_000,
            "num_requests": 20_000,
            "num_events": 200_000,
            "contenders": {"tackboard": BATCH, "polars": BATCH | {"cpu_seconds": 0.16}, "pandas": {"failed": "x"}},
        },
        "online": part | {"contenders": {"tackboard": FIGURES, **online}},
        "unprepared": part | {"contenders": {"tackboard": FIGURES}},
        "others_share": 0.01,
        "disturbed": False,
        "hardware": {"cpu": "some CPU", "usable_cores": 2, "memory_bytes": 2**32},
        "python": "3.11.7",
        "packages": {"numpy": "2.4.6", "absent": None},
        "commit": "abc",
        "date": "2026-11-15",
    }
    return result | {"aims": aims(result)}


def test_figures() -> None:
    batch = batch_figures({"cpu_seconds": [0.5, 0.25, 1.0], "wall_seconds": [0.4, 0.3, 0.9]}, 1000)
    assert (batch["rows_per_cpu_s"], batch["rows_per_cpu_s_median"], batch["wall_seconds"]) == (4000, 2000, 0.3)
    online = online_figures({"wall_us": [1.0, 3.0, 2.0], "cpu_us": [1.0, 1.0, 4.0]})
    assert (online["us_median"], online["us_cpu_median"], online["repeats"]) == (2.0, 1.0, 3)


def test_aims_are_judged_by_what_was_measured() -> None:
    slow = FIGURES | {"us_cpu_median": 5_760.0}
    found = aims(result_with(pandas=slow, feast_store={"differs": ["x"]}))
    assert [(aim["value"], aim["met"]) for aim in found] == [(1.25, True), (12.0, True)]
    assert not aims(result_with(pandas=FIGURES))[1]["met"]


def test_a_speedup_on_the_clock_alone_is_not_met() -> None:
    """What a busy machine showed: 26.5 times our time on the clock, and 8.7 times our CPU time."""
    found = aims(result_with(pandas=FIGURES | {"us_median": 500 * 26.5, "us_cpu_median": 480 * 8.7}))[1]
    assert (found["value"], found["met"]) == (8.7, False)


def test_a_disturbed_run_says_so_and_meets_nothing() -> None:
    result = result_with(pandas=FIGURES | {"us_cpu_median": 9_999.0}) | {"others_share": 0.62, "disturbed": True}
    result["aims"] = judged(result["aims"], result)
    text = "\n".join(table_lines(report(result)))
    assert "disturbed: other processes used 62%" in text and "not judged: 20.83" in text
    assert not any(line.startswith("met") for line in table_lines(report(result)))


def test_table_and_result_file(tmp_path: Path) -> None:
    slow = FIGURES | {"us_median": 6_000.0, "us_cpu_median": 5_760.0}
    result = result_with(pandas=slow, feast_store={"differs": ["x differs"]})
    text = "\n".join(table_lines(report(result)))
    for expected in ("1,000,000", "5,760", "values differ", "failed", "met: 1.25"):
        assert expected in text, expected
    path = write_result(report(result), tmp_path / "results", "vm2")
    assert path.name == "features_vm2_202611.md"
    written = path.read_text()
    for expected in ("commit abc", "some CPU", "polars 2.1.0", "| pandas | 6,000 |", "values differ", "Met: 12"):
        assert expected in written, expected


def test_without_rivals_only_ours_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(json.dumps(measure(tmp_path, quick=True, rivals_python=tmp_path / "none")))
    assert result["rivals"] == "not installed: make rivals"
    assert "make rivals" in capsys.readouterr().err
    assert result["num_features"] == 40 and result["aims"] == []
    for part in ("batch", "online", "unprepared"):
        assert list(result[part]["contenders"]) == ["tackboard"]
    assert result["batch"]["contenders"]["tackboard"]["rows_per_cpu_s"] > 0
    assert result["online"]["contenders"]["tackboard"]["us_median"] > 0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the next process exits with."""
    answer: dict[str, Any] = {"code": 0, "output": json.dumps({"wall_us": [1.0], "cpu_us": [1.0]})}
    monkeypatch.setattr(features, "ask", lambda *_words, **_options: Answer(**answer))
    return answer


def contend(name: str, folder: Path) -> dict[str, Any]:
    run = features._contend(name, part="online", folder=folder, sizes=features.QUICK, python=Path("python"))
    return features._figures(name, "online", folder, [run, run], 10)


def test_a_rival_whose_values_differ_gets_no_time(
    tmp_path: Path, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "read_table", lambda path: path.name)
    monkeypatch.setattr(features, "differences", lambda ours, theirs: [f"{theirs} differs"])
    found = contend("pandas", tmp_path)
    assert found == {"differs": ["pandas_online_requests.arrow differs", "pandas_online_rows.arrow differs"]}
    monkeypatch.setattr(features, "differences", lambda ours, theirs: [])
    found = contend("pandas", tmp_path)
    assert (found["us_median"], found["repeats"]) == (1.0, 2), "what all its turns measured"


def test_a_rival_that_fails_says_why_and_ours_is_an_error(tmp_path: Path, answers: dict[str, Any]) -> None:
    answers |= {"code": 1, "errors": "Traceback\nValueError: no"}
    assert contend("polars", tmp_path) == {"failed": "ValueError: no"}
    with pytest.raises(TackboardError, match="own side of the online bench failed: ValueError: no"):
        contend("tackboard", tmp_path)


# ---- are a rival's values ours? ----


def one(values: Any, type_: Any = None) -> pa.Table:
    return pa.table({"x": pa.array(values, type=type_)})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (one([1, None]), one([1, None], pa.int32())),
        (one([True, False]), one([True, False])),
        (one([1.0, float("nan"), float("inf"), None]), one([1.0 + 1e-13, float("nan"), float("inf"), None])),
        (one([1e6]), one([1e6 * (1 + 1e-13)])),
        (one([[1, 2], []], pa.large_list(pa.int64())), one([[1, 2], []])),
    ],
)
def test_same(ours: pa.Table, theirs: pa.Table) -> None:
    assert differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (one([1, None]), one([1, 0])),
        (one([2**62]), one([2**62 + 1])),
        (one([1.0]), one([1.0 + 1e-11])),
        (one([1.0]), one([float("nan")])),
        (one([float("inf")]), one([float("-inf")])),
        (one([float("inf")]), one([1e300])),
        (one([1.0]), one([1])),
        (one([[1, 2]]), one([[2, 1]])),
        (one([1]), one([1, 1])),
        (one([1]), pa.table({"y": [1]})),
    ],
)
def test_different(ours: pa.Table, theirs: pa.Table) -> None:
    assert len(differences(ours, theirs)) == 1


def test_a_difference_names_column_row_and_values() -> None:
    ours, theirs = one([5, 6, 7]), one([5, 0, 0])
    assert differences(ours, theirs) == ["x differs in 2 of 3 rows: row 1 is 0, not 6"]
