"""What a study of `tackboard bench quality` is: options in; cells, and how to read those that are finished, out.

A study is a function of a `Context` that gives a `Plan`. Studies are named in `STUDIES` and imported when they are
asked for, so another module adds one by one line there; stages of its own it adds to STAGES of quality_cell.py.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tackboard.bench.quality_cells import Cell, Result, Work
from tackboard.bench.quality_data import Bench, prepare, read_facts
from tackboard.bench.quality_methods import Method, Place, config_of, find_method
from tackboard.core.config import suggest
from tackboard.core.errors import UsageError
from tackboard.train.config import config_to_json

STUDIES = {
    "reproduce": "tackboard.bench.quality_studies:reproduce",
    "validate": "tackboard.bench.quality_studies:validate",
    "compare": "tackboard.bench.quality_studies:compare",
    "transfer": "tackboard.bench.transfer:transfer",
    "transfer-hidden": "tackboard.bench.transfer:transfer_hidden",
    "ablations": "tackboard.bench.ablations:ablations",
}
"""Study → module:function of a context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    study: str = "compare"
    """Name of the study."""
    quick: bool = False
    """Few users, few steps: shows that it works."""
    methods: tuple[str, ...] = ()
    """Names of methods; empty: those of the study."""
    seeds: int = 0
    """How many seeds; 0: those of the study."""
    ties: tuple[str, ...] = ()
    """Tie rules; empty: those of the study."""
    overrides: tuple[str, ...] = ()
    """Settings to change, see `config_of`."""


@dataclasses.dataclass
class Context:
    """What a study plans with."""

    work: Work
    bench: Bench
    options: Options
    data: Path | None = None
    """Where the publisher's files lie."""

    def ties(self, otherwise: Sequence[str]) -> tuple[str, ...]:
        """The tie rules that were asked for, or those of the study."""
        return self.options.ties or tuple(otherwise)

    def methods(self, otherwise: Sequence[str]) -> list[Method]:
        """The methods that were asked for, or those of the study."""
        return [find_method(name) for name in self.options.methods or otherwise]

    def seeds(self, otherwise: int) -> range:
        """The seeds: as many as were asked for, or as the study wants; one where it shall be quick."""
        return range(self.options.seeds or (1 if self.options.quick else otherwise))

    def places(self, ties: Sequence[str]) -> dict[str, Place]:
        """Tie rule → prepared dataset."""
        stride = self.bench.quick_stride if self.options.quick else 1
        paths = prepare(self.bench, ties, self.work.datasets, self.data, stride)
        return {
            rule: Place(self.bench, read_facts(path), path.name, self.options.quick) for rule, path in paths.items()
        }

    def protocol(self) -> dict[str, Any]:
        """How cells are judged."""
        quick_users = self.bench.quick_max_users if self.options.quick else 0
        return {"filter_seen": self.bench.filter_seen, "max_users": quick_users or self.bench.max_users}

    def cell(
        self, place: Place, ties: str, method: Method, seed: int, stage: str, after: Cell | None = None, **protocol: Any
    ) -> Cell:
        """The cell of a method with a seed at a stage; `protocol` adds to how it is judged."""
        config = None
        if method.build is not None:
            config = config_to_json(config_of(method, place, seed, self.options.overrides))
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
"""`sections`: title, header and rows of text; `notes`: sentences; `figures`: the same as numbers; `charts`: see
quality_report.py."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Cells, and how to read those that are finished."""

    cells: Sequence[Cell]
    table: Callable[[Find], Table]


def find_study(name: str) -> Callable[[Context], Plan]:
    """The study of that name; another name raises UsageError with the closest."""
    if name not in STUDIES:
        close = suggest(name, STUDIES)
        raise UsageError(
            f"--study {name}", allowed=f"allowed: {', '.join(STUDIES)}", fix=f"did you mean {close}?" if close else ""
        )
    module, _, function = STUDIES[name].partition(":")
    found: Callable[[Context], Plan] = getattr(importlib.import_module(module), function)
    return found


def section(title: str, header: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """A titled table of text."""
    return {"title": title, "header": header, "rows": rows}
