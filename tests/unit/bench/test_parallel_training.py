"""The bench of two processes: its commands, what it compares, and when it stops. Most trained runs are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tackboard.bench import parallel_training
from tackboard.bench.parallel_training import (
    ARMS,
    BY_TABLE,
    ONE,
    QUICK_ARMS,
    REFERENCE,
    TORCHRUN,
    check_equal,
    compared,
    measure,
    ranks_of,
    report,
)
from tackboard.bench.report import table_lines
from tackboard.cli.evaluate import evaluate_run
from tackboard.core.errors import TackboardError
from tackboard.core.rundir import RunDirectory
from tackboard.flow.command import PROGRAM, Finished

LOSSES = {BY_TABLE: 1.000001, "fp8": 1.01}
BYTES = {REFERENCE: 1e6, "fp8": 277_000}


def an_arm(name: str, **changes: Any) -> dict[str, Any]:
    is_worse = name == "fp8"
    return {
        "losses": [5.0] * 19 + [LOSSES.get(name, 1.0), 4.0],
        "ranks": [0, 10 if is_worse else 9, 20],
        "evaluation": {
            "model": {"hr@10": 1 / 3 if is_worse else 2 / 3, "ndcg@10": 0.5},
            "oracle": {"hr@10": 0.9, "ndcg@10": 0.8},
        },
        "bytes_per_step": None if name == ONE else BYTES.get(name, 1e6),
        "cpu_s": 10.0 if name == ONE else 15.0,
        "others_share": 0.1,
        "disturbed": True,
    } | changes


def test_an_arm_is_compared_with_fp32_and_with_one_process() -> None:
    row = compared({name: an_arm(name) for name in ARMS}, "fp8")
    assert row["loss_difference"] == pytest.approx(0.01)
    assert row["byte_share"] == pytest.approx(0.277)
    assert row["times_cpu"] == 1.5
    mean, low, high = row["hr@10_difference"]
    assert mean == pytest.approx(-1 / 3) and low <= mean <= high <= 0


def test_losses_that_must_be_equal_may_differ_by_rounding_in_the_first_steps_only() -> None:
    same = [5.0] * 20
    check_equal(BY_TABLE, [*same[:-1], 5.00001, 7.0], [*same, 1.0])
    with pytest.raises(TackboardError, match=r"losses of fp32 and of one process differ by 2.0e-05 within 20 steps"):
        check_equal(REFERENCE, [*same[:-1], 5.0001], same)
    with pytest.raises(TackboardError, match="differ by nan"):
        check_equal(REFERENCE, [float("nan")] * 20, same)


@pytest.fixture
def commands(
    trained_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The (arguments, program) of the commands of the bench, which finish at once with the figures of one run."""
    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    rows = [{"name": name, "hr@10": 0.25, "ndcg@10": 0.125} for name in ("popularity", "model")]
    answers = {"run": str(trained_run.path), "wire": {"payload_bytes": 2000}, "rows": rows}

    def run(name: str, arguments: tuple[str, ...], *, log: Path, program: tuple[str, ...] = PROGRAM) -> Finished:
        asked.append((arguments, program))
        log.parent.mkdir(parents=True, exist_ok=True)
        return Finished(name=name, arguments=arguments, answer=answers, seconds=1, cpu_seconds=1, peak_rss_bytes=1)

    monkeypatch.setattr(parallel_training, "run_command", run)
    monkeypatch.setattr(parallel_training, "check_packages", lambda: None)
    return asked


def test_every_arm_is_trained_and_evaluated_once(
    commands: list[tuple[tuple[str, ...], tuple[str, ...]]], tmp_path: Path
) -> None:
    result = json.loads(json.dumps(measure(tmp_path, quick=True)))
    assert [row["arm"] for row in result["rows"]] == list(QUICK_ARMS)
    trained = [(arguments, program) for arguments, program in commands if arguments[0] == "train"]
    assert [program for _, program in trained] == [PROGRAM, *[TORCHRUN] * 3]
    assert "parallel.sharding=table" in trained[2][0]
    assert {"--narrow-tables", "parallel.backward_precision=fp8"} <= set(trained[3][0])
    assert result["rows"][1]["bytes_per_step"] == 100
    count = len(commands)
    assert count == 1 + 2 * len(QUICK_ARMS)
    again = measure(tmp_path, quick=True)
    assert again["rows"] == result["rows"]
    assert [arguments[0] for arguments, _ in commands[count:]] == ["data"], "finished arms are not trained again"


def test_ranks_are_those_of_evaluate(trained_run: RunDirectory) -> None:
    (model,) = (row for row in evaluate_run(trained_run.path, quiet=True)["rows"] if row["name"] == "model")
    ranks = ranks_of(trained_run.path)
    cutoffs = [int(name.removeprefix("hr@")) for name in model if name.startswith("hr@")]
    assert cutoffs and [np.mean(ranks < k) for k in cutoffs] == pytest.approx(
        [model[f"hr@{k}"] for k in cutoffs], abs=1e-6
    )


def test_the_report_shows_each_seed_of_an_arm_and_the_best_that_is_possible() -> None:
    found = {name: an_arm(name) for name in ARMS}
    result = {
        "quick": False,
        "steps": 300,
        "seeds": 2,
        "rows": [{"arm": name, "seed": seed, **compared(found, name)} for seed in (0, 1) for name in ARMS],
        "evaluation": found[REFERENCE]["evaluation"],
        "others_share": 0.1,
        "disturbed": True,
    }
    shown = report(result)
    assert shown.command == "bench parallel --steps 300 --seeds 2"
    quality, cost = shown.tables
    assert "oracle 0.9000 / 0.8000" in quality.words
    assert [row[:2] for row in quality.rows[:3]] == [(ONE, "0"), (ONE, "1"), (REFERENCE, "0")]
    by_name = {row[0]: row for row in quality.rows}
    assert by_name["fp8"][3:5] == ("1.0000", "0.3333") and by_name[REFERENCE][5] == "+0.0000 [+0.0000, +0.0000]"
    costs = {row[0]: row[2:] for row in cost.rows}
    assert costs[ONE] == ("", "", "10.0", "1.00×", "10%")
    assert costs["fp8"] == ("0.277", "27.7%", "15.0", "1.50×", "10%")
    assert table_lines(shown)[-1].startswith("disturbed: other processes used 10%")
