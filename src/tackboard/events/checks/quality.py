"""`tackboard data check`: a snapshot on disk in, everything that is wrong with it out.

First the manifest and every byte that it vouches for, then each Parquet file, a row group at a time: memory is that of
one row group and of the ids of items and users, however many events there are. A file that is damaged does not keep the
others from being looked at. Decided: a check never repairs, and never stops at the first mistake.
"""

from __future__ import annotations

import dataclasses
import time
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
from tackboard.events.dataset import EVENTS, KIND, LATEST, REQUESTS, open_dataset
from tackboard.events.privacy import forgetting
from tackboard.events.privacy.forgetting import read_forgotten

REQUIRED = (EVENTS, "items.parquet", "users.parquet", "statistics.json")
FEATURES = "features.parquet"


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """What was looked at, and what was found; errors first."""

    path: Path
    num_events: int
    num_users: int
    num_items: int
    findings: list[Finding]

    @property
    def num_errors(self) -> int:
        """Findings that are errors."""
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def num_warnings(self) -> int:
        """Findings that are warnings."""
        return len(self.findings) - self.num_errors


def check_dataset(path: Path, *, max_user_share: float = 0.05, now_ms: int | None = None) -> QualityReport:
    """Looks at a snapshot, or at the newest of a dataset. A path that holds no dataset raises DataError.

    `max_user_share` is the share of events above which one user is called heavy; `now_ms` is the time after which
    events lie in the future, by default the clock's.
    """
    folder = path
    if not (path / MANIFEST).exists() and (path / LATEST).exists():
        folder = (path / LATEST).resolve()
    if not (folder / MANIFEST).exists() and not (folder / EVENTS).exists():
        open_dataset(path)  # Says which datasets there are.
    findings = Findings()
    if not _check_manifest(folder, findings):
        return QualityReport(folder, 0, 0, 0, findings.sorted())
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    # Nothing else is opened: a link may lead anywhere, and a pipe would be waited for.
    plain = [file for file in sorted(folder.glob("*.parquet")) if file.is_file() and not file.is_symlink()]
    files = {file.name: file for file in plain}
    for name in REQUIRED:
        if not (folder / name).is_file():
            findings.add("file-missing", name)
    items, users = EntityCheck("item", findings), EntityCheck("user", findings)
    for check, name in ((items, "items.parquet"), (users, "users.parquet")):
        _run(check, files.get(name), findings)
    known = KnownIds(items.ids(), users.ids(), items.births())
    events = EventCheck(findings, known, now_ms=now_ms)
    _run(events, files.get(EVENTS), findings)
    events.finish(max_user_share)
    if events.is_whole:
        items.compare_counts(events.item_counts())
        users.compare_counts(events.user_counts())
        _check_statistics(folder, events, findings)
    _check_others(files, known, findings, now_ms)
    _check_layout(folder, events, findings)
    _check_forgotten(folder.resolve().parent, known, findings)
    if FEATURES in files and events.is_whole:
        _check_row_count(files[FEATURES], events.num_rows, findings)
    num_users = len(events.user_counts()[0]) if events.is_whole else 0
    num_items = 0 if known.items is None else len(known.items)
    return QualityReport(folder, events.num_rows, num_users, num_items, findings.sorted())


def _check_manifest(folder: Path, findings: Findings) -> bool:
    """Every file against the manifest; False where the snapshot is of a kind or version that cannot be looked into."""
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
            findings.add("manifest", name, "it is a link, or neither a file nor a folder")
        elif file.is_file() and name not in listed and file != folder / MANIFEST:
            findings.add("manifest", name, "the manifest does not list it")
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
            findings.add("manifest", name, "its SHA-256 differs from the manifest's")
    return True


def _run(check: TableCheck, file: Path | None, findings: Findings) -> None:
    """Shows a check the columns of a file, then its row groups in order."""
    if file is None:
        return
    try:
        with pq.ParquetFile(file) as opened:
            names = [name for name in opened.schema_arrow.names if check.columns is None or name in check.columns]
            if not check.begin(opened.schema_arrow.empty_table().select(names)):
                return
            first_row = 0
            for group in range(opened.num_row_groups):
                table = opened.read_row_group(group, columns=names)
                table.validate(full=True)
                if table.num_rows:
                    check.look(table, first_row)
                first_row += table.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        findings.add("file-unreadable", file.name, " ".join(str(error).split())[:120])
        return
    check.is_whole = True


def _check_others(files: dict[str, Path], known: KnownIds, findings: Findings, now_ms: int) -> None:
    for kind in ("item", "user"):
        _run(HistoryCheck(kind, known, findings), files.get(f"{kind}_history.parquet"), findings)
    _run(ImpressionCheck(known, findings), files.get("impressions.parquet"), findings)
    _run(RequestCheck(known, findings, now_ms), files.get(REQUESTS), findings)


def _check_statistics(folder: Path, events: EventCheck, findings: Findings) -> None:
    try:
        statistics = read_json(folder / "statistics.json")
        said = {name: statistics[name] for name in ("num_events", "num_users", "num_items")}
    except (TackboardError, KeyError, TypeError) as error:
        if (folder / "statistics.json").is_file():
            findings.add("file-unreadable", "statistics.json", f"{type(error).__name__}")
        return
    counted = (events.num_rows, len(events.user_counts()[0]), len(events.item_counts()[0]))
    for (name, value), right in zip(said.items(), counted, strict=True):
        if value != right:
            findings.add("statistics", "statistics.json", f"{name} is {value}, {EVENTS} says {right}")


def _check_layout(folder: Path, events: EventCheck, findings: Findings) -> None:
    """layout.json against the row groups that were seen."""
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
            findings.add("layout", name, f"it has rows of {path.name}, which is not there")
        elif file != "events" and not findings.has(("file-unreadable",), path.name):
            num_rows = pq.read_metadata(path).num_rows
            if int(offsets[-1]) != num_rows:
                findings.add("layout", name, f"it has {int(offsets[-1]):,} rows of {path.name}, which has {num_rows:,}")


def _check_forgotten(parent: Path, known: KnownIds, findings: Findings) -> None:
    """The list beside the snapshots, and whether this one holds somebody who is on it."""
    try:
        forgotten = read_forgotten(parent)
    except DataError as error:
        findings.add("forgotten-list", f"../{forgetting.FILE_NAME}", error.got.replace(f"{parent}/", ""))
        return
    num_held = 0 if known.users is None else int(forgotten.holds(known.users).sum())
    if num_held:
        findings.add("forgotten-user", "users.parquet", count=num_held)


def _check_row_count(path: Path, num_events: int, findings: Findings) -> None:
    try:
        num_rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        findings.add("file-unreadable", path.name, " ".join(str(error).split())[:120])
        return
    if num_rows != num_events:
        findings.add("row-count", path.name, f"it has {num_rows:,} rows for {num_events:,} events")
