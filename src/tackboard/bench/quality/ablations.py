"""The study `ablations` of `tackboard bench quality` repeats published ablations and compares the results.

The study runs the recipes of recipes/ablations.py and makes one table per question. Recipes are judged on the
validation event when their training ends, by default with three seeds. No recipe sees the test event, because the
tables help to choose settings. Each difference is shown with the interval of the paired bootstrap over users and with
the standard error over seeds. A difference counts only if neither the choice of users nor the choice of seeds explains
the difference (verdict.py).

The publication of PinFM measured how well a fine-tuned ranker predicts saves. In this study, a model is judged by how
well it ranks the next item. The next-token loss trains exactly this task, so losses that look further ahead are at a
disadvantage here.

One question compares sets of positive actions. It needs a dataset with several actions, and all sets must be judged in
the same way (stage `ablation-positives`). The model ranks the article of the user's second-last save among all articles
that are new to the user. The history ends before the user's first event with this article, and training reads no later
event of the user. Decided: the history does not end right before the save, because people open an article and then save
it. With the opening in the history, a model could succeed by guessing the article that the user opened last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.quality.cell import Fit, Machine, Outcome, metrics_of
from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.quality.methods import Method, MethodContext, check_overrides
from tackboard.bench.quality.studies import mean_metrics, measure
from tackboard.bench.quality.study_plan import Find, StudyContext, StudyPlan, Table, section
from tackboard.bench.quality.verdict import DIFFERENCE_COLUMNS, SAME_SHARE, Measured, difference_cells, figures_of
from tackboard.bench.transfer.data import write_beginning
from tackboard.core.config import did_you_mean
from tackboard.core.errors import UsageError
from tackboard.core.vocabulary import Vocabulary
from tackboard.data.sequences import Sequences
from tackboard.data.source import SequenceSource, open_sequences
from tackboard.events.dataset import open_dataset
from tackboard.metrics.paired import gains, paired_bootstrap
from tackboard.recipes.ablations import SAVES, STEPS
from tackboard.recipes.registry import find_recipe
from tackboard.train.config import RunConfig, features_for

JUDGED = ("ndcg@10", "hr@10")
HELD_OUT = 2
"""The judged event is the second-last positive event. This is the validation event, which serves to choose settings."""
AHEAD = (5, 10)
"""Losses are also compared by how well a model ranks the 5th and the 10th event after the end of the history. These
events should favour losses that look further ahead."""
QUICK_STEPS, QUICK_TOKENS = 20, 2_048
NOTES = [
    "Recipes are judged at the end of their schedule. No method saw the test event.",
    "The publication measured saves in a ranker after fine-tuning; here the next item is ranked. So the directions of "
    "differences can be compared, but their sizes cannot.",
    f'If the publication found almost no difference, "agree" means that our difference is below {SAME_SHARE:.0%} '
    "everywhere in its intervals over users and over seeds.",
]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A recipe, and the recipe that it is compared with."""

    name: str
    """Name of the recipe without its prefix `ablation-QUESTION-`."""
    title: str
    against: str = ""
    """Name of the variant that this variant is compared with; empty if this variant is compared with none."""
    published: int | None = None
    """Sign of the published difference; 0 if almost no difference was found, None if no difference was published."""
    words: str = ""
    """The published result in words."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, and the recipes that answer it. Compared recipes differ only in what the question asks about."""

    name: str
    title: str
    dataset: str
    variants: tuple[Variant, ...]


NOT_PUBLISHED = "not in the publication"


def _ladder(name: str, title: str, dataset: str, steps: Sequence[tuple[str, str]]) -> Question:
    """Returns a question: what is each step from the published configuration to the shipped recipe worth?"""
    variants = [Variant("published", "the published configuration")]
    for respect, words in steps:
        variants.append(Variant(respect, words, variants[-1].name, None, NOT_PUBLISHED))
    return Question(name, title, dataset, tuple(variants))


