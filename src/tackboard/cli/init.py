"""`tackboard init` makes a dataset and a recipe from a user's own log, and prints a summary."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tackboard.events.checks.advice import Advice
    from tackboard.events.dataset import Dataset
    from tackboard.events.importer import ImportReport

LOG_HELP = "Read this log: CSV, gzipped CSV or Parquet, a folder of them, or a quoted pattern such as 'logs/*.csv'."


def init(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help=LOG_HELP, show_default=False)] = None,
    from_: Annotated[list[Path] | None, typer.Option("--from", help="Read this log too. Repeatable.")] = None,
    *,
    user: Annotated[str, typer.Option(help="Read user ids from this column.")],
    item: Annotated[str, typer.Option(help="Read item ids from this column.")],
    time: Annotated[str, typer.Option(help="Read times from this column: s, ms, µs or ns since 1970, or ISO 8601.")],
    action: Annotated[str | None, typer.Option(help="Read actions from this column.")] = None,
    surface: Annotated[str | None, typer.Option(help="Read surfaces from this column.")] = None,
    request: Annotated[str | None, typer.Option(help="Read request ids from this column.")] = None,
    position: Annotated[str | None, typer.Option(help="Read positions in requests (from 0) from this column.")] = None,
    received: Annotated[str | None, typer.Option(help="Read the log's times of receipt from this column.")] = None,
    context: Annotated[str | None, typer.Option(help="Read contexts (JSON objects) from this column.")] = None,
    field: Annotated[list[str] | None, typer.Option(help="Keep another column: COLUMN or name=COLUMN.")] = None,
    items: Annotated[Path | None, typer.Option(help="Read item attributes from this file.")] = None,
    users: Annotated[Path | None, typer.Option(help="Read user attributes from this file.")] = None,
    impressions: Annotated[list[Path] | None, typer.Option(help="Read this log of shown items (same columns).")] = None,
    name: Annotated[str | None, typer.Option(help="Name the dataset; default: the file's name.")] = None,
    out: Annotated[Path, typer.Option(help="Write into this folder of datasets.")] = Path("datasets"),
    recipe: Annotated[Path, typer.Option(help="Write the recipe to this file.")] = Path("recipe.py"),
    max_bad_share: Annotated[float, typer.Option(help="Drop unusable rows; fail if their share is above this.")] = 0.01,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe file.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Make a dataset and a recipe from your own log."""
    from tackboard.core.errors import UsageError
    from tackboard.events.checks.advice import advise
    from tackboard.events.checks.turnover import measure_turnover
    from tackboard.events.dataset import open_dataset
    from tackboard.events.fields import parse_field_options
    from tackboard.events.importer import ImportConfig, default_name, import_log
    from tackboard.events.recipe_file import check_recipe_path, recipe_text, write_recipe

    given = [*(files or []), *(from_ or [])]
    if not given:
        raise UsageError("no log was given", fix="name a log: tackboard init clicks.csv --user … --item … --time …")
    config = ImportConfig(
        files=given,
        user=user,
        item=item,
        time=time,
        action=action,
        surface=surface,
        request=request,
        position=position,
        received=received,
        context=context,
        fields=parse_field_options(field or []),
        items=items,
        users=users,
        impressions=impressions or (),
        max_bad_share=max_bad_share,
    )
    check_recipe_path(recipe, force=force)
    dataset_name = name or default_name(given[0])
    path, report = import_log(config, out, dataset_name)
    dataset = open_dataset(path)
    folder = (out / dataset_name).as_posix()
    measures = measure_turnover(dataset)
    advice = advise(measures)
    write_recipe(recipe, recipe_text(recipe, folder, dataset_name, dataset.statistics, advice))
    if json_output:
        content = {"dataset": str(dataset.path), "recipe": str(recipe), "report": dataclasses.asdict(report)}
        content |= {"measures": dataclasses.asdict(measures), "advice": dataclasses.asdict(advice)}
        typer.echo(json.dumps(content | {"statistics": dict(dataset.statistics)}))
    else:
        typer.echo("\n".join(_summary(dataset, report, recipe, advice)))


def _summary(dataset: Dataset, report: ImportReport, recipe: Path, advice: Advice) -> list[str]:
    from datetime import UTC, datetime

    first, last = (
        datetime.fromtimestamp(dataset.statistics[key] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        for key in ("first_ms", "last_ms")
    )
    num_untouched = dataset.num_items - dataset.statistics["num_items"]
    untouched = f", {num_untouched:,} without events" if num_untouched else ""
    lines = [
        f"rows read    {report.rows_read:>12,}",
        f"rows kept    {report.rows_kept:>12,}",
        f"users        {dataset.num_users:>12,}  ({dataset.user_type} ids)",
        f"items        {dataset.num_items:>12,}  ({dataset.item_type} ids{untouched})",
        f"actions      {', '.join(dataset.actions[:8])}",
        f"surfaces     {', '.join(dataset.surfaces[:8])}",
        f"time span    {first} to {last} UTC (read as {report.time_unit})",
    ]
    if report.impressions_kept:
        num_without = report.impressions_without_position
        without = (
            f"  ({num_without:,} without a position; name the column of positions with --position)"
            if num_without
            else ""
        )
        lines.append(f"impressions  {report.impressions_kept:>12,}{without}")
    if dataset.fields:
        lines.append(f"fields       {', '.join(f'{name} ({kind})' for name, kind in dataset.fields.items())}")
    left_out = ((report.forgotten_events, "events"), (report.forgotten_impressions, "impressions"))
    lines += [f"left out     {count:>12,}  {what} of forgotten users" for count, what in left_out if count]
    lines += [f"fixed        {count:>12,}  {text}" for count, text in report.fixes()]
    lines += [f"advice       {line}" for line in advice.lines()]
    lines += [
        f"dataset      {dataset.path}",
        f"recipe       {recipe}",
        "",
        "next:",
        f"  tackboard train {recipe}:recipe --fast-dev-run    # a few steps, to see that it runs",
        f"  tackboard train {recipe}:recipe",
    ]
    return lines
