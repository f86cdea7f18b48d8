"""This module checks a snapshot on disk against all rules, for `tackboard data check`.

The check compares every file with the manifest, then reads each Parquet file one row group at a time. It needs memory
for one row group and for the ids of items and users, whatever the number of events. If a file is damaged, the other
files are still checked. Decided: a check never repairs anything, and never stops at the first error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tackboard.core.errors import CorruptFileError, DataError, TackboardError
from tackboard.core.files import read_json, sha256_file
from tackboard.core.manifest import MANIFEST, read_manifest
from tackboard.events import layout
from tackboard.events.checks.event_quality import EventCheck
from tackboard.events.checks.findings import Finding, Findings
from tackboard.events.checks.table_quality import (
    EntityCheck,
    HistoryCheck,
    ImpressionCheck,
    KnownIds,
    RequestCheck,
    TableCheck,
)
from tackboard.events.dataset import EVENTS, KIND, LIVE_COUNTS, snapshot_folder
from tackboard.events.privacy import forgetting
from tackboard.events.privacy.forgetting import read_forgotten

REQUIRED = (EVENTS, "items.parquet", "users.parquet", "statistics.json")
FEATURES = "features.parquet"


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """Says what was checked, and lists the findings. Errors come first."""

    path: Path
    num_events: int
    num_users: int
    num_items: int
    findings: list[Finding]

    @property
    def num_errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def num_warnings(self) -> int:
        return len(self.findings) - self.num_errors


def check_dataset(path: Path, *, max_user_share: float = 0.05, now_ms: int | None = None) -> QualityReport:
    """Checks a snapshot, or the newest snapshot of a dataset. A path without a dataset raises DataError.

    The user with the most events is reported if they have more than `max_user_share` of the events and more than 10
    times the average. Events more than a day after `now_ms` (by default the clock's time) are reported.
    """
    folder = snapshot_folder(path)
    findings = Findings()
    if not _check_manifest(folder, findings):
        return QualityReport(folder, 0, 0, 0, findings.sorted())
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    # Only plain files are opened, because a link may lead anywhere, and reading a pipe would wait for ever.
    plain = [file for file in sorted(folder.glob("*.parquet")) if file.is_file() and not file.is_symlink()]
    files = {file.name: file for file in plain}
    for name in REQUIRED:
        if not (folder / name).is_file():
            findings.add("file-missing", name)
    items, users = EntityCheck("item", findings), EntityCheck("user", findings)
    for check in (items, users):
        _run(check, files, findings)
    known = KnownIds(items.ids(), users.ids(), items.births())
    events = EventCheck(findings, known, now_ms=now_ms)
    _run(events, files, findings)
    events.finish(max_user_share)
    if events.is_whole:
        items.compare_counts(events.items.result())
        users.compare_counts(events.users.result())
        _check_statistics(folder, events, findings)
    versions = (("item", "item_history.parquet"), ("user", "user_history.parquet"), ("item", LIVE_COUNTS))
    histories = [HistoryCheck(kind, file, known, findings) for kind, file in versions]
    for other in (*histories, ImpressionCheck(known, findings), RequestCheck(known, findings, now_ms)):
        _run(other, files, findings)
    _check_layout(folder, events, findings)
    _check_forgotten(folder.resolve().parent, known, findings)
    if FEATURES in files and events.is_whole:
        with _noting(FEATURES, findings):
            num_rows = pq.read_metadata(files[FEATURES]).num_rows
            if num_rows != events.num_rows:
                findings.add("row-count", FEATURES, f"has {num_rows:,} rows for {events.num_rows:,} events")
    num_users = len(events.users.result()[0]) if events.is_whole else 0
    num_items = 0 if known.items is None else len(known.items)
    return QualityReport(folder, events.num_rows, num_users, num_items, findings.sorted())


def _check_manifest(folder: Path, findings: Findings) -> bool:
    """Compares the files with the folder's manifest if the manifest is intact.

    Returns False if the folder is not a dataset, or has a newer format version than this Tackboard can read.
    """
    try:
        manifest = read_manifest(folder)
    except CorruptFileError as error:
        findings.add("manifest", MANIFEST, error.got.replace(f"{folder}/", ""))
        return True
    except DataError as error:
        findings.add("manifest", MANIFEST, f"{error.got.rpartition(' has ')[2]}, {error.allowed}")
        return False
    if manifest.get("kind") != KIND:
        findings.add("manifest", MANIFEST, f"the folder is a {manifest.get('kind')}, not a {KIND}")
        return False
    listed = {str(entry["name"]): entry for entry in manifest.get("files", [])}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            findings.add("manifest", name, "is a link, or neither a file nor a folder")
        elif file.is_file() and name not in listed and file != folder / MANIFEST:
            findings.add("manifest", name, "is not listed in the manifest")
    for name, entry in listed.items():
        file = folder / name
        if file.is_symlink():
            continue
        if not file.is_file():
            if name not in REQUIRED:
                findings.add("file-missing", name)
        elif file.stat().st_size != entry["bytes"]:
            findings.add("manifest", name, f"has {file.stat().st_size:,} bytes, the manifest says {entry['bytes']:,}")
        elif sha256_file(file) != entry["sha256"]:
            findings.add("manifest", name, "has a SHA-256 that differs from the manifest's")
    return True


@contextlib.contextmanager
def _noting(name: str, findings: Findings) -> Iterator[None]:
    """Turns an error inside the `with` block, which reads the Parquet file `name`, into a finding."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        findings.add("file-unreadable", name, " ".join(str(error).split())[:120])


def _run(check: TableCheck, files: Mapping[str, Path], findings: Findings) -> None:
    """Runs a check: gives it the columns of its file, and then the row groups in order."""
    if check.file not in files:
        return
    with _noting(check.file, findings), pq.ParquetFile(files[check.file]) as opened:
        names = [name for name in opened.schema_arrow.names if check.columns is None or name in check.columns]
        if not check.begin(opened.schema_arrow.empty_table().select(names)):
            return
        for group in range(opened.num_row_groups):
            table = opened.read_row_group(group, columns=names)
            table.validate(full=True)
            if table.num_rows:
                check.look(table)
        check.is_whole = True


def _check_statistics(folder: Path, events: EventCheck, findings: Findings) -> None:
    try:
        statistics = read_json(folder / "statistics.json")
        said = {name: statistics[name] for name in ("num_events", "num_users", "num_items")}
    except (TackboardError, KeyError, TypeError) as error:
        if (folder / "statistics.json").is_file():
            findings.add("file-unreadable", "statistics.json", type(error).__name__)
        return
    counted = (events.num_rows, len(events.users.result()[0]), len(events.items.result()[0]))
    for (name, value), right in zip(said.items(), counted, strict=True):
        if value != right:
            findings.add("statistics", "statistics.json", f"{name} is {value}, {EVENTS} says {right}")


def _check_layout(folder: Path, events: EventCheck, findings: Findings) -> None:
    """Compares layout.json with the row groups of the events, and with the number of rows of requests.parquet."""
    name = layout.FILE_NAME
    if not (folder / name).exists() or not events.is_whole:
        return
    try:
        found = layout.read_layout(folder, folder / EVENTS)
    except CorruptFileError as error:
        findings.add("layout", name, error.got.replace(f"{folder}/", ""))
        return
    starts, firsts, lasts = events.row_groups()
    if found.offsets["events"].tolist() != [*starts, events.num_rows]:
        findings.add("layout", name, f"its buckets are not the row groups of {EVENTS}")
    elif found.first_users.tolist() != firsts:
        findings.add("layout", name, f"its first users are not those of the row groups of {EVENTS}")
    if any(last >= first for last, first in zip(lasts[:-1], firsts[1:], strict=True)):
        findings.add("layout", EVENTS, "a user is split over two buckets")
    for file, offsets in found.offsets.items():
        path = folder / f"{file}.parquet"
        if not path.is_file():
            findings.add("layout", name, f"has rows of {path.name}, but this file does not exist")
        elif file != "events" and not findings.has("file-unreadable", path.name):
            num_rows = pq.read_metadata(path).num_rows
            if int(offsets[-1]) != num_rows:
                findings.add("layout", name, f"has {int(offsets[-1]):,} rows of {path.name}, which has {num_rows:,}")


def _check_forgotten(parent: Path, known: KnownIds, findings: Findings) -> None:
    """Checks the list of forgotten users, and whether the snapshot holds any user on this list."""
    try:
        forgotten = read_forgotten(parent)
    except DataError as error:
        findings.add("forgotten-list", f"../{forgetting.FILE_NAME}", error.got.replace(f"{parent}/", ""))
        return
    num_held = 0 if known.users is None else int(forgotten.holds(known.users).sum())
    if num_held:
        findings.add("forgotten-user", "users.parquet", count=num_held)
