"""What `tackboard bench quality` found, for people: lines of text, a Markdown file, charts.

In: the object that `quality.measure` gives, whose `table` a study made. So every study is shown alike.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tackboard.core.errors import counted
from tackboard.core.files import write_text_atomic, writing
from tackboard.flow.outcome import hardware_words
from tackboard.report.svg import Dots, Line, Svg, dot_chart, line_chart

DOTS_DESCRIPTION = "A dot for each seed and tie rule, a stroke at their mean; dashed: published figures."
MOST_LINES = 5
"""Lines of one chart; more could not be told apart."""


def table_lines(result: Mapping[str, Any]) -> list[str]:
    """Everything that was found, as lines of text."""
    lines = [headline(result), protocol(result)]
    for part in result["table"]["sections"]:
        if part["rows"]:
            lines += ["", part["title"], *_aligned(part["header"], part["rows"])]
    lines += ["", *result["table"]["notes"]] if result["table"]["notes"] else []
    if len(result["commits"]) > 1:
        lines += ["", f"These cells were run by different versions, commits {', '.join(result['commits'])}."]
    return [*lines, *unfinished(result)]


def headline(result: Mapping[str, Any]) -> str:
    """What this is a table of; a quick one says so."""
    quick = "QUICK, says nothing about quality: " if result["quick"] else ""
    data = result["data"]
    return (
        f"{quick}{result['study']} on {result['dataset']}: {data['num_users']:,} users, {data['num_items']:,} items, "
        f"{data['num_events']:,} events"
    )


def protocol(result: Mapping[str, Any]) -> str:
    """How it was judged, in a sentence or two: those of the study, where it judges otherwise."""
    if words := result["table"].get("protocol"):
        return str(words)
    how = result["protocol"]
    users = f"{how['max_users']:,} users, drawn once" if how["max_users"] else "all users"
    seen = "items of the history taken out" if how["filter_seen"] else "items of the history kept"
    share = result["data"]["last_tied_share"]
    ties = f"; {share:.1%} of users have several events in their last instant" if share else ""
    return (
        f"leave one out, the whole catalogue ranked, {seen}, equal scores count against the held-out item; {users}; "
        f"ties: {', '.join(result['ties'])}{ties}. {result['note']}"
    )


def unfinished(result: Mapping[str, Any]) -> list[str]:
    """What failed and what is left, if anything."""
    lines = [f"FAILED ({one['code']}): {one['cell']}: {one['reason']}; see {one['log']}" for one in result["failures"]]
    if result["num_left"]:
        are = "is" if result["num_left"] == 1 else "are"
        lines.append(f"{counted(result['num_left'], 'cell')} {are} not finished: run the same command again to go on")
    return ["", *lines] if lines else []


def write_result(result: Mapping[str, Any], results: Path, hardware: str) -> Path:
    """Writes the table as Markdown under `results`, named by a short word for the hardware; returns the file.

    Charts are written beside it, with its name.
    """
    stem = f"quality-{result['dataset']}-{result['study']}_{hardware}_{result['date'][:4]}{result['date'][5:7]}"
    path = results / f"{stem}.md"
    with writing("--results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        names = {}
        for name, chart in charts(result).items():
            names[name] = f"{stem}_{name}.svg"
            write_text_atomic(path.parent / names[name], chart.document)
        write_text_atomic(path, "\n".join(_markdown(result, names)) + "\n")
    return path


def charts(result: Mapping[str, Any]) -> dict[str, Svg]:
    """The charts of the study, by name."""
    drawn: dict[str, Svg] = {}
    for chart in result["table"]["charts"]:
        if chart["kind"] == "dots":
            drawn[chart["name"]] = dot_chart(
                [Dots(name=row["name"], values=row["values"]) for row in chart["rows"]],
                title=chart["title"],
                description=chart.get("description", DOTS_DESCRIPTION),
                x_label=chart.get("x_label", "HR@10"),
                marks=chart["marks"],
            )
            continue
        lines = [Line(name=line["name"], x=line["x"], y=line["y"]) for line in chart["lines"]]
        for number, begin in enumerate(range(0, len(lines), MOST_LINES)):
            name = chart["name"] + (f"-{number + 1}" if len(lines) > MOST_LINES else "")
            drawn[name] = line_chart(
                lines[begin : begin + MOST_LINES],
                title=chart["title"],
                description=chart.get("description", "One line for each fit; the names are method, tie rule and seed."),
                x_label=chart["x_label"],
                y_label=chart.get("y_label", "NDCG@10"),
            )
    return drawn


def _markdown(result: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items() if version)
    devices = ", ".join(result["devices"]) or "none"
    lines = [
        f"# Quality: {result['study']} on {result['dataset']}{', quick' if result['quick'] else ''}",
        "",
        f"`tackboard {_shown(result['command'])}`, {result['date']}, commit {result['commit'] or 'unknown'} "
        f"(cells: {', '.join(result['commits']) or 'unknown'}).",
        f"Machine: {hardware_words(result['hardware'])}; models were fitted on: {devices}. "
        f"Python {result['python']}, {packages}.",
        "",
        f"{headline(result)}; {protocol(result)}",
    ]
    for part in result["table"]["sections"]:
        if part["rows"]:
            rule = "|" + "".join("--:|" if _is_number(column) else "---|" for column in _columns(part))
            rows = [_cells(row) for row in part["rows"]]
            lines += ["", f"## {part['title']}", "", _cells(part["header"]), rule, *rows]
    lines += ["", *result["table"]["notes"]]
    for name, file in names.items():
        lines += ["", f"![{name}]({file})"]
    return [*lines, *unfinished(result)]


def _shown(command: Sequence[str]) -> str:
    """A command without the paths of one machine: of an absolute one its last part."""
    return shlex.join([Path(word).name if Path(word).is_absolute() else word for word in command])


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def _columns(part: Mapping[str, Any]) -> list[list[str]]:
    return [[row[place] for row in part["rows"]] for place in range(len(part["header"]))]


def _is_number(column: Sequence[str]) -> bool:
    return any(column) and all(not cell or cell.replace(",", "").lstrip("+-")[:1].isdigit() for cell in column)


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns, numbers to the right."""
    whole = [list(header), *map(list, rows)]
    columns = [[row[place] for row in whole] for place in range(len(header))]
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [_is_number(column[1:]) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in whole
    ]
