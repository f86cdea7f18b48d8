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
    assert summary["requests"] == 200
    assert 0 < summary["latency_ms"]["p50"] < summary["latency_ms"]["p99"]
    assert summary["server_cpu_ms_per_request"] == {"binary": 3.2, "JSON": 4.4}
    assert summary["replayed"] == {"compared": 210, "values": 4321, "mismatches": 0, "late": 17}


@pytest.mark.parametrize(("gap_closed", "met"), [(0.4, True), (0.399, False), (-0.2, False)])
def test_the_target_is_forty_percent(demo_outcome: Outcome, gap_closed: float, met: bool) -> None:
    evaluate = demo_outcome.stages["evaluate"]
    stage = replace(evaluate, answer=evaluate.answer | {"gap_closed": gap_closed})
    assert replace(demo_outcome, stages=demo_outcome.stages | {"evaluate": stage}).target_met is met


def test_a_world_without_a_gap_meets_no_target(demo_outcome: Outcome) -> None:
    evaluate = demo_outcome.stages["evaluate"]
    stage = replace(evaluate, answer=evaluate.answer | {"gap_closed": None})
    flat = replace(demo_outcome, stages=demo_outcome.stages | {"evaluate": stage})
    assert flat.target_met is False
    assert flat.summary()["gap_closed"] is None


def test_percentiles_of_one_wire_format(demo_outcome: Outcome) -> None:
    binary = demo_outcome.exchanges[0]
    assert min(binary.latencies_ms) <= binary.percentile_ms(50) <= max(binary.latencies_ms)


def test_hardware_is_described() -> None:
    hardware = describe_hardware()
    assert hardware["cpu"]
    assert hardware["usable_cores"] >= 1
    assert f"{hardware['usable_cores']} usable cores" in hardware_words(hardware)
