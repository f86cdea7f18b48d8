"""The study `transfer` of `tackboard bench quality` asks whether pretraining helps with a different task.

The study takes a dataset with a task (data.py) and compares three arms, which train the same model on the same examples
of the task: pretrained and fine-tuned, pretrained and frozen, and from scratch. Readers who choose an arm know how many
examples they have, so the table shows results for several numbers of examples. The table also shows predictions from
item means and user means, which need no model. In `transfer`, the head of the model reads the model's outputs. In
`transfer-hidden`, the head also reads the hidden vectors from which the outputs are computed. We publish the results of
both studies, whatever they are.

The model is pretrained on the first 70% of each user's events, to the end of its schedule. No setting of pretraining
is chosen by results on the task. The interval of a difference comes from a bootstrap over test users, with the same
draws for both arms. Each seed draws other examples (unless all are used), another order and other initial parameters.
The table also shows the results of each seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.quality.cells import Cell, Result
from tackboard.bench.quality.data import read_facts
from tackboard.bench.quality.methods import Method, MethodContext
from tackboard.bench.quality.study_plan import Find, StudyContext, StudyPlan, Table, section
from tackboard.bench.quality.verdict import DIFFERENCE_COLUMNS, Measured, difference_cells, figures_of
from tackboard.bench.transfer.data import (
    PRETRAINED_SHARE,
    SHARES,
    TASKS,
    Task,
    share_of,
    user_offsets,
    write_beginning,
    write_task,
)
from tackboard.bench.transfer.fit import ARMS, FitSettings
from tackboard.core.errors import UsageError, counted
from tackboard.evaluation.labelled_requests import METRICS
from tackboard.metrics.binary import interval

SIZES = (1_000, 5_000, 25_000, 0)
"""Numbers of examples to train with; 0 stands for all examples."""
QUICK_SIZES = (1_000, 0)
QUICK = FitSettings(learning_rates=(3e-3,), max_points=6, patience=2)
PRIMARY = "auc"
"""The metric that answers the question. It was fixed beforehand, because one of many metrics may differ by chance."""
PAIRS = (("fine-tuned", "scratch"), ("frozen", "scratch"), ("fine-tuned", "frozen"))
Published = Mapping[tuple[str, str], tuple[int | None, str]]
PUBLISHED: Published = {
    ("fine-tuned", "scratch"): (1, "fine-tuned against none: Save +3.76%"),
    ("frozen", "scratch"): (None, "frozen against none: Save +0.10%"),
    ("fine-tuned", "frozen"): (1, "fine-tuned against frozen: Save about +3.7%"),
}
"""Pair of arms → sign and words from Table 6 of the PinFM publication. The publication's arm `None` is a ranker without
PinFM, but our arm `scratch` contains a PinFM that is not pretrained. So only signs can be compared. The sign is None if
the published difference was too small to have a sign."""

Key = tuple[int, str]
"""A pair (requested number of examples, arm)."""


def transfer(context: StudyContext) -> StudyPlan:
    """Plans cells for each arm and each number of examples. The head reads the model's outputs."""
    return _plan(context, "outputs")


def transfer_hidden(context: StudyContext) -> StudyPlan:
    """Plans the same cells as `transfer`, but the head also reads the hidden vectors behind the outputs."""
    return _plan(context, "hidden")


def find_task(dataset: str) -> Task:
    """Returns the task on a dataset. Raises UsageError for a dataset without a task."""
    if dataset not in TASKS:
        raise UsageError(f"--study transfer has no task on --dataset {dataset}", allowed=f"allowed: {', '.join(TASKS)}")
    return TASKS[dataset]


