"""This module defines the studies `reproduce`, `validate` and `compare` of `tackboard bench quality`.

A study is a function that plans cells (units of work, see cells.py) and can make a table of their results. "Tie rule"
means the order of events of one user that have the same time (data.py).

    reproduce  runs SASRec, HSTU and HSTU-large as published, under every tie rule, to check this harness
    validate   fits each method once and judges the fit on the validation event alone; this study serves for tuning
    compare    chooses the number of steps on validation, then refits and tests once per seed, under every tie rule;
               compares each of our methods, paired over users, with the strongest baseline that reads no more inputs
               than our method

Decided: published figures stand only beside figures under random ties. The public code of HSTU sorts events by time
with a sort that is not stable, so its order of simultaneous events follows neither the file nor its reverse.

Tables show only the finished cells, so the table of a study that takes days can be read before the study ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.quality.cells import Cell, Result
from tackboard.bench.quality.gaps import by_gap, gap_names, gap_rows, with_gaps, without_same_second
from tackboard.bench.quality.methods import INPUTS, METHODS, Method
from tackboard.bench.quality.row_labels import softmax_of, title_of, tries_of
from tackboard.bench.quality.study_plan import Find, StudyContext, StudyPlan, Table, section
from tackboard.bench.quality.verdict import DIFFERENCE_COLUMNS, Measured, difference_cells, figures_of
from tackboard.core.errors import DataError, UsageError
from tackboard.metrics.paired import gains, hits, paired_bootstrap

METRICS = ("hr@10", "ndcg@10", "hr@50", "ndcg@50", "hr@200", "ndcg@200")
TOLERANCE = 0.015
"""A published figure agrees with our figure if they differ by at most this number."""
PUBLISHED_TIES = "random"
"""The tie rule of our figures that stand beside published figures."""
NUM_RESAMPLES = 1000
NAMED = ("", "reads", "softmax over", "tries", "ties")
"""Columns that name a row."""
TRIES_NOTE = (
    "Tries: the number of fits that were judged on the validation event before the settings of a method were chosen. "
    "The number of steps of the test is chosen afterwards, for every method in the same way."
)
MEANS_HEADER = [*NAMED, "seeds", *METRICS]
APART = "not in the {} of the event before"
"""Words for test events that are not in the same second (in some logs: not in the same hour) as the event before."""
HSTU_README = "meta-recsys/generative-recommenders, README"
PUBLISHED: dict[str, dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "ml-1m": {
        "sasrec": ("SASRec, sampled softmax", HSTU_README, (0.2853, 0.1603, 0.5474, 0.2185, 0.7528, 0.2498)),
        "hstu": ("HSTU", HSTU_README, (0.3097, 0.1720, 0.5754, 0.2307, 0.7716, 0.2606)),
        "hstu-large": ("HSTU-large", HSTU_README, (0.3294, 0.1893, 0.5935, 0.2481, 0.7839, 0.2771)),
        "sasrec-items": ("SASRec, cross-entropy", "Klenitskiy and Vasilev, RecSys 2023", (0.3152, 0.1821)),
        "gsasrec": ("gSASRec", "asash/gSASRec-pytorch, README", (0.3003, 0.1726)),
    }
}
"""Dataset → our corresponding method → (name, source, metrics in the order of METRICS). The figures with the source
HSTU_README were measured on the test event during training."""


# ---- reproduce ----


def reproduce(context: StudyContext) -> StudyPlan:
    """Plans one cell for each published rival, tie rule and seed."""
    if context.bench.name not in PUBLISHED:
        raise UsageError(
            f"--study reproduce does not support --dataset {context.bench.name}",
            allowed=f"allowed: datasets with published figures: {', '.join(PUBLISHED)}",
            fix="use --study compare",
        )
    methods = context.fitted_methods(("sasrec", "hstu", "hstu-large"))
    places = context.places(context.ties(context.bench.ties))
    cells = [
        # Published code takes an item out of the ranking only if it is in the part of the history that the model reads.
        context.cell(place, rule, method, seed, "published", filter_newest=place.max_length)
        for seed in context.seeds(1)
        for method in methods
        for rule, place in places.items()
    ]
    return StudyPlan(cells, lambda find: _reproduce_table(context, methods, cells, find))


def _reproduce_table(context: StudyContext, methods: list[Method], cells: Sequence[Cell], find: Find) -> Table:
    results = [result for cell in cells if (result := find(cell)) is not None]
    rows, figures, verdicts, agreement = [], [], [], []
    for result in results:
        cell, values = result.cell, result.values
        best, last = values["best_metrics"], values["metrics"]
        names = (METHODS[cell.method].title, cell.ties, str(cell.seed))
        rows.append([*names, *_numbers(best, METRICS[:2]), *_numbers(last, METRICS[:2]), f"{values['best_step']:,}"])
        figures.append({"method": cell.method, "ties": cell.ties, "seed": cell.seed, "best": best, "last": last})
    for method in methods:
        known = published_for(context).get(method.name)
        mine = [r for r in results if r.cell.method == method.name and r.cell.ties == PUBLISHED_TIES]
        if known is None or not mine:
            continue
        for place, metric in enumerate(METRICS[:2]):
            verdict = agrees(mine, metric, known[2][place])
            agreement.append({"method": method.name, "metric": metric} | verdict)
            ours = [f"{verdict[kind]:.4f}" for kind in ("best", "last")]
            words = "agree" if verdict["agrees"] else "do NOT agree"
            verdicts.append([known[0], metric, f"{known[2][place]:.4f}", *ours, words])
    header = ["", "ties", "seed", "best hr@10", "best ndcg@10", "last hr@10", "last ndcg@10", "best step"]
    return {
        "sections": [
            section("Tested during training: the best figures, as published, and the last figures", header, rows),
            section(
                f"Published figures against ours under {PUBLISHED_TIES} ties (within {TOLERANCE})",
                ["", "metric", "published", "our best", "our last", ""],
                verdicts,
            ),
        ],
        "notes": [
            "Published figures are the best figures on the test event during training, and so are the figures named "
            "best here. The table checks the harness; it does not show how good a method is. As in the published code, "
            "only the part of the history that the model reads is taken out of the ranking.",
        ],
        "figures": {"rows": figures, "agreement": agreement},
        "charts": [*_curves(results, "test"), *_dots(context, results, "best_metrics")],
    }


def published_for(context: StudyContext) -> dict[str, tuple[str, str, tuple[float, ...]]]:
    """Returns the published figures for the dataset. Returns {} with --quick, because a quick run leaves out users."""
    return {} if context.options.quick else PUBLISHED.get(context.bench.name, {})


def agrees(results: Sequence[Result], metric: str, published: float) -> dict[str, Any]:
    """Averages our figures over seeds and checks whether the published figure is near. `results` share a tie rule."""
    best, last = (float(np.mean([one.values[kind][metric] for one in results])) for kind in ("best_metrics", "metrics"))
    # Without rounding, a difference of exactly the tolerance would depend on how the numbers are represented.
    is_near = round(abs(published - best), 6) <= TOLERANCE
    return {"published": published, "best": best, "last": last, "agrees": is_near}


# ---- validate ----


def validate(context: StudyContext) -> StudyPlan:
    """Plans a fit of each method. The fits are judged on the validation event alone."""
    methods = context.fitted_methods(_compared(context))
    rules = context.places(context.ties(context.bench.ties[:1]))
    cells = [
        context.cell(place, rule, method, seed, "validate")
        for rule, place in rules.items()
        for seed in context.seeds(1)
        for method in methods
    ]
    return StudyPlan(cells, lambda find: _validation_table(context, cells, find))


def _validation_table(context: StudyContext, cells: Sequence[Cell], find: Find) -> Table:
    results = [result for cell in cells if (result := find(cell)) is not None]
    header = [*NAMED, "seed", *METRICS[:2], "steps", "of", "parameters", "s", "tokens/s"]
    rows = [_validation_row(context, result) for result in results]
    return {
        "sections": [section("Validation: the event before the last", header, rows)],
        "notes": ["No method saw the test event.", TRIES_NOTE] if results else [],
        "figures": {"rows": [_figures(result) for result in results]},
        "charts": _curves(results, "validation"),
    }


def _validation_row(context: StudyContext, result: Result) -> list[str]:
    cell, values = result.cell, result.values
    planned = cell.run_config().training.steps
    return [
        *(*_named(context, result), str(cell.seed)),
        *_numbers(values["metrics"], METRICS[:2]),
        *(f"{values['chosen_steps']:,}", f"{planned:,}", f"{values['parameters']:,}"),
        *(f"{values['seconds']:,.0f}", f"{values['tokens_per_s']:,}"),
    ]


# ---- compare ----


def compare(context: StudyContext) -> StudyPlan:
    """Plans the validation, the refit and the test of our methods and of the rivals."""
    methods = context.methods(_compared(context))
    cells = []
    rules = context.ties(context.bench.ties[:1] if context.options.quick else context.bench.ties)
    for rule, place in context.places(rules).items():
        for method in methods:
            if method.build is None:
                cells.append(context.cell(place, rule, method, 0, "baseline"))
                continue
            # The number of steps is chosen once, with the first seed. The other seeds show the effect of chance.
            chosen = context.cell(place, rule, method, 0, "validate")
            cells += [context.cell(place, rule, method, seed, "test", chosen) for seed in context.seeds(3)]
    return StudyPlan(cells, lambda find: _compare_table(context, cells, find))


def _compared(context: StudyContext) -> tuple[str, ...]:
    """Returns the methods that are compared by default: our methods, and all rivals that may be the strongest."""
    if context.options.quick:
        return ("popularity", "item-to-item", "sasrec-history", "pinfm-history")
    fair = ("sasrec-wide", "sasrec-fair", "hstu-fair", "pinfm-published", "pinfm")
    if context.bench.name == "ml-1m":
        names = ("hstu-large", "hstu-wide", *fair)
        fits = (f"{name}-{inputs}" for inputs in ("history", "request") for name in names)
        return ("popularity", "item-to-item", "sasrec-items", "hstu-large", *fits)
    fits = (f"{name}-history" for name in ("sasrec", *fair))
    return ("popularity", "item-to-item", "recently-seen", *fits)


def _compare_table(context: StudyContext, cells: Sequence[Cell], find: Find) -> Table:
    results = [result for cell in cells if (result := find(cell)) is not None]
    groups = _grouped(results)
    singles = [
        [*_named(context, result), str(result.cell.seed) if METHODS[result.cell.method].build else "",
         *_numbers(result.values["metrics"]), f"{result.values['steps']:,}" if "steps" in result.values else ""]
        for result in results
    ]  # fmt: skip
    # Published figures are shown only beside figures under the same tie rule.
    random = {key: group for key, group in groups.items() if key[0] == PUBLISHED_TIES}
    published = published_for(context) if random else {}
    apart = without_same_second(groups) if any(_knows_request(method) for _, method in groups) else {}
    differences = [
        *(
            {"targets": APART.format(context.bench.instant)} | one
            for one in compare_to_strongest(apart)
            if _knows_request(one["method"])
        ),
        *({"targets": "all"} | one for one in compare_to_strongest(groups)),
    ]
    sections = [
        section("Test, each seed", [*NAMED, "seed", *METRICS, "steps"], singles),
        *_headline(context, apart, groups),
        section("Test, mean over seeds", MEANS_HEADER, _mean_rows(context, groups)),
        *_beside_published(context, random, published),
        section(
            f"Difference to the strongest baseline that reads no more ({NUM_RESAMPLES:,} paired resamples of users)",
            ["", "reads", "tries", "ties", "targets", "metric", "against", "its tries", *DIFFERENCE_COLUMNS, ""],
            [_comparison_row(context, one, groups) for one in differences],
        ),
        section(
            "By the time from the event before to the test event, mean over seeds",
            ["", "reads", "ties", "metric", *gap_names(context.bench.instant)],
            gap_rows(groups, {key: _names(group[0].cell) for key, group in groups.items()}),
        ),
        *_returning(context, groups),
        section("What it cost", ["", "reads", "ties", "parameters", "train s", "tokens/s", "ranking s", "GPU MiB",
                                 "host MiB"], [_cost_row(group[0]) for group in groups.values()]),
    ]  # fmt: skip
    validations = {cell.after.name: cell.after for cell in cells if cell.after is not None}
    fits = [result for cell in validations.values() if (result := find(cell)) is not None]
    notes = []
    if any(result.cell.config for result in results):
        notes.append(
            "The number of steps was chosen on the event before the last, with the first seed. Then each method was "
            "refit on all events but the last and tested once."
        )
        notes.append(TRIES_NOTE)
    if published:
        notes.append(
            "The publishers of HSTU and sampled-softmax SASRec ranked the test event during training. Their order of "
            "simultaneous events looks random; the order of the other publications is not known."
        )
    if old := len(groups) - len(with_gaps(groups)):
        notes.append(f"The tables by time leave out {old} methods: an older version ran their cells and kept no times.")
    return {
        "sections": sections,
        "notes": notes,
        "figures": {
            "rows": [_figures(result) for result in results],
            "means": [
                {"method": method, "ties": ties, "seeds": len(group)} | mean_metrics(group)
                for (ties, method), group in groups.items()
            ],
            "comparisons": differences,
            "without_same_second": [
                {"method": method, "ties": ties} | mean_metrics(group) for (ties, method), group in apart.items()
            ],
            "by_gap": by_gap(groups, context.bench.instant),
            "validation": [_figures(result) for result in fits],
            "published": {name: dict(zip(METRICS, entry[2], strict=False)) for name, entry in published.items()},
        },
        "charts": [*_dots(context, results, "metrics"), *_curves(fits, "validation")],
    }


def _knows_request(method: str) -> bool:
    return "request's time" in INPUTS[METHODS[method].inputs]


def _mean_rows(context: StudyContext, groups: Mapping[tuple[str, str], Sequence[Result]]) -> list[list[str]]:
    return [[*_named(context, group[0]), str(len(group)), *_numbers(mean_metrics(group))] for group in groups.values()]


def _headline(
    context: StudyContext,
    apart: Mapping[tuple[str, str], Sequence[Result]],
    groups: Mapping[tuple[str, str], Sequence[Result]],
) -> list[dict[str, Any]]:
    """Returns a table without the users whose test event is in the same second as the event before."""
    if not apart:
        return []
    key = next(iter(apart))
    part, every = (len(which[key][0].array()) for which in (apart, groups))
    title = (
        f"Test, mean over seeds, of the {part:,} of {every:,} users whose test event is not in the "
        f"{context.bench.instant} of the event before: the leading figures of methods that read the request's time"
    )
    return [section(title, MEANS_HEADER, _mean_rows(context, apart))]


def _beside_published(
    context: StudyContext,
    random: Mapping[tuple[str, str], Sequence[Result]],
    published: Mapping[str, tuple[str, str, tuple[float, ...]]],
) -> list[dict[str, Any]]:
    """Returns a table of our figures under random ties and the published figures."""
    if not published:
        return []
    rows = _mean_rows(context, random)
    for title, source, metrics in published.values():
        known = dict(zip(METRICS, metrics, strict=False))
        rows.append([f"published: {title}", source, "", "", "", "", *_numbers(known)])
    return [section(f"Under {PUBLISHED_TIES} ties, beside published figures", MEANS_HEADER, rows)]


def mean_metrics(group: Sequence[Result]) -> dict[str, float]:
    """Returns the mean of each metric over seeds."""
    return {metric: float(np.mean([one.values["metrics"][metric] for one in group])) for metric in METRICS}


def per_user(group: Sequence[Result], metric: str) -> NDArray[np.float64]:
    """Returns the mean of a metric over seeds, for each user [U]."""
    name, _, k = metric.partition("@")
    measure = {"hr": hits, "ndcg": gains}[name]
    return np.asarray(np.mean([measure(one.array(), int(k)) for one in group], axis=0))


def compare_to_strongest(groups: Mapping[tuple[str, str], Sequence[Result]]) -> list[dict[str, Any]]:
    """Compares each of our methods, for each metric, with the best baseline that reads no more than our method."""
    found = []
    for (ties, name), ours in groups.items():
        if not METHODS[name].is_ours:
            continue
        others = [
            group
            for (other_ties, other), group in groups.items()
            if other_ties == ties and not METHODS[other].is_ours and METHODS[other].reads_no_more_than(METHODS[name])
        ]
        for metric in METRICS[:2] if others else ():
            strongest = max(others, key=lambda group: mean_metrics(group)[metric])
            measured = measure(ours, strongest, metric)
            names = {"method": name, "ties": ties, "metric": metric, "against": strongest[0].cell.method}
            found.append(names | figures_of(measured))
    return found


def measure(ours: Sequence[Result], theirs: Sequence[Result], metric: str) -> Measured:
    """Measures the difference between two methods, paired over users. Each method has one result per seed.

    Raises DataError if the methods were judged on different events.
    """
    check_same_targets([*ours, *theirs])
    drawn = paired_bootstrap(per_user(ours, metric), per_user(theirs, metric), num_resamples=NUM_RESAMPLES)
    mine, other = ([float(one.values["metrics"][metric]) for one in group] for group in (ours, theirs))
    return Measured(drawn.mean, drawn.low, drawn.high, mine, other, is_fixed=theirs[0].cell.config is None)


def check_same_targets(results: Sequence[Result]) -> None:
    """Raises DataError if results were judged on different users or on different events."""
    for one in results[1:]:
        if one.values["targets_sha256"] != results[0].values["targets_sha256"]:
            raise DataError(
                f"{results[0].cell.label} and {one.cell.label} were judged on different events",
                allowed="needed: the same held-out events of the same users",
                fix=f"if {one.path} comes from an older version, remove it and run again",
            )


def _returning(context: StudyContext, groups: Mapping[tuple[str, str], Sequence[Result]]) -> list[dict[str, Any]]:
    """Returns a table of HR@10 for seen and for new held-out items. Returns [] if seen items are filtered out."""
    if context.bench.filter_seen or not groups:
        return []
    rows = []
    for group in groups.values():
        returns = group[0].array("returns")
        values = per_user(group, "hr@10")
        parts = [values[returns], values[~returns]]
        rows.append([*_names(group[0].cell), *(f"{part.mean():.4f}" if len(part) else "" for part in parts)])
    share = float(next(iter(groups.values()))[0].array("returns").mean())
    title = f"hr@10 where the item is in the history already ({share:.1%} of users), and where it is new"
    return [section(title, ["", "reads", "ties", "seen before", "new"], rows)]


# ---- parts of tables ----


def _grouped(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Returns (tie rule, method) → results, one result per seed."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.cell.ties, result.cell.method), []).append(result)
    return groups


def _names(cell: Cell) -> list[str]:
    return [title_of(cell), METHODS[cell.method].reads, cell.ties]


def _named(context: StudyContext, result: Result) -> list[str]:
    """Returns the text in the columns NAMED."""
    title, reads, ties = _names(result.cell)
    return [
        title,
        reads,
        softmax_of(result.cell, result.values.get("num_items", 0)),
        tries_of(context, result.cell),
        ties,
    ]


def _numbers(metrics: Mapping[str, float], names: Sequence[str] = METRICS) -> list[str]:
    return [f"{metrics[name]:.4f}" if name in metrics else "" for name in names]


def _comparison_row(
    context: StudyContext, one: Mapping[str, Any], groups: Mapping[tuple[str, str], Sequence[Result]]
) -> list[str]:
    ours, theirs = (groups[one["ties"], one[side]][0].cell for side in ("method", "against"))
    title, reads, ties = _names(ours)
    against = [title_of(theirs), tries_of(context, theirs)]
    names = [title, reads, tries_of(context, ours), ties, one["targets"], one["metric"], *against]
    return [*names, *difference_cells(one), one["verdict"]]


def _cost_row(result: Result) -> list[str]:
    values, in_mebibytes = result.values, ("peak_device_bytes", "peak_rss_bytes")
    counts = ("parameters", "seconds", "tokens_per_s", "evaluation_seconds")
    return [
        *_names(result.cell),
        *(f"{values[key]:,}" if key in values else "" for key in counts),
        *(f"{values[key] / 2**20:,.0f}" if values.get(key) else "" for key in in_mebibytes),
    ]


def _figures(result: Result) -> dict[str, Any]:
    """Returns the numbers of a result, for JSON."""
    cell = result.cell
    named = {"method": cell.method, "ties": cell.ties, "seed": cell.seed, "stage": cell.stage}
    left_out = ("environment", "cell", "curve")
    return named | {key: value for key, value in result.values.items() if key not in left_out} | {
        "commit": result.values["environment"]["commit"]
    }  # fmt: skip


def _curves(results: Sequence[Result], event: str) -> list[dict[str, Any]]:
    """Returns a chart of NDCG@10 over steps, with a line for each fit."""
    lines = [
        {
            "name": f"{result.cell.method} {result.cell.ties} {result.cell.seed}",
            "x": [point["step"] for point in result.values["curve"]],
            "y": [point["ndcg@10"] for point in result.values["curve"]],
        }
        for result in results
        if len(result.values.get("curve", ())) > 1
    ]
    title = f"NDCG@10 on the {event} event while training"
    return [{"kind": "lines", "name": "curves", "title": title, "x_label": "steps", "lines": lines}] if lines else []


def _dots(context: StudyContext, results: Sequence[Result], kind: str) -> list[dict[str, Any]]:
    """Returns a chart of HR@10 with a row for each method and a dot for each result.

    If figures are published and there are results under random ties, the chart shows only the results under random ties
    and marks the published figures.
    """
    known = published_for(context)
    random = [result for result in results if result.cell.ties == PUBLISHED_TIES] if known else []
    results = random or results
    rows = [
        {"name": method.name, "values": values}
        for method in METHODS.values()
        if (values := [result.values[kind]["hr@10"] for result in results if result.cell.method == method.name])
    ]
    marks = {entry[0]: entry[2][0] for entry in known.values()} if random else {}
    title = f"HR@10 on {context.bench.name}{f', {PUBLISHED_TIES} ties' if random else ''}"
    chart = {"kind": "dots", "name": "hr10", "title": title, "rows": rows, "marks": marks}
    return [chart] if rows else []
