"""The study `tune` of `tackboard bench quality` tries the same number of settings for each method.

A comparison is fair only if each method was tuned with the same care. For each method, this study draws N points from
the grid of its kind (GRIDS, declared here before any try is made). All points are fitted with the same seed on the same
data. The points are judged on the validation event alone, at the best of about twelve checkpoints, and the point with
the best NDCG@10 is chosen. A fit that diverges is a try like any other: it is shown, and it is never chosen. The draw
depends on the grid alone, and the first tries of a longer study are the tries of a shorter one, so --tries can be
raised later. Every try is a cell (cells.py), so the study can be stopped and continued.

The study writes nothing into the package. For each family (methods whose names differ only in their inputs), it prints
the entry to be put into tuned.py. The module methods.py reads the settings from tuned.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tackboard.bench.quality.cell import CHOOSE_BY, Machine, Outcome, run_validation
from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.quality.methods import METHODS, Method, MethodContext
from tackboard.bench.quality.row_labels import softmax_of, title_of
from tackboard.bench.quality.study_plan import Find, StudyContext, StudyPlan, Table, section
from tackboard.core import keyed_random
from tackboard.core.errors import DivergedError, UsageError

TRIES, QUICK_TRIES = 12, 2
"""Number of tries of each method, without and with --quick."""
TUNE_STREAM = 33
"""Random stream for the draw of tries. No other draw uses this stream."""
DEFAULT_METHODS = ("pinfm-history", "sasrec-fair-history", "hstu-fair-history")
RATE, TABLE_RATE = "optimizer.dense_learning_rate", "optimizer.table_learning_rate"
DECAY, DROPOUT, STEPS = "optimizer.weight_decay", "model.dropout", "training.steps"
Grid = Mapping[str, tuple[float, ...]]
"""Setting → values."""
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "rival": {
        RATE: (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        DECAY: (0.0, 0.01, 0.1),
        DROPOUT: (0.1, 0.2, 0.3, 0.4, 0.5),
        STEPS: (0.75, 1.0, 1.35),
    },
    "pinfm": {
        RATE: (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        TABLE_RATE: (0.1, 0.3, 1.0),
        DECAY: (0.0, 0.01, 0.1),
        DROPOUT: (0.1, 0.2, 0.3, 0.4, 0.5),
        STEPS: (0.75, 1.0, 1.35),
    },
}
"""Kind of method → setting → values. The values of STEPS are factors by which the number of steps
in PinFM's recipe is multiplied. Only PinFM has hashed tables with a rate of their own."""
LARGE = {DROPOUT: (0.0, 0.1, 0.2, 0.3), STEPS: (1.0, 2.0, 3.0)}
"""The values that replace those of GRIDS if the catalogue is large. Training reads a large log only a few times, so
there is less to gain from dropout and more from steps."""
COLUMNS = {RATE: "rate", TABLE_RATE: "table rate", DECAY: "decay", DROPOUT: "dropout", STEPS: "steps planned"}


@dataclasses.dataclass(frozen=True)
class Try:
    """A point of the grid, and its fit."""

    settings: Mapping[str, float]
    cell: Cell


def tune(context: StudyContext) -> StudyPlan:
    """Plans the tries of each method."""
    methods = context.fitted_methods(DEFAULT_METHODS)
    for method in methods:
        if method.is_published:
            raise UsageError(
                f"--study tune cannot tune {method.name}, which has the published settings",
                allowed="allowed: methods whose name ends with -items, -history or -request",
            )
    if context.options.seeds > 1:
        raise UsageError(f"--study tune has one seed, not {context.options.seeds}", fix="leave --seeds out")
    num_tries = context.options.tries or (QUICK_TRIES if context.options.quick else TRIES)
    rule = context.one_rule()
    place = context.places([rule])[rule]
    grids = {method.name: grid_of(method, place) for method in methods}
    tries: dict[str, list[Try]] = {method.name: [] for method in methods}
    for method in methods:
        for number, point in enumerate(draw(grids[method.name], num_tries), start=1):
            tried = [f"{name}={value}" for name, value in point.items()]
            cell = context.cell(place, rule, method, 0, "tune", tried=tried, try_number=number)
            tries[method.name].append(Try(point, cell))
    # The first try of all methods runs before the second try, so that methods are tuned evenly if time runs out.
    cells = [one.cell for of_number in zip(*tries.values(), strict=True) for one in of_number]
    return StudyPlan(cells, lambda find: _table(context, methods, grids, tries, find))


def grid_of(method: Method, place: MethodContext) -> Grid:
    """Returns setting → values for a method on a dataset, with whole numbers of steps."""
    assert method.build is not None
    grid = GRIDS["pinfm" if method.is_ours else "rival"] | (LARGE if place.is_large else {})
    planned = method.build(place).training.steps
    return grid | {STEPS: tuple(max(1, round(share * planned)) for share in grid[STEPS])}


def draw(grid: Grid, num_tries: int) -> list[dict[str, float]]:
    """Draws distinct points of the grid. A larger number of tries only adds points at the end."""
    sizes = [len(values) for values in grid.values()]
    size = int(np.prod(sizes))
    if num_tries > size:
        raise UsageError(f"--tries is {num_tries}", allowed=f"allowed: at most {size}, the points of the grid")
    points = []
    for number in keyed_random.permutation(size, 0, TUNE_STREAM)[:num_tries]:
        places = np.unravel_index(int(number), sizes)
        points.append({name: values[place] for (name, values), place in zip(grid.items(), places, strict=True)})
    return points


