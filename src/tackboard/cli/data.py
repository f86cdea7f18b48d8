"""The commands `tackboard data …` make, describe and check datasets, and remove users and old events from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tackboard.cli.sequences import milliseconds_of, without_password

if TYPE_CHECKING:
    from tackboard.data.request_layout import Labelled
    from tackboard.events.dataset import Dataset

app = typer.Typer(help="Make, describe and check datasets.", no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", help="Write into this folder of datasets.")]
Newest = Annotated[Path, typer.Argument(help="Take the newest snapshot in this dataset's folder.")]
Snapshot = Annotated[Path, typer.Argument(help="Take this snapshot, or the newest snapshot in this dataset's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command("synth")
def data_synth(
    world: Annotated[
        str, typer.Option(help="Choose a shipped world (`demo`, `news`) or a JSON file of settings.")
    ] = "demo",
    name: Annotated[str | None, typer.Option(help="Name the dataset; default: the world's name.")] = None,
    out: Out = Path("datasets"),
    seed: Annotated[int | None, typer.Option(help="Use this seed instead of the world's.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: num_users=100. Repeatable.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Make a dataset from a synthetic world, whose true probabilities are known."""
    from tackboard.core.config import apply_overrides
    from tackboard.events.dataset import check_name, open_dataset
    from tackboard.events.synthetic.world_config import load_world_config
    from tackboard.events.synthetic.world_dataset import write_world

    config = apply_overrides(load_world_config(world), set_ or [])
    if seed is not None:
        config = apply_overrides(config, [f"seed={seed}"])
    dataset_name = name or Path(world).name.removesuffix(".json")
    check_name(dataset_name)
    dataset = open_dataset(write_world(config, out, dataset_name, quiet=False))
    if json_output:
        typer.echo(json.dumps({"dataset": str(dataset.path), "statistics": dict(dataset.statistics)}))
        return
    popularity, repeats = dataset.statistics["popularity"], dataset.statistics["repeats"]
    lines = [
        *_counts(dataset),
        f"surfaces     {', '.join(dataset.surfaces)}",
        f"popularity   {popularity['top_10_percent_share']:>12.1%}  of events fall on the most popular tenth of items",
        f"repeats      {repeats['share']:>12.1%}  of events are on an item that the user engaged with before",
        f"dataset      {dataset.path}",
    ]
    typer.echo("\n".join(lines))


