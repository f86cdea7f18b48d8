"""What a demo found: the numbers that the report and `--json` read."""

import json
from dataclasses import replace

import pytest

from tackboard.flow.outcome import Outcome, describe_hardware, hardware_words


def test_summary_is_one_json_object(demo_outcome: Outcome) -> None:
    summary = json.loads(json.dumps(demo_outcome.summary()))
    assert summary["hr@10"] == {"popularity": 0.09, "item-to-item": 0.14, "model": 0.24, "oracle": 0.34}
    assert summary["gap_closed"] == 0.5
    assert summary["target_met"] is True
    hits = {name: metrics["hit@3"] for name, metrics in summary["lift"]["next"].items()}
    assert hits == {"item mean": 0.08, "ranker without PinFM": 0.22, "ranker on PinFM": 0.31}
    assert list(summary["lift"]) == ["next", "save"]
    assert summary["requests"] == 200
    assert 0 < summary["latency_ms"]["p50"] < summary["latency_ms"]["p99"]
    assert summary["server_cpu_ms_per_request"] == {"binary": 3.2, "JSON": 4.4}
    assert summary["replayed"] == {"compared": 210, "values": 4321, "mismatches": 0, "late": 17}


@pytest.mark.parametrize(("gap_closed", "met"), [(0.4, True), (0.399, False), (-0.2, False), (None, False)])
def test_the_target_is_forty_percent(demo_outcome: Outcome, gap_closed: float | None, met: bool) -> None:
    evaluate = demo_outcome.stages["evaluate"]
    stage = replace(evaluate, answer=evaluate.answer | {"gap_closed": gap_closed})
    outcome = replace(demo_outcome, stages=demo_outcome.stages | {"evaluate": stage})
    assert (outcome.target_met, outcome.summary()["gap_closed"]) == (met, gap_closed)


def test_hardware_is_described() -> None:
    hardware = describe_hardware()
    assert hardware["cpu"]
    assert hardware["usable_cores"] >= 1
    assert f"{hardware['usable_cores']} usable cores" in hardware_words(hardware)
