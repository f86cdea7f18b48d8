"""The study `transfer` of `tackboard bench quality` asks whether pretraining helps with a different task.

The study takes a dataset with a task (data.py) and compares three arms, which train the same model on the same examples
of the task: pretrained and fine-tuned, pretrained and frozen, and from scratch. It also fits baselines that read counts
instead of sequences (count_baselines.py) on the same examples, and compares each arm with the strongest baseline. The
strongest baseline is the baseline with the highest AUC on test users; this choice favours the baselines. Readers who
choose an arm know how many examples they have, so the table shows results for a tenth, a third and all of the examples.
In `transfer`, the head of the model reads the model's outputs. In `transfer-hidden`, the head also reads the hidden
vectors from which the outputs are computed. `transfer-baselines` fits the baselines alone, on all tasks of the dataset,
and needs no GPU. We publish the results, whatever they are.

The model is pretrained on the first 70% of each user's events, to the end of its schedule. No setting of pretraining
is chosen by results on the task. The interval of a difference comes from a bootstrap over test users, with the same
resamples for both sides. Each seed draws other examples (unless all are used), another order and other initial
parameters. With all examples, baselines do not depend on the seed. The table also shows the results of each seed.
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
from tackboard.bench.transfer.count_baselines import TITLES, result_of
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

EXAMPLES = {"tenth": 0.1, "third": 1 / 3, "all": 1.0}
"""Name of a share of the training examples → share."""
QUICK_EXAMPLES = {"third": 1 / 3, "all": 1.0}
NUM_SEEDS = 5
QUICK = FitSettings(learning_rates=(3e-3,), regularisations=((0.1, 0.0),), max_points=6, patience=2)
WIDEST = {"ml-1m": 0.003}
"""Dataset → aim: intervals of AUC differences have at most this half-width."""
PRIMARY = "auc"
"""The metric that answers the question. It was fixed beforehand, because one of many metrics may differ by chance."""
PAIRS = (("fine-tuned", "scratch"), ("frozen", "scratch"), ("fine-tuned", "frozen"))
WEAK = ("means", "previous")
"""Baselines that nobody would choose. The widest interval that the study reports leaves them out."""
Published = Mapping[tuple[str, str], tuple[int | None, str]]
PUBLISHED: Published = {
    ("fine-tuned", "scratch"): (1, "fine-tuned against none: Save +3.76%"),
    ("frozen", "scratch"): (None, "frozen against none: Save +0.10%"),
    ("fine-tuned", "frozen"): (1, "fine-tuned against frozen: Save about +3.7%"),
}
"""Pair of arms → sign and words from Table 6 of the PinFM publication. The publication's arm `None` is a ranker without
PinFM, but our arm `scratch` contains a PinFM that is not pretrained. So only signs can be compared. The sign is None if
the published difference was too small to have a sign."""

NAMES = {**ARMS, **TITLES}
"""Arm or baseline → its name in tables."""
Key = tuple[str, str]
"""A pair (name of a share of the examples, arm or baseline)."""
Groups = Mapping[Key, Sequence[Result]]
"""Results of an arm or of a baseline, one result per seed."""


def transfer(context: StudyContext) -> StudyPlan:
    """Plans cells for each arm and each number of examples. The head reads the model's outputs."""
    return _plan(context, "outputs")


def transfer_hidden(context: StudyContext) -> StudyPlan:
    """Plans the same cells as `transfer`, but the head also reads the hidden vectors behind the outputs."""
    return _plan(context, "hidden")


def transfer_baselines(context: StudyContext) -> StudyPlan:
    """Plans the cells of the baselines for each task of the dataset, without any model."""
    tasks = find_tasks(context.bench.name)
    method, rule, place = _place(context)
    source = context.work.datasets / place.prepared
    if not context.is_trial:
        for task in tasks:
            for part in SHARES:
                write_task(source, task, part)
    cells = {task: _baseline_cells(context, place, rule, method, task) for task in tasks}
    every = [cell for of_task in cells.values() for cell in of_task.values()]
    return StudyPlan(every, lambda find: _table_of_baselines(context, cells, find))


def find_tasks(dataset: str) -> tuple[Task, ...]:
    """Returns the tasks on a dataset. Raises UsageError for a dataset without a task."""
    if dataset not in TASKS:
        raise UsageError(f"--study transfer has no task on --dataset {dataset}", allowed=f"allowed: {', '.join(TASKS)}")
    return TASKS[dataset]


