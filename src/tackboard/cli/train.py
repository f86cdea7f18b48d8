"""`tackboard train RECIPE` runs a recipe of Tackboard or a recipe in a user's file."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tackboard.core.rundir import RunDirectory
    from tackboard.data.source import SequenceSource
    from tackboard.events.dataset import Dataset
    from tackboard.parallel.training_world import TrainingWorld
    from tackboard.train.config import RunConfig


def train(
    recipe: str = typer.Argument(..., help="Run this recipe: a name (demo) or path/to/file.py:recipe."),
    overrides: list[str] = typer.Option([], "--set", help="Change a setting: --set training.steps=200. Repeatable."),
    start: str = typer.Option(
        "",
        "--from",
        metavar="RUN",
        help="Begin with the parameters of this run, checkpoint, or bundle made by `tackboard export --for-training`.",
    ),
    goes_on: str = typer.Option(
        "",
        "--continue",
        metavar="RUN",
        help="Go on with the model of this run or checkpoint on newer data: train on the events since its end.",
    ),
    narrow: bool = typer.Option(False, "--narrow-tables", help="Halve the width of item tables and double their rows."),
    runs: Path = typer.Option(Path("runs"), "--runs", help="Write the run into this folder of runs."),
    resume: str = typer.Option(
        "never", "--resume", help="Resume this run; `auto` resumes the newest unfinished run; `never` starts a new run."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check config, data and sizes; train nothing."),
    fast_dev_run: bool = typer.Option(False, "--fast-dev-run", help="Train two steps, then evaluate and export."),
    settings: bool = typer.Option(False, "--settings", help="List every setting with its value and meaning, and stop."),
    print_config: bool = typer.Option(False, "--print-config", help="Print the resolved config and stop."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
) -> None:
    """Train a model and write a run directory with checkpoints and metrics."""
    began = time.perf_counter()
    from tackboard.train.config import config_to_json
    from tackboard.train.continuation import with_instant

    if fast_dev_run:
        overrides = [*overrides, "training.steps=2", "training.checkpoint_every=1", "training.log_every=1"]
    config = _configured(recipe, overrides, start, goes_on, narrow=narrow)
    if settings:
        _print_settings(config)
        return
    if print_config:
        typer.echo(json.dumps(config_to_json(with_instant(config)), indent=2))
        return
    from tackboard.parallel.meeting import end_world, start_world
    from tackboard.parallel.roll_call import lost_processes_named

    world = start_world(config.parallel, config.training.device)
    with lost_processes_named(world):
        result = _run(config, world, runs, resume, began, dry_run=dry_run, fast_dev_run=fast_dev_run)
        end_world(world)
    if world.is_first:
        _report(result, json_output)


def _run(
    config: RunConfig,
    world: TrainingWorld,
    runs: Path,
    resume: str,
    began: float,
    *,
    dry_run: bool,
    fast_dev_run: bool,
) -> dict[str, Any]:
    """Trains, or only estimates what a run needs; returns what to report. All processes of `world` call this."""
    from tackboard.checkpoint.store import CheckpointStore, find_checkpoint
    from tackboard.core.rundir import RunDirectory
    from tackboard.parallel.agreement import check_agreement, run_facts
    from tackboard.parallel.sharded_tables import measured_balance
    from tackboard.train.config import config_to_json
    from tackboard.train.continuation import check_alone, with_instant
    from tackboard.train.resume import newest_checkpoint
    from tackboard.train.start import open_source

    check_alone(config, world)
    found = _find_run(config, runs, resume) if world.is_first else None
    config = with_instant(config, found.config if found else None)
    path = world.from_first(found and found.path)
    checkpoint = newest_checkpoint(CheckpointStore(path / "checkpoints"), world) if path else None
    source = open_source(config, checkpoint)
    check_agreement(world, run_facts(world, config_to_json(config), source.snapshot, features=source.features.hash))
    if config.data.dataset and world.is_first:  # A stream has no snapshot that could hold forgotten users.
        _warn_of_forgotten(source.dataset.path)
    with world.first_before_others():  # The first process writes the index of the data, which the others read.
        steps = config.data.steps(
            *(source, config.model.tables, config.seed), quiet=False, rank=world.rank, world_size=world.size
        )
    if world.is_first:
        _warn_of_choices(config, source)
    if dry_run or path is None:
        from tackboard.train.dry_run import estimate_run

        # A run that does not fit into memory or disk is refused before anything is allocated.
        estimate = estimate_run(config, source, runs, steps, is_resumed=checkpoint is not None, world=world)
        if dry_run:
            return estimate
    from tackboard.train.footprint import footprint
    from tackboard.train.trainer import Trainer

    is_new = path is None
    run = RunDirectory(path or world.from_first(RunDirectory.new(runs, config.name).path), is_writer=world.is_first)
    # Impossible settings fail here, before a run directory is written.
    trainer = Trainer(config, run, source, steps=steps, checkpoint=checkpoint, world=world, quiet=False)
    # The checkpoint's files are memory-mapped. While this variable exists, deleting them would free no disk space.
    del checkpoint
    if is_new:
        run.write(config_to_json(config))
    code_file = _trust_own_code(config)
    busy_s = -time.process_time()
    trainer.train()
    busy_s += time.process_time()
    result: dict[str, Any] = {
        "run": str(run.path),
        "status": run.status,
        "step": trainer.step,
        "checkpoint": str(find_checkpoint(run.path)),
        "tokens": trainer.num_tokens,
        "tokens_per_s": round(trainer.tokens_per_s, 1),
        "final_loss": trainer.last_loss,
        "seconds_to_start": round(trainer.began - began, 2),
        **footprint(trainer.model, trainer.optimizers, find_checkpoint(run.path), world),
        "features": source.features.reads(),
        "trimming": dict(source.trimming),
    }
    if not world.is_alone:
        result |= {"processes": world.size, "wire": trainer.optimizers.wire()}
        balance = measured_balance(trainer.sharded, world, trainer.num_made, busy_s)
        result |= {"balance": balance and dataclasses.asdict(balance)}
    if fast_dev_run and world.is_first:
        result |= _after_training(run, source.dataset, code_file)
    return result


def _configured(recipe: str, overrides: list[str], start: str, goes_on: str = "", *, narrow: bool = False) -> RunConfig:
    """Returns the config of a recipe with the values of --set, --from and --continue, and narrow tables if wanted."""
    from tackboard.core.config import apply_overrides
    from tackboard.core.errors import UsageError
    from tackboard.recipes.registry import find_recipe

    config: RunConfig = apply_overrides(find_recipe(recipe), overrides)
    if narrow:
        config = _with_narrow_tables(config)
    if start and goes_on:
        raise UsageError(
            f"--from {start} and --continue {goes_on} are both given",
            allowed="--from takes the parameters of a run for another model or task; --continue goes on with a run",
            fix="give only one of them",
        )
    option, wanted = ("--continue", goes_on) if goes_on else ("--from", start)
    if not wanted:
        return config
    if any(override.startswith("start.run=") for override in overrides) and config.start.run != wanted:
        raise UsageError(
            f"{option} {wanted} and --set start.run={config.start.run} name different runs",
            allowed=f"{option} RUN does the same as --set start.run=RUN{' and more' if goes_on else ''}",
            fix="give only one of them",
        )
    return apply_overrides(config, [f"start.run={wanted}", *(["start.is_continued=true"] if goes_on else [])])


def _with_narrow_tables(config: RunConfig) -> RunConfig:
    """Returns the config with tables of half the width and twice the rows. The run stores these numbers."""
    from tackboard.models.tables import halved

    model = dataclasses.replace(config.model, tables=halved(config.model.tables))
    return dataclasses.replace(config, model=model)


def _warn_of_forgotten(snapshot: Path) -> None:
    """Warns if a snapshot still holds users who must be forgotten."""
    from tackboard.core.progress import say
    from tackboard.events.privacy.forgetting import read_forgotten, remains_in

    held = remains_in(snapshot, read_forgotten(snapshot.resolve().parent))
    if held.num_users:
        what = f"{snapshot} holds {held.num_users:,} forgotten users"
        say(f"warning: {what}; remove them: tackboard data retain {snapshot.resolve().parent}")


def _warn_of_choices(config: RunConfig, source: SequenceSource) -> None:
    """Warns if the log suggests another split or filter than the run has. Only pretraining on a log has these."""
    from tackboard.core.progress import say
    from tackboard.data.loader import DataConfig
    from tackboard.data.stored_turnover import turnover_once
    from tackboard.events.checks.advice import warnings_of

    if isinstance(config.data, DataConfig):
        filter_seen = config.evaluation.filter_seen
        for warning in warnings_of(turnover_once(source), split=config.data.split, filter_seen=filter_seen):
            say(f"warning: {warning}")


def _print_settings(config: RunConfig) -> None:
    from tackboard.core.config import explain

    rows = explain(config)
    width = max(len(f"{name}={value}") for name, value, _ in rows)
    for name, value, meaning in rows:
        typer.echo(f"{f'{name}={value}':<{width}}  {meaning}")


def _find_run(config: RunConfig, runs: Path, resume: str) -> RunDirectory | None:
    """Returns the run to resume, or None for a new run. Raises UsageError if settings that affect the result differ."""
    from tackboard.core.errors import UsageError
    from tackboard.core.progress import say
    from tackboard.core.rundir import RunDirectory
    from tackboard.train.continuation import with_instant
    from tackboard.train.resume import changed_settings, find_unfinished

    if resume == "never":
        return None
    if resume == "auto":
        found, sentence = find_unfinished(runs, config)
        say(sentence)
        return found
    run = RunDirectory.open(Path(resume))
    if changed := changed_settings(run.config, with_instant(config, run.config)):
        raise UsageError(
            f"{resume} was started with other settings: {', '.join(changed)[:200]}",
            allowed="a resumed run keeps the settings that decide its result",
            fix="leave these settings as they were, or start a new run with --resume never",
        )
    return run


def _trust_own_code(config: RunConfig) -> Path | None:
    """Lets later commands run the file of a user's own model. Returns the file, or None for a model of Tackboard."""
    from tackboard.core.trusted_code import trust_code
    from tackboard.models.description import describe_model

    described = describe_model(config.model)
    if "code_file" not in described:
        return None
    path = Path(described["code_file"])
    trust_code(path, described["code_sha256"])
    return path


