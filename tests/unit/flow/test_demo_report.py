"""The demo's report: it says what was promised, shows every measured number and loads nothing."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tackboard.flow.demo_report import commands_by_hand, render, smooth, verdict, write_report
from tackboard.flow.outcome import Outcome


def words(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html)


def test_report_is_written_and_self_contained(demo_outcome: Outcome) -> None:
    path = write_report(demo_outcome)
    assert path == demo_outcome.out / "report.html"
    html = path.read_text()
    assert re.findall(r"https?://", html) == []
    assert "<script" not in html
    assert html.count("<svg") == 5


def test_report_shows_what_was_measured(demo_outcome: Outcome) -> None:
    text = words(render(demo_outcome))
    for expected in (
        "Met: the model closes 50.0%",
        "0.240",
        "412,345 events",
        "2 min 51 s",
        "800.0 MB",
        "51,234 tokens per second",
        "Items the user has seen stay in",
        "The oracle is a ranker",
        "3.1e-07",
        "A &lt;fast&gt; &amp; good CPU",
        "dense.safetensors",
        "123.5 kB",
        "abc123",
        "987,654 parameters",
        "items.weight: 20,000 rows of 32 fp16 numbers",
        "num_before",
        "What the user did before.",
        "Of 4,321 values in 210 requests, 0 differ in at least one bit",
        "For 17 requests, some event had happened before the request but was received only after the request",
        "into memory: item, action (6.4 kB for all events)",
        "(surface) stayed on disk, which saved 3.2 kB",
        "19,876 requests were made from it: from each user",
        "the newest 4 are taken, and each of them gives one request",
        "on the requests of these 998 users, which have 198,765 candidates in all",
        "PinFM raises HIT@3 of next from 0.220 to 0.310 and leaves HIT@3 of save at 0.200",
        "+0.0900",
    ):
        assert expected in text, expected


def test_a_target_that_was_missed_is_said(demo_outcome: Outcome) -> None:
    evaluate = demo_outcome.stages["evaluate"]
    stage = replace(evaluate, answer=evaluate.answer | {"gap_closed": 0.12})
    missed = replace(demo_outcome, stages=demo_outcome.stages | {"evaluate": stage})
    assert "Not met: the model closes 12.0%" in verdict(missed)
    assert 'class="verdict bad"' in render(missed)
    assert "quick run" in verdict(replace(demo_outcome, quick=True)), "a quick run is not judged"


def test_filtered_evaluation_is_said(demo_outcome: Outcome) -> None:
    evaluate = demo_outcome.stages["evaluate"]
    stage = replace(evaluate, answer=evaluate.answer | {"filter_seen": True})
    text = words(render(replace(demo_outcome, stages=demo_outcome.stages | {"evaluate": stage})))
    assert "Items the user has seen are left out" in text


def test_a_bundle_from_before_features_still_has_a_report(demo_outcome: Outcome) -> None:
    bundle = Path(demo_outcome.stages["export"].answer["bundle"])
    (bundle / "features.json").unlink()
    assert "num_before" not in words(render(demo_outcome))


def test_a_run_without_losses_still_has_a_report(demo_outcome: Outcome) -> None:
    (Path(demo_outcome.stages["pretrain"].answer["run"]) / "metrics.jsonl").write_text("")
    html = render(demo_outcome)
    assert "wrote no losses" in html
    assert html.count("<svg") == 4


def test_commands_by_hand_are_the_stages_without_json(demo_outcome: Outcome) -> None:
    lines = commands_by_hand(demo_outcome)
    assert lines[0] == "tackboard data demo"
    assert all("--json" not in line for line in lines)
    assert any(line.startswith("tackboard serve") and "--port 8000" in line for line in lines)
    assert lines[-1] == "tackboard replay demo"


@pytest.mark.parametrize(
    ("values", "window", "expected"),
    [([1.0, 2.0, 3.0, 4.0, 5.0], 3, [1.0, 2.0, 3.0, 4.0, 5.0]), ([0.0, 3.0, 0.0], 3, [0.0, 1.0, 0.0]), ([], 3, [])],
)
def test_smoothing_is_a_centred_mean(values: list[float], window: int, expected: list[float]) -> None:
    assert smooth(values, window) == expected
