"""`tackboard bench …` measures the figures that the documentation claims, prints them and can write them to files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tackboard.bench.report import Report

app = typer.Typer(help="Measure what the documentation claims.", no_args_is_help=True, rich_markup_mode=None)

Quick = Annotated[bool, typer.Option("--quick", help="Measure only a little, to see that it works.")]
Results = Annotated[Path | None, typer.Option("--results", help="Write the result into this folder, as Markdown.")]
Hardware = Annotated[str, typer.Option("--hardware", help="Name this machine in one word, for the result's file name.")]
Data = Annotated[Path | None, typer.Option("--data", help="Read this dataset instead of a synthetic one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tackboard-bench-")


def _show(report: Report, results: Path | None, hardware: str, *, as_json: bool, with_table: bool = True) -> None:
    from tackboard.bench.report import table_lines, write_result
    from tackboard.core.progress import say

    if results is not None:
        say(f"written: {write_result(report, results, hardware)}")
    _print(table_lines(report) if with_table else [], report.result, as_json=as_json)


def _print(lines: Iterable[str], result: Mapping[str, Any], *, as_json: bool) -> None:
    for line in lines:
        typer.echo(line)
    if as_json:
        typer.echo(json.dumps(result))


@app.command("skeleton")
def bench_skeleton(
    quick: Quick = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep the demo in this folder; by default nothing is kept.")
    ] = None,
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Measure the whole path: events, training, evaluation, serving, memory."""
    from tackboard.bench.skeleton import measure, report

    with _scratch() as scratch:
        result = measure(out or Path(scratch) / "demo", quick=quick)
    _show(report(result), results, hardware, as_json=json_output, with_table=not json_output)


@app.command("features")
def bench_features(
    quick: Quick = False, results: Results = None, hardware: Hardware = "cpu", json_output: Json = False
) -> None:
    """Measure 40 features in batch and online; compare with Polars, pandas and Feast (needs `make rivals`)."""
    from tackboard.bench.features.run import measure, report

    with _scratch() as scratch:
        result = measure(Path(scratch), quick=quick)
    _show(report(result), results, hardware, as_json=json_output, with_table=not json_output)


@app.command("feeding")
def bench_feeding(
    data: Data = None,
    num_events: Annotated[
        int, typer.Option("--events", min=1000, help="Give the synthetic dataset this many events.")
    ] = 12_000_000,
    tokens: Annotated[int, typer.Option("--tokens", min=512, help="Put at most this many tokens in a step.")] = 65_536,
    json_output: Json = False,
) -> None:
    """Measure tokens per second for each number of workers and, on a GPU, the step time for three ways to feed data."""
    from tackboard.bench.feeding import measure
    from tackboard.bench.turns import disturbance_lines

    with _scratch() as scratch:
        result = measure(Path(scratch), data=data, num_events=num_events, tokens_per_step=tokens)
    lines = ["workers   million tokens per second   per CPU-second"]
    for workers, figures in result["host"].items():
        lines.append(f"{workers:>7}   {figures['per_s']:>25}   {figures['per_cpu_s']:>14}")
    if result["device"] is None:
        lines.append("there is no GPU here, so the step time was not measured")
    lines += [f"{way:<36}{milliseconds:>9} ms" for way, milliseconds in (result["device"] or {}).items()]
    _print([*lines, *disturbance_lines(result)], result, as_json=json_output)


@app.command("sequences")
def bench_sequences(
    quick: Quick = False, results: Results = None, hardware: Hardware = "cpu", json_output: Json = False
) -> None:
    """Measure appends and reads of user sequences in SQLite, and in Redis if redis-server is installed."""
    from tackboard.bench.sequence_store import measure, report

    with _scratch() as scratch:
        result = measure(Path(scratch), quick=quick)
    _show(report(result), results, hardware, as_json=json_output)


