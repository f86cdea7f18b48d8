"""The skeleton bench: its numbers come from the demo's stages, and its result names machine, commit and date."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tackboard.bench import skeleton
from tackboard.bench.skeleton import (
    UNITS,
    measure,
    measurement,
    report,
)
from tackboard.flow.command import Finished
from tackboard.flow.demo import DemoConfig
from tackboard.flow.outcome import Exchange, Outcome


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    """One demo with round numbers."""
    row = {"hr@10": 0.5}
    answers: dict[str, dict[str, Any]] = {
        "data": {"num_events": 100_000},
        "pretrain": {"run": str(tmp_path), "tokens_per_s": 50_000.0},
        "evaluate": {"users_per_s": 800.0, "gap_closed": 0.6, "rows": [{"name": "model", **row}]},
        "ranker-eval": {"rows": [{"name": name, "label": "next", "hit@3": 0.1} for name in ("item mean", "model")]},
        "finetune-eval": {"rows": [{"name": "model", "label": "next", "hit@3": 0.2}]},
        "replay": {"num_compared": 2, "num_values": 6, "num_mismatches": 0, "num_late": 0},
    }
    stages = {
        name: Finished(name=name, arguments=(name,), answer=answer, seconds=5.0, cpu_seconds=4.0, peak_rss_bytes=10**8)
        for name, answer in answers.items()
    }
    return Outcome(
        out=tmp_path,
        quick=False,
        stages=stages,
        exchanges=[
            Exchange(wire="binary", latencies_ms=[2.0, 4.0], server_cpu_ms_per_request=1.5),
            Exchange(wire="JSON", latencies_ms=[6.0, 8.0], server_cpu_ms_per_request=2.5),
        ],
        num_candidates=1000,
        num_compared=1,
        largest_difference=0.0,
        total_seconds=60.0,
        peak_rss_bytes=2 * 10**8,
        environment={
            "python": "3.11.7",
            "packages": {"torch": "2.13.0", "absent": None},
            "commit": "abc",
            "hardware": {"cpu": "some CPU", "usable_cores": 2, "memory_bytes": 2**32},
        },
    )


def test_measurement_has_every_promised_number(outcome: Outcome) -> None:
    result = json.loads(json.dumps(measurement(outcome)))
    assert result["events_per_cpu_s"] == 25_000
    assert result["train_tokens_per_s"] == 50_000
    assert result["evaluate_users_per_s"] == 800
    assert result["serve_cpu_ms_per_request_binary"] == 1.5
    assert result["serve_cpu_ms_per_request_json"] == 2.5
    assert result["candidates_per_request"] == 1000
    assert result["demo_peak_rss_bytes"] == 2 * 10**8
    assert result["latency_p50_ms"] == 5.0
    assert result["commit"] == "abc"
    assert result["hardware"]["cpu"] == "some CPU"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])


def test_table_has_a_unit_for_every_number(outcome: Outcome) -> None:
    shown = report(measurement(outcome) | {"others_share": 0.4, "disturbed": True})
    assert shown.theme == "skeleton" and shown.notes[0].startswith("disturbed: other processes used 40%")
    rows = shown.tables[0].rows
    assert [name for name, _, _ in rows] == list(UNITS)
    assert ("train_tokens_per_s", "50,000.0", "tokens per second, training") in rows


def test_measure_runs_the_demo(outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoConfig] = []

    def run(config: DemoConfig) -> Outcome:
        seen.append(config)
        return outcome

    monkeypatch.setattr(skeleton, "run_demo", run)
    assert measure(tmp_path / "x", quick=True)["bench"] == "skeleton"
    assert measure(tmp_path / "x")["quick"] is False
    assert [(config.quick, config.num_users) for config in seen] == [(True, 20), (False, 500)]
