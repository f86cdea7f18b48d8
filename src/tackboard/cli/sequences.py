"""The commands `tackboard sequences …` make, fill, read and correct a sequence store, and delete old events."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tackboard.events.importer import ImportReport
    from tackboard.events.sequence_store.engine import Appended
    from tackboard.events.sequence_store.interface import StoredSequences

app = typer.Typer(help="Keep users' histories: append, read, correct.", no_args_is_help=True, rich_markup_mode=None)

JSON_LINES = (".jsonl", ".ndjson")
Store = Annotated[str, typer.Argument(help="Use the store at this path, or at redis://host:port/db?prefix=name.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def without_password(url: str) -> str:
    """Returns the address of a store as it may be shown: a URL without user name and password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else url


@app.command("create")
def sequences_create(
    store: Store,
    field: list[str] = typer.Option([], "--field", help="Add a field: name=int, float, bool or string. Repeatable."),
    max_events: int = typer.Option(16_000, "--max-events", min=1, help="Keep at most this many events of each user."),
) -> None:
    """Make an empty store. This is optional for logs: `sequences append` makes a missing store from a log's columns."""
    from tackboard.core.errors import UsageError
    from tackboard.events.sequence_store import StoreConfig, create_store

    fields = {}
    for option in field:
        name, equals, kind = option.partition("=")
        if not equals or name in fields:
            raise UsageError(
                f"--field {option} is not name=TYPE, or repeats a name",
                allowed="allowed: name=int, float, bool or string, each name once",
            )
        fields[name] = kind
    create_store(store, StoreConfig(fields=fields, max_events=max_events)).close()
    typer.echo(f"made {without_password(store)}: it keeps at most {max_events:,} events of each user")


@app.command("append")
def sequences_append(
    store: Store,
    file: Annotated[
        Path,
        typer.Argument(help="Read CSV, gzipped CSV, Parquet or JSON lines (.jsonl, - for stdin)."),
    ],
    user: Annotated[str, typer.Option(help="Read user ids from this column.")] = "user",
    item: Annotated[str, typer.Option(help="Read item ids from this column.")] = "item",
    time: Annotated[
        str, typer.Option(help="Read times from this column: s, ms, µs or ns since 1970, or ISO 8601.")
    ] = "time",
    action: Annotated[str | None, typer.Option(help="Read actions from this column.")] = None,
    surface: Annotated[str | None, typer.Option(help="Read surfaces from this column.")] = None,
    request: Annotated[str | None, typer.Option(help="Read request ids from this column.")] = None,
    position: Annotated[str | None, typer.Option(help="Read positions in requests (from 0) from this column.")] = None,
    received: Annotated[str | None, typer.Option(help="Read the log's times of receipt from this column.")] = None,
    field: Annotated[list[str] | None, typer.Option(help="Keep another column: COLUMN or name=COLUMN.")] = None,
    max_bad_share: Annotated[float, typer.Option(help="Drop unusable rows; fail if their share is above this.")] = 0.01,
    json_output: Json = False,
) -> None:
    """Append events. A missing store is made from a log (not JSON lines). Appending a file again changes nothing."""
    from tackboard.core.errors import UsageError
    from tackboard.events.fields import parse_field_options
    from tackboard.events.importer import ImportConfig
    from tackboard.events.sequence_store.event_files import append_json_lines, append_table, config_of, read_log
    from tackboard.events.sequence_store.opening import create_store, open_store, store_exists

    is_new = not store_exists(store)
    if str(file) == "-" or file.suffix in JSON_LINES:
        if str(file) != "-" and not file.is_file():
            raise UsageError(f"{file} does not exist", fix="give the path of a file with one JSON object per line")
        if is_new:
            # The fields of a store are fixed when it is made, and the first JSON lines may not show all fields.
            raise UsageError(
                f"{without_password(store)} does not exist",
                fix=f"tackboard sequences create {without_password(store)} --field dwell_ms=int …",
            )
        with open_store(store) as opened:
            if str(file) == "-":
                answer = append_json_lines(opened, sys.stdin, "standard input")
            else:
                with file.open(encoding="utf-8", errors="surrogateescape") as lines:
                    answer = append_json_lines(opened, lines, str(file))
        _print_appended(store, answer, None, is_new=is_new, as_json=json_output)
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
    _print_appended(store, answer, report, is_new=is_new, as_json=json_output)


def _print_appended(store: str, answer: Appended, report: ImportReport | None, *, is_new: bool, as_json: bool) -> None:
    if as_json:
        content = {"store": without_password(store), "is_new": is_new, **dataclasses.asdict(answer)}
        typer.echo(json.dumps(content | ({} if report is None else {"report": dataclasses.asdict(report)})))
        return
    lines = [
        f"store        {without_password(store)}{' (made)' if is_new else ''}",
        f"appended     {answer.num_events:>12,}",
        f"held already {answer.num_duplicates:>12,}  duplicates: dropped",
    ]
    if answer.num_forgotten:
        lines.append(f"refused      {answer.num_forgotten:>12,}  received before their user was forgotten")
    if report is not None:
        lines += [f"fixed        {count:>12,}  {text}" for count, text in report.fixes()]
    typer.echo("\n".join(lines))