def run_try(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Does the stage `validate`. If the fit diverges, the result says so, and the try is not repeated."""
    try:
        return run_validation(work, cell, machine)
    except DivergedError as error:
        return {"diverged": error.got}, {}


# ---- the table ----


def _table(
    context: StudyContext,
    methods: Sequence[Method],
    grids: Mapping[str, Grid],
    tries: Mapping[str, Sequence[Try]],
    find: Find,
) -> Table:
    rows, figures, choices, entries = [], [], [], []
    for method in methods:
        results = [find(one.cell) for one in tries[method.name]]
        found = [(one, result) for one, result in zip(tries[method.name], results, strict=True) if result is not None]
        best = _best(found)
        for number, (one, result) in enumerate(zip(tries[method.name], results, strict=True), start=1):
            if result is not None:
                rows.append([*_names(result), str(number), *_try_row(one, result, is_best=one is best)])
                kept = {key: result.values.get(key) for key in ("metrics", "chosen_steps", "diverged")}
                figures.append({"method": method.name, "try": number, "settings": dict(one.settings)} | kept)
        if found:
            choices.append(_choice_row(grids[method.name], found, len(results), best))
        if best is not None and len(found) == len(results) and not context.options.quick:
            entries.append(entry_of(method, context.bench.name, found, best))
    header = ["", "reads", "softmax over", "try", *COLUMNS.values(), "hr@10", "ndcg@10", "best at step", "s", ""]
    choice_header = ["", "reads", "tries", "diverged", "hr@10", "ndcg@10", "chosen", "at the edge of its grid"]
    notes = [
        "All tries have the same seed. The try with the best NDCG@10 is chosen. A try that diverged counts as a try.",
        *(f"For bench/quality/tuned.py: {entry}" for entry in entries),
    ]
    return {
        "sections": [section("Every try", header, rows), section("Choice", choice_header, choices)],
        "protocol": _protocol(context),
        "notes": notes if rows else [],
        "figures": {"rows": figures, "entries": entries},
        "charts": [],
    }


def _protocol(context: StudyContext) -> str:
    """Describes how tries are judged, for the report."""
    max_users = context.protocol()["max_users"]
    users = f"{max_users:,} users, drawn once" if max_users else "all users"
    seen = "without" if context.bench.filter_seen else "with"
    return (
        f"Validation: each try ranks the event before the last, for {users}, in the whole catalogue {seen} the items "
        "of the history. Its best checkpoint counts. No try sees the last event. An item with the same score as the "
        f"held-out item counts as ranked above it. Tie rule: {context.one_rule()}. {context.bench.note}"
    )


def _best(found: Sequence[tuple[Try, Result]]) -> Try | None:
    """Returns the try with the best figure, or the earliest of several equal tries; None if all diverged."""
    fits = [(one, result) for one, result in found if "metrics" in result.values]
    return max(fits, key=lambda pair: pair[1].values["metrics"][CHOOSE_BY])[0] if fits else None


def _names(result: Result) -> list[str]:
    cell = result.cell
    return [title_of(cell), METHODS[cell.method].reads, softmax_of(cell, result.values.get("num_items", 0))]


def _try_row(one: Try, result: Result, *, is_best: bool) -> list[str]:
    values = result.values
    settings = [f"{one.settings[name]:g}" if name in one.settings else "" for name in COLUMNS]
    if "diverged" in values:
        return [*settings, "", "", "", "", f"diverged: {values['diverged']}"]
    metrics = [f"{values['metrics'][name]:.4f}" for name in ("hr@10", "ndcg@10")]
    return [*settings, *metrics, f"{values['chosen_steps']:,}", f"{values['seconds']:,.0f}", "best" if is_best else ""]


def _choice_row(grid: Grid, found: Sequence[tuple[Try, Result]], num_tries: int, best: Try | None) -> list[str]:
    is_done = len(found) == num_tries
    made = str(num_tries) if is_done else f"{len(found)} of {num_tries}"
    title, reads, _ = _names(found[0][1])
    names = [title, reads, made, str(num_diverged(found))]
    if best is None:
        return [*names, "", "", "none: all diverged" if is_done else "not yet", ""]
    metrics = next(result.values["metrics"] for one, result in found if one is best)
    settings = ", ".join(f"{COLUMNS[name]} {value:g}" for name, value in best.settings.items())
    chosen = settings if is_done else f"not yet; best so far: {settings}"
    edges = ", ".join(COLUMNS[name] for name in edges_of(grid, best.settings))
    return [*names, *(f"{metrics[name]:.4f}" for name in ("hr@10", "ndcg@10")), chosen, edges]


def edges_of(grid: Grid, point: Mapping[str, float]) -> list[str]:
    """Returns the settings whose value is at an end of the grid and not 0. A better value may lie beyond the grid."""
    return [name for name, value in point.items() if value and value in (min(grid[name]), max(grid[name]))]


def num_diverged(found: Sequence[tuple[Try, Result]]) -> int:
    """Returns the number of tries that diverged."""
    return sum("diverged" in result.values for _, result in found)


def entry_of(method: Method, dataset: str, found: Sequence[tuple[Try, Result]], best: Try) -> str:
    """Returns the entry of a family for tuned.py. Its number of tries includes those made before this study existed
    (docs/log.md)."""
    before = method.tuned(dataset)
    num_before = 0 if before.commit else before.tries
    parts = [f"{num_before} before the study" if num_before else "", f"{num_diverged(found)} diverged"]
    note = ", ".join(part for part in parts if part)
    settings = ", ".join(f'"{name}={value:g}"' for name, value in best.settings.items())
    commits = ", ".join(sorted({str(result.values["environment"]["commit"]) for _, result in found}))
    date = max(str(result.values["date"])[:10] for _, result in found)
    return (
        f'("{method.family}", "{dataset}"): Tuned(tries={num_before + len(found)}, note="{note}", '
        f'settings=({settings},), commit="{commits}", date="{date}"),'
    )