QUESTIONS = (
    Question(
        "losses",
        "Losses (Table 3)",
        "ml-1m",
        (
            Variant("next", "next-token"),
            Variant("multi", "and multi-token", "next", 1, "Save +0.42%"),
            Variant("multi-light", "and multi-token at weight 0.1", "next", None, NOT_PUBLISHED),
            Variant("all", "and multi-token and future-token", "next", 1, "Save +0.95%"),
        ),
    ),
    Question(
        "rows",
        "Rows of each sub-table (Table 7)",
        "ml-1m",
        (
            Variant("256", "256"),
            Variant("1024", "1,024", "256", 1, "20M to 40M: Save +0.81%"),
            Variant("4096", "4,096", "256", 1, "20M to 80M: Save +0.91%"),
            Variant("16384", "16,384", "256", 1, "20M to 160M: Save +1.98%"),
            Variant("plain", "a plain table, a row for each film", "4096", None, NOT_PUBLISHED),
        ),
    ),
    Question(
        "length",
        "Length of pretraining (Figure 3)",
        "ml-1m",
        (
            Variant("eighth", "about 2.5 passes"),
            Variant("half", "about 10 passes", "eighth", 1, "longer is better"),
            Variant("base", "about 20 passes", "half", 1, "longer is better"),
            Variant("double", "about 40 passes", "base", 1, "longer is better, up to about 3 of their passes"),
        ),
    ),
    Question(
        "negatives",
        "Negatives",
        "ml-1m",
        (
            Variant("batch", "the batch's, uncorrected"),
            Variant("batch-corrected", "the batch's, logQ", "batch", 1, "Yi et al. 2019: better"),
            Variant("batch-streaming", "the batch's, logQ estimated", "batch-corrected", 0, "Yi et al. 2019: as good"),
            Variant("drawn", "1,024 drawn uniformly", "batch-corrected", None, NOT_PUBLISHED),
            Variant("mixed", "both, logQ", "batch-corrected", 1, "Yang et al. 2020: better"),
            Variant("all", "the whole catalogue", "mixed", None, NOT_PUBLISHED),
        ),
    ),
    Question(
        "own",
        "A user's own positives among that user's negatives",
        "ml-1m",
        (
            Variant("none", "none"),
            Variant("later", "those that come later", "none", None, NOT_PUBLISHED),
            Variant("all", "all", "none", None, NOT_PUBLISHED),
            Variant("later-multi", "those that come later, and multi-token", "later", None, NOT_PUBLISHED),
        ),
    ),
    Question(
        "positives",
        f"Positives, judged on {' and '.join(f'{name}s' for name in SAVES)} (Table 4)",
        "deskdrop",
        (
            Variant("saves", "saves (bookmarks, likes)"),
            Variant("saves-comments", "and comments", "saves", 1, "and Download: Save +0.21%"),
            Variant("saves-views", "and views", "saves", 0, "and Clickthrough: Save +0.02%"),
            Variant("all", "all", "saves", -1, "all but Hide: Save −0.2%"),
        ),
    ),
    _ladder(
        "ladder",
        "From the published configuration to the recipe ml-1m, one difference at a time",
        "ml-1m",
        (
            ("correction", "logQ for the batch's negatives"),
            ("negatives", "all films as negatives: the exact softmax"),
            ("losses", "next-token, and multi-token at weight 0.1, instead of three losses"),
            ("own", "a user's later films stay negatives"),
            ("layers", "HSTU layers without positions instead of GPT layers with learned positions"),
            ("maps", "residual maps: the recipe"),
        ),
    ),
    _ladder(
        "reads",
        "From the published configuration to the recipe kakao-brunch, one difference at a time",
        "kakao-brunch",
        (
            ("correction", "logQ for the batch's negatives"),
            ("negatives", "16,384 drawn articles added to the batch's"),
            ("losses", "the next-token loss alone instead of three losses"),
            ("layers", "rotary positions instead of learned ones"),
            ("maps", "residual maps: the recipe"),
        ),
    ),
)