@app.command("import")
def data_import(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Choose a public dataset; see --list.")] = None,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Read what you downloaded: an archive, a folder or files."),
    ] = None,
    out: Out = Path("datasets"),
    as_: Annotated[str | None, typer.Option("--name", help="Name the dataset; default: NAME.")] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Show what can be imported, where it comes from, and its terms.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Make a dataset from the downloaded files of a public dataset."""
    from tackboard.core.errors import UsageError
    from tackboard.events.dataset import open_dataset
    from tackboard.events.public.listing import find_public
    from tackboard.events.public.publisher import import_public

    if list_:
        typer.echo(_listing(as_json=json_output))
        return
    if name is None:
        raise UsageError("no dataset was named", fix="see `tackboard data import --list`")
    public = find_public(name)
    if not files:
        raise UsageError(
            f"no file of {name} was given", allowed=f"needed: {public.files}", fix=f"download it from {public.source}"
        )
    path, _ = import_public(public, files, out, as_)
    dataset = open_dataset(path)
    if json_output:
        content = {"dataset": str(dataset.path), "statistics": dict(dataset.statistics)}
        typer.echo(json.dumps(content | {"note": public.note, "terms": public.terms}))
        return
    told = [f"note         {public.note}", f"terms        {public.terms}", f"dataset      {dataset.path}"]
    typer.echo("\n".join([*_counts(dataset), *told]))


def _counts(dataset: Dataset) -> list[str]:
    return [
        f"events       {dataset.num_events:>12,}",
        f"users        {dataset.num_users:>12,}",
        f"items        {dataset.num_items:>12,}",
        f"actions      {', '.join(dataset.actions)}",
    ]


def _listing(*, as_json: bool) -> str:
    from tackboard.events.public.listing import DATASETS

    if as_json:
        names = ("name", "title", "files", "source", "terms", "note")
        entries = [
            {key: getattr(public, key) for key in names} | {"counts": dataclasses.asdict(public.counts)}
            for public in DATASETS.values()
        ]
        return json.dumps({"datasets": entries})
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


@app.command("label")
def data_label(
    dataset: Newest,
    label: Annotated[
        list[str], typer.Option(help="Add a label ACTION=WINDOW: save=7d means a save within 7 days. Repeatable.")
    ],
    shown: Annotated[str | None, typer.Option(help="Treat events of this action as impressions.")] = None,
    negatives: Annotated[
        int | None, typer.Option(help="Keep at most this many negatives per request; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draw the negatives with this seed.")] = 0,
    json_output: Json = False,
) -> None:
    """Label each shown item by the actions that followed, and add the labelled requests to the dataset."""
    from tackboard.data.labels import LabelConfig, parse_label
    from tackboard.data.request_layout import label_dataset
    from tackboard.events.dataset import open_dataset

    config = LabelConfig(labels=tuple(parse_label(text) for text in label), shown=shown, negatives=negatives, seed=seed)
    result = label_dataset(open_dataset(dataset), config)
    if json_output:
        content = {"dataset": str(result.path), "end_ms": result.end_ms}
        typer.echo(
            json.dumps(content | {"rules": dataclasses.asdict(config), "counts": dataclasses.asdict(result.counts)})
        )
        return
    typer.echo("\n".join(_label_lines(result)))


def _label_lines(result: Labelled) -> list[str]:
    counts = result.counts
    lines = [f"requests     {counts.requests:>12,}", f"candidates   {counts.candidates:>12,}"]
    for name, count in counts.labels.items():
        lines.append(
            f"{name:<12} {count.positives:>12,}  positive, {count.negatives:,} negative, "
            f"{count.not_known_yet:,} not known yet"
        )
    for name, count in counts.labels.items():
        reasons = (
            (count.actions_repeated, "repeated for the same impression"),
            (count.actions_late, "after the window"),
            (count.actions_early, "before the item was shown"),
            (count.actions_not_shown, "on an item that the request did not show"),
            (count.actions_without_request, "without a request"),
        )
        lines += [f"no label     {number:>12,}  {name} {reason}" for number, reason in reasons if number]
    left_out = (
        (counts.negatives_left_out, "negatives because of --negatives; the kept negatives have larger weights"),
        (counts.impressions_repeated, "impressions of an item that the request had shown already"),
        (counts.impressions_without_request, "impressions without a request"),
        (counts.impressions_without_user, "impressions whose request has no event, so their user is unknown"),
    )
    lines += [f"left out     {number:>12,}  {what}" for number, what in left_out if number]
    if counts.events_in_future:
        lines.append(
            f"ignored      {counts.events_in_future:>12,}  events received in the future: "
            "they do not move the end of the log"
        )
    return [*lines, f"dataset      {result.path}"]


@app.command("pseudo-requests")
def data_pseudo_requests(
    dataset: Newest,
    candidates: Annotated[int, typer.Option(help="Draw this many other items for each true item.")] = 100,
    from_: Annotated[
        str,
        typer.Option("--from", help="Draw the other items from the events of the same `hour`, or from `all` events."),
    ] = "hour",
    per_user: Annotated[int | None, typer.Option(help="Use at most this many of each user's newest events.")] = None,
    since: Annotated[str | None, typer.Option(help="Use events from this time on: ISO 8601, or ms since 1970.")] = None,
    action: Annotated[
        list[str] | None, typer.Option(help="Use only events with this action; default: all. Repeatable.")
    ] = None,
    repeats: Annotated[
        bool, typer.Option("--repeats", help="Also use events on items that the user had engaged with before.")
    ] = False,
    label: Annotated[str, typer.Option(help="Name the label.")] = "next",
    also: Annotated[
        list[str] | None,
        typer.Option(help="Add a label for this action: 1 for true items whose event has this action. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draw with this seed.")] = 0,
    json_output: Json = False,
) -> None:
    """Make requests from a log without impressions; candidates are the item that a user chose and drawn items."""
    from tackboard.core.progress import say
    from tackboard.data.pseudo_requests import PseudoRequestConfig, make_pseudo_requests
    from tackboard.events.dataset import open_dataset

    config = PseudoRequestConfig(
        candidates=candidates,
        pool=from_,
        per_user=per_user,
        since_ms=milliseconds_of("--since", since),
        actions=tuple(action or ()),
        repeats=repeats,
        label=label,
        also=tuple(also or ()),
        seed=seed,
    )
    result = make_pseudo_requests(open_dataset(dataset), config)
    counts = result.counts
    if counts.repeats_kept:
        say(
            f"warning: in {counts.repeats_kept:,} requests the user had engaged with the true item before. In these "
            "requests a candidate that is in the history is always the true item, so metrics come out too good"
        )
    if json_output:
        content = {"dataset": str(result.path), "rules": dataclasses.asdict(config)}
        typer.echo(json.dumps(content | {"counts": dataclasses.asdict(counts)}))
        return
    lines = [f"requests     {counts.requests:>12,}", f"candidates   {counts.candidates:>12,}"]
    if counts.requests_short:
        lines.append(
            f"short        {counts.requests_short:>12,}  requests with fewer than {candidates:,} other items; "
            f"{counts.candidates_missing:,} items are missing"
        )
    if counts.events_repeated:
        lines.append(
            f"left out     {counts.events_repeated:>12,}  events on the same item at the same time as another event"
        )
    if counts.repeats_left_out:
        lines.append(
            f"left out     {counts.repeats_left_out:>12,}  events on items that the user had engaged with before"
        )
    if counts.repeats_kept:
        lines.append(
            f"repeats      {counts.repeats_kept:>12,}  requests whose true item is in the user's earlier events"
        )
    typer.echo("\n".join([*lines, f"dataset      {result.path}"]))


@app.command("attributes")
def data_attributes(
    dataset: Newest,
    first_event: Annotated[
        str | None, typer.Option(metavar="NAME", help="Add the time of each item's first event under this name.")
    ] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="NAME", help="Add a vector per item, from co-engagement, under this name.")
    ] = None,
    live_counts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WINDOW",
            help="Add the number of events in the last WINDOW, e.g. reads_24h=24h; it changes with time. Repeatable.",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Let live counts change only at multiples of this time; default: a twelfth of the window."),
    ] = None,
    width: Annotated[int, typer.Option(help="Make vectors of this many numbers.")] = 32,
    window: Annotated[int, typer.Option(help="Call items neighbours if they are at most this many steps apart.")] = 5,
    until: Annotated[
        str | None,
        typer.Option(help="Make vectors from events before this time (ISO 8601 or ms); live counts never look ahead."),
    ] = None,
    action: Annotated[
        list[str] | None, typer.Option(help="Use only events with this action; default: all. Repeatable.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Give an item without neighbours the mean vector of the items that agree with it in this attribute."
        ),
    ] = None,
    max_pairs: Annotated[int, typer.Option(help="Keep at most this many pairs of neighbours in memory.")] = 1 << 25,
    seed: Annotated[int, typer.Option(help="Start the computation of vectors with this seed.")] = 0,
    json_output: Json = False,
) -> None:
    """Compute attributes of items from the log and add them: the first event's time, vectors, live counts."""
    from tackboard.core.errors import shown_bytes
    from tackboard.data.count_history import parse_live_counts
    from tackboard.data.derived_attributes import VectorsConfig, add_attributes
    from tackboard.events.dataset import LIVE_COUNTS, open_dataset

    config = None
    if vectors is not None:
        config = VectorsConfig(
            name=vectors,
            width=width,
            window=window,
            until_ms=milliseconds_of("--until", until),
            actions=tuple(action or ()),
            group=group,
            max_pairs=max_pairs,
            seed=seed,
        )
    counted = parse_live_counts(live_counts or [], step, action or [])
    result = add_attributes(open_dataset(dataset), first_event=first_event, vectors=config, live_counts=counted)
    if json_output:
        typer.echo(json.dumps({"dataset": str(result.path), "attributes": result.made}))
        return
    lines = [f"{first_event}: the time of each item's first event"] if first_event else []
    if vectors is not None:
        counts = result.made[vectors]["counts"]
        seen = f"events before {until}" if until else "the whole log (give --until to keep later events out)"
        lines += [
            f"{vectors}: vectors of width {width}, from {seen}",
            f"events       {counts['events']:>12,}",
            f"pairs        {counts['pairs']:>12,}  with a positive weight; dropped: {counts['pairs_dropped']:,}",
            f"neighbours   {counts['with_neighbours']:>12,}  items have a vector of their own",
            f"group mean   {counts['from_group']:>12,}  items",
            f"zeros        {counts['zero']:>12,}  items",
        ]
    for one in counted:
        changes = result.made[one.name]["counts"]["changes"]
        lines.append(f"{one.name}: {changes:,} changes, at multiples of {one.every_ms // 1000:,} s")
    if counted:
        lines.append(f"live counts  {shown_bytes((result.path / LIVE_COUNTS).stat().st_size):>12}  {LIVE_COUNTS}")
    typer.echo("\n".join([*lines, f"dataset      {result.path}"]))


