"""`tackboard bench quality`: how well PinFM and its rivals rank on public data."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def bench_quality(
    dataset: str = typer.Option("ml-1m", "--dataset", help="ml-1m, kakao-brunch or deskdrop."),
    data: Path | None = typer.Option(
        None, "--data", envvar="TACKBOARD_DATA", help="Folder of what you downloaded, or one with a folder NAME in it."
    ),
    study: str = typer.Option(
        "compare", "--study", help="compare, validate, reproduce, transfer, transfer-hidden, ablations."
    ),
    methods: str = typer.Option("", "--methods", help="Names between commas; the study's own by default."),
    seeds: int | None = typer.Option(None, "--seeds", min=1, help="How many seeds; the study's own by default."),
    ties: str = typer.Option("", "--ties", help="file, reverse, random: between commas."),
    overrides: list[str] = typer.Option(
        [], "--set", help="Change a setting of every method, or of one: --set METHOD:model.width=64. Repeatable."
    ),
    quick: bool = typer.Option(False, "--quick", help="Few users and steps: shows that it works, in minutes."),
    work: Path = typer.Option(Path("runs/quality"), "--work", help="Folder that keeps what is done, to go on from."),
    jobs: int = typer.Option(1, "--jobs", min=0, help="Cells at a time, in processes; 0: in this process."),
    device: str = typer.Option("auto", "--device", help="cpu, cuda, or auto."),
    time_limit: float | None = typer.Option(
        None, "--time-limit", min=1.0, help="Seconds after which everything is saved and ends, with exit code 75."
    ),
    results: Path | None = typer.Option(None, "--results", help="Folder to write the table and its charts into."),
    hardware: str = typer.Option("cpu", "--hardware", help="A short word for this machine, used in the result's name."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Rank the held-out events of a public dataset: PinFM, SASRec, HSTU, baselines; beside published figures."""
    from tackboard.bench.quality.plan import Options
    from tackboard.bench.quality.report import report
    from tackboard.bench.quality.run import measure
    from tackboard.bench.report import table_lines, write_result
    from tackboard.core.errors import EXIT_BUG, Preempted
    from tackboard.core.progress import say

    options = Options(
        study=study,
        quick=quick,
        methods=_words(methods),
        seeds=seeds or 0,
        ties=_words(ties),
        overrides=tuple(overrides),
    )
    result = measure(dataset, options, work=work, data=data, jobs=jobs, device=device, time_limit=time_limit)
    if results is not None:
        say(f"written: {write_result(report(result), results, hardware)}")
    for line in table_lines(report(result)):
        typer.echo(line)
    if json_output:
        typer.echo(json.dumps(result))
    if result["failures"]:
        codes = {failure["code"] for failure in result["failures"]}
        code = codes.pop()
        raise typer.Exit(code if not codes and 0 < code < Preempted.exit_code else EXIT_BUG)
    if result["is_stopped"]:
        raise typer.Exit(Preempted.exit_code)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)