def ablations(context: StudyContext) -> StudyPlan:
    """Plans the cells of every question that the dataset can answer."""
    questions = [question for question in QUESTIONS if question.dataset == context.bench.name]
    if not questions:
        allowed = ", ".join(dict.fromkeys(question.dataset for question in QUESTIONS))
        raise UsageError(
            f"--study ablations does not support --dataset {context.bench.name}", allowed=f"allowed: {allowed}"
        )
    if context.options.methods:
        raise UsageError(
            f"--study ablations takes no --methods, but got {','.join(context.options.methods)}",
            allowed="this study runs all recipes named ablation-…",
            fix="leave --methods out",
        )
    chosen = chosen_questions(questions, context.options.questions)
    rule = context.one_rule()
    place = context.places([rule])[rule]
    cells: dict[tuple[str, str], list[Cell]] = {}
    methods: list[tuple[RunConfig, Method]] = []
    for question in questions:
        # Several questions share the base recipe. All of them set AHEAD, so that they share its cell.
        stage = "validate"
        protocol: dict[str, Any] = {} if question.name in ("ladder", "reads") else {"ahead": list(AHEAD)}
        if question.name == "positives" and question in chosen:
            stage, protocol = "ablation-positives", _saves_protocol(context, place)
        for variant in question.variants:
            # A shared recipe is named after the first question that uses it. So every question gets methods here.
            method = _method(question, variant, place, methods)
            if question not in chosen:
                continue
            cells[question.name, variant.name] = [
                context.cell(place, rule, method, seed, stage, **protocol) for seed in context.seeds(3)
            ]
    check_overrides(context.options.overrides, [method.name for _, method in methods])
    # The first seed of all recipes runs before the second seed, so that recipes can be compared if time runs out.
    every = [cell for of_seed in zip(*cells.values(), strict=True) for cell in of_seed]
    return StudyPlan(every, lambda find: _table(context, chosen, cells, find))


def chosen_questions(questions: Sequence[Question], names: Sequence[str]) -> list[Question]:
    """Returns the named questions, or all questions if `names` is empty. Raises UsageError for an unknown name."""
    known = [question.name for question in questions]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--questions {name} is no question about this dataset",
                allowed=f"allowed: {', '.join(known)}",
                fix=did_you_mean(name, known),
            )
    return [question for question in questions if not names or question.name in names]


def _method(
    question: Question, variant: Variant, place: MethodContext, known: list[tuple[RunConfig, Method]]
) -> Method:
    """Returns the recipe as a method. Recipes that differ only in their names share one method, so they run once."""
    name = f"ablation-{question.name}-{variant.name}"
    config = _at(place, find_recipe(name))
    for other, method in known:
        if dataclasses.replace(other, name=name) == config:
            return method
    method = Method(name=name, title=variant.title, inputs="history", is_ours=True, build=lambda _place: config)
    known.append((config, method))
    return method


def _at(place: MethodContext, config: RunConfig) -> RunConfig:
    """Returns the config of a recipe for a prepared dataset. With --quick the model is small and the run is short."""
    data = dataclasses.replace(config.data, dataset=place.prepared, window_buckets=64)
    if not place.quick:
        return dataclasses.replace(config, data=data)
    length = min(place.max_length, config.model.max_history)
    steps = max(2, round(QUICK_STEPS * config.training.steps / STEPS)) if place.bench.name == "ml-1m" else QUICK_STEPS
    backbone = dataclasses.replace(config.model.backbone, num_layers=1)
    loss = dataclasses.replace(config.model.loss, future_token_anchor=max(1, length // 2))
    model = dataclasses.replace(config.model, backbone=backbone, loss=loss, width=16, maps="mlp", max_history=length)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, max_length=length, tokens_per_step=max(QUICK_TOKENS, 2 * length)),
        model=model,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=1),
        training=dataclasses.replace(config.training, steps=steps, checkpoint_every=steps),
    )


# ---- positives ----


def _saves_protocol(context: StudyContext, place: MethodContext) -> dict[str, Any]:
    """Returns the protocol of the question `positives`. Writes training data that end before the judged events."""
    source = context.work.datasets / place.prepared
    target = context.work.datasets / f"{place.prepared}-before-saved"
    if not target.exists() and not context.is_trial:
        sequences = when_met(open_sequences(source, SAVES, held_out=HELD_OUT).read())
        write_beginning(source, sequences.train_ends - sequences.offsets[:-1], target)
    return {"judged_actions": list(SAVES), "trained_on": target.name, "filter_seen": True}


def when_met(sequences: Sequences) -> Sequences:
    """Returns `sequences` with another held-out event: each user's first event with the held-out item."""
    targets = sequences.targets.copy()
    for user in np.flatnonzero(targets >= 0):
        begin, target = int(sequences.offsets[user]), int(targets[user])
        same = sequences.item_ids[begin : target + 1] == sequences.item_ids[target]
        targets[user] = begin + int(np.argmax(same))
    return dataclasses.replace(sequences, targets=targets)


