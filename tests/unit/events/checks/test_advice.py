"""Choices for a log, at both sides of each threshold, and their reasons."""

from __future__ import annotations

from typing import Any

import pytest

from tackboard.events.checks.advice import (
    CUT,
    FAST_SHARE,
    MIN_LAST_EVENTS,
    MIN_POSSIBLE_REPEATS,
    MIN_SPAN_MS,
    MIN_USERS_ACROSS,
    NEW_SHARE,
    RARE_REPEATS,
    advise,
    warnings_of,
)
from tackboard.events.checks.measures import DAY_MS, HOUR_MS
from tackboard.events.checks.turnover import Turnover

NEWS = {
    "num_events": 100_000,
    "num_users": 5_000,
    "num_items": 2_000,
    "span_ms": 16 * DAY_MS,
    "num_repeats": 1_250,
    "num_immediate_repeats": 250,
    "median_age_ms": 6 * HOUR_MS,
    "half_life_ms": 5 * HOUR_MS,
    "before_ms": 14 * DAY_MS,
    "num_last": 10_000,
    "num_last_new": 6_000,
    "num_last_by_chance": 10,
    "num_last_under_hour": 1_200,
    "num_last_under_day": 5_500,
    "num_last_under_week": 9_000,
    "num_users_last": 2_000,
    "num_users_across": 1_500,
}


def news(**changes: Any) -> Turnover:
    return Turnover(**NEWS | changes)


def test_a_news_log_gets_a_split_by_time_a_filter_and_a_word_about_retraining() -> None:
    advice = advise(news())
    assert advice.filter_seen.value is True and "1.25% of the events" in advice.filter_seen.reason
    assert (advice.split.value, advice.cut) == ("time", CUT) and "60.0%" in advice.split.reason
    assert "55.0%" in advice.retraining and "12.0%" in advice.retraining
    assert "--continue RUN" in advice.retraining and "docs/choosing.md" in advice.retraining
    assert advice.uniform_negatives.value == 0 and advice.uniform_negatives.reason
    filter_line, split_line, negatives_line, retraining_line = advice.lines()
    assert filter_line == f"filter_seen=True: {advice.filter_seen.reason}"
    assert split_line == f'split="time", cut="0.9": {advice.split.reason}'
    assert negatives_line.startswith("uniform_negatives=0: ")
    assert retraining_line == advice.retraining


def test_a_stable_log_with_repeats_keeps_the_defaults() -> None:
    advice = advise(news(num_repeats=30_000, num_last_new=100, num_last_under_day=100))
    assert advice.filter_seen.value is False and "30.0%" in advice.filter_seen.reason
    assert (advice.split.value, advice.cut, advice.retraining) == ("last", "", "")
    assert "1.0%" in advice.split.reason and "stable" in advice.split.reason
    assert len(advice.lines()) == 3


def test_seen_items_are_filtered_below_a_share_of_repeats() -> None:
    at = round(RARE_REPEATS * 100_000)
    assert advise(news(num_repeats=at - 1)).filter_seen.value is True
    assert advise(news(num_repeats=at)).filter_seen.value is False
    # Too few events that could be repeats say nothing.
    few = {"num_users": 5, "num_repeats": 0}
    assert advise(news(**few, num_events=5 + MIN_POSSIBLE_REPEATS)).filter_seen.value is True
    choice = advise(news(**few, num_events=4 + MIN_POSSIBLE_REPEATS)).filter_seen
    assert choice.value is False and "Only 99 events could repeat an item" in choice.reason


def test_repeats_that_follow_at_once_are_named() -> None:
    assert "reloads" in advise(news(num_repeats=30_000, num_immediate_repeats=15_001)).filter_seen.reason
    assert "reloads" not in advise(news(num_repeats=30_000, num_immediate_repeats=15_000)).filter_seen.reason


@pytest.mark.parametrize(
    ("name", "enough", "reason"),
    [
        ("num_last_new", round(NEW_SHARE * 10_000) + 10, "10.1% of the last tenth"),
        ("span_ms", MIN_SPAN_MS, "suit a split by time: the log covers only 48.0 hours"),
        ("num_last", MIN_LAST_EVENTS, "suit a split by time: the last tenth has fewer than 1,000 events (999)"),
        ("num_users_across", MIN_USERS_ACROSS, "fewer than 100 users (99)"),
    ],
)
def test_the_log_is_split_by_time_only_if_it_turns_over_and_both_parts_are_large(
    name: str, enough: int, reason: str
) -> None:
    others = {"num_last_new": 600} if name == "num_last" else {}
    assert advise(news(**others | {name: enough})).split.value == "time"
    choice = advise(news(**others | {name: enough - 1})).split
    assert choice.value == "last" and reason in choice.reason
    small = advise(news(num_last=999, num_last_new=0)).split
    assert small.value == "last" and small.reason.endswith("the last tenth has fewer than 1,000 events (999).")


def test_a_log_mostly_of_one_instant_is_not_split() -> None:
    assert advise(news(num_last=50_000, num_last_new=20_000)).split.value == "time"
    choice = advise(news(num_last=50_001, num_last_new=20_000)).split
    assert choice.value == "last" and "most events (50,001)" in choice.reason


def test_rare_items_alone_are_no_turnover() -> None:
    advice = advise(news(num_last_new=9_000, num_last_by_chance=8_500))
    assert (advice.split.value, advice.retraining) == ("last", "")
    assert "90.0%" in advice.split.reason and "85.0%" in advice.split.reason


def test_retraining_is_advised_if_most_events_are_on_items_of_a_day() -> None:
    at = round(FAST_SHARE * 10_000)
    assert advise(news(num_last_under_day=at)).retraining
    assert not advise(news(num_last_under_day=at - 1)).retraining
    assert not advise(news(before_ms=DAY_MS - 1)).retraining, "the log does not know the age of a day"
    assert not advise(news(num_last=MIN_LAST_EVENTS - 1, num_last_new=900)).retraining


def test_a_run_is_warned_where_its_settings_differ_from_the_advice() -> None:
    split, filtered = warnings_of(news(), split="last", filter_seen=False)
    assert "60.0%" in split and split.endswith("--set data.split=time --set data.cut=0.9")
    assert "1.25%" in filtered and filtered.endswith("--set evaluation.filter_seen=true")
    assert warnings_of(news(), split="time", filter_seen=True) == []
    stable = news(num_repeats=30_000, num_last_new=100)
    assert warnings_of(stable, split="last", filter_seen=False) == []
    assert warnings_of(stable, split="time", filter_seen=True) == [], "the advice is not to be forced on anybody"


@pytest.mark.parametrize("num_events", [0, 1])
def test_any_measures_have_advice(num_events: int) -> None:
    zero = dict.fromkeys(NEWS, 0)
    advice = advise(Turnover(**zero | {"num_events": num_events, "num_last": num_events, "half_life_ms": None}))
    assert (advice.filter_seen.value, advice.split.value, advice.cut, advice.retraining) == (False, "last", "", "")
    assert all("\n" not in line for line in advice.lines())