def _plan(context: StudyContext, vectors: str) -> StudyPlan:
    task = find_task(context.bench.name)
    methods = context.methods(("pinfm-history",))
    method = methods[0]
    if len(methods) > 1 or not method.is_ours:
        names = ",".join(one.name for one in methods)
        raise UsageError(f"--methods {names} does not name exactly one PinFM", fix="use --methods pinfm-history")
    rule = context.one_rule()
    place = context.places([rule])[rule]
    beginning = _write_parts(context, place, task)
    seeds = context.seeds(3)
    pretrained = {seed: context.cell(beginning, rule, method, seed, "pretrain") for seed in seeds}
    sizes = QUICK_SIZES if context.options.quick else SIZES
    settings = dataclasses.asdict(_settings(context))
    shared = {"actions": list(task.actions), "pretrained_on": beginning.prepared}
    cells: dict[tuple[int, str, int], Cell] = {}
    for size in sizes:
        for arm in ARMS:
            for seed in seeds:
                after = None if arm == "scratch" else pretrained[seed]
                protocol = shared | settings | {"arm": arm, "vectors": vectors, "num_examples": size}
                name = f"{method.name}-{arm}-{vectors}-{size or 'all'}"
                cells[size, arm, seed] = _cell(pretrained[seed], place, name, "transfer", protocol, after)
    first = pretrained[seeds[0]]
    means = _cell(first, place, "means", "transfer-means", shared | {"sizes": list(sizes)}, None)
    # The first seed of all arms runs before the second seed, so that arms can be compared if time runs out.
    every = [*pretrained.values(), means, *sorted(cells.values(), key=lambda cell: cell.seed)]
    return StudyPlan(every, lambda find: _table(context, task, method, cells, means, list(pretrained.values()), find))


def _settings(context: StudyContext) -> FitSettings:
    return QUICK if context.options.quick else FitSettings()


def _write_parts(context: StudyContext, place: MethodContext, task: Task) -> MethodContext:
    """Writes the datasets of the examples and of pretraining, and returns the context of the pretraining dataset."""
    source = context.work.datasets / place.prepared
    target = context.work.datasets / f"{place.prepared}-first{round(100 * PRETRAINED_SHARE)}"
    if context.is_trial:
        return dataclasses.replace(place, prepared=target.name)
    for part in SHARES:
        write_task(source, task.actions, part)
    write_beginning(source, share_of(user_offsets(source), PRETRAINED_SHARE), target)
    return MethodContext(place.bench, read_facts(target), target.name, place.quick)


def _cell(
    like: Cell, place: MethodContext, name: str, stage: str, protocol: Mapping[str, Any], after: Cell | None
) -> Cell:
    return dataclasses.replace(
        like, prepared=place.prepared, method=name, stage=stage, protocol=dict(protocol), after=after
    )


# ---- the table ----


def _table(
    context: StudyContext,
    task: Task,
    method: Method,
    cells: Mapping[tuple[int, str, int], Cell],
    means: Cell,
    pretrained: Sequence[Cell],
    find: Find,
) -> Table:
    groups: dict[Key, list[Result]] = {}
    for (size, arm, _), cell in cells.items():
        if (result := find(cell)) is not None:
            groups.setdefault((size, arm), []).append(result)
    groups = without_repeats(groups)
    results = [result for group in groups.values() for result in group]
    found_means = find(means)
    published = {} if context.options.quick else PUBLISHED
    differences = [*compare_arms(groups, published), *compare_to_means(groups, found_means)]
    all_means = [] if found_means is None else found_means.values["means"]
    rows_of_means = [row for place, row in enumerate(all_means) if row not in all_means[:place]]
    facts = next((result.values for result in [*results, *([found_means] if found_means else [])]), None)
    fits = [result for cell in pretrained if (result := find(cell)) is not None]
    return {
        "sections": [
            section(
                "Test, mean over seeds",
                ["examples", "", "seeds", *METRICS],
                [_mean_row(group) for group in groups.values()],
            ),
            *(
                section(
                    f"{title}: paired draws of test users, mean over seeds",
                    ["examples", "metric", "", *DIFFERENCE_COLUMNS, "published", ""],
                    [_arms_row(one) for one in differences if (one["metric"] == PRIMARY) == is_primary],
                )
                for title, is_primary in (
                    (f"Differences of {PRIMARY}, the metric that decides", True),
                    ("Differences of the other metrics, for comparison", False),
                )
            ),
            section("Predictions from means", ["examples", "", *METRICS], [_means_row(row) for row in rows_of_means]),
            section(
                "Test, each seed",
                ["examples", "", "seed", *METRICS, "validation log_loss", "rate", "steps", "epochs", "s"],
                [_single_row(result) for result in results],
            ),
            section(
                "Pretraining: next item, the last event of the first 70%",
                ["seed", "hr@10", "ndcg@10", "steps", "s"],
                [_pretraining_row(result) for result in fits],
            ),
        ],
        "protocol": _protocol(task, method, facts),
        "notes": _notes(_settings(context).learning_rates) if groups else [],
        "figures": {
            "rows": [_figures(key, result) for key, group in groups.items() for result in group],
            "differences": differences,
            "means": rows_of_means,
            "pretraining": [{"seed": result.cell.seed} | dict(result.values["metrics"]) for result in fits],
        },
        "charts": _charts(groups),
    }