def _place(context: StudyContext) -> tuple[Method, str, MethodContext]:
    """Returns the method that is pretrained, the tie rule and the dataset."""
    methods = context.methods(("pinfm-history",))
    if len(methods) > 1 or not methods[0].is_ours:
        names = ",".join(one.name for one in methods)
        raise UsageError(f"--methods {names} does not name exactly one PinFM", fix="use --methods pinfm-history")
    rule = context.one_rule()
    return methods[0], rule, context.places([rule])[rule]


def _plan(context: StudyContext, vectors: str) -> StudyPlan:
    task = find_tasks(context.bench.name)[0]
    method, rule, place = _place(context)
    beginning = _write_parts(context, place, task)
    seeds = context.seeds(NUM_SEEDS)
    pretrained = {seed: context.cell(beginning, rule, method, seed, "pretrain") for seed in seeds}
    settings = dataclasses.asdict(_settings(context))
    shared = _protocol_of(task) | {"pretrained_on": beginning.prepared}
    cells: dict[tuple[str, str, int], Cell] = {}
    for name, share in _examples(context).items():
        for arm in ARMS:
            for seed in seeds:
                after = None if arm == "scratch" else pretrained[seed]
                protocol = shared | settings | {"arm": arm, "vectors": vectors, "share": share}
                of_arm = f"{method.name}-{arm}-{vectors}-{name}"
                cells[name, arm, seed] = _cell(pretrained[seed], place, of_arm, "transfer", protocol, after)
    baselines = _baseline_cells(context, place, rule, method, task)
    # The first seed of all arms runs before the second seed, so that arms can be compared if time runs out.
    every = [*pretrained.values(), *baselines.values(), *sorted(cells.values(), key=lambda cell: cell.seed)]
    return StudyPlan(
        every, lambda find: _table(context, task, method, cells, baselines, list(pretrained.values()), find)
    )


def _examples(context: StudyContext) -> Mapping[str, float]:
    return QUICK_EXAMPLES if context.options.quick else EXAMPLES


def _protocol_of(task: Task) -> dict[str, Any]:
    return {"question": task.question, "actions": list(task.actions), "only_new": task.only_new}


def _baseline_cells(
    context: StudyContext, place: MethodContext, rule: str, method: Method, task: Task
) -> dict[tuple[str, int], Cell]:
    """Returns the cells of all baselines, by the name of the share of the examples and the seed."""
    cells = {}
    for name, share in _examples(context).items():
        # With all examples, no baseline depends on the seed.
        for seed in context.seeds(NUM_SEEDS) if share < 1.0 else range(1):
            like = context.cell(place, rule, method, seed, "transfer-baselines")
            of = f"baselines-{'new-' if task.only_new else ''}{name}"
            protocol = _protocol_of(task) | {"share": share}
            cells[name, seed] = _cell(like, place, of, "transfer-baselines", protocol, None)
    return cells


def _settings(context: StudyContext) -> FitSettings:
    return QUICK if context.options.quick else FitSettings()