@app.command("check")
def data_check(
    dataset: Snapshot,
    max_user_share: float = typer.Option(
        0.05, "--max-user-share", min=0.0, max=1.0, help="Warn when one user has more than this share of the events."
    ),
    json_output: Json = False,
) -> None:
    """Check the files, types, ranges, duplicates and times of a dataset. If there are errors, exit with code 3."""
    from tackboard.core.errors import DataError, counted
    from tackboard.events.checks.quality import check_dataset

    report = check_dataset(dataset, max_user_share=max_user_share)
    if json_output:
        counts = ("num_events", "num_users", "num_items", "num_errors", "num_warnings")
        answer = {"dataset": str(report.path)} | {name: getattr(report, name) for name in counts}
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        typer.echo(json.dumps(answer | {"findings": findings}))
    else:
        typer.echo(
            f"{report.path}: {counted(report.num_events, 'event')}, {counted(report.num_users, 'user')}, "
            f"{counted(report.num_items, 'item')}"
        )
        for finding in report.findings:
            typer.echo(f"{finding.text}\n         {finding.fix}")
        rows = "; rows are counted from 0" if any(finding.rows for finding in report.findings) else ""
        typer.echo(f"{counted(report.num_errors, 'error')}, {counted(report.num_warnings, 'warning')}{rows}")
    if report.num_errors:
        first = report.findings[0]
        raise DataError(f"{report.path / first.file}: {first.text.partition(': ')[2]}", fix=first.fix)


