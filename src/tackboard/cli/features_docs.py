"""`tackboard features docs SPEC`: a page that says where features come from and who uses them; and the reference."""

from __future__ import annotations

from pathlib import Path

import typer


def features_docs(
    spec: str = typer.Argument("", help="file.py[:name], features.json, a bundle, checkpoint, run or dataset."),
    models: list[Path] = typer.Option([], "--models", help="A bundle, run or checkpoint; may be given more than once."),
    out: Path | None = typer.Option(None, "--out", help="Where to write; features.html by default."),
    reference: bool = typer.Option(
        False,
        "--reference",
        help="Print the operator reference; with --out PAGE.md, put it between the page's markers.",
    ),
) -> None:
    """Write a static page of features: source, transform, and the models that use it."""
    from tackboard.core.errors import UsageError

    if reference:
        from tackboard.features.reference import reference as operator_reference
        from tackboard.features.reference import refresh

        if spec or models:
            raise UsageError("--reference is about the language and takes no features")
        if out is not None and not out.is_file():
            raise UsageError(f"{out} is not a file", allowed="allowed: a page with the reference's markers")
        if out is None:
            typer.echo(operator_reference(), nl=False)
        else:
            typer.echo(f"{out}: {'reference renewed' if refresh(out) else 'reference was up to date'}")
        return
    from tackboard.core.files import write_text_atomic
    from tackboard.features.catalogue import Catalogue, read_model
    from tackboard.features.feature_set import load_features

    if not spec:
        raise UsageError("no features were named", fix="tackboard features docs features.py")
    catalogue = Catalogue(load_features(spec), [read_model(folder) for folder in models])
    path = out or Path("features.html")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder", allowed="allowed: --out in a folder that exists")
    write_text_atomic(path, catalogue.page())
    typer.echo(f"{path}: {len(catalogue.features)} features, {len(catalogue.sources)} sources, {len(models)} models")