def _write_parts(context: StudyContext, place: MethodContext, task: Task) -> MethodContext:
    """Writes the datasets of the examples and of pretraining, and returns the context of the pretraining dataset."""
    source = context.work.datasets / place.prepared
    target = context.work.datasets / f"{place.prepared}-first{round(100 * PRETRAINED_SHARE)}"
    if context.is_trial:
        return dataclasses.replace(place, prepared=target.name)
    for part in SHARES:
        write_task(source, task, part)
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
    cells: Mapping[tuple[str, str, int], Cell],
    baselines: Mapping[tuple[str, int], Cell],
    pretrained: Sequence[Cell],
    find: Find,
) -> Table:
    arms: dict[Key, list[Result]] = {}
    for (share, arm, _), cell in cells.items():
        if (result := find(cell)) is not None:
            arms.setdefault((share, arm), []).append(result)
    counts = results_of_baselines(baselines, find)
    groups = _in_order(arms | counts)
    results = [result for group in arms.values() for result in group]
    published = {} if context.options.quick else PUBLISHED
    against = compare_to_strongest(groups)
    differences = [*compare_arms(arms, published), *against]
    facts = next((group[0].values for group in groups.values()), None)
    fits = [result for cell in pretrained if (result := find(cell)) is not None]
    return {
        "sections": [
            _means_section("Test, mean over seeds", groups),
            *(
                section(
                    f"{title}: paired draws of test users, mean over seeds",
                    ["examples", "metric", "", *DIFFERENCE_COLUMNS, "half-width", "published", ""],
                    [_difference_row(one) for one in differences if (one["metric"] == PRIMARY) == is_primary],
                )
                for title, is_primary in (
                    (f"Differences of {PRIMARY}, the metric that decides", True),
                    ("Differences of the other metrics, for comparison", False),
                )
            ),
            section(
                "Test, each seed",
                ["examples", "", "seed", *METRICS, "validation log_loss", *SETTINGS, "steps", "epochs", "s"],
                [_single_row(result) for result in results],
            ),
            _baselines_section("Baselines, each seed", counts),
            section(
                "Pretraining: next item, the last event of the first 70%",
                ["seed", "hr@10", "ndcg@10", "steps", "s"],
                [_pretraining_row(result) for result in fits],
            ),
        ],
        "protocol": _protocol(task, method, facts),
        "notes": _notes(_settings(context), context.bench.name, differences) if groups else [],
        "figures": {
            "rows": [_figures(key, result) for key, group in groups.items() for result in group],
            "differences": differences,
            "pretraining": [{"seed": result.cell.seed} | dict(result.values["metrics"]) for result in fits],
        },
        "charts": _charts(groups),
    }


def _table_of_baselines(
    context: StudyContext, cells: Mapping[Task, Mapping[tuple[str, int], Cell]], find: Find
) -> Table:
    sections, differences, rows, words = [], [], [], []
    for task, of_task in cells.items():
        groups = _in_order(results_of_baselines(of_task, find))
        if not groups:
            continue
        against = compare_to_strongest(groups)
        sections += [
            _means_section(f"{task.words} Test, mean over seeds", groups),
            section(
                f"{task.words} Differences of {PRIMARY}: paired draws of test users, mean over seeds",
                ["examples", "metric", "", *DIFFERENCE_COLUMNS, "half-width", "published", ""],
                [_difference_row(one) for one in against],
            ),
            _baselines_section(f"{task.words} Each seed", groups),
        ]
        differences += [{"task": task.words} | one for one in against]
        rows += [{"task": task.words} | _figures(key, result) for key, group in groups.items() for result in group]
        words.append(f"{task.words}{_counts(next(iter(groups.values()))[0].values)}")
    return {
        "sections": sections,
        "protocol": f"Examples are events after the first {PRETRAINED_SHARE:.0%} of a user's events; the examples "
        f"for validation or test come last. {' '.join(words)}",
        "notes": _notes_on_baselines(context.bench.name, differences) if rows else [],
        "figures": {"rows": rows, "differences": differences},
        "charts": [],
    }


def results_of_baselines(cells: Mapping[tuple[str, int], Cell], find: Find) -> dict[Key, list[Result]]:
    """Returns the finished results of each baseline, in the form of results of arms."""
    groups: dict[Key, list[Result]] = {}
    for (share, _), cell in cells.items():
        if (result := find(cell)) is None:
            continue
        for name in TITLES:
            if (one := result_of(result, name)) is not None:
                groups.setdefault((share, name), []).append(one)
    return groups


def _in_order(groups: Groups) -> dict[Key, Sequence[Result]]:
    """Returns the groups in the order of the table: by share, arms first."""
    keys = [(share, name) for share in EXAMPLES for name in NAMES if (share, name) in groups]
    return {key: groups[key] for key in keys}


def strongest_baseline(groups: Groups, share: str) -> str | None:
    """Returns the baseline with the highest mean AUC on test users, among the baselines with this share of the
    examples."""
    found = {name: _mean(groups[share, name], PRIMARY) for name in TITLES if (share, name) in groups}
    return max(found, key=lambda name: found[name]) if found else None


def _mean(group: Sequence[Result], metric: str) -> float:
    return float(np.mean([result.values["metrics"][metric] for result in group]))


