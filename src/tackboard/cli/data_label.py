"""`tackboard data label DATASET --label ACTION=WINDOW`: what was shown and what came of it, as a new snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tackboard.data.requests import Labelled


def data_label(
    dataset: Annotated[Path, typer.Argument(help="The dataset's folder; its newest snapshot is taken.")],
    label: Annotated[list[str], typer.Option(help="ACTION=WINDOW, e.g. save=7d or click=30m; repeatable.")],
    shown: Annotated[
        str | None, typer.Option(help="The action that means shown, where events are impressions.")
    ] = None,
    negatives: Annotated[int | None, typer.Option(help="Most negatives to keep per request; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Key of the draw of negatives.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Join actions to what each request showed, and add the labelled requests to the dataset."""
    import dataclasses
    from json import dumps

    from tackboard.data.labels import LabelConfig, parse_label
    from tackboard.data.requests import label_dataset
    from tackboard.events.dataset import open_dataset

    config = LabelConfig(labels=tuple(parse_label(text) for text in label), shown=shown, negatives=negatives, seed=seed)
    result = label_dataset(open_dataset(dataset), config)
    if json:
        content = {"dataset": str(result.path), "end_ms": result.end_ms}
        typer.echo(dumps(content | {"rules": dataclasses.asdict(config), "counts": dataclasses.asdict(result.counts)}))
        return
    typer.echo("\n".join(_summary(result)))


def _summary(result: Labelled) -> list[str]:
    counts = result.counts
    lines = [f"requests     {counts.requests:>12,}", f"candidates   {counts.candidates:>12,}"]
    for name, count in counts.labels.items():
        lines.append(
            f"{name:<12} {count.positives:>12,}  positive, {count.negatives:,} negative, "
            f"{count.not_known_yet:,} not known yet"
        )
    for name, count in counts.labels.items():
        reasons = (
            (count.actions_repeated, "again after the first"),
            (count.actions_late, "after the window"),
            (count.actions_early, "before the item was shown"),
            (count.actions_not_shown, "on an item that the request did not show"),
            (count.actions_without_request, "without a request"),
        )
        lines += [f"no label     {number:>12,}  {name} {reason}" for number, reason in reasons if number]
    left_out = (
        (counts.negatives_left_out, "negatives, by --negatives; those kept weigh more"),
        (counts.impressions_repeated, "impressions of an item that the request had shown already"),
        (counts.impressions_without_request, "impressions without a request"),
        (counts.impressions_without_user, "impressions whose request has no event, so no user"),
    )
    lines += [f"left out     {number:>12,}  {what}" for number, what in left_out if number]
    if counts.events_in_future:
        lines.append(
            f"ignored      {counts.events_in_future:>12,}  received times in the future, for the end of the log"
        )
    return [*lines, f"dataset      {result.path}"]
