"""`tackboard predict DATASET --bundle B --out FOLDER` scores the candidates of all labelled requests of a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def predict(
    dataset: Path = typer.Argument(
        ..., help="Score the requests of this snapshot, or of the newest snapshot in this dataset's folder."
    ),
    bundle: Path = typer.Option(..., "--bundle", help="Score with the model of this bundle."),
    out: Path = typer.Option(..., "--out", help="Write into this folder; after a kill, run the command again."),
    code: Path | None = typer.Option(None, help="Run this Python file, which holds a model of your own."),
    device: str = typer.Option("auto", "--device", help="Compute on cpu, cuda, or auto: a GPU if there is one."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Score every candidate of the labelled requests with a bundle, and write the scores as Parquet.

    The scores are those of `tackboard evaluate` and of the server. Run the same command again after a kill: it goes on
    where it stopped. The folder is finished when it has a MANIFEST.json.
    """
    from tackboard.cli.evaluate import device_named, warn_of_unseen
    from tackboard.evaluation.prediction import open_for_prediction
    from tackboard.evaluation.prediction import predict as write_predictions
    from tackboard.events.dataset import open_dataset
    from tackboard.scoring.scorer import Scorer

    place = device_named(device)
    scorer = Scorer.load(bundle, code_file=code)
    scorer.model.to(place)
    source = open_for_prediction(open_dataset(dataset), scorer)
    warn_of_unseen(source)
    result = write_predictions(source, scorer, bundle, out, code_file=code)
    if json_output:
        typer.echo(json.dumps(result))
        return
    rows = f"{result['num_candidates']:,} candidates of {result['num_requests']:,} requests"
    if result["was_finished"]:
        typer.echo(f"{out}: was finished before; {rows} with {result['bundle']}; nothing was written")
        return
    kept = f", {result['num_parts_kept']} of them from before" if result["num_parts_kept"] else ""
    typer.echo(f"{out}: {rows} with {result['bundle']}, {result['num_parts']} files{kept}")
    typer.echo(f"{result['seconds']:.1f} s, {result['rows_per_s']:,.0f} rows/s")
