"""`tackboard bench quality` measures how well methods rank on public data, and shows published figures beside ours.

`measure` takes a publisher's files and a study, and returns one object with a table. The work is divided into cells
(cells.py). Each cell runs once and its result is kept, so a study can be split over many calls and machines.
study_plan.py defines what a study is, cell.py does the work of a cell, flow/jobs.py runs cells, and report.py shows the
result. `recompute` returns the same object, with the same table, from the ranks that `measure` kept (kept_ranks.py).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tackboard.bench.quality.cell import step_of
from tackboard.bench.quality.cells import Cell, Result, Work
from tackboard.bench.quality.data import find_bench, find_files, prepared_name, read_facts
from tackboard.bench.quality.kept_ranks import SUFFIX, read_kept, write_kept
from tackboard.bench.quality.methods import METHODS, find_method
from tackboard.bench.quality.study_plan import Options, StudyContext, StudyPlan, find_study
from tackboard.bench.report import where_and_when
from tackboard.core.errors import DataError, UsageError
from tackboard.flow.jobs import JobReport, JobRunner
from tackboard.train.devices import choose_device


def measure(
    dataset: str,
    options: Options,
    *,
    work: Path,
    data: Path | None = None,
    jobs: int = 1,
    device: str = "auto",
    time_limit: float | None = None,
) -> dict[str, Any]:
    """Finishes the cells of a study as far as time allows. Returns the table of the study and the number of cells left.

    Wrong input is refused before anything is written. Unknown names raise UsageError, and files that do not match the
    named dataset raise DataError.
    """
    end = None if time_limit is None else time.monotonic() + time_limit
    bench = find_bench(dataset)
    study = find_study(options.study)
    for name in options.methods:
        find_method(name)
    if options.seeds < 0:
        raise UsageError(f"--seeds is {options.seeds}", allowed="allowed: 1 or more")
    if options.tries and options.study != "tune":
        raise UsageError(f"--tries {options.tries} does nothing in --study {options.study}", fix="use --study tune")
    if options.questions and options.study != "ablations":
        raise UsageError(
            f"--questions {','.join(options.questions)} does nothing in --study {options.study}",
            fix="use --study ablations",
        )
    check_device(device)
    context = StudyContext(Work.check(work), bench, options, data)
    study(dataclasses.replace(context, is_trial=True))
    if data is not None:
        find_files(bench.public, data)  # A mistyped --data is an error even if the files are no longer needed.
    plan = study(context)
    folder = Work.open(work)
    # The device is chosen once. A process that cannot reach the GPU must fail, not continue for days on the CPU.
    chosen = str(choose_device(device))
    steps = [step_of(folder, cell, chosen) for cell in plan.cells]
    report = JobRunner(jobs=jobs, end=end, noun="cell").run(steps)
    result = describe(context, plan, report)
    kept = work / f"{dataset}-{options.study}{'-quick' if options.quick else ''}{SUFFIX}"
    write_kept(kept, kept_options(context, plan), result, finished(context, plan))
    return result | {"ranks": str(kept)}


def recompute(path: Path) -> dict[str, Any]:
    """Returns the result of a study, with the table computed again from the study's kept ranks. Nothing is
    trained and no data is read.

    Raises DataError if the file holds a cell that this version does not plan for the study.
    """
    kept = read_kept(path)
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.options.items()}
    options = Options(**given)
    bench, study = find_bench(kept.result["dataset"]), find_study(options.study)
    # A trial plans cells without data. The configs of these cells are only estimates. This does no harm, because kept
    # cells are found by their labels.
    plan = study(StudyContext(Work(path.parent), bench, options, is_trial=True))
    planned = {cell.label for cell in with_earlier(plan.cells)}
    if unknown := sorted(set(kept.results) - planned):
        raise DataError(
            f"{path} holds {unknown[0]}, which this version does not plan for --study {options.study}",
            fix="use the version of Tackboard that wrote the file: the .md file beside it names the commit",
        )
    return {**kept.result, "table": plan.table(kept.find), "ranks": str(path)}


def with_earlier(cells: Sequence[Cell]) -> list[Cell]:
    """Returns cells and the earlier cells that they read, each label once."""
    found: dict[str, Cell] = {}
    for cell in cells:
        step: Cell | None = cell
        while step is not None:
            found.setdefault(step.label, step)
            step = step.after
    return list(found.values())


def finished(context: StudyContext, plan: StudyPlan) -> list[Result]:
    """Returns the results of a plan's cells, and of the cells that these cells read, as far as they are finished."""
    return [result for cell in with_earlier(plan.cells) if (result := context.work.find(cell)) is not None]


def kept_options(context: StudyContext, plan: StudyPlan) -> dict[str, Any]:
    """Returns options that plan the same cells even in a version with other defaults.

    Some studies name their cells after arms or recipes, not after methods. These studies keep the options that the user
    gave.
    """
    names = tuple(dict.fromkeys(cell.method for cell in plan.cells))
    options = dataclasses.asdict(context.options)
    if all(name in METHODS for name in names):
        options |= {"methods": names, "ties": tuple(dict.fromkeys(cell.ties for cell in plan.cells))}
    return options


def check_device(device: str) -> None:
    """Raises UsageError for a device that does not exist."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(
            f"--device {device} does not exist", allowed="allowed: auto, cpu, cuda", fix="use --device auto"
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device} needs a GPU, and torch sees none here", fix="use --device cpu")


def describe(context: StudyContext, plan: StudyPlan, report: JobReport) -> dict[str, Any]:
    """Returns the finished part of a study as one object."""
    results = [result for cell in plan.cells if (result := context.work.find(cell)) is not None]
    ties = tuple(dict.fromkeys(cell.ties for cell in plan.cells))
    stride = context.bench.quick_stride if context.options.quick else 1
    facts = read_facts(context.work.datasets / prepared_name(context.bench, ties[0], stride))
    table = plan.table(context.work.find)
    own_words = table.get("protocol")  # A study may judge differently from other studies on the same dataset.
    return {
        "bench": "quality",
        "study": context.options.study,
        "dataset": context.bench.name,
        "quick": context.options.quick,
        "data": {
            "num_users": facts.num_users,
            "num_items": facts.num_items,
            "num_events": facts.num_events,
            "last_tied_share": facts.last_tied_share,
        },
        "ties": list(ties),
        "protocol": {"words": own_words} if own_words else context.protocol(),
        "note": "" if own_words else context.bench.note,
        "table": table,
        "num_cells": report.num_found + report.num_done + len(report.failures) + len(report.left),
        "num_finished": report.num_found + report.num_done,
        "num_left": len(report.left),
        "is_stopped": report.is_stopped,
        "failures": [
            {"cell": one.step.label, "code": one.code, "log": str(one.step.log), "reason": one.reason}
            for one in report.failures
        ],
        "devices": _distinct(results, lambda result: result.values.get("device")),
        "commits": _distinct(results, lambda result: result.values["environment"]["commit"]),
        "command": sys.argv[1:],
        **where_and_when(),
    }


def _distinct(results: list[Result], of: Any) -> list[str]:
    return sorted({str(value) for result in results if (value := of(result))})
