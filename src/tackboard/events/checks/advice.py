"""This module chooses settings of a recipe from the measures of a log, and says why.

It takes the measures of `turnover.py` and returns choices with one or two sentences each. `tackboard init` writes the
choices into the recipe and prints them; `tackboard train` warns if a run has other settings where this matters. All
functions are pure. If a log is too small to tell, the choice is the default of the setting.
"""

from __future__ import annotations

import dataclasses

from tackboard.events.checks.measures import DAY_MS, HOUR_MS
from tackboard.events.checks.turnover import LAST_SHARE, Turnover

RARE_REPEATS = 0.05
"""Repeats are rare if their share of the events is below this. A filter of seen items then hides at most one next event
in 20."""
MIN_POSSIBLE_REPEATS = 100
"""Repeats are judged only if at least this many events are not the first event of their user."""
NEW_SHARE = 0.1
"""The catalogue turns over if at least this share of the last tenth's events are on items without an earlier event. The
share that rare items alone would cause is subtracted first. Of the public logs, those with a stable catalogue are far
below this value (MovieLens-1M: 0.1%), and those of articles are far above it (Kakao Brunch: 41%)."""
MIN_SPAN_MS = 2 * DAY_MS
"""A log must span this time to be split by time. In a shorter log the two parts differ by the hour of the day."""
MIN_LAST_EVENTS = 1_000
MIN_USERS_ACROSS = 100
"""A split by time needs this many users with events in both parts. With fewer users, HR@10 is only a rough figure: at
100 users, an HR@10 of 0.1 has a standard error of 0.03."""
FAST_SHARE = 0.5
"""The catalogue turns over within a day if this share of the last tenth's events are on items younger than a day."""
CUT = str(1.0 - LAST_SHARE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A value for a setting, and the reason for it in one or two sentences."""

    value: bool | int | str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """The choices for a log."""

    filter_seen: Choice
    """`evaluation.filter_seen`: whether seen items are removed from the ranking."""
    split: Choice
    """`data.split`: `last` holds out each user's last event, `time` holds out the events after `cut`."""
    cut: str
    """`data.cut`: the share of the events before the cut, or empty if `split` is `last`."""
    uniform_negatives: Choice
    """`data.uniform_negatives`: number of negatives drawn for each step."""
    retraining: str
    """What to do if the catalogue turns over within a day, or empty."""

    def lines(self) -> list[str]:
        """Returns one line for each piece of advice."""
        cut = f', cut="{self.cut}"' if self.cut else ""
        lines = [
            f"filter_seen={self.filter_seen.value}: {self.filter_seen.reason}",
            f'split="{self.split.value}"{cut}: {self.split.reason}',
            f"uniform_negatives={self.uniform_negatives.value}: {self.uniform_negatives.reason}",
        ]
        return [*lines, *([self.retraining] if self.retraining else [])]


def advise(measures: Turnover) -> Advice:
    """Returns the choices for a log with these measures."""
    split = choose_split(measures)
    return Advice(
        filter_seen=choose_filter_seen(measures),
        split=split,
        cut=CUT if split.value == "time" else "",
        uniform_negatives=choose_negatives(),
        retraining=advise_retraining(measures),
    )


def choose_filter_seen(measures: Turnover) -> Choice:
    """Chooses True if users hardly ever repeat an item, and False if they do or if the log is too small to tell."""
    num_possible = measures.num_events - measures.num_users
    if num_possible < MIN_POSSIBLE_REPEATS:
        return Choice(
            value=False, reason=f"Only {num_possible:,} events could repeat an item, which is too few to tell."
        )
    share = measures.repeat_share
    if share < RARE_REPEATS:
        what = f"{share:.2%} of the events are on an item that the user had before"
        return Choice(value=True, reason=f"{what}, so a seen item would only take the place of another item.")
    reason = f"{share:.1%} of the events are on an item that the user had before, so users come back to items."
    if 2 * measures.num_immediate_repeats > measures.num_repeats:
        reason += " Most of these events directly follow an event on the same item; if they are reloads, set True."
    return Choice(value=False, reason=reason)


def choose_split(measures: Turnover) -> Choice:
    """Chooses `time` if the catalogue turns over and both parts are large enough, else `last`."""
    found = f"{measures.new_share:.1%} of the last tenth of the events are on items without an event before that tenth"
    lacking = _lacking_for_split(measures)
    if turns_over(measures) and not lacking:
        more = "Leave-last-out would train on such items before it asks for them, so its figures would be too high."
        return Choice(value="time", reason=f"{found}. {more}")
    if turns_over(measures):
        reason = f"{found}, but the log does not suit a split by time: {lacking}."
    elif measures.num_last < MIN_LAST_EVENTS:
        reason = f"The log is too small for a split by time: {lacking}."
    elif measures.new_share < NEW_SHARE:
        reason = f"{found}, so the catalogue is stable."
    else:
        reason = f"{found}, but rare items alone would make this share {measures.chance_share:.1%}."
    return Choice(value="last", reason=reason)


def turns_over(measures: Turnover) -> bool:
    """Returns whether the last tenth's share of events on new items is at least NEW_SHARE above what chance makes."""
    return measures.new_share - measures.chance_share >= NEW_SHARE


def choose_negatives() -> Choice:
    """Chooses no drawn negatives for any log, because no measurement has shown that they pay in this recipe."""
    return Choice(
        value=0,
        reason="The other items of a step are its negatives. Drawing more from the catalogue makes a step slower, and "
        "did not improve the ranking in a short measurement (105,469 articles, 500 steps).",
    )


def advise_retraining(measures: Turnover) -> str:
    """Returns what to do if most events are on items that a model trained a day before has never seen, else ""."""
    share = measures.younger_share(DAY_MS)
    if share is None or share < FAST_SHARE or measures.num_last < MIN_LAST_EVENTS or not turns_over(measures):
        return ""
    under_hour = measures.younger_share(HOUR_MS)
    return (
        f"The catalogue turns over within a day: {share:.1%} of the last tenth of the events are on items "
        f"younger than a day, {under_hour:.1%} on items younger than an hour. Retrain every night from the last run "
        "(`tackboard train --continue RUN`), and add live counts of recent events; see docs/choosing.md."
    )


def warnings_of(measures: Turnover, *, split: str, filter_seen: bool) -> list[str]:
    """Returns a warning for each setting of a run that makes its figures or its ranking worse than they need to be."""
    advice, warnings = advise(measures), []
    if split == "last" and advice.split.value == "time":
        fix = f"--set data.split=time --set data.cut={advice.cut}"
        warnings.append(f"data.split is last. {advice.split.reason} Choose a split by time: {fix}")
    if not filter_seen and advice.filter_seen.value is True:
        fix = "--set evaluation.filter_seen=true"
        warnings.append(f"evaluation.filter_seen is false. {advice.filter_seen.reason} Remove seen items: {fix}")
    return warnings


def _lacking_for_split(measures: Turnover) -> str:
    """Returns what the log has too little of to be split by time, or ""."""
    if measures.num_last < MIN_LAST_EVENTS:
        return f"the last tenth has fewer than {MIN_LAST_EVENTS:,} events ({measures.num_last:,})"
    if measures.span_ms < MIN_SPAN_MS:
        return f"the log covers only {measures.span_ms / HOUR_MS:.1f} hours"
    if 2 * measures.num_last > measures.num_events:
        return f"most events ({measures.num_last:,}) are at the very end of the log"
    if measures.num_users_across < MIN_USERS_ACROSS:
        across = f"({measures.num_users_across:,}) have events both in the last tenth and before it"
        return f"fewer than {MIN_USERS_ACROSS:,} users {across}"
    return ""
