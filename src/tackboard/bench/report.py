"""Shows the result of a bench on the terminal and writes the same tables to a Markdown file.

A bench turns its result into a `Report`. This module turns the report into lines of text and into the Markdown file
`<theme>_<hardware>_<yyyymm>.md`. This file states the command, the machine, the commit and the date, and holds the
tables and the notes (such as aims and whether they were met). Charts are written to the same folder, and so are the
ranks from which the tables of `bench quality` are computed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tackboard.core.files import write_bytes_atomic, write_text_atomic, writing
from tackboard.core.rundir import describe_environment
from tackboard.flow.outcome import describe_hardware, hardware_words

KEPT_WORDS = {"ranks": "the rank of every user", "places": "the place of every true item"}
"""Last word in the name of a file with kept results → what the file holds."""


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header. `words` is a sentence about the table. A table without rows shows no header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a bench's report."""

    result: Mapping[str, Any]
    """The measurement, with the entries of `where_and_when`."""
    theme: str
    title: str
    command: str
    """The command line after `tackboard`."""
    words: Sequence[str] = ()
    """Sentences about what was measured and how."""
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    versions: str = ""
    """Sentences about other programs that took part."""
    charts: Mapping[str, str] = field(default_factory=dict)
    """SVG documents by name."""
    ranks: Path | None = None
    """A file with the ranks behind the tables (quality/kept_ranks.py). A copy is written beside the Markdown file."""
    kept_as: str = "ranks"
    """The last word in the name of this copy."""


def where_and_when() -> dict[str, Any]:
    """Returns the part of every result that names the machine, the versions, the commit and the date."""
    environment = describe_environment()
    return {
        "hardware": describe_hardware(),
        **{name: environment[name] for name in ("python", "packages", "commit")},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def shown_command(words: Sequence[str]) -> str:
    """Returns a command line. Absolute paths are cut to their last part, because they are valid on one machine only."""
    return shlex.join([Path(word).name if Path(word).is_absolute() else word for word in words])


def shown_versions(packages: Mapping[str, Any]) -> str:
    """Lists the installed packages with their versions."""
    return ", ".join(f"{name} {version}" for name, version in packages.items() if version)


def table_lines(report: Report) -> list[str]:
    """Returns the lines of the report for a terminal."""
    lines = list(report.words)
    for table in report.tables:
        titles = [words for words in (table.title, table.words) if words]
        lines += ["", *titles, *_aligned(table)] if table.rows else ["", *titles]
    return [*lines, *(["", *report.notes] if report.notes else [])]


def write_result(report: Report, results: Path, hardware: str) -> Path:
    """Writes the report as Markdown under `results` and returns the file. `hardware` is part of the file name."""
    result = report.result
    stem = f"{report.theme}_{hardware}_{result['date'][:4]}{result['date'][5:7]}"
    lines = [
        f"# {report.title}",
        "",
        f"`tackboard {report.command}`, {result['date']}, commit {result['commit'] or 'unknown'}.",
        f"Machine: {hardware_words(result['hardware'])}. Python {result['python']}, "
        f"{shown_versions(result['packages'])}. {report.versions}".rstrip(),
        *(["", " ".join(report.words)] if report.words else []),
    ]
    for table in report.tables:
        lines += ["", f"## {_sentence(table.title, end='')}"] if table.title else []
        lines += ["", _sentence(table.words)] if table.words else []
        if table.rows:
            marks = "".join("--:|" if is_number else "---|" for is_number in _numeric(table))
            lines += ["", _cells(table.header), f"|{marks}", *map(_cells, table.rows)]
    lines += ["", *(f"- {_sentence(note)}" for note in report.notes)] if report.notes else []
    for name in report.charts:
        lines += ["", f"![{name}]({stem}_{name}.svg)"]
    kept = f"{stem}_{report.kept_as}.npz"
    if report.ranks is not None:
        command = f"tackboard bench {result['bench']} --recompute {kept}"
        lines += ["", f"`{command}` makes these tables again from [{KEPT_WORDS[report.kept_as]}]({kept})."]
    path = results / f"{stem}.md"
    with writing("--results", path):
        results.mkdir(parents=True, exist_ok=True)
        for name, document in report.charts.items():
            write_text_atomic(results / f"{stem}_{name}.svg", document)
        if report.ranks is not None:
            write_bytes_atomic(results / kept, report.ranks.read_bytes())
        write_text_atomic(path, "\n".join(lines) + "\n")
    return path


def _sentence(words: str, end: str = ".") -> str:
    return f"{words[0].upper()}{words[1:]}{'' if words.endswith(('.', ':')) else end}"


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def _numeric(table: Table) -> list[bool]:
    """Returns for each column whether the column holds numbers."""
    columns = [[row[place] for row in table.rows] for place in range(len(table.header))]
    return [
        any(column) and all(not cell or cell.replace(",", "").lstrip("+-")[:1].isdigit() for cell in column)
        for column in columns
    ]


def _aligned(table: Table) -> list[str]:
    """Returns the rows as lines of aligned columns, with numbers aligned to the right."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.header))]
    right = _numeric(table)
    return [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
