"""`tackboard data import`: the files of a public dataset, as they were downloaded, in; a dataset out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data_import(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A public dataset; see --list.")] = None,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="What you downloaded: an archive, a folder or files.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of datasets.")] = Path("datasets"),
    as_: Annotated[str | None, typer.Option("--name", help="Name of the dataset; NAME by default.")] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Show what can be imported, from where, on what terms.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Make a dataset from the files of a public one."""
    from json import dumps

    from tackboard.core.errors import UsageError
    from tackboard.events.dataset import open_dataset
    from tackboard.events.public.listing import find_public
    from tackboard.events.public.publisher import import_public

    if list_:
        typer.echo(_listing(json=json))
        return
    if name is None:
        raise UsageError("no dataset was named", fix="see `tackboard data import --list`")
    public = find_public(name)
    if not files:
        raise UsageError(f"no file of {name} was given", allowed=f"needed: {public.files}", fix=f"from {public.source}")
    path, _ = import_public(public, files, out, as_)
    dataset = open_dataset(path)
    if json:
        content = {"dataset": str(dataset.path), "statistics": dict(dataset.statistics)}
        typer.echo(dumps(content | {"note": public.note, "terms": public.terms}))
        return
    lines = [
        f"events       {dataset.num_events:>12,}",
        f"users        {dataset.num_users:>12,}",
        f"items        {dataset.num_items:>12,}",
        f"actions      {', '.join(dataset.actions)}",
        f"note         {public.note}",
        f"terms        {public.terms}",
        f"dataset      {dataset.path}",
    ]
    typer.echo("\n".join(lines))


def _listing(*, json: bool) -> str:
    import dataclasses
    from json import dumps

    from tackboard.events.public.listing import DATASETS

    if json:
        names = ("name", "title", "files", "source", "terms", "note")
        entries = [
            {key: getattr(public, key) for key in names} | {"counts": dataclasses.asdict(public.counts)}
            for public in DATASETS.values()
        ]
        return dumps({"datasets": entries})
    lines = []
    for public in DATASETS.values():
        counts = public.counts
        lines += [
            f"{public.name}: {public.title}",
            f"  {counts.users:,} users, {counts.items:,} items, {counts.events:,} events",
            f"  files  {public.files}",
            f"  from   {public.source}",
            f"  terms  {public.terms}",
            f"  note   {public.note}",
        ]
    return "\n".join([*lines, "", "tackboard data import NAME FILE...   # the files as you downloaded them"])
