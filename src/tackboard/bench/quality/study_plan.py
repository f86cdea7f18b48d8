"""This module defines what a study of `tackboard bench quality` is.

A study is a function that takes a `StudyContext` (options and data) and returns a `StudyPlan` (cells, and a function
that makes a table of the finished cells). To add a study, add one line to `STUDIES`. If its cells do a new kind of
work, also add a stage for this work to STAGES in cell.py. A study is imported only when it is needed.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.quality.data import Bench, check_ties, expected_facts, prepare, prepared_name, read_facts
from tackboard.bench.quality.methods import Method, MethodContext, check_overrides, config_of, find_method
from tackboard.core.config import did_you_mean
from tackboard.core.errors import UsageError
from tackboard.train.config import config_to_json

STUDIES = {
    "reproduce": "tackboard.bench.quality.studies:reproduce",
    "validate": "tackboard.bench.quality.studies:validate",
    "tune": "tackboard.bench.quality.tuning:tune",
    "compare": "tackboard.bench.quality.studies:compare",
    "transfer": "tackboard.bench.transfer.study:transfer",
    "transfer-hidden": "tackboard.bench.transfer.study:transfer_hidden",
    "transfer-baselines": "tackboard.bench.transfer.study:transfer_baselines",
    "ablations": "tackboard.bench.quality.ablations:ablations",
}
"""Name of a study → module:function of the study."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options that the user gave."""

    study: str = "compare"
    """Name of the study."""
    quick: bool = False
    """Run with few users and few steps, to see that everything works."""
    methods: tuple[str, ...] = ()
    """Names of methods; empty for the default methods of the study."""
    seeds: int = 0
    """Number of seeds; 0 for the default number of the study."""
    ties: tuple[str, ...] = ()
    """Tie rules; empty for the default tie rules of the study."""
    overrides: tuple[str, ...] = ()
    """Settings to change, see `config_of`."""
    tries: int = 0
    """Number of tries of each method in the study `tune`; 0 for the default number."""
    questions: tuple[str, ...] = ()
    """Names of questions of the study `ablations`; empty for all questions that the dataset can answer."""


@dataclasses.dataclass
class StudyContext:
    """The options and the data from which a study plans its cells."""

    work: Work
    bench: Bench
    options: Options
    data: Path | None = None
    """Folder or file with the publisher's data."""
    is_trial: bool = False
    """If true, only the options are checked. Nothing is read or written, and the sizes of datasets are estimates."""

    def ties(self, otherwise: Sequence[str]) -> tuple[str, ...]:
        """Returns the distinct tie rules of the options, or `otherwise` if the options name no tie rule."""
        return tuple(dict.fromkeys(self.options.ties)) or tuple(otherwise)

    def one_rule(self) -> str:
        """Returns the tie rule, for studies that need exactly one. Raises UsageError if the options name several."""
        rules = self.ties(self.bench.ties[:1])
        if len(rules) > 1:
            raise UsageError(
                f"--study {self.options.study} takes one tie rule, not {','.join(rules)}", fix=f"use --ties {rules[0]}"
            )
        return rules[0]

    def methods(self, otherwise: Sequence[str]) -> list[Method]:
        """Returns the distinct methods of the options, or the methods `otherwise` if the options name no method."""
        methods = [find_method(name) for name in dict.fromkeys(self.options.methods or otherwise)]
        check_overrides(self.options.overrides, [method.name for method in methods if method.build is not None])
        return methods

    def fitted_methods(self, otherwise: Sequence[str]) -> list[Method]:
        """Returns the methods that fit a model. Raises UsageError if the options name a method that fits no model."""
        methods = self.methods(otherwise)
        for method in methods if self.options.methods else ():
            if method.build is None:
                raise UsageError(
                    f"--study {self.options.study} only fits models, and {method.name} fits nothing",
                    fix=f"use --study compare --methods {method.name}",
                )
        return [method for method in methods if method.build is not None]

    def seeds(self, otherwise: int) -> range:
        """Returns the seeds 0, 1, 2, …. By default there are `otherwise` seeds, but only one seed with --quick."""
        return range(self.options.seeds or (1 if self.options.quick else otherwise))

    def places(self, ties: Sequence[str]) -> dict[str, MethodContext]:
        """Returns tie rule → context with the dataset of this rule. Prepares missing datasets unless `is_trial`."""
        stride = self.bench.quick_stride if self.options.quick else 1
        if self.is_trial:
            check_ties(self.bench, ties)
            facts = expected_facts(self.bench, stride)
            return {
                rule: MethodContext(self.bench, facts, prepared_name(self.bench, rule, stride), self.options.quick)
                for rule in ties
            }
        paths = prepare(self.bench, ties, self.work.datasets, self.data, stride)
        return {
            rule: MethodContext(self.bench, read_facts(path), path.name, self.options.quick)
            for rule, path in paths.items()
        }

    def protocol(self) -> dict[str, Any]:
        """Returns how cells are judged: whether seen items are filtered, and the largest number of ranked users."""
        quick_users = self.bench.quick_max_users if self.options.quick else 0
        return {"filter_seen": self.bench.filter_seen, "max_users": quick_users or self.bench.max_users}

    def cell(
        self,
        place: MethodContext,
        ties: str,
        method: Method,
        seed: int,
        stage: str,
        after: Cell | None = None,
        tried: Sequence[str] = (),
        **protocol: Any,
    ) -> Cell:
        """Returns the cell for a method, a seed and a stage. `protocol` adds settings to `self.protocol()`.

        `tried` holds settings that the study tries, see `config_of`.
        """
        config = None
        if method.build is not None:
            config = config_to_json(config_of(method, place, seed, self.options.overrides, tried))
        return Cell(
            prepared=place.prepared,
            ties=ties,
            method=method.name,
            seed=seed,
            stage=stage,
            protocol=self.protocol() | protocol,
            config=config,
            after=after,
        )


Find = Callable[[Cell], Result | None]
Table = dict[str, Any]
"""The results of a study. `sections` holds titles, headers and rows of text, and `notes` holds sentences. `figures`
holds the same results as numbers. `charts` holds descriptions of charts, which report.py draws."""


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """Cells, and a function that makes a table of the finished cells."""

    cells: Sequence[Cell]
    table: Callable[[Find], Table]


def find_study(name: str) -> Callable[[StudyContext], StudyPlan]:
    """Returns the function of the study. An unknown name raises UsageError, which suggests the closest name."""
    if name not in STUDIES:
        raise UsageError(
            f"--study {name} does not exist", allowed=f"allowed: {', '.join(STUDIES)}", fix=did_you_mean(name, STUDIES)
        )
    found: Callable[[StudyContext], StudyPlan] = pkgutil.resolve_name(STUDIES[name])
    return found


def section(title: str, header: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """Returns a table of text with a title."""
    return {"title": title, "header": header, "rows": rows}
