"""What the overload bench makes of its clients' answers. The bench itself runs in tests/e2e/test_bench_overload.py."""

from __future__ import annotations

from typing import Any

from tackboard.bench.overload import aims, figures_of, mean_of, report
from tackboard.bench.report import table_lines
from tackboard.bench.turns import judged

FOUND = {
    "seconds": 2.0,
    "outcomes": {"in_time": 200, "late": 4, "429": 100, "504": 1},
    "latencies_ms": [10.0, 20.0, 30.0],
    "refused_after_ms": [1.0, 3.0],
    "late_starts_ms": [0.1],
    "num_connections": 3,
    "cpu_share": 0.051,
}


def result_of(at_three: float, *, disturbed: bool = False) -> dict[str, Any]:
    """A run with a peak of 100 answers in time per second, and another figure at three times the capacity."""
    figures = mean_of([figures_of(FOUND, 150.0) | {"server_cores": 1.1}])
    result: dict[str, Any] = {
        "quick": False,
        "deadline_ms": 200,
        "candidates_per_request": 1000,
        "rounds": 3,
        "seconds_per_round": 3.0,
        "alone_per_s": 98.0,
        "peak_per_s": 100.0,
        "loads": {"1": figures, "3": figures | {"in_time_per_s": at_three}},
        "others_share": 0.4 if disturbed else 0.0,
        "disturbed": disturbed,
        "hardware": {"cpu": "some CPU", "usable_cores": 2, "memory_bytes": 2**32},
        "python": "3.11.7",
        "packages": {"numpy": "2.4.6"},
        "commit": "abc",
        "date": "2026-11-16",
    }
    return result | {"aims": judged(aims(result), result)}


def test_figures() -> None:
    figures = figures_of(FOUND, 150.0)
    assert (figures["in_time_per_s"], figures["late_per_s"]) == (100.0, 2.0)
    assert figures["refused_per_s"] == {"429": 50.0, "504": 0.5}
    assert (figures["p50_ms"], figures["refused_after_p50_ms"], figures["clients_cores"]) == (20.0, 2.0, 0.05)
    assert figures_of(FOUND | {"refused_after_ms": []}, 1.0)["refused_after_p50_ms"] is None


def test_the_mean_of_rounds() -> None:
    one = figures_of(FOUND, 150.0)
    other = one | {"in_time_per_s": 50.0, "refused_per_s": {"429": 70.0}, "refused_after_p50_ms": None}
    found = mean_of([one, other])
    assert (found["in_time_per_s"], found["in_time_per_s_rounds"]) == (75.0, [100.0, 50.0])
    assert found["refused_per_s"] == {"429": 60.0, "504": 0.2}
    assert found["refused_after_p50_ms"] == 2.0


def test_the_aim_is_a_share_of_the_peak_and_a_disturbed_run_is_not_judged() -> None:
    assert [aim["met"] for aim in result_of(91.0)["aims"]] == [True]
    assert [aim["met"] for aim in result_of(89.0)["aims"]] == [False]
    assert [aim["met"] for aim in result_of(91.0, disturbed=True)["aims"]] == [None]
    assert not any(line.startswith("met") for line in table_lines(report(result_of(91.0, disturbed=True))))


def test_table() -> None:
    lines = table_lines(report(result_of(91.0)))
    row = next(line for line in lines if "3×" in line)
    for expected in ("3×", "91.0", "91%", "429: 50, 504: 0.5", "0.05"):
        assert expected in row, expected
    assert lines[-1].startswith("met: 0.91")
