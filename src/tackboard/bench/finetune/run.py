"""`tackboard bench finetune` compares rankers that use a pretrained model in different ways, or not at all.

`measure` finishes the cells of a study (finetune_study.py) as far as time allows, and returns one object with tables
(finetune_tables.py). The folder of work, the cells and their processes are those of `tackboard bench quality`, so a
study continues after a kill, and cells can run on several machines. `recompute` makes the tables again from the places
of true items that `measure` kept.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tackboard.bench.finetune.data import find_source, names_of
from tackboard.bench.finetune.finetune_study import FinetuneOptions, FinetunePlan, plan, prepare_plan
from tackboard.bench.finetune.finetune_tables import tables_of
from tackboard.bench.quality.cell import step_of
from tackboard.bench.quality.cells import Work
from tackboard.bench.quality.data import find_bench, find_files
from tackboard.bench.quality.kept_ranks import read_kept, write_kept
from tackboard.bench.quality.report import charts, unfinished
from tackboard.bench.quality.run import check_device, with_earlier
from tackboard.bench.report import Report, Table, shown_command, where_and_when
from tackboard.core.errors import DataError, UsageError
from tackboard.data.pseudo_requests import read_pseudo_requests
from tackboard.data.request_layout import read_requests
from tackboard.evaluation.labelled_requests import TOP
from tackboard.events.dataset import open_dataset
from tackboard.flow.jobs import JobReport, JobRunner
from tackboard.train.devices import choose_device

KEPT = "places"
"""The file of kept results ends with `_places.npz`."""


def measure(
    options: FinetuneOptions,
    *,
    work: Path,
    data: Path | None = None,
    jobs: int = 1,
    device: str = "auto",
    time_limit: float | None = None,
) -> dict[str, Any]:
    """Finishes the cells of a study as far as time allows. Wrong input is refused before anything is written."""
    end = None if time_limit is None else time.monotonic() + time_limit
    source = find_source(options.dataset)
    check_device(device)
    folder = Work.check(work)
    if source.is_synthetic and data is not None:
        raise UsageError("--data has no meaning with --dataset synthetic", fix="leave --data out")
    if not source.is_synthetic and not (folder.datasets / names_of(source, quick=options.quick)[1]).exists():
        find_files(find_bench(source.name).public, data)
    planned = plan(options)
    folder = Work.open(work)
    prepare_plan(options, folder, data)
    chosen = str(choose_device(device))
    report = JobRunner(jobs=jobs, end=end, noun="cell").run([step_of(folder, cell, chosen) for cell in planned.cells])
    result = describe(options, planned, folder, report)
    kept = work / f"finetune-{options.dataset}{'-quick' if options.quick else ''}_{KEPT}.npz"
    finished = [one for cell in with_earlier(planned.cells) if (one := folder.find(cell)) is not None]
    write_kept(kept, dataclasses.asdict(options), result, finished)
    return result | {"ranks": str(kept)}


def recompute(path: Path) -> dict[str, Any]:
    """Returns the result of a study with the tables that its kept places give. Nothing is trained, no data is read."""
    if not path.is_file():
        raise UsageError(f"--recompute {path} does not exist", allowed=f"allowed: a file …_{KEPT}.npz")
    kept = read_kept(path)
    if kept.result.get("bench") != "finetune":
        raise UsageError(
            f"{path} holds results of tackboard bench {kept.result.get('bench')}",
            allowed=f"allowed: a file …_{KEPT}.npz",
            fix=f"tackboard bench {kept.result.get('bench')} --recompute {path}",
        )
    planned = plan(FinetuneOptions(**kept.options))
    known = {cell.label for cell in with_earlier(planned.cells)}
    if unknown := sorted(set(kept.results) - known):
        raise DataError(
            f"{path} holds {unknown[0]}, which this version does not plan",
            fix="use the version of Tackboard that wrote the file: the .md file beside it names the commit",
        )
    return {**kept.result, "table": tables_of(planned, kept.find), "ranks": str(path)}


def describe(options: FinetuneOptions, planned: FinetunePlan, work: Work, report: JobReport) -> dict[str, Any]:
    """Returns the finished part of a study as one object."""
    results = [one for cell in planned.cells if (one := work.find(cell)) is not None]
    path = work.datasets / names_of(planned.source, quick=options.quick)[0]
    dataset, requests = open_dataset(path, verify=False), read_pseudo_requests(path)
    assert requests is not None
    statistics, lengths = dataset.statistics, pc.list_value_length(read_requests(dataset)["item_id"]).to_numpy()
    return {
        "bench": "finetune",
        "dataset": options.dataset,
        "quick": options.quick,
        "data": {
            **{f"num_{name}": int(statistics[f"num_{name}"]) for name in ("users", "items", "events")},
            "num_requests": requests.counts.requests,
            "num_candidates": requests.counts.candidates,
            "random_hit": round(float(np.mean(np.minimum(1.0, TOP / lengths))), 4),
            "rules": dataclasses.asdict(requests.config),
        },
        "table": tables_of(planned, work.find),
        "num_cells": report.num_found + report.num_done + len(report.failures) + len(report.left),
        "num_finished": report.num_found + report.num_done,
        "num_left": len(report.left),
        "is_stopped": report.is_stopped,
        "failures": [
            {"cell": one.step.label, "code": one.code, "log": str(one.step.log), "reason": one.reason}
            for one in report.failures
        ],
        "devices": sorted({str(one.values["device"]) for one in results}),
        "commits": sorted({str(one.values["environment"]["commit"]) for one in results}),
        "command": sys.argv[1:],
        **where_and_when(),
    }


def report(result: dict[str, Any]) -> Report:
    """Makes a report, with charts, of the finished cells of a study."""
    data, table, source = result["data"], result["table"], find_source(result["dataset"])
    rules = data["rules"]
    quick = "QUICK, says nothing about quality: " if result["quick"] else ""
    pool = "the same hour" if rules["pool"] == "hour" else "the whole log"
    words = [
        f"{quick}{data['num_users']:,} users, {data['num_items']:,} items, {data['num_events']:,} events, "
        f"{data['num_requests']:,} requests with {data['num_candidates'] / data['num_requests']:.1f} candidates each "
        f"on average: the item that the user chose, and up to {rules['candidates']} others drawn from {pool} with the "
        f"seed {rules['seed']}.",
        source.note,
        f"HIT@3 is the share of requests whose true item is among the first three candidates; a random order of the "
        f"candidates has {data['random_hit']:.4f}. HIT@3 depends on the drawn candidates, so only the signs of "
        "differences can be compared with published ones.",
    ]
    return Report(
        result=result,
        theme=f"finetune-{result['dataset']}{'-quick' if result['quick'] else ''}",
        title=f"Fine-tuning on {result['dataset']}{', quick' if result['quick'] else ''}",
        command=shown_command(result["command"]),
        versions=f"Models were fitted on: {', '.join(result['devices']) or 'none'}. "
        f"Commits of the cells: {', '.join(result['commits']) or 'unknown'}.",
        words=words,
        tables=[Table(part["title"], part["header"], part["rows"]) for part in table["sections"] if part["rows"]],
        notes=[*table["notes"], *unfinished(result)],
        charts={name: chart.document for name, chart in charts(result).items()},
        ranks=Path(result["ranks"]) if "ranks" in result else None,
        kept_as=KEPT,
    )
