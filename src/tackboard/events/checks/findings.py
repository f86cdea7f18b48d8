"""This module holds the rules for a snapshot, and collects findings, which say that rows or files break a rule.

RULES holds every rule of `tackboard data check`, and what to do if the rule is broken. Decided: a broken rule is an
error if it stops training or serving, or makes results wrong. A broken rule is a warning if the data may be correct,
but somebody should look at the data. A finding names files, columns, days, row numbers and counts, never a user.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Severity = Literal["error", "warning"]
COUNTED = {"rows": "row", "events": "event", "users": "user", "days": "day"}
"""If a rule's sentence begins with a key of this dict, the sentence is shown after the number of cases. The value
is the singular of the key."""
OF_ONE = {"have": "has", "repeat": "repeats", "name": "names", "lie": "lies", "were": "was", "are": "is"}
OF_ONE |= {"them": "it", "they": "it", "their": "its"}
"""Maps other words of the rules' sentences to the words that replace them if the count is one."""
ROWS_NAMED = 5
"""Largest number of rows that a finding names."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The severity, a sentence that says what is wrong, and what to do. {} stands for a detail, such as a column."""

    severity: Severity
    wrong: str
    fix: str


IMPORT_AGAIN = "import the log again, or restore the snapshot from a copy"
CORRECT_LOG = "correct the log and import it again"
RULES: dict[str, Rule] = {
    "manifest": Rule("error", "{}", IMPORT_AGAIN),
    "file-missing": Rule("error", "the file is missing", IMPORT_AGAIN),
    "file-unreadable": Rule("error", "cannot be read: {}", IMPORT_AGAIN),
    "column-missing": Rule("error", "lacks the column {}", IMPORT_AGAIN),
    "column-type": Rule("error", "{}", IMPORT_AGAIN),
    "null": Rule("error", "rows have no {}", CORRECT_LOG),
    "time-range": Rule(
        "error", "rows have a {} before 1990 or in the future", "check the unit of the log's times and import again"
    ),
    "position-range": Rule("error", "rows have a {} below 0", "positions count from 0: correct the log"),
    "not-finite": Rule("error", "rows have a {} that is not finite", "leave such values empty in the log"),
    "id-mismatch": Rule("error", "rows have a {} that is not the id of the user or item in the same row", IMPORT_AGAIN),
    "not-sorted": Rule("error", "rows are not in the order of {}", IMPORT_AGAIN),
    "duplicate-event": Rule(
        "warning",
        "rows repeat user, item, action and time of an earlier row",
        "log each action once, or keep these rows: a user may do a thing twice",
    ),
    "duplicate-id": Rule("error", "rows repeat the {} of an earlier row", IMPORT_AGAIN),
    "received-early": Rule(
        "warning",
        "rows were received before they happened",
        "compare the clients' clocks with the log's clock; features see an event only after its received time",
    ),
    "before-birth": Rule(
        "warning", "events lie before the birth of their item", "check birth_ms in the items file, or leave it out"
    ),
    "unknown-item": Rule("error", "rows name an item that items.parquet does not list", IMPORT_AGAIN),
    "unknown-user": Rule("error", "rows name a user that users.parquet does not list", IMPORT_AGAIN),
    "unseen-user": Rule(
        "warning", "rows name a user that users.parquet does not list", "these users are read with an empty history"
    ),
    "forgotten-user": Rule(
        "warning",
        "users were forgotten but are still in the snapshot",
        "make a snapshot without forgotten users: tackboard data retain DATASET",
    ),
    "forgotten-list": Rule(
        "error", "{}", "restore the list from a copy: without the list, forgotten users would come back"
    ),
    "count-mismatch": Rule("error", "rows have a num_events that does not match events.parquet", IMPORT_AGAIN),
    "statistics": Rule("error", "says {}", IMPORT_AGAIN),
    "layout": Rule("error", "{}", IMPORT_AGAIN),
    "row-count": Rule("error", "{}", "run `tackboard features backfill` again"),
    "list-lengths": Rule("error", "rows have lists of different lengths: {}", "join the labels again"),
    "label-value": Rule("error", "rows have a {} that is neither 0 nor 1 nor null", "join the labels again"),
    "heavy-user": Rule(
        "warning", "one user has {} of the events", "check whether this user is a robot; `data retain --days` may help"
    ),
    "long-history": Rule(
        "warning", "users have more than {} events", "only their newest events are read; check whether they are robots"
    ),
    "day-gap": Rule(
        "warning",
        "days have far fewer events than the days around them: {}",
        "check whether part of the log is missing",
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem, with its rule, the file, the number of cases, the first rows (counted from 0), and what to do."""

    rule: str
    severity: Severity
    file: str
    count: int
    rows: tuple[int, ...]
    wrong: str
    fix: str

    @property
    def text(self) -> str:
        """The finding as one line for people, without the advice on what to do."""
        first = self.wrong.partition(" ")[0]
        count = f"{self.count:,} " if first in COUNTED or first in COUNTED.values() else ""
        where = f" (row {', '.join(map(str, self.rows))})" if self.rows else ""
        return f"{self.severity:<8} {self.file}: {count}{self.wrong}{where}"


class Findings:
    """Collects problems. Problems that have the same rule, file and `about` become one finding with a count."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[Any]] = {}

    def add(self, rule: str, file: str, about: str = "", count: int = 1) -> None:
        """Adds a problem that is not about rows. `about` replaces {} in the rule's sentence."""
        self._found.setdefault((rule, file, about), [0, []])[0] += count

    def add_rows(self, rule: str, file: str, rows: NDArray[np.int64], about: str = "") -> None:
        """Adds rows of a file, counted from 0, that break a rule."""
        if len(rows):
            self.add(rule, file, about, count=len(rows))
            entry = self._found[rule, file, about]
            entry[1].extend(int(row) for row in rows[: ROWS_NAMED - len(entry[1])])

    def sorted(self) -> list[Finding]:
        """Returns the errors, then the warnings, both in the order in which they were found."""
        found = []
        for (name, file, about), (count, rows) in self._found.items():
            rule = RULES[name]
            wrong = _sentence(rule.wrong, count).format(about)
            found.append(Finding(name, rule.severity, file, count, tuple(rows), wrong, rule.fix))
        return sorted(found, key=lambda finding: finding.severity)

    def has(self, rule: str, file: str) -> bool:
        """Returns whether `file` broke `rule`."""
        return any((rule, file) == (broken, where) for broken, where, _ in self._found)


def _sentence(wrong: str, count: int) -> str:
    """Returns a rule's sentence. If the count is one, the sentence is put into the singular."""
    first, _, rest = wrong.partition(" ")
    if count == 1 and first in COUNTED:
        return COUNTED[first] + " " + re.sub(r"\w+", lambda word: OF_ONE.get(word[0], word[0]), rest)
    return wrong
