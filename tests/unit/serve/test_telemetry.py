from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from tackboard.serve.telemetry import LOG_OUTCOMES, Telemetry, Timings


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = telemetry.prometheus_text().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser writes every counter with `_total`; here the name is the one that stands in the text.
            stands = re.search(rf"^{sample.name}[ {{]", text, re.MULTILINE)
            name = sample.name if stands else sample.name.removesuffix("_total")
            assert stands or re.search(rf"^{name}[ {{]", text, re.MULTILINE)
            found[name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


MODEL = (("model", "m"), ("version", "1"))


def test_answers_reach_both_sets_of_names() -> None:
    telemetry = Telemetry("m", "1", pending=lambda: 3)
    telemetry.answered(Timings(9_000_000, 1_000_000, 500_000, 6_000_000, 250_000), num_candidates=1000)
    found = samples(telemetry)
    assert found["nv_inference_request_success", MODEL] == 1
    assert found["nv_inference_count", MODEL] == found["nv_inference_exec_count", MODEL] == 1
    assert found["nv_inference_pending_request_count", MODEL] == 3
    assert found["nv_inference_request_duration_us", MODEL] == 9000
    assert found["nv_inference_queue_duration_us", MODEL] == 1000
    assert found["nv_inference_compute_input_duration_us", MODEL] == 500
    assert found["nv_inference_compute_infer_duration_us", MODEL] == 6000
    assert found["nv_inference_compute_output_duration_us", MODEL] == 250
    assert found["tackboard_request_duration_seconds_sum", (("status", "200"),)] == 0.009
    assert found["tackboard_queue_wait_seconds_sum", ()] == 0.001
    assert found["tackboard_request_candidates_sum", ()] == 1000


def test_failures_have_reasons() -> None:
    telemetry = Telemetry("m", "1")
    for status in (400, 404, 429, 499, 500, 503, 504):
        telemetry.failed(status, 1000)
    found = samples(telemetry)
    counts = {
        reason: found["nv_inference_request_failure", tuple(sorted({"reason": reason, **dict(MODEL)}.items()))]
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert counts == {"REJECTED": 3, "CANCELED": 1, "BACKEND": 1, "OTHER": 2}


def test_refusals_are_counted_and_exist_from_the_start() -> None:
    telemetry = Telemetry("m", "1")
    before = samples(telemetry)
    assert before["tackboard_shed_total", (("reason", "queue_full"),)] == 0
    assert before["tackboard_connections_closed_total", (("reason", "made_room"),)] == 0
    assert before["tackboard_accept_errors_total", ()] == 0
    telemetry.shed("queue_full")
    telemetry.expired("queue")
    telemetry.closed("body_deadline")
    telemetry.accept_failed()
    telemetry.set_ready(ready=True)
    after = samples(telemetry)
    assert after["tackboard_shed_total", (("reason", "queue_full"),)] == 1
    assert after["tackboard_deadline_expired_total", (("stage", "queue"),)] == 1
    assert after["tackboard_connections_closed_total", (("reason", "body_deadline"),)] == 1
    assert after["tackboard_accept_errors_total", ()] == 1
    assert after["tackboard_ready", ()] == 1


def test_the_text_names_counters_as_dashboards_know_them() -> None:
    text = Telemetry('with "quotes"\\', "1").prometheus_text().decode()
    assert "# TYPE nv_inference_request_success counter\n" in text
    assert "nv_inference_request_success_total" not in text
    assert 'model="with \\"quotes\\"\\\\"' in text


def test_statistics_have_the_shape_of_triton() -> None:
    telemetry = Telemetry("m", "1")
    assert telemetry.statistics()["batch_stats"] == []
    telemetry.answered(Timings(9, 1, 2, 3, 4), num_candidates=1)
    telemetry.failed(400, 5)
    statistics = telemetry.statistics()
    assert statistics["inference_count"] == statistics["execution_count"] == 1
    assert statistics["last_inference"] > 0
    assert statistics["inference_stats"] == {
        "success": {"count": 1, "ns": 9},
        "fail": {"count": 1, "ns": 5},
        "queue": {"count": 1, "ns": 1},
        "compute_input": {"count": 1, "ns": 2},
        "compute_infer": {"count": 1, "ns": 3},
        "compute_output": {"count": 1, "ns": 4},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert statistics["batch_stats"][0]["batch_size"] == 1
    assert statistics["trimmed_bytes"] == 0


def test_the_log_of_features_is_asked_when_someone_asks() -> None:
    name, counts = "tackboard_feature_log_total", {"logged": 0}
    telemetry = Telemetry("m", "1", feature_log=lambda: counts)
    assert samples(telemetry)[name, (("outcome", "logged"),)] == 0
    counts["logged"], counts["dropped"] = 5, 2
    found = samples(telemetry)
    assert [found[name, (("outcome", outcome),)] for outcome in LOG_OUTCOMES] == [5, 2, 0]
    assert samples(Telemetry("m", "1"))[name, (("outcome", "logged"),)] == 0