def _after_training(run: RunDirectory, dataset: Dataset, code_file: Path | None) -> dict[str, Any]:
    """Loads the model, evaluates it on a few users, and exports it."""
    from tackboard.checkpoint.store import find_checkpoint
    from tackboard.checkpoint.trained import load_trained
    from tackboard.cli.evaluate import evaluate_run
    from tackboard.export.exporter import export_bundle

    checkpoint = load_trained(find_checkpoint(run.path))
    table = evaluate_run(checkpoint, verified=dataset, max_users=32, code_file=code_file, quiet=True)
    exported = export_bundle(
        checkpoint, run.path / "bundle", name="dev", version="1", tables="fp16", code_file=code_file
    )
    return {"evaluated_users": table["num_users"], "bundle": exported["bundle"]}


def _report(result: dict[str, Any], json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps(result))
        return
    if "trimming" in result:
        trimming, left = result["trimming"], ", ".join(result["trimming"]["skipped"]) or "nothing"
        saved = f"not read: {left}; {trimming['bytes_saved'] / 1e6:.1f} MB saved"
        result = result | {"features": ", ".join(result["features"]), "trimming": saved}
    if balance := result.pop("balance", None):
        result["busy_ms_per_step"] = [round(process["measured_ms_per_step"], 1) for process in balance["processes"]]
        result["lookups_per_step"] = [round(process["measured_lookups_per_step"]) for process in balance["processes"]]
        wire = result["wire"]
        result["wire"] = f"{wire['payload_bytes'] / 1e6:.1f} MB sent by process 0, {wire['share']:.1%} of fp32"
    for key, value in result.items():
        shown = round(value, 4) if isinstance(value, float) else value
        typer.echo(f"{key:>20}  {f'{shown:,}' if isinstance(value, int) else shown}")