def without_repeats(groups: Mapping[Key, Sequence[Result]]) -> dict[Key, list[Result]]:
    """Drops groups that requested more examples than exist. They only repeat the groups with all examples (size 0)."""
    everything = {int(group[0].values["num_examples"]) for (size, _), group in groups.items() if not size}
    return {
        (size, arm): list(group)
        for (size, arm), group in groups.items()
        if not size or int(group[0].values["num_examples"]) not in everything
    }


def compare_arms(groups: Mapping[Key, Sequence[Result]], published: Published) -> list[dict[str, Any]]:
    """Compares each pair of arms with the same examples. Returns the difference of the means over seeds."""
    found = []
    for size in dict.fromkeys(size for size, _ in groups):
        for one, other in PAIRS:
            if (size, one) not in groups or (size, other) not in groups:
                continue
            ours, theirs = groups[size, one], groups[size, other]
            for metric in METRICS:
                sign, words = published.get((one, other), (None, ""))
                measured = measure(ours, theirs, metric)
                found.append(_figures_of_pair(measured, one, other, metric, ours, sign) | {"published": words})
    return found


def compare_to_means(groups: Mapping[Key, Sequence[Result]], means: Result | None) -> list[dict[str, Any]]:
    """Compares arms that trained on all examples with predictions from the means of item and user (`run_means`)."""
    if means is None:
        return []
    found = []
    for (size, arm), group in groups.items():
        for metric in () if size else METRICS:
            theirs = float(means.values["means"][-1]["metrics"][metric])
            singles = [float(result.values["metrics"][metric]) for result in group]
            low, high = interval(_draws(group, metric) - means.array(f"draws_{metric}"))
            measured = Measured(float(np.mean(singles)) - theirs, low, high, singles, [theirs], is_fixed=True)
            found.append(_figures_of_pair(measured, arm, "means", metric, group, None) | {"published": ""})
    return found


def _figures_of_pair(
    measured: Measured, arm: str, against: str, metric: str, group: Sequence[Result], published: int | None
) -> dict[str, Any]:
    names = {"num_examples": group[0].values["num_examples"], "arm": arm, "against": against, "metric": metric}
    return names | figures_of(measured, published, is_lower_better=metric == "log_loss")


def measure(ours: Sequence[Result], theirs: Sequence[Result], metric: str) -> Measured:
    """Measures the difference between two arms. Its interval comes from draws of test users, the same for both arms."""
    draws = _draws(ours, metric) - _draws(theirs, metric)
    mine, other = ([float(result.values["metrics"][metric]) for result in group] for group in (ours, theirs))
    low, high = interval(draws)
    return Measured(float(np.mean(mine) - np.mean(other)), low, high, mine, other)


def _draws(group: Sequence[Result], metric: str) -> NDArray[np.float64]:
    return np.mean([result.array(f"draws_{metric}") for result in group], axis=0, dtype=np.float64)