class JudgedFit(Fit):
    """A fit that trains on the positive actions of the recipe, but is judged on the same events as all other recipes.
    Training reads all events before the judged event."""

    def trained_on(self, work: Work, cell: Cell) -> Path:
        return work.datasets / str(cell.protocol["trained_on"])

    def open_source(self, work: Work, cell: Cell) -> SequenceSource:
        """Opens all events that come before the judged events, with the vocabulary of the whole dataset."""
        whole = open_dataset(work.dataset(cell), verify=False)
        return open_sequences(
            self.trained_on(work, cell),
            self.config.data.positive_actions,
            held_out=0,
            vocabulary=Vocabulary(actions=tuple(whole.actions), surfaces=tuple(whole.surfaces)),
            features=features_for(self.config),
        )

    def judged(self, work: Work, cell: Cell) -> Sequences:
        """Reads the whole dataset and holds out the judged event of each user."""
        whole = open_sequences(
            work.dataset(cell),
            tuple(cell.protocol["judged_actions"]),
            held_out=HELD_OUT,
            vocabulary=self.source.vocabulary,
            features=features_for(self.config),
        )
        return when_met(whole.read())


def run_positives(work: Work, cell: Cell, machine: Machine) -> Outcome:
    """Fits with the recipe's positives. Then ranks the second-last saved article, as the top of the file describes."""
    fit = JudgedFit(work, cell, cell.run_config(), machine)
    fit.train(judge_always=False)
    ranks = fit.ranks_at(fit.last_step())
    return fit.values() | {"metrics": metrics_of(ranks)}, {"ranks": ranks} | fit.judge.arrays()


# ---- the tables ----


def _table(
    context: StudyContext, questions: Sequence[Question], cells: Mapping[tuple[str, str], Sequence[Cell]], find: Find
) -> Table:
    groups: dict[tuple[str, str], list[Result]] = {}
    for key, group in cells.items():
        if found := [result for cell in group if (result := find(cell)) is not None]:
            groups[key] = found
    sections, comparisons = [], []
    for question in questions:
        mine = {name: group for (of, name), group in groups.items() if of == question.name}
        differences = compare(question, mine, is_quick=context.options.quick)
        comparisons += differences
        sections += [
            section(
                question.title,
                ["", *JUDGED, "each seed", "parameters", "steps", "s"],
                [_row(variant, mine[variant.name]) for variant in question.variants if variant.name in mine],
            ),
            section(
                f"{question.title}: differences, beside what was published",
                ["", "against", "metric", *DIFFERENCE_COLUMNS, "published", ""],
                [_difference_row(one) for one in differences],
            ),
        ]
        if question.name == "losses":
            sections.append(_ahead_section(question, mine))
    return {
        "sections": sections,
        "protocol": _protocol(context, [result for group in groups.values() for result in group]),
        "notes": NOTES if groups else [],
        "figures": {
            "comparisons": comparisons,
            "rows": [
                {"question": of, "variant": name, "seed": result.cell.seed, "metrics": result.values["metrics"]}
                for (of, name), group in groups.items()
                for result in group
            ],
        },
        "charts": [chart for question in questions for chart in _charts(question, groups)],
    }


def _protocol(context: StudyContext, results: Sequence[Result]) -> str:
    """Describes how the recipes are judged, for the report."""
    users = f" of each of {results[0].values['num_ranked_users']:,} users" if results else ""
    if context.bench.name == "deskdrop":
        saves = " or ".join(SAVES)
        return (
            f"Each recipe ranks the article of the second-last {saves}{users} among all articles that are new to the "
            "user. The history and the training data end before the user's first event with this article. All recipes "
            "are judged on the same articles. Articles with the same score as the held-out article rank above it."
        )
    seen = "without the items of the history" if context.bench.filter_seen else "with the items of the history"
    return (
        f"Validation: each recipe ranks the second-last event{users} in the whole catalogue {seen}, at the end of its "
        f"schedule. No recipe sees the last event. An item with the same score as the held-out item counts as ranked "
        f"above it. Tie rule: {context.one_rule()}. {context.bench.note}"
    )