def compare_arms(groups: Groups, published: Published) -> list[dict[str, Any]]:
    """Compares each pair of arms with the same examples. Returns the difference of the means over seeds."""
    found = []
    for share in dict.fromkeys(share for share, _ in groups):
        for one, other in PAIRS:
            if (share, one) not in groups or (share, other) not in groups:
                continue
            ours, theirs = groups[share, one], groups[share, other]
            for metric in METRICS:
                sign, words = published.get((one, other), (None, ""))
                measured = measure(ours, theirs, metric)
                found.append(_figures_of_pair(measured, one, other, metric, ours, sign) | {"published": words})
    return found


def compare_to_strongest(groups: Groups) -> list[dict[str, Any]]:
    """Compares the AUC of each arm and baseline with that of the strongest baseline on the same examples."""
    found = []
    for share, name in groups:
        best = strongest_baseline(groups, share)
        if best is None or name == best:
            continue
        ours, theirs = groups[share, name], groups[share, best]
        measured = measure(ours, theirs, PRIMARY)
        found.append(_figures_of_pair(measured, name, best, PRIMARY, ours, None) | {"published": ""})
    return found


def _figures_of_pair(
    measured: Measured, arm: str, against: str, metric: str, group: Sequence[Result], published: int | None
) -> dict[str, Any]:
    names = {"num_examples": group[0].values["num_examples"], "arm": arm, "against": against, "metric": metric}
    figures = figures_of(measured, published, is_lower_better=metric == "log_loss")
    return names | figures | {"half_width": (measured.high - measured.low) / 2}


def measure(ours: Sequence[Result], theirs: Sequence[Result], metric: str) -> Measured:
    """Measures the difference between two groups. Its interval comes from resamples of test users (the same for
    both)."""
    draws = _draws(ours, metric) - _draws(theirs, metric)
    mine, other = ([float(result.values["metrics"][metric]) for result in group] for group in (ours, theirs))
    low, high = interval(draws)
    # A baseline on all examples is the same for every seed.
    fixed = [
        group[0].cell.stage == "transfer-baselines" and group[0].cell.protocol["share"] == 1.0
        for group in (ours, theirs)
    ]
    if fixed[0]:
        mine = mine * 2  # Two equal figures: another seed would change nothing.
    return Measured(float(np.mean(mine) - np.mean(other)), low, high, mine, other, is_fixed=fixed[1])


def _draws(group: Sequence[Result], metric: str) -> NDArray[np.float64]:
    return np.mean([result.array(f"draws_{metric}") for result in group], axis=0, dtype=np.float64)


def _counts(facts: Mapping[str, Any]) -> str:
    return (
        f" Up to {facts['num_train']:,} examples serve for training, {facts['num_validation']:,} for validation "
        f"and {facts['num_test']:,} for the test, of which {round(facts['num_test'] * facts['share_yes']):,} are yes "
        f"({facts['share_yes']:.1%}). The {facts['num_test_users']:,} test users are not validation users, but their "
        "earlier events may be training examples."
    )


def _protocol(task: Task, method: Method, facts: Mapping[str, Any] | None) -> str:
    return (
        f"Task: {task.words} The model gets the history with its actions, and the item. PinFM ({method.reads}) is "
        f"pretrained on the first {PRETRAINED_SHARE:.0%} of each user's events, to predict items. Examples come after "
        f"these events. A user's examples for validation or test come last.{_counts(facts) if facts else ''}"
    )


def _notes(settings: FitSettings, dataset: str, differences: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "fine-tuned: the pretrained model learns at a tenth of the head's rates; frozen: only the head learns; from "
        "scratch: the same model starts from random parameters and learns at the head's rates.",
        f"Every arm tries {counted(len(settings.tried()), 'setting')}: {counted(len(settings.learning_rates), 'rate')} "
        f"with {counted(len(settings.regularisations), 'regularisation')} each. Steps and setting are chosen by "
        "log-loss on validation users; each arm is tested once.",
        "auc_within_users compares examples only with examples of the same user.",
        *_notes_on_baselines(dataset, differences),
        "The publication's arms are rankers with and without PinFM; here all three arms are the same model, so only "
        "the directions of differences can be compared.",
    ]


