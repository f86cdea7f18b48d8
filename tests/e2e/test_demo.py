"""The demo as a user runs it, whole: the quality target, the report, equal scores, and nothing left running."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def run_demo(folder: Path, *options: str, timeout_s: float) -> tuple[dict[str, Any], str]:
    """Runs `tackboard demo --json` in `folder`; returns its object and what it wrote to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    # The suite pins tests to one thread; the demo is promised on two cores, so it gets what a user would give it.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "tackboard", "demo", "--json", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary, done.stderr


def check_traces(folder: Path, summary: dict[str, Any], log: str) -> None:
    """What must be so after any demo, quick or not."""
    html = (folder / "demo" / "report.html").read_text()
    assert re.findall(r"https?://", html) == []
    assert html.count("<svg") == 5
    assert summary["requests"] == 200
    assert summary["largest_difference_from_offline"] <= 1e-5
    assert "\r" not in log
    assert len(re.findall(r"^\[[ \d]\d/13\] ", log, re.MULTILINE)) == 13
    # 100 users by two wires and five warm-ups of each: history, three features of the request, and 1,000 vectors.
    assert summary["replayed"] == {"compared": 210, "values": 210 * 1004, "mismatches": 0, "late": 210}
    assert list(summary["lift"]) == ["next", "save"]
    for steps in summary["lift"].values():
        assert list(steps) == ["item mean", "ranker without PinFM", "ranker on PinFM"]
    assert not (folder / "demo" / "port").exists(), "the server did not end cleanly"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_demo(tmp_path: Path) -> None:
    summary, log = run_demo(tmp_path, "--quick", timeout_s=400)
    check_traces(tmp_path, summary, log)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_demo_meets_its_target(tmp_path: Path) -> None:
    summary, log = run_demo(tmp_path, timeout_s=800)
    check_traces(tmp_path, summary, log)
    assert summary["target_met"] is True
    assert summary["gap_closed"] >= 0.40
    assert summary["hr@10"]["oracle"] > summary["hr@10"]["model"] > summary["hr@10"]["item-to-item"]
    # Worlds of other seeds: .59 with PinFM, .10 without (docs/log.md).
    hits = {name: metrics["hit@3"] for name, metrics in summary["lift"]["next"].items()}
    assert hits["ranker on PinFM"] > hits["ranker without PinFM"] + 0.1
    assert summary["peak_rss_bytes"] < 4 * 2**30
