from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tackboard.events.checks.profile import profile
from tackboard.events.checks.stats_page import MAX_DAYS, lines, render
from tackboard.events.dataset import open_dataset


@pytest.fixture(scope="module")
def found(tiny_dataset: Path) -> dict[str, Any]:
    return profile(open_dataset(tiny_dataset))


def test_the_page_loads_nothing_and_has_every_section(found: dict[str, Any]) -> None:
    page = render(found)
    assert page.startswith("<!doctype html>") and "<script" not in page and "://" not in page
    for title in ("Time", "Users", "Items", "Actions and surfaces", "Files"):
        assert f">{title}</h2>" in page
    assert ">Fields</h2>" not in page and ">Requests and labels</h2>" not in page
    for chart in ("Events per day", "Events by hour of the day", "Events per user", "Events of an item by its rank"):
        assert f">{chart}</title>" in page
    assert page.count("<svg") == 10 if len(found["catalogue"]["day"]) > 1 else 9


def test_requests_and_fields_have_sections_where_there_are_any(found: dict[str, Any]) -> None:
    requests = {
        "num_requests": 2,
        "num_candidates": 5,
        "candidates_per_request": {"q50": 2.5},
        "labels": {
            "save": {"positive": 1, "negative": 3, "unknown": 1},
            "hide": {"positive": 0, "negative": 0, "unknown": 0},
        },
    }
    more = found | {"requests": requests, "fields": {"price": {"type": "float", "missing_share": 0.25}}}
    page = render(more)
    assert ">Fields</h2>" in page and "25.00%" in page and "<td" in page
    text = "\n".join(lines(more))
    assert "label save" in text and "1 positive, 3 negative, 1 unknown" in text
    assert "float, 25.0% missing" in text


def test_a_wrong_unit_does_not_make_a_page_of_a_million_days(found: dict[str, Any]) -> None:
    far = {"first": "1970-01-01", "day": [0, 20 * MAX_DAYS], "events": [1, 2]}
    assert len(render(found | {"days": far})) < len(render(found)) + 20_000


def test_a_user_of_one_event_has_no_gaps(found: dict[str, Any]) -> None:
    nothing = {"bins": dict.fromkeys(found["gap_s"]["bins"], 0), "num_negative": 0, "quantiles": {}}
    assert "Seconds: none" in render(found | {"gap_s": nothing})
    assert any(line.endswith("none") for line in lines(found | {"gap_s": nothing}))


def test_what_comes_from_a_sample_is_marked(found: dict[str, Any]) -> None:
    assert not any("estimated" in line for line in lines(found))
    drawn = found | {"gap_s": found["gap_s"] | {"estimated": True}}
    assert [line.split()[0] for line in lines(drawn) if line.endswith(" (estimated)")] == ["gaps,"]
    assert render(drawn).count("(estimated)") == 1