@app.command("stats")
def data_stats(
    dataset: Snapshot,
    out: Path | None = typer.Option(None, "--out", help="Write a self-contained HTML page with plots to this file."),
    json_output: Json = False,
) -> None:
    """Describe a dataset: events over time, users, items, gaps, lateness, labels, sizes on disk."""
    from tackboard.core.files import write_text_atomic, writing
    from tackboard.events.checks.profile import profile
    from tackboard.events.checks.stats_page import lines, render
    from tackboard.events.dataset import open_dataset

    result = profile(open_dataset(dataset))
    if out is not None:
        with writing("--out", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(out, render(result))
    if json_output:
        typer.echo(json.dumps(result | {"page": None if out is None else str(out)}))
        return
    for line in lines(result):
        typer.echo(line)
    if out is not None:
        typer.echo(f"page: {out}")


@app.command("drift")
def data_drift(
    old: Path = typer.Argument(..., help="Compare with this dataset or snapshot."),
    new: Path = typer.Argument(..., help="Measure this dataset or snapshot; it may be OLD if both ranges are given."),
    old_range: str | None = typer.Option(
        None, help="Take these UTC days of OLD: 2026-01-01..2026-01-31, both included."
    ),
    new_range: str | None = typer.Option(None, help="Take these days of NEW, written in the same way."),
    threshold: float | None = typer.Option(
        None,
        "--threshold",
        min=0.0,
        max=1.0,
        help="Exit with code 3 if a column's Jensen–Shannon divergence (bits) is above this.",
    ),
    json_output: Json = False,
) -> None:
    """Measure how much each column changed between two snapshots (L∞ and Jensen–Shannon); list the largest first."""
    from tackboard.core.errors import DataError
    from tackboard.events.checks.drift import measure_drift
    from tackboard.events.checks.measures import Slice, parse_range
    from tackboard.events.dataset import open_dataset

    first, second = parse_range(old_range), parse_range(new_range)
    drift = measure_drift(Slice(open_dataset(old), *first), Slice(open_dataset(new), *second))
    if json_output:
        typer.echo(json.dumps(dataclasses.asdict(drift) | {"threshold": threshold}))
    else:
        width = max(len(one.column) for one in drift.distances)
        typer.echo(f"{'column':<{width}}   JS, bits     L∞  moved most")
        for one in drift.distances:
            moved = f"{one.moved[:40]}: {one.old_share:.2%} → {one.new_share:.2%}"
            typer.echo(f"{one.column:<{width}}   {one.jensen_shannon_bits:8.4f} {one.l_infinity:6.4f}  {moved}")
        for side, names in (("old", drift.only_old), ("new", drift.only_new)):
            if names:
                typer.echo(f"only in {side}, or of another type: {', '.join(names)}")
        typer.echo(f"{drift.num_old:,} old events, {drift.num_new:,} new events")
    far = [one for one in drift.distances if threshold is not None and one.jensen_shannon_bits > threshold]
    if far:
        named = ", ".join(f"{one.column} by {one.jensen_shannon_bits:.4f} bits" for one in far[:3])
        raise DataError(
            f"{len(far)} of {len(drift.distances)} columns moved further than {threshold}: {named}",
            allowed=f"allowed: at most {threshold} bits of Jensen–Shannon divergence (--threshold)",
            fix="look at the worst columns above; then train again, or correct the log",
        )


@app.command("forget")
def data_forget(
    user: list[str] = typer.Option(
        ..., "--user", help="Forget the user with this id; `-` reads ids from stdin, one per line."
    ),
    data: list[Path] = typer.Option([], "--data", help="Forget the users in this dataset, datasets/NAME. Repeatable."),
    store: list[str] = typer.Option([], "--store", help="Forget the users in this sequence store. Repeatable."),
    json_output: Json = False,
) -> None:
    """Forget users: remove them from stores now, and from the next snapshot of each dataset."""
    import sys

    from tackboard.core.errors import UsageError, counted
    from tackboard.core.progress import say
    from tackboard.events.privacy.forgetting import dataset_folder, forget_users, user_ids_of

    words = [name for word in user for name in (sys.stdin.read().splitlines() if word == "-" else [word])]
    names = list(dict.fromkeys(name.strip() for name in words if name.strip()))
    if not names:
        raise UsageError("no user was named", fix="tackboard data forget --user U --data datasets/NAME")
    if not data and not store:
        raise UsageError(
            "no dataset and no store was named", fix="name datasets with --data, sequence stores with --store, or both"
        )
    folders = [dataset_folder(path) for path in data]
    # The lists of forgotten users are written first. If a later step fails, new snapshots still omit these users.
    listed = forget_users(names, folders)
    ids_of = {name: user_ids_of(name) for name in names}
    removed = [_forget_in_store(url, [user_id for ids in ids_of.values() for user_id in ids]) for url in store]

    def num_found(found: Collection[int]) -> int:
        return sum(not set(ids).isdisjoint(found) for ids in ids_of.values())

    everywhere = {user_id for found in (*(one.found for one in listed), *removed) for user_id in found}
    answer = {
        "num_users": len(names),
        "num_found": num_found(everywhere),
        "datasets": [
            {
                "dataset": str(folder),
                "num_found": num_found(one.found),
                "snapshots": [
                    {"snapshot": str(rest.snapshot), "num_users": rest.num_users, "num_events": rest.num_events}
                    for rest in one.remains
                ],
            }
            for folder, one in zip(folders, listed, strict=True)
        ],
        "stores": [
            {"store": without_password(url), "num_found": num_found(had), "num_events_removed": sum(had.values())}
            for url, had in zip(store, removed, strict=True)
        ],
    }
    typer.echo(json.dumps(answer) if json_output else "\n".join(_forget_lines(answer)))
    if num_lost := len(names) - num_found(everywhere):
        given = counted(len(names), "user")
        say(f"warning: {num_lost:,} of {given} were not found; check whether the ids are right")


def _forget_lines(answer: dict[str, Any]) -> list[str]:
    from tackboard.core.errors import counted

    num_users = answer["num_users"]
    lines = [
        f"{one['store']}: removed {counted(one['num_events_removed'], 'event')}; "
        f"found {one['num_found']:,} of {counted(num_users, 'user')}"
        for one in answer["stores"]
    ]
    for one in answer["datasets"]:
        lines.append(
            f"{one['dataset']}: {counted(num_users, 'user')} will be left out of new snapshots; "
            f"{one['num_found']:,} found in existing snapshots"
        )
        for rest in one["snapshots"]:
            name = rest["snapshot"].rpartition("/")[2]
            lines.append(
                f"  {name} still holds {counted(rest['num_users'], 'forgotten user')} with "
                f"{counted(rest['num_events'], 'event')}"
            )
        if one["snapshots"]:
            lines.append(
                "  to make a snapshot without these users and remove the old snapshots, run: "
                f"tackboard data retain {one['dataset']} --prune"
            )
    return lines


def _forget_in_store(url: str, user_ids: list[int]) -> dict[int, int]:
    """Returns user → number of removed events, for each user who had events in the store."""
    from tackboard.events.sequence_store import open_store

    opened = open_store(url)
    try:
        removed = {user_id: int(opened.forget(user_id)) for user_id in user_ids}
    finally:
        opened.close()
    return {user_id: count for user_id, count in removed.items() if count}


@app.command("retain")
def data_retain(
    dataset: Newest,
    days: float | None = typer.Option(
        None, "--days", help="Keep only the events of this many days up to the newest event; default: all."
    ),
    prune: bool = typer.Option(False, "--prune", help="Remove older snapshots that no unfinished run needs."),
    runs: Path = typer.Option(Path("runs"), "--runs", help="With --prune: look for unfinished runs in this folder."),
    json_output: Json = False,
) -> None:
    """Make a snapshot without old events and without forgotten users."""
    from tackboard.core.errors import counted
    from tackboard.events.dataset import open_dataset
    from tackboard.events.privacy import retention
    from tackboard.events.privacy.forgetting import dataset_folder

    folder = dataset_folder(dataset)
    if prune:
        # If this call raises an error, nothing has been written yet, so the command never does half of its work.
        retention.snapshots_in_use(folder, runs)
    result = retention.retain(open_dataset(dataset), days)
    pruned = retention.prune(folder, runs) if prune else retention.Pruned([], {})
    if json_output:
        typer.echo(json.dumps({**dataclasses.asdict(result), "path": str(result.path), **dataclasses.asdict(pruned)}))
        return
    typer.echo(
        f"left out  {counted(result.num_events_removed, 'event')} and {counted(result.num_users_removed, 'user')}; "
        f"forgotten: {counted(result.num_forgotten_removed, 'user')}"
    )
    if result.num_future:
        typer.echo(f"kept      {counted(result.num_future, 'event')} dated in the future; `data check` names the rows")
    for name in pruned.removed:
        typer.echo(f"removed   {folder / name}")
    for name, run in pruned.kept.items():
        typer.echo(f"kept      {folder / name}: the run {run} is unfinished and needs it")
    if result.num_events_removed and not prune:
        typer.echo(
            "          older snapshots still hold these events; --prune removes snapshots that no unfinished run needs"
        )
    typer.echo(f"dataset   {result.path}")
