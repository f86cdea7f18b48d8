"""`tackboard sequences append STORE FILE`: events of a file into a sequence store."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tackboard.events.importer import ImportReport
    from tackboard.events.sequence_store.interface import Appended

JSON_LINES = (".jsonl", ".ndjson")


def sequences_append(
    store: Annotated[str, typer.Argument(help="A path, or redis://host:port/db?prefix=name.")],
    file: Annotated[Path, typer.Argument(help="CSV, gzipped CSV, Parquet, JSON lines (.jsonl), or - for JSON lines.")],
    user: Annotated[str, typer.Option(help="Column of user ids.")] = "user",
    item: Annotated[str, typer.Option(help="Column of item ids.")] = "item",
    time: Annotated[str, typer.Option(help="Column of times: s, ms, µs or ns since 1970, or ISO 8601.")] = "time",
    action: Annotated[str | None, typer.Option(help="Column of actions.")] = None,
    surface: Annotated[str | None, typer.Option(help="Column of surfaces.")] = None,
    request: Annotated[str | None, typer.Option(help="Column of request ids.")] = None,
    position: Annotated[str | None, typer.Option(help="Column of positions in the request, from 0.")] = None,
    received: Annotated[str | None, typer.Option(help="Column of the times at which the log got the event.")] = None,
    field: Annotated[list[str] | None, typer.Option(help="A further column to keep: COLUMN or name=COLUMN.")] = None,
    max_bad_share: Annotated[float, typer.Option(help="Largest share of unusable rows to drop.")] = 0.01,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Append events; a store that is not there is made of a log's columns. The same file again changes nothing."""
    from tackboard.core.errors import UsageError
    from tackboard.events.fields import parse_field_options
    from tackboard.events.importer import ImportConfig
    from tackboard.events.sequence_store.files import append_json_lines, append_table, config_of, read_log
    from tackboard.events.sequence_store.opening import create_store, open_store, store_exists

    is_new = not store_exists(store)
    if str(file) == "-" or file.suffix in JSON_LINES:
        if str(file) != "-" and not file.is_file():
            raise UsageError(f"{file} does not exist", fix="give the path of a file with one JSON object per line")
        if is_new:
            # JSON lines do not say which fields there will be, and a store's are fixed.
            raise UsageError(
                f"{store} does not exist", fix=f"tackboard sequences create {store} --field dwell_ms=int …"
            )
        with open_store(store) as opened:
            if str(file) == "-":
                answer = append_json_lines(opened, sys.stdin, "standard input")
            else:
                with file.open(encoding="utf-8", errors="surrogateescape") as lines:
                    answer = append_json_lines(opened, lines, str(file))
        _report(store, answer, None, is_new=is_new, as_json=json)
        return
    config = ImportConfig(
        files=[file],
        user=user,
        item=item,
        time=time,
        action=action,
        surface=surface,
        request=request,
        position=position,
        received=received,
        fields=parse_field_options(field or []),
        max_bad_share=max_bad_share,
    )
    table, report = read_log(config)
    with create_store(store, config_of(table)) if is_new else open_store(store) as opened:
        answer = append_table(opened, table)
    _report(store, answer, report, is_new=is_new, as_json=json)


def _report(store: str, answer: Appended, report: ImportReport | None, *, is_new: bool, as_json: bool) -> None:
    from json import dumps

    if as_json:
        content = {"store": store, "is_new": is_new, **dataclasses.asdict(answer)}
        typer.echo(dumps(content | ({} if report is None else {"report": dataclasses.asdict(report)})))
        return
    lines = [
        f"store        {store}{' (made)' if is_new else ''}",
        f"appended     {answer.num_events:>12,}",
        f"held already {answer.num_duplicates:>12,}  duplicates: dropped",
    ]
    if answer.num_forgotten:
        lines.append(f"refused      {answer.num_forgotten:>12,}  received before their user was forgotten")
    if report is not None:
        lines += [f"fixed        {count:>12,}  {text}" for count, text in report.fixes()]
    typer.echo("\n".join(lines))