def _protocol(task: Task, method: Method, facts: Mapping[str, Any] | None) -> str:
    counts = ""
    if facts is not None:
        counts = (
            f" Up to {facts['num_train']:,} examples serve for training, {facts['num_validation']:,} for validation "
            f"and {facts['num_test']:,} for the test ({facts['share_yes']:.1%} yes). The {facts['num_test_users']:,} "
            "test users are not validation users, but their earlier events may be training examples."
        )
    return (
        f"Task: {task.question} The model gets the history with its actions, and the item. PinFM ({method.reads}) is "
        f"pretrained on the first {PRETRAINED_SHARE:.0%} of each user's events, to predict items. Examples come after "
        f"these events. A user's examples for validation or test come last.{counts}"
    )


def _notes(rates: Sequence[float]) -> list[str]:
    return [
        "fine-tuned: the pretrained model learns at a tenth of the head's rates; frozen: only the head learns; from "
        "scratch: the same model starts from random parameters and learns at the head's rates.",
        f"Every arm tries {counted(len(rates), 'rate')}; steps and rate are chosen by log-loss on validation users; "
        "each arm is tested once.",
        "auc_within_users compares examples only with examples of the same user.",
        "means: predictions from the means of item and user over all events before the judged events. They use the "
        "answers of all these events, but the arms use only the answers of their examples.",
        "The publication's arms are rankers with and without PinFM; here all three arms are the same model, so only "
        "the directions of differences can be compared.",
    ]


def _mean_row(group: Sequence[Result]) -> list[str]:
    values = group[0].values
    means = [float(np.mean([result.values["metrics"][metric] for result in group])) for metric in METRICS]
    arm = ARMS[group[0].cell.protocol["arm"]]
    return [f"{values['num_examples']:,}", arm, str(len(group)), *(f"{mean:.4f}" for mean in means)]


def _arms_row(one: Mapping[str, Any]) -> list[str]:
    names = [f"{one['num_examples']:,}", one["metric"], f"{one['arm']} − {one['against']}"]
    return [*names, *difference_cells(one), one["published"], one["verdict"]]


def _means_row(row: Mapping[str, Any]) -> list[str]:
    name = "mean of the item" + (" and of the user" if row["with_users"] else "")
    source = ", all events before the judged events" if row["all_known"] else ""
    return [f"{row['num_examples']:,}", name + source, *(f"{row['metrics'][metric]:.4f}" for metric in METRICS)]


def _single_row(result: Result) -> list[str]:
    values, cell = result.values, result.cell
    return [
        *(f"{values['num_examples']:,}", ARMS[cell.protocol["arm"]], str(cell.seed)),
        *(f"{values['metrics'][metric]:.4f}" for metric in METRICS),
        *(f"{values['validation_log_loss']:.4f}", f"{values['learning_rate']:g}", f"{values['steps']:,}"),
        *(f"{values['epochs']:.1f}", f"{values['seconds']:,.0f}"),
    ]


def _pretraining_row(result: Result) -> list[str]:
    values = result.values
    metrics = [f"{values['metrics'][name]:.4f}" for name in ("hr@10", "ndcg@10")]
    return [str(result.cell.seed), *metrics, f"{values['steps']:,}", f"{values['seconds']:,.0f}"]


def _figures(key: Key, result: Result) -> dict[str, Any]:
    kept = ("metrics", "num_examples", "steps", "epochs", "learning_rate", "validation_log_loss", "seconds", "device")
    return {"arm": key[1], "seed": result.cell.seed} | {name: result.values[name] for name in kept}


def _charts(groups: Mapping[Key, Sequence[Result]]) -> list[dict[str, Any]]:
    """Returns a chart of AUC over the number of examples on a logarithmic scale, with a line for each arm."""
    lines = []
    for arm, title in ARMS.items():
        mine = sorted(
            (group[0].values["num_examples"], float(np.mean([result.values["metrics"]["auc"] for result in group])))
            for (_, other), group in groups.items()
            if other == arm
        )
        if len(mine) > 1:
            lines.append({"name": title, "x": [float(np.log10(x)) for x, _ in mine], "y": [y for _, y in mine]})
    if not lines:
        return []
    return [
        {
            "kind": "lines",
            "name": "auc",
            "title": "AUC on test users by the number of examples",
            "x_label": "log10 of the number of training examples",
            "y_label": "AUC",
            "description": "One line for each arm, mean over seeds.",
            "lines": lines,
        }
    ]
