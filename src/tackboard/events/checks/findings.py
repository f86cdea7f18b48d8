"""What can be wrong with a snapshot: rows that break a rule go in, one finding per rule and place comes out.

The table below is every rule that `tackboard data check` knows, with what to do about it. Decided: an error is what
makes training or serving wrong or stops it; a warning is what may be true of the world and should be looked at. A
finding names files, columns, items, row numbers and counts, never a user.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Severity = Literal["error", "warning"]
COUNTED = {"rows": "row", "events": "event", "users": "user", "days": "day"}
"""A rule whose sentence begins so is told with its count before it; and what one of them is called."""
OF_ONE = {
    "have": "has",
    "repeat": "repeats",
    "name": "names",
    "lie": "lies",
    "were": "was",
    "are": "is",
    "them": "it",
    "they": "it",
    "their": "its",
}
"""The other words of these sentences that are different of one."""
ROWS_NAMED = 5
"""Rows that a finding names; the first ones."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How bad it is, what is wrong in words ({} is the column or another name), and what to do."""

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
    "id-mismatch": Rule("error", "rows have a {} that is not the id of the name beside it", IMPORT_AGAIN),
    "not-sorted": Rule("error", "rows lie before a row that should precede them, by {}", IMPORT_AGAIN),
    "duplicate-event": Rule(
        "warning",
        "rows repeat user, item, action and time of a row before them",
        "log each action once, or leave them: a user may do a thing twice",
    ),
    "duplicate-id": Rule("error", "rows repeat a {} of a row before them", IMPORT_AGAIN),
    "received-early": Rule(
        "warning",
        "rows were received before they happened",
        "compare the clocks of clients and log; features see an event from its received time on",
    ),
    "before-birth": Rule(
        "warning", "events lie before the birth of their item", "check birth_ms in the items file, or leave it out"
    ),
    "unknown-item": Rule("error", "rows name an item that items.parquet does not list", IMPORT_AGAIN),
    "unknown-user": Rule("error", "rows name a user that users.parquet does not list", IMPORT_AGAIN),
    "unseen-user": Rule(
        "warning",
        "rows are of a user whom users.parquet does not list",
        "they are read with an empty history",
    ),
    "forgotten-user": Rule(
        "warning",
        "users who were forgotten are still in it",
        "make a snapshot without them: tackboard data retain DATASET",
    ),
    "forgotten-list": Rule("error", "{}", "restore it from a copy: without it, forgotten users would come back"),
    "count-mismatch": Rule("error", "rows have another num_events than events.parquet holds", IMPORT_AGAIN),
    "statistics": Rule("error", "says {}", IMPORT_AGAIN),
    "layout": Rule("error", "{}", IMPORT_AGAIN),
    "row-count": Rule("error", "{}", "run `tackboard features backfill` again"),
    "list-lengths": Rule("error", "rows have lists of different lengths: {}", "join the labels again"),
    "label-value": Rule("error", "rows have a {} other than 0, 1 and not known", "join the labels again"),
    "heavy-user": Rule(
        "warning", "one user has {} of the events", "look whether it is a robot; a retention in days may help"
    ),
    "long-history": Rule(
        "warning", "users have more than {} events", "only the newest are read: nothing to do unless they are robots"
    ),
    "day-gap": Rule(
        "warning", "days have hardly any event although their neighbours do: {}", "look whether a part of the log lacks"
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong: which rule, where, how often, the first rows (counted from 0), and what to do."""

    rule: str
    severity: Severity
    file: str
    count: int
    rows: tuple[int, ...]
    wrong: str
    fix: str

    @property
    def text(self) -> str:
        """One line for people, without what to do."""
        first = self.wrong.partition(" ")[0]
        count = f"{self.count:,} " if first in COUNTED or first in COUNTED.values() else ""
        where = f" (row {', '.join(map(str, self.rows))})" if self.rows else ""
        return f"{self.severity:<8} {self.file}: {count}{self.wrong}{where}"


class Findings:
    """Collects what is wrong. The same rule about the same place is one finding whose count grows."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[Any]] = {}

    def add(self, rule: str, file: str, about: str = "", count: int = 1) -> None:
        """Something that has no rows; `about` fills the rule's sentence."""
        self._entry(rule, file, about)[0] += count

    def add_rows(self, rule: str, file: str, rows: NDArray[np.int64], about: str = "") -> None:
        """Rows of a file, by number from 0, that break a rule; none adds nothing."""
        if len(rows):
            entry = self._entry(rule, file, about)
            entry[0] += len(rows)
            entry[1].extend(int(row) for row in rows[: ROWS_NAMED - len(entry[1])])

    def sorted(self) -> list[Finding]:
        """Errors first, otherwise in the order in which they were found."""
        found = [
            Finding(
                rule, RULES[rule].severity, file, count, tuple(rows), _sentence(rule, count, about), self._fix(rule)
            )
            for (rule, file, about), (count, rows) in self._found.items()
        ]
        return sorted(found, key=lambda finding: finding.severity)

    def has(self, rules: Iterable[str], file: str) -> bool:
        """Whether one of `rules` was broken by `file`."""
        wanted = set(rules)
        return any(rule in wanted and where == file for rule, where, _ in self._found)

    def _entry(self, rule: str, file: str, about: str) -> list[Any]:
        return self._found.setdefault((rule, file, about), [0, []])

    @staticmethod
    def _fix(rule: str) -> str:
        return RULES[rule].fix


def _sentence(rule: str, count: int, about: str) -> str:
    """What is wrong, of one thing or of several."""
    wrong = RULES[rule].wrong
    first, _, rest = wrong.partition(" ")
    if count == 1 and first in COUNTED:
        wrong = COUNTED[first] + " " + re.sub(r"\w+", lambda word: OF_ONE.get(word[0], word[0]), rest)
    return wrong.format(about)
