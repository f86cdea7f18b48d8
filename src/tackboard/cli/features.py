"""`tackboard features …` checks, explains, computes and documents features, and compares them with served features.

SPEC is a Python file of features, a features.json, or a bundle, checkpoint, run or dataset that has a features.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Define features once: check, explain, compute, document.", no_args_is_help=True, rich_markup_mode=None
)

SPEC_HELP = "Read features from file.py[:name], features.json, a bundle, checkpoint, run or dataset."
Spec = Annotated[str, typer.Argument(help=SPEC_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command("check")
def features_check(
    spec: Spec,
    data: Path | None = typer.Option(None, "--data", help="Check that this dataset has SPEC's columns and ranges."),
    against: str | None = typer.Option(None, "--against", help="Fail if SPEC changes this older SPEC incompatibly."),
    json_output: Json = False,
) -> None:
    """Compile a feature set and list its features."""
    from tackboard.events.dataset import open_dataset
    from tackboard.features.data_check import check_data
    from tackboard.features.evolution import check_evolution, sentences
    from tackboard.features.feature_set import load_features

    features = load_features(spec)
    changes = [] if against is None else check_evolution(load_features(against), features)
    if data is not None:
        check_data(features, open_dataset(data))
    names = ("name", "type", "level", "place", "description", "hash")
    rows = [
        {name: getattr(feature, name) for name in names} | {"type": str(feature.type)}
        for feature in features.features()
    ]
    if json_output:
        result = {
            "name": features.name,
            "version": features.version,
            "hash": features.hash,
            "features": rows,
            "data": None if data is None else str(data),
            "changes": [dataclasses.asdict(change) for change in changes],
        }
        typer.echo(json.dumps(result))
        return
    columns = ("name", "type", "level", "place")
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    for row in (dict(zip(columns, columns, strict=True)), *rows):
        typer.echo("  ".join(row[column].ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip())
    typer.echo(f"feature set {features.name}, version {features.version}, {features.hash[:12]}: {len(rows)} features")
    if data is not None:
        typer.echo(f"{data} has every column that is read, with the declared type and values in the declared range")
    for sentence in sentences(changes):
        typer.echo(f"since {against}: {sentence}")
    if against is not None and not changes:
        typer.echo(f"nothing changed since {against}")


@app.command("explain")
def features_explain(
    spec: Spec,
    feature: list[str] | None = typer.Option(None, "--feature", help="Show only this feature. Repeatable."),
    json_output: Json = False,
) -> None:
    """Show the plan of a feature set, one line per operation."""
    from tackboard.features.feature_set import load_features
    from tackboard.features.plan import LEVELS

    features = load_features(spec)
    if feature:
        features = features.trimmed(feature)
    if not json_output:
        typer.echo(features.explain())
        return
    result = features.to_json()
    for entry, node in zip(result["nodes"], features.plan.nodes, strict=True):
        entry |= {"type": str(node.type), "level": LEVELS[node.level]}
    typer.echo(json.dumps(result))


@app.command("backfill")
def features_backfill(
    spec: Spec,
    data: Path = typer.Option(..., "--data", help="Take the newest snapshot in this dataset's folder."),
    json_output: Json = False,
) -> None:
    """Compute the features of every event of a dataset and add them to it, as a new snapshot."""
    from tackboard.events.dataset import open_dataset
    from tackboard.features.backfill import backfill
    from tackboard.features.evolution import sentences
    from tackboard.features.feature_set import load_features

    features = load_features(spec)
    result = backfill(open_dataset(data), features)
    if json_output:
        answer = {
            "dataset": str(result.path),
            "set": features.name,
            "version": features.version,
            "hash": features.hash,
            **{name: getattr(result, name) for name in ("num_rows", "computed", "taken_over")},
            "changes": [dataclasses.asdict(change) for change in result.changes],
        }
        typer.echo(json.dumps(answer))
        return
    for sentence in sentences(result.changes):
        typer.echo(sentence)
    typer.echo(
        f"{result.num_rows:,} events; {len(result.computed)} features computed, "
        f"{len(result.taken_over)} copied from the last snapshot\ndataset  {result.path}"
    )


@app.command("docs")
def features_docs(
    spec: Spec = "",
    models: list[Path] = typer.Option(
        [], "--models", help="Show which features this bundle, run or checkpoint uses. Repeatable."
    ),
    out: Path | None = typer.Option(None, "--out", help="Write to this file; default: features.html."),
    reference: bool = typer.Option(
        False,
        "--reference",
        help="Print the operator reference; with --out PAGE.md, put it between the page's markers.",
    ),
) -> None:
    """Write a page that shows the source and the transform of each feature, and the models that use the feature."""
    from tackboard.core.errors import UsageError

    if reference:
        from tackboard.features.reference import reference as operator_reference
        from tackboard.features.reference import refresh

        if spec or models:
            raise UsageError("--reference prints the operators of the language and takes no features")
        if out is not None and not out.is_file():
            raise UsageError(f"--out {out} is not a file", allowed="allowed: a page with the markers of the reference")
        if out is None:
            typer.echo(operator_reference(), nl=False)
        else:
            typer.echo(f"{out}: {'reference renewed' if refresh(out) else 'reference was up to date'}")
        return
    from tackboard.core.files import write_text_atomic
    from tackboard.features.feature_catalogue import FeatureCatalogue, read_model
    from tackboard.features.feature_set import load_features

    if not spec:
        raise UsageError("no features were named", fix="tackboard features docs features.py")
    catalogue = FeatureCatalogue(load_features(spec), [read_model(folder) for folder in models])
    path = out or Path("features.html")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder", allowed="allowed: --out in an existing folder")
    write_text_atomic(path, catalogue.page())
    typer.echo(f"{path}: {len(catalogue.features)} features, {len(catalogue.sources)} sources, {len(models)} models")


@app.command("replay")
def features_replay(
    log: Path = typer.Argument(..., help="Read the folder of `tackboard serve --log-features`, or one of its files."),
    data: Path = typer.Option(..., "--data", help="Take the events of the logged users from this dataset."),
    key: Path = typer.Option(..., "--key", help="Read the key from this file, the server's --log-key."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Replay at most this many requests."),
    examples: int = typer.Option(3, "--examples", min=0, help="Show at most this many differences of each feature."),
    json_output: Json = False,
) -> None:
    """Compute logged features again from a dataset and compare them bit for bit. If some differ, exit with code 3."""
    from tackboard.core.errors import DataError
    from tackboard.events.dataset import open_dataset
    from tackboard.features.replay import replay
    from tackboard.features.serving_log import read_key

    report = replay(log, open_dataset(data), read_key(key), max_requests=limit, num_examples=examples)
    typer.echo(json.dumps(report.to_json()) if json_output else report.text())
    if report.num_mismatches:
        name, result = report.worst()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in result.mismatches.items() if count)
        others = sum(1 for other in report.features.values() if other.num_mismatches) - 1
        raise DataError(
            f"the served values of feature {name} differ from training: "
            f"{result.num_mismatches:,} of {result.compared:,} values differ ({reasons})",
            allowed=f"number of other features that differ: {others}" if others else "",
            fix="docs/serving.md says what the reasons mean",
        )