@app.command("loader")
def bench_loader(
    data: Data = None,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Measure this many times; default 3.")] = None,
    quick: Quick = False,
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Measure speed and memory of reading training batches; compare with three other loaders (needs `make rivals`)."""
    from tackboard.bench.loader.run import measure, report

    with _scratch() as scratch:
        result = measure(Path(scratch), data=data, repeats=repeats, quick=quick)
    _show(report(result), results, hardware, as_json=json_output)


@app.command("pretrain")
def bench_pretrain(
    size: Annotated[
        str,
        typer.Option("--size", help="Measure these sizes, comma-separated: cpu, cpu-256, h200, …; default: by device."),
    ] = "",
    data: Data = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of every run: --set model.width=128. Repeatable."),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Measure everything this many times.")] = None,
    rungs: Annotated[
        str, typer.Option("--rungs", help="Measure these rungs (each adds an optimisation) and the last; default: all.")
    ] = "",
    quick: Quick = False,
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Measure a training step, adding one optimisation at a time; compare it with a lower bound and plain PyTorch."""
    from tackboard.bench.pretrain.report import report
    from tackboard.bench.pretrain.run import measure

    with _scratch() as scratch:
        chosen = {"sizes": _words(size), "rungs": _words(rungs), "overrides": overrides or ()}
        result = measure(Path(scratch), data=data, rounds=rounds, quick=quick, **chosen)
    _show(report(result), results, hardware, as_json=json_output)


@app.command("parallel")
def bench_parallel(
    steps: Annotated[
        int | None, typer.Option("--steps", min=20, help="Train this many steps; default 300, with --quick 20.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Use this many seeds; default 2.")] = None,
    quick: Quick = False,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep finished runs in this folder; continue from them.")
    ] = None,
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Measure training in two processes: bytes on the wire, loss, quality and CPU time of every precision."""
    from tackboard.bench.parallel_training import measure, report

    with _scratch() as scratch:
        result = measure(work or Path(scratch), steps=steps, seeds=seeds, quick=quick)
    _show(report(result), results, hardware, as_json=json_output)


@app.command("dcat")
def bench_dcat(
    device: Annotated[
        str, typer.Option("--device", help="Compute on cpu, cuda, or auto: a GPU if there is one.")
    ] = "auto",
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Measure everything this many times.")] = None,
    quick: Quick = False,
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Compare DCAT, which reads a history once for all candidates, with whole sequences for every candidate."""
    from tackboard.bench.dcat.report import report
    from tackboard.bench.dcat.run import measure

    with _scratch() as scratch:
        result = measure(Path(scratch), device=device, quick=quick, rounds=rounds)
    _show(report(result), results, hardware, as_json=json_output)


@app.command("daily")
def bench_daily(
    context: typer.Context,
    dataset: str = typer.Option("news", "--dataset", help="Choose kakao-brunch, deskdrop or news, a synthetic world."),
    data: Path | None = typer.Option(
        None, "--data", envvar="TACKBOARD_DATA", help="Read the downloads in this folder, or in its subfolder DATASET."
    ),
    periods: int | None = typer.Option(None, "--periods", min=2, help="Judge this many periods; default: the plan's."),
    tokens: int | None = typer.Option(None, "--tokens", min=1, help="Train each arm on at most this many tokens."),
    seed: int = typer.Option(0, "--seed", min=0, help="Train with this seed."),
    quick: Quick = False,
    work: Path = typer.Option(
        Path("runs/daily"), "--work", help="Keep finished runs and ranks in this folder; continue from them."
    ),
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Retrain, go on training, or do neither, while a log goes on; judge on the time after, beside live popularity."""
    from tackboard.bench.daily.daily_study import measure
    from tackboard.bench.daily.daily_tables import daily_report

    given = None if dataset == "news" and _is_from_environment(context, "data") else data
    result = measure(work, dataset, data=given, periods=periods, tokens=tokens, seed=seed, quick=quick)
    _show(daily_report(result), results, hardware, as_json=json_output)


@app.command("splits")
def bench_splits(
    context: typer.Context,
    dataset: str = typer.Option("news", "--dataset", help="Choose ml-1m, kakao-brunch, deskdrop or news."),
    data: Path | None = typer.Option(
        None, "--data", envvar="TACKBOARD_DATA", help="Read the downloads in this folder, or in its subfolder DATASET."
    ),
    tokens: int | None = typer.Option(None, "--tokens", min=1, help="Train each run on at most this many tokens."),
    seed: int = typer.Option(0, "--seed", min=0, help="Train with this seed."),
    work: Path = typer.Option(Path("runs/daily"), "--work", help="Keep finished runs in this folder."),
    results: Results = None,
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Train a recipe for leave-last-out and for a split by time, and show both tables side by side."""
    from tackboard.bench.splits import measure_splits, splits_report

    given = None if dataset == "news" and _is_from_environment(context, "data") else data
    result = measure_splits(work, dataset, data=given, tokens=tokens, seed=seed)
    _show(splits_report(result), results, hardware, as_json=json_output)


@app.command("overload")
def bench_overload(
    quick: Quick = False, results: Results = None, hardware: Hardware = "cpu", json_output: Json = False
) -> None:
    """Measure the answers per second within a deadline, under loads of 0.5 to 3 times the server's capacity."""
    from tackboard.bench.overload import measure, report

    with _scratch() as scratch:
        result = measure(Path(scratch), quick=quick)
    _show(report(result), results, hardware, as_json=json_output)


@app.command("finetune")
def bench_finetune(
    context: typer.Context,
    dataset: str = typer.Option("synthetic", "--dataset", help="Choose synthetic, ml-1m or kakao-brunch."),
    data: Path | None = typer.Option(
        None, "--data", envvar="TACKBOARD_DATA", help="Read the downloads in this folder, or in its subfolder DATASET."
    ),
    seeds: int | None = typer.Option(None, "--seeds", min=1, help="Use this many seeds; default: 3, with --quick 1."),
    quick: bool = typer.Option(False, "--quick", help="Use few users and steps, to see within minutes that it works."),
    work: Path = typer.Option(
        Path("runs/finetune"), "--work", help="Keep finished cells (units of work) in this folder; continue from them."
    ),
    jobs: int = typer.Option(
        1, "--jobs", min=0, help="Run this many cells at once, each in its own process; 0: all in this process."
    ),
    device: str = typer.Option("auto", "--device", help="Train on cpu, cuda, or auto."),
    time_limit: float | None = typer.Option(
        None, "--time-limit", min=1.0, help="Save everything after this many seconds and exit with code 75."
    ),
    results: Path | None = typer.Option(
        None, "--results", help="Write the tables, charts and the place of every true item into this folder."
    ),
    recompute: Path | None = typer.Option(
        None, "--recompute", help="Make the tables again from this file …_places.npz."
    ),
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Compare rankers without PinFM, with frozen PinFM and with fine-tuned PinFM: old items, new items, few labels."""
    from tackboard.bench.finetune import run
    from tackboard.bench.finetune.finetune_study import FinetuneOptions

    if recompute is not None:
        _refuse_with_recompute(context)
        _show(run.report(run.recompute(recompute)), results, hardware, as_json=json_output)
        return
    options = FinetuneOptions(dataset=dataset, quick=quick, seeds=seeds or 0)
    given = None if dataset == "synthetic" and _is_from_environment(context, "data") else data
    result = run.measure(options, work=work, data=given, jobs=jobs, device=device, time_limit=time_limit)
    _show(run.report(result), results, hardware, as_json=json_output)
    _exit_unless_finished(result)


@app.command("quality")
def bench_quality(
    context: typer.Context,
    dataset: str = typer.Option("ml-1m", "--dataset", help="Choose ml-1m, kakao-brunch or deskdrop."),
    data: Path | None = typer.Option(
        None, "--data", envvar="TACKBOARD_DATA", help="Read the downloads in this folder, or in its subfolder DATASET."
    ),
    study: str = typer.Option(
        "compare",
        "--study",
        help="Choose compare, tune, validate, reproduce, ablations, transfer, transfer-hidden, transfer-baselines.",
    ),
    methods: str = typer.Option("", "--methods", help="Use these methods, comma-separated; the study has a default."),
    seeds: int | None = typer.Option(None, "--seeds", min=1, help="Use this many seeds; the study has a default."),
    tries: int | None = typer.Option(
        None, "--tries", min=1, help="With --study tune: try this many settings of each method."
    ),
    questions: str = typer.Option(
        "", "--questions", help="With --study ablations: answer these questions, separated by commas; default: all."
    ),
    ties: str = typer.Option(
        "", "--ties", help="Order simultaneous events by these rules, separated by commas: file, reverse, random."
    ),
    overrides: list[str] = typer.Option(
        [], "--set", help="Change a setting of every method, or of one: --set METHOD:model.width=64. Repeatable."
    ),
    quick: bool = typer.Option(False, "--quick", help="Use few users and steps, to see within minutes that it works."),
    work: Path = typer.Option(
        Path("runs/quality"), "--work", help="Keep finished cells (units of work) in this folder; continue from them."
    ),
    jobs: int = typer.Option(
        1, "--jobs", min=0, help="Run this many cells at once, each in its own process; 0: all in this process."
    ),
    device: str = typer.Option("auto", "--device", help="Train on cpu, cuda, or auto."),
    time_limit: float | None = typer.Option(
        None, "--time-limit", min=1.0, help="Save everything after this many seconds and exit with code 75."
    ),
    results: Path | None = typer.Option(
        None, "--results", help="Write the table, charts and the ranks of all users' held-out items into this folder."
    ),
    recompute: Path | None = typer.Option(
        None, "--recompute", help="Make the tables again from this file of ranks, or from all such files of a folder."
    ),
    hardware: Hardware = "cpu",
    json_output: Json = False,
) -> None:
    """Compare PinFM, SASRec, HSTU and baselines on held-out events of a public dataset, and with published figures."""
    from tackboard.bench.quality.report import report
    from tackboard.bench.quality.run import measure
    from tackboard.bench.quality.study_plan import Options

    if recompute is not None:
        _recompute(context, recompute, results, hardware, as_json=json_output)
        return
    options = Options(
        study=study,
        quick=quick,
        methods=_words(methods),
        seeds=seeds or 0,
        ties=_words(ties),
        overrides=tuple(overrides),
        tries=tries or 0,
        questions=_words(questions),
    )
    result = measure(dataset, options, work=work, data=data, jobs=jobs, device=device, time_limit=time_limit)
    _show(report(result), results, hardware, as_json=json_output)
    _exit_unless_finished(result)


def _exit_unless_finished(result: Mapping[str, Any]) -> None:
    """Exits with the code of failed cells if cells failed, or with 75 if cells are left to run."""
    from tackboard.core.errors import EXIT_BUG, Preempted

    if result["failures"]:
        codes = {failure["code"] for failure in result["failures"]}
        code = codes.pop()
        raise typer.Exit(code if not codes and 0 < code < Preempted.exit_code else EXIT_BUG)
    if result["is_stopped"]:
        raise typer.Exit(Preempted.exit_code)


def _recompute(context: typer.Context, path: Path, results: Path | None, hardware: str, *, as_json: bool) -> None:
    """Shows the studies whose ranks are in `path`. Raises UsageError for options that have no meaning here."""
    from tackboard.bench.quality import run
    from tackboard.bench.quality.kept_ranks import find_kept
    from tackboard.bench.quality.report import report

    _refuse_with_recompute(context)
    for number, file in enumerate(find_kept(path)):
        typer.echo(f"{chr(10) if number else ''}{file}:")
        _show(report(run.recompute(file)), results, hardware, as_json=as_json)


def _is_from_environment(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def _refuse_with_recompute(context: typer.Context) -> None:
    """Raises UsageError for an option that has no meaning with --recompute."""
    from tackboard.core.errors import UsageError

    for name in context.params:
        source = context.get_parameter_source(name)
        if (
            source is not None
            and source.name == "COMMANDLINE"
            and name not in ("recompute", "results", "hardware", "json_output")
        ):
            option = "set" if name == "overrides" else name.replace("_", "-")
            raise UsageError(
                f"--{option} has no meaning with --recompute",
                allowed="allowed: --results, --hardware, --json",
                fix=f"leave --{option} out: the file says what was run",
            )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)
