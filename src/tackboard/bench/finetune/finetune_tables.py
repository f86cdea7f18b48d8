"""Makes the tables of `tackboard bench finetune` from finished cells, with published differences beside ours.

HIT@3 is computed from the places of true items (ranker_cells.py). A difference is a mean over test requests and over
the seeds that both rankers finished. Its interval comes from resamples of test users (a bootstrap), which are the same
for both rankers. verdict.py decides whether a difference is more than chance. The published differences are those of
Tables 1, 2 and 6 of the publication of PinFM, which reports HIT@3 of saves. Only their signs are compared with ours,
because the publication's rankers, data and candidates differ from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.finetune.finetune_study import COLD, OF_LABELS, SCRATCH, SHARES, TITLES, TREES, WAYS, FinetunePlan
from tackboard.bench.finetune.ranker_cells import NO_PLACE, PLACES
from tackboard.bench.quality.cells import Cell, Result
from tackboard.bench.quality.study_plan import Table, section
from tackboard.bench.quality.verdict import DIFFERENCE_COLUMNS, Measured, difference_cells, figures_of
from tackboard.evaluation.item_age import AGES
from tackboard.evaluation.labelled_requests import TOP
from tackboard.metrics.binary import UserResamples, interval

ALL, YOUNG, UNDER_28 = "all", AGES[0], "under 28 days"
SLICES: Mapping[str, tuple[int, ...]] = {
    **{age: (place,) for place, age in enumerate(AGES[:3])},
    UNDER_28: (0, 1),
    ALL: tuple(range(len(AGES))),
}
"""Slice of item age → positions in `AGES`."""
Published = tuple[int | None, str]
"""The sign of a published difference (None if it is too small to have one), and words for the table."""
UNKNOWN: Published = (None, "")
OF_WAYS: Mapping[tuple[str, str], Published] = {
    ("late-mean", "none"): (1, "+1.87%"),
    ("late-last", "none"): (1, "+1.93%"),
    ("early", "none"): (1, "+2.91%"),
    ("content", "none"): (1, "+3.08%"),
    ("content-token", "none"): (1, "+3.76%"),
    ("frozen", "none"): (None, "+0.10%"),
    ("late-last", "frozen"): (1, "about +3.7%, early fusion"),
    ("early", "late-last"): (1, "about +1.0%"),
    ("content", "early"): (1, "about +0.2%"),
    ("content-token", "content"): (1, "about +0.7%"),
    (SCRATCH, "none"): UNKNOWN,
    ("late-last", SCRATCH): UNKNOWN,
}
"""Pair of rankers → published difference (Table 1, home feed, and Table 6). The difference between two rankers with a
PinFM is the difference of their published lifts."""
OF_COLD: Mapping[str, Mapping[str, Published]] = {
    "early": {ALL: (1, "+3.36%"), UNDER_28: (-1, "−4.40%"), YOUNG: (-1, "−23.98%")},
    "random-ids": {ALL: (1, "+3.43%"), UNDER_28: (1, "+1.25%"), YOUNG: (-1, "−4.38%")},
    "dropout": {ALL: (1, "+3.49%"), UNDER_28: (1, "+10.71%"), YOUNG: (1, "+8.16%")},
    "cold-start": {ALL: (1, "+3.76%"), UNDER_28: (1, "+17.72%"), YOUNG: (1, "+12.01%")},
}
"""Ranker → slice → difference from the ranker without PinFM, in Table 2."""
OF_SHARES = (
    ("late-last", SCRATCH),
    ("frozen", SCRATCH),
    ("late-last", "frozen"),
    ("late-last", TREES),
    (SCRATCH, TREES),
)
"""Pairs of rankers that are compared for each share of the requests. The publication has no such table."""

Groups = Mapping[tuple[str, str], Mapping[int, Result]]
"""(ranker, share) → seed → finished result."""
Find = Callable[[Cell], Result | None]


class HitComparison:
    """Computes HIT@3 and its differences from finished results. Resamples are drawn once for each set of users."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._draws: dict[bytes, UserResamples] = {}

    def hits(self, result: Result, label: str, part: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Returns whether each request of a slice is a hit, and which requests are in the slice."""
        places = result.array(PLACES + label)
        chosen = np.isin(result.array("ages"), SLICES[part]) & (places != NO_PLACE)
        return (places[chosen] < TOP).astype(np.float64), chosen

    def figure(self, result: Result, label: str, part: str = ALL) -> float:
        """Returns HIT@3 of one result; NaN if the slice has no request."""
        hits, _ = self.hits(result, label, part)
        return float(hits.mean()) if len(hits) else float("nan")

    def mean(self, key: tuple[str, str], label: str, part: str = ALL) -> float:
        """Returns the mean HIT@3 over seeds."""
        return float(np.mean([self.figure(result, label, part) for result in self.groups[key].values()]))

    def measure(self, one: tuple[str, str], other: tuple[str, str], label: str, part: str) -> Measured | None:
        """Returns the difference between two rankers, or None if they share no finished seed, or no request is in the
        slice."""
        seeds = sorted(self.groups.get(one, {}).keys() & self.groups.get(other, {}).keys())
        if not seeds:
            return None
        ours, theirs = ([self.hits(self.groups[key][seed], label, part)[0] for seed in seeds] for key in (one, other))
        first = self.groups[one][seeds[0]]
        users = first.array("users")[self.hits(first, label, part)[1]]
        if not len(users):
            return None
        difference = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
        low, high = interval(self._resamples(users).mean(difference))
        of_ours, of_theirs = ([float(hits.mean()) for hits in side] for side in (ours, theirs))
        return Measured(float(difference.mean()), low, high, of_ours, of_theirs)

    def row(
        self, one: tuple[str, str], other: tuple[str, str], label: str, part: str, published: Published
    ) -> dict[str, Any] | None:
        """Returns a difference as numbers and words, or None if it cannot be measured."""
        measured = self.measure(one, other, label, part)
        if measured is None:
            return None
        sign, words = published
        base = float(np.mean(measured.theirs))
        return {
            "ranker": one[0],
            "against": other[0],
            "share": one[1],
            "label": label,
            "items": part,
            **figures_of(measured, sign),
            "relative": measured.difference / base if base else None,
            "published": words,
        }

    def _resamples(self, users: NDArray[np.int64]) -> UserResamples:
        key = users.tobytes()
        if key not in self._draws:
            self._draws[key] = UserResamples(np.unique(users, return_inverse=True)[1].astype(np.int64))
        return self._draws[key]


def tables_of(planned: FinetunePlan, find: Find) -> Table:
    """Returns the tables of the finished cells."""
    groups: dict[tuple[str, str], dict[int, Result]] = {}
    for (name, share, seed), cell in planned.rankers.items():
        if (result := find(cell)) is not None:
            groups.setdefault((name, share), {})[seed] = result
    pretrained = [result for cell in planned.pretrained.values() if (result := find(cell)) is not None]
    compare, labels, parts = HitComparison(groups), planned.labels, planned.source.parts
    sections: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []

    def add(title: str, rows: Sequence[dict[str, Any] | None]) -> None:
        found = [row for row in rows if row is not None]
        differences.extend(found)
        header = ["requests", "label", "items", "", *DIFFERENCE_COLUMNS, "relative", "published", ""]
        sections.append(section(title, header, [_difference_row(row) for row in found]))

    if "ways" in parts:
        sections.append(_ways_section(compare, labels))
        add(
            "Ways to use PinFM: differences of HIT@3, paired resamples of test users",
            [compare.row((a, "all"), (b, "all"), label, ALL, OF_WAYS[a, b]) for label in labels for a, b in OF_WAYS],
        )
    if "cold start" in parts:
        sections.append(_cold_section(compare, labels[0]))
        add(
            "Cold start: differences of HIT@3 from no PinFM, by the age of the true item",
            [
                compare.row((name, "all"), ("none", "all"), labels[0], part, published)
                for name, of_parts in OF_COLD.items()
                for part, published in of_parts.items()
            ],
        )
    if "labels" in parts:
        sections.append(_shares_section(compare, labels[0]))
        add(
            "Does pretraining pay? Differences of HIT@3 by the number of training requests",
            [compare.row((a, share), (b, share), labels[0], ALL, UNKNOWN) for share in SHARES for a, b in OF_SHARES],
        )
    sections += [_seeds_section(compare, planned, groups), _pretraining_section(pretrained)]
    return {
        "sections": sections,
        "notes": _notes(groups) if groups else [],
        "figures": {"differences": differences, "rows": _rows(compare, groups, labels)},
        "charts": _charts(compare, labels[0], parts) if groups else [],
    }


def _ways_section(compare: HitComparison, labels: Sequence[str]) -> dict[str, Any]:
    rows = []
    for name in WAYS:
        if (name, "all") in compare.groups:
            group = compare.groups[name, "all"].values()
            hits = [f"{compare.mean((name, 'all'), label):.4f}" for label in labels]
            others = [np.mean([one.values["metrics"][f"{labels[0]}/{metric}"] for one in group]) for metric in METRICS]
            rows.append([TITLES[name], str(len(group)), *hits, *(f"{value:.4f}" for value in others)])
    header = ["", "seeds", *(f"HIT@{TOP} {label}" for label in labels), *(f"{name} {labels[0]}" for name in METRICS)]
    return section("Ways to use PinFM: all requests, mean over seeds", header, rows)


METRICS = ("auc", "ne", "calibration")


def _cold_section(compare: HitComparison, label: str) -> dict[str, Any]:
    rows = []
    for name in COLD:
        if (name, "all") in compare.groups:
            figures = [f"{compare.mean((name, 'all'), label, part):.4f}" for part in SLICES]
            rows.append([TITLES[name], str(len(compare.groups[name, "all"])), *figures])
    known = next(iter(compare.groups.values()), {})
    counts = [
        f"{int(compare.hits(result, label, part)[1].sum()):,}" for result in [*known.values()][:1] for part in SLICES
    ]
    rows += [["test requests", "", *counts]] if rows else []
    title = f"Cold start: HIT@{TOP} of {label} by the age of the true item, mean over seeds"
    return section(title, ["", "seeds", *SLICES], rows)


def _shares_section(compare: HitComparison, label: str) -> dict[str, Any]:
    rows = []
    for share in SHARES:
        for name in OF_LABELS:
            if group := compare.groups.get((name, share)):
                auc = np.mean([one.values["metrics"][f"{label}/auc"] for one in group.values()])
                figures = [f"{compare.mean((name, share), label):.4f}", f"{auc:.4f}"]
                rows.append([_count(group), TITLES[name], str(len(group)), *figures])
    header = ["training requests", "", "seeds", f"HIT@{TOP} {label}", f"auc {label}"]
    return section("Does pretraining pay? By the number of training requests, mean over seeds", header, rows)


def _count(group: Mapping[int, Result]) -> str:
    return f"{next(iter(group.values())).values['num_train']:,}"


def _difference_row(row: Mapping[str, Any]) -> list[str]:
    relative = "" if row["relative"] is None else f"{100 * row['relative']:+.1f}%"
    names = [row["share"], row["label"], row["items"], f"{TITLES[row['ranker']]} − {TITLES[row['against']]}"]
    return [*names, *difference_cells(row), relative, row["published"], row["verdict"]]


def _seeds_section(compare: HitComparison, planned: FinetunePlan, groups: Groups) -> dict[str, Any]:
    rows = []
    for (name, _), group in groups.items():
        for seed, result in sorted(group.items()):
            values = result.values
            hits = [f"{compare.figure(result, label):.4f}" for label in planned.labels]
            ages = [f"{compare.figure(result, planned.labels[0], part):.4f}" for part in AGES[:3]]
            steps = f"{values['steps']:,} of {values['of_steps']:,}" if "steps" in values else ""
            fit = [steps, f"{values['validation_loss']:.4f}", f"{values['seconds']:,.0f}"]
            rows.append([f"{values['num_train']:,}", TITLES[name], str(seed), *hits, *ages, *fit])
    hits = [f"HIT@{TOP} {label}" for label in planned.labels]
    header = ["training requests", "", "seed", *hits, *AGES[:3], "best step", "validation loss", "s"]
    return section("Each seed", header, rows)


def _pretraining_section(pretrained: Sequence[Result]) -> dict[str, Any]:
    rows = [
        [
            str(one.cell.seed),
            *(f"{one.values['metrics'][name]:.4f}" for name in ("hr@10", "ndcg@10")),
            *(f"{one.values['num_events']:,}", f"{one.values['steps']:,}", f"{one.values['seconds']:,.0f}"),
        ]
        for one in pretrained
    ]
    return section(
        "Pretraining: each user's last event before the requests, among all items",
        ["seed", "hr@10", "ndcg@10", "events", "steps", "s"],
        rows,
    )


def _rows(compare: HitComparison, groups: Groups, labels: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "ranker": name,
            "share": share,
            "seed": seed,
            "num_train": result.values["num_train"],
            "hit@3": {
                label: {part: _number(compare.figure(result, label, part)) for part in SLICES} for label in labels
            },
            "metrics": result.values["metrics"],
        }
        for (name, share), group in groups.items()
        for seed, result in sorted(group.items())
    ]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def _notes(groups: Groups) -> list[str]:
    values = next(iter(next(iter(groups.values())).values())).values
    fits = [one.values for group in groups.values() for one in group.values() if "steps" in one.values]
    num_last = sum(one["steps"] == one["of_steps"] for one in fits)
    return [
        f"The {values['num_test']:,} requests of test users judge every ranker once; {values['num_validation']:,} "
        "requests of validation users choose its checkpoint. Requests of other users are for training. Pretraining "
        "reads events of all users, but none from the time of the requests.",
        f"For {num_last} of {len(fits)} fits, the last checkpoint was the best: more steps may change their figures.",
        "No setting was tuned, for any ranker. PinFM learns at a tenth of the ranker's learning rates, unless it is "
        "frozen or starts from scratch.",
        "The seed decides which requests a share contains. Boosted trees on all requests are the same for every seed.",
        "published: relative lifts of HIT@3 of saves in the publication of PinFM, Tables 1, 2 and 6, on other data and "
        "candidates. A verdict compares only signs; `within noise` means that chance alone may explain the difference.",
    ]


def _charts(compare: HitComparison, label: str, parts: Sequence[str]) -> list[dict[str, Any]]:
    rows = [
        {"name": TITLES[name], "values": [compare.figure(one, label) for one in compare.groups[name, "all"].values()]}
        for name in dict.fromkeys((*WAYS, *COLD))
        if (name, "all") in compare.groups
    ]
    dots = {
        "kind": "dots",
        "name": "hit3",
        "title": f"HIT@{TOP} of {label} on all requests",
        "rows": rows,
        "marks": {},
        "x_label": f"HIT@{TOP}",
        "description": "A dot for each seed, a stroke at their mean.",
    }
    lines = []
    for name in OF_LABELS if "labels" in parts else ():
        shares = [share for share in SHARES if (name, share) in compare.groups]
        if len(shares) > 1:
            counts = [next(iter(compare.groups[name, share].values())).values["num_train"] for share in shares]
            ys = [compare.mean((name, share), label) for share in shares]
            lines.append({"name": TITLES[name], "x": [float(np.log10(count)) for count in counts], "y": ys})
    curve = {
        "kind": "lines",
        "name": "requests",
        "title": f"HIT@{TOP} of {label} by the number of training requests",
        "x_label": "log10 of the number of training requests",
        "y_label": f"HIT@{TOP}",
        "description": "One line for each ranker, mean over seeds.",
        "lines": lines,
    }
    return [*([dots] if rows else []), *([curve] if lines else [])]