def _ahead_section(question: Question, groups: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Returns a table of how well each loss ranks events further ahead, and the difference from the next-token loss."""
    rows = []
    header = ["", "events ahead", *JUDGED, f"difference of {JUDGED[0]}", *DIFFERENCE_COLUMNS[1:], ""]
    for variant in question.variants:
        for number in AHEAD:
            name = f"ranks_{number}_ahead"
            group = [result for result in groups.get(variant.name, ()) if name in result.values]
            if not group:
                continue
            means = [np.mean([result.values[name][metric] for result in group]) for metric in JUDGED]
            row = [variant.title, str(number), *(f"{mean:.4f}" for mean in means)]
            base = [result for result in groups.get(variant.against, ()) if name in result.values]
            if base:
                drawn = paired_bootstrap(_gains(group, name), _gains(base, name))
                ours, theirs = ([float(one.values[name][JUDGED[0]]) for one in side] for side in (group, base))
                figures = figures_of(Measured(drawn.mean, drawn.low, drawn.high, ours, theirs))
                row += [*difference_cells(figures), figures["verdict"]]
            rows.append(row + [""] * (len(header) - len(row)))
    return section("Losses: an event further ahead, ranked from what came before", header, rows)


def _charts(question: Question, groups: Mapping[tuple[str, str], Sequence[Result]]) -> list[dict[str, Any]]:
    """Returns a chart with a dot for each seed of each variant. For losses, adds a chart of events further ahead."""
    mine = [
        (variant.title, groups[question.name, variant.name])
        for variant in question.variants
        if (question.name, variant.name) in groups
    ]
    if not mine:
        return []
    dots = {
        "kind": "dots",
        "name": question.name,
        "title": question.title,
        "description": "A dot for each seed, a stroke at their mean.",
        "x_label": "NDCG@10",
        "marks": {},
        "rows": [
            {"name": title, "values": [result.values["metrics"]["ndcg@10"] for result in group]}
            for title, group in mine
        ],
    }
    if question.name != "losses":
        return [dots]
    names = {1: "metrics"} | {number: f"ranks_{number}_ahead" for number in AHEAD}
    ahead = {
        "kind": "lines",
        "name": "ahead",
        "title": "Losses, by how far ahead the ranked event lies",
        "description": "One line for each set of losses, mean over seeds.",
        "x_label": "events ahead",
        "lines": [
            {
                "name": title,
                "x": [float(number) for number in names],
                "y": [float(np.mean([result.values[name]["ndcg@10"] for result in group])) for name in names.values()],
            }
            for title, group in mine
            if all(name in result.values for result in group for name in names.values())
        ],
    }
    return [dots, ahead] if ahead["lines"] else [dots]


def _gains(group: Sequence[Result], name: str) -> NDArray[np.float64]:
    """Returns the NDCG@10 of each user, averaged over seeds [U]."""
    return np.asarray(np.mean([gains(result.array(name), 10) for result in group], axis=0))


def compare(
    question: Question, groups: Mapping[str, Sequence[Result]], *, is_quick: bool = False
) -> list[dict[str, Any]]:
    """Compares each variant with the variant that it names in `against`, for each metric, if both have results.

    Quick runs ignore the published results.
    """
    found = []
    for variant in question.variants:
        if variant.name not in groups or variant.against not in groups:
            continue
        ours, theirs = groups[variant.name], groups[variant.against]
        against = next(one.title for one in question.variants if one.name == variant.against)
        for metric in JUDGED:
            names = {"question": question.name, "variant": variant.title, "against": against, "metric": metric}
            figures = figures_of(measure(ours, theirs, metric), None if is_quick else variant.published)
            found.append(names | figures | {"published": "" if is_quick else variant.words})
    return found


def _difference_row(one: Mapping[str, Any]) -> list[str]:
    return [one["variant"], one["against"], one["metric"], *difference_cells(one), one["published"], one["verdict"]]


def _row(variant: Variant, group: Sequence[Result]) -> list[str]:
    means, values = mean_metrics(group), group[0].values
    singles = " ".join(f"{result.values['metrics'][JUDGED[0]]:.4f}" for result in group)
    numbers = [f"{means[metric]:.4f}" for metric in JUDGED]
    costs = [f"{values['parameters']:,}", f"{values['steps']:,}", f"{values['seconds']:,.0f}"]
    return [variant.title, *numbers, singles, *costs]