@app.command("read")
def sequences_read(
    store: Store,
    user: str = typer.Option(..., "--user", help="Show the user who has this id in the log."),
    last: int | None = typer.Option(None, "--last", min=1, help="Show at most this many of the newest events."),
    since: str | None = typer.Option(
        None, "--since", help="Show events from this time on: ms since 1970, or ISO 8601."
    ),
    until: str | None = typer.Option(None, "--until", help="Show events before this time: ms since 1970, or ISO 8601."),
    received_before: str | None = typer.Option(None, "--received-before", help="Show events received before a time."),
    fields: str | None = typer.Option(None, "--fields", help="Show these columns, separated by commas; default: all."),
    json_output: Json = False,
) -> None:
    """Show a user's events, oldest first. An unknown user has no events."""
    from tackboard.events.privacy.forgetting import user_ids_of
    from tackboard.events.sequence_store import open_store

    names = None if fields is None else [name.strip() for name in fields.split(",") if name.strip()]
    # A user such as `42` has one id if the log's ids are numbers, and another id if they are text. Read both.
    with open_store(store) as opened:
        found = [
            opened.read(
                user_id,
                names,
                last=last,
                since_ms=milliseconds_of("--since", since),
                until_ms=milliseconds_of("--until", until),
                received_before_ms=milliseconds_of("--received-before", received_before),
            )
            for user_id in user_ids_of(user)
        ]
    _print_events(max(found, key=lambda one: one.num_events), as_json=json_output)


def _print_events(found: StoredSequences, *, as_json: bool) -> None:
    lists = {name: column.to_pylist() for name, column in found.columns.items()}
    if as_json:
        typer.echo(json.dumps({"num_events": found.num_events, "columns": lists}))
        return
    texts = {name: [name, *("" if value is None else str(value) for value in lists[name])] for name in lists}
    widths = {name: max(len(text) for text in texts[name]) for name in texts}
    for row in range(found.num_events + 1):
        typer.echo("  ".join(texts[name][row].ljust(widths[name]) for name in texts).rstrip())


def milliseconds_of(option: str, text: str | None) -> int | None:
    """Reads the time that an option gives, in ms since 1970 or in ISO 8601. Any other text raises UsageError."""
    from datetime import UTC, datetime

    from tackboard.core.errors import UsageError

    if text is None:
        return None
    try:
        if text.lstrip("-").isdigit():
            return int(text)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a time", allowed="allowed: ms since 1970, or ISO 8601 like 2026-11-15T10:00:00Z"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


@app.command("correct")
def sequences_correct(
    store: Store,
    data: Path = typer.Option(..., "--data", help="Use this snapshot, or the newest snapshot in this dataset folder."),
    compare_only: bool = typer.Option(False, "--compare", help="Say what would change; change nothing."),
    json_output: Json = False,
) -> None:
    """Replace events received before the snapshot's end by the snapshot's events. Readers and writers can continue."""
    from tackboard.events.dataset import open_dataset
    from tackboard.events.sequence_store import open_store
    from tackboard.events.sequence_store.correction import compare, correct

    dataset = open_dataset(data)
    with open_store(store) as opened:
        report = compare(opened, dataset) if compare_only else correct(opened, dataset)
    kinds = ("missing", "extra", "different")
    if json_output:
        content = {
            "store": without_password(store),
            "snapshot": str(dataset.path),
            "is_changed": not compare_only,
            **{name: getattr(report, name) for name in ("horizon_ms", "num_users", "num_changed_users")},
            "actions": {
                action: {kind: counts[kind] for kind in kinds} for action, counts in sorted(report.actions.items())
            },
        }
        typer.echo(json.dumps(content))
        return
    verb = "differ" if compare_only else "were corrected"
    typer.echo(f"{report.num_changed_users:,} of {report.num_users:,} users {verb}")
    if report.actions:
        typer.echo(f"{'action':<20}" + "".join(f"{kind:>12}" for kind in kinds))
    for action, counts in sorted(report.actions.items()):
        typer.echo(f"{action:<20}" + "".join(f"{counts[kind]:>12,}" for kind in kinds))


@app.command("stats")
def sequences_stats(
    store: Store,
    json_output: Json = False,
) -> None:
    """Count users and events, and show the store's settings."""
    from tackboard.events.sequence_store import open_store

    with open_store(store) as opened:
        content = {"store": without_password(store), **opened.stats(), "settings": dataclasses.asdict(opened.config)}
    if json_output:
        typer.echo(json.dumps(content))
        return
    settings = content.pop("settings")
    for name, value in {**content, **settings}.items():
        if name == "fields":
            value = ", ".join(f"{field} ({kind})" for field, kind in value.items()) or "none"
        typer.echo(f"{name:<22}{value:,}" if isinstance(value, int) else f"{name:<22}{value}")


@app.command("retain")
def sequences_retain(
    store: Store,
    days: float = typer.Option(..., "--days", help="Delete events that happened more than this many days ago."),
    json_output: Json = False,
) -> None:
    """Delete old events. Readers and writers can continue."""
    from tackboard.events.sequence_store import open_store

    with open_store(store) as opened:
        num_dropped = opened.retain(days)
    typer.echo(
        json.dumps({"store": without_password(store), "num_dropped": num_dropped})
        if json_output
        else f"dropped {num_dropped:,}"
    )


@app.command("migrate")
def sequences_migrate(
    store: Store,
    json_output: Json = False,
) -> None:
    """Add checksums to an older store. Stop its readers and writers first. If the command is killed, run it again."""
    from tackboard.core.errors import counted
    from tackboard.events.sequence_store.codec import FORMAT_VERSION
    from tackboard.events.sequence_store.migration import migrate_store

    report = migrate_store(store)
    if json_output:
        found = {} if report is None else dataclasses.asdict(report)
        typer.echo(json.dumps({"store": without_password(store), "is_changed": report is not None, **found}))
    elif report is None:
        typer.echo(f"{without_password(store)} has format version {FORMAT_VERSION} already; nothing was changed")
    else:
        held = f"{counted(report.num_users, 'user')}, {counted(report.num_events, 'event')}"
        typer.echo(
            f"{without_password(store)} has format version {FORMAT_VERSION} now: {held}, each block with a checksum"
        )