def _notes_on_baselines(dataset: str, differences: Sequence[Mapping[str, Any]]) -> list[str]:
    judged = [one for one in differences if one["metric"] == PRIMARY and one["arm"] not in WEAK]
    widest = max((one["half_width"] for one in judged), default=None)
    words = f"The widest interval of a difference of {PRIMARY}, without weak baselines, is ±{widest or 0.0:.4f}."
    aim = (
        f" The aim is at most {WIDEST[dataset]:.4f}."
        if dataset in WIDEST
        else " The number of test users allows no narrower interval."
    )
    return [
        "Baselines read the event before, and counts: of the user's earlier events, of the item's events among the "
        f"first {PRETRAINED_SHARE:.0%} of users' events, and of the user's earlier events with the item. "
        "Their settings are chosen by log-loss on validation users; each baseline is tested once. The strongest "
        "baseline is the one with the highest AUC on the test, which favours the baselines.",
        *([] if widest is None else [words + aim]),
    ]


def _means_section(title: str, groups: Groups) -> dict[str, Any]:
    rows = []
    for (share, name), group in groups.items():
        means = [f"{_mean(group, metric):.4f}" for metric in METRICS]
        words = "strongest baseline" if strongest_baseline(groups, share) == name else ""
        values = group[0].values
        rows.append([f"{values['num_examples']:,}", NAMES[name], str(values["tries"]), str(len(group)), *means, words])
    return section(title, ["examples", "", "tries", "seeds", *METRICS, ""], rows)


def _difference_row(one: Mapping[str, Any]) -> list[str]:
    names = [f"{one['num_examples']:,}", one["metric"], f"{NAMES[one['arm']]} − {NAMES[one['against']]}"]
    return [*names, *difference_cells(one), f"{one['half_width']:.4f}", one["published"], one["verdict"]]


SETTINGS = ("rate", "dropout", "weight decay")


def _single_row(result: Result) -> list[str]:
    values, cell = result.values, result.cell
    return [
        *(f"{values['num_examples']:,}", ARMS[cell.protocol["arm"]], str(cell.seed)),
        *(f"{values['metrics'][metric]:.4f}" for metric in METRICS),
        f"{values['validation_log_loss']:.4f}",
        *(f"{values[name]:g}" for name in ("learning_rate", "dropout", "weight_decay")),
        *(f"{values['steps']:,}", f"{values['epochs']:.1f}", f"{values['seconds']:,.0f}"),
    ]


def _baselines_section(title: str, groups: Groups) -> dict[str, Any]:
    rows = [
        [
            *(f"{result.values['num_examples']:,}", NAMES[name], str(result.cell.seed)),
            *(f"{result.values['metrics'][metric]:.4f}" for metric in METRICS),
            *(f"{result.values['validation_log_loss']:.4f}", result.values["settings"]),
        ]
        for (_, name), group in groups.items()
        for result in group
    ]
    return section(title, ["examples", "", "seed", *METRICS, "validation log_loss", "settings"], rows)


def _pretraining_row(result: Result) -> list[str]:
    values = result.values
    metrics = [f"{values['metrics'][name]:.4f}" for name in ("hr@10", "ndcg@10")]
    return [str(result.cell.seed), *metrics, f"{values['steps']:,}", f"{values['seconds']:,.0f}"]


def _figures(key: Key, result: Result) -> dict[str, Any]:
    kept = ("metrics", "num_examples", "tries", "validation_log_loss", "learning_rate", "steps", "settings", "device")
    values = {name: result.values[name] for name in kept if name in result.values}
    return {"arm": key[1], "seed": result.cell.seed} | values


def _charts(groups: Groups) -> list[dict[str, Any]]:
    """Returns a chart of AUC over the number of examples on a logarithmic scale: a line for each arm, and one for the
    strongest baseline."""
    lines = []
    for name, title in {**ARMS, "": "strongest baseline"}.items():
        mine = []
        for share in EXAMPLES:
            found = name or strongest_baseline(groups, share)
            if group := groups.get((share, found or "")):
                mine.append((float(np.log10(group[0].values["num_examples"])), _mean(group, PRIMARY)))
        if len(mine) > 1:
            lines.append({"name": title, "x": [x for x, _ in mine], "y": [y for _, y in mine]})
    if not lines:
        return []
    return [
        {
            "kind": "lines",
            "name": "auc",
            "title": "AUC on test users by the number of examples",
            "x_label": "log10 of the number of training examples",
            "y_label": "AUC",
            "description": "One line for each arm and one for the strongest baseline, mean over seeds.",
            "lines": lines,
        }
    ]
