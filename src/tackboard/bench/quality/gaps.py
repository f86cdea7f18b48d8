"""Shows how well methods rank for short and long gaps. A gap is the time from the previous to the held-out event.

A method that reads the request's time knows the gap. If both events carry the same second, no request can have come
between them, so the gap tells such a method something that no server would know. So the leading figure of such methods
leaves out the users with a gap of 0 seconds. The input is the results of cells, each with ranks and gaps (whole
seconds) of the same users. The output is tables of text, and the same results for a part of the users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.quality.cell import metrics_of
from tackboard.bench.quality.cells import Result
from tackboard.metrics.paired import gains, hits

GAPS = {"same second": 0, "under a minute": 1, "under an hour": 60, "under a day": 3_600, "longer": 86_400}
"""Name of a range of gaps → its smallest gap in seconds. A range ends where the next range begins."""
SAME = next(iter(GAPS))
MEASURES = {"hr@10": hits, "ndcg@10": gains}

Groups = Mapping[tuple[str, str], Sequence[Result]]
"""(tie rule, method) → results, one result per seed."""


def gap_names(instant: str) -> list[str]:
    """Returns the names of the ranges for a dataset whose times are whole seconds, hours or another `instant`."""
    return [f"same {instant}" if name == SAME else name for name in GAPS]


def range_of_gaps(gaps_U: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index in GAPS of each user's gap [U]; -1 for a user without an event before the held-out event."""
    return np.searchsorted(np.array(list(GAPS.values())), gaps_U, side="right") - 1


def with_gaps(groups: Groups) -> dict[tuple[str, str], Sequence[Result]]:
    """Returns the groups whose results have gaps. Cells of older versions have none."""
    return {key: group for key, group in groups.items() if all("gaps" in one.array_names() for one in group)}


def without_same_second(groups: Groups) -> dict[tuple[str, str], list[Result]]:
    """Returns the results for the users whose held-out event is not in the same second as the event before.

    Groups without such users are left out.
    """
    return {
        key: [_for_users(one, one.array("gaps") != GAPS[SAME]) for one in group]
        for key, group in with_gaps(groups).items()
        if (group[0].array("gaps") != GAPS[SAME]).any()
    }


def _for_users(result: Result, is_chosen_U: NDArray[np.bool_]) -> Result:
    """Returns a result with the arrays of the chosen users and their metrics."""
    arrays = {name: result.array(name)[is_chosen_U] for name in ("ranks", "returns", "gaps")}
    changed = {
        "metrics": metrics_of(arrays["ranks"]),
        "num_ranked_users": int(is_chosen_U.sum()),
        "targets_sha256": f"{result.values['targets_sha256']}, some users",
    }
    return dataclasses.replace(result, values={**result.values, **changed}, loaded=arrays)


def by_gap(groups: Groups, instant: str = "second") -> list[dict[str, Any]]:
    """Returns for each group and each range of gaps the number of users, HR@10 and NDCG@10 (mean over seeds)."""
    figures = []
    for (ties, method), group in with_gaps(groups).items():
        ranges_U = range_of_gaps(group[0].array("gaps"))
        for index, name in enumerate(gap_names(instant)):
            chosen_U = ranges_U == index
            means = {
                metric: float(np.mean([measure(one.array()[chosen_U], 10).mean() for one in group]))
                for metric, measure in MEASURES.items()
                if chosen_U.any()
            }
            figures.append({"method": method, "ties": ties, "gap": name, "users": int(chosen_U.sum())} | means)
    return figures


def gap_rows(groups: Groups, names: Mapping[tuple[str, str], Sequence[str]]) -> list[list[str]]:
    """Returns the rows of a table: for each tie rule the number of users, then each metric of each group.

    `names` holds the first cells of each group's rows: title, inputs, tie rule.
    """
    figures = by_gap(groups)
    rows = []
    for rule in dict.fromkeys(ties for ties, _ in groups):
        mine = [one for one in figures if one["ties"] == rule]
        counts = [f"{one['users']:,}" for one in mine[: len(GAPS)]]
        rows += [["number of users", "", rule, "", *counts]] if mine else []
        for method in dict.fromkeys(one["method"] for one in mine):
            of_method = [one for one in mine if one["method"] == method]
            for metric in MEASURES:
                cells = [f"{one[metric]:.4f}" if metric in one else "" for one in of_method]
                rows.append([*names[rule, method], metric, *cells])
    return rows
