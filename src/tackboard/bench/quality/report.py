"""Turns the result of `quality.run.measure` into a report with charts.

The table in the result has the same form for every study, so every study is shown in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tackboard.bench.report import Report, Table, shown_command
from tackboard.core.errors import counted
from tackboard.report.svg import Dots, Line, Svg, dot_chart, line_chart

DOTS_DESCRIPTION = "A dot for each seed and tie rule, a stroke at their mean; dashed: published figures."
MOST_LINES = 5
"""Largest number of lines in one chart. A reader cannot tell more lines apart."""


def report(result: Mapping[str, Any]) -> Report:
    """Makes a report, with charts, of the finished cells of a study."""
    commits = result["commits"]
    table = result["table"]
    several = (
        [f"Different versions of the code ran these cells: commits {', '.join(commits)}."] if len(commits) > 1 else []
    )
    return Report(
        result=result,
        theme=f"quality-{result['dataset']}-{result['study']}",
        title=f"Quality: {result['study']} on {result['dataset']}{', quick' if result['quick'] else ''}",
        command=shown_command(result["command"]),
        versions=f"Models were fitted on: {', '.join(result['devices']) or 'none'}. "
        f"Commits of the cells: {', '.join(commits) or 'unknown'}.",
        words=[f"{headline(result)}.", protocol(result)],
        tables=[Table(part["title"], part["header"], part["rows"]) for part in table["sections"] if part["rows"]],
        notes=[*table["notes"], *several, *unfinished(result)],
        charts={name: chart.document for name, chart in charts(result).items()},
        ranks=Path(result["ranks"]) if "ranks" in result else None,
    )


def headline(result: Mapping[str, Any]) -> str:
    """Returns one line about the study and the dataset. With --quick, the line warns that the figures mean nothing."""
    quick = "QUICK, says nothing about quality: " if result["quick"] else ""
    data = result["data"]
    return (
        f"{quick}{result['study']} on {result['dataset']}: {data['num_users']:,} users, {data['num_items']:,} items, "
        f"{data['num_events']:,} events"
    )


def protocol(result: Mapping[str, Any]) -> str:
    """Describes how methods were judged. A study with a different protocol provides the description itself."""
    if words := result["table"].get("protocol"):
        return str(words)
    how = result["protocol"]
    users = f"{how['max_users']:,} users, drawn once" if how["max_users"] else "all users"
    seen = "without" if how["filter_seen"] else "with"
    share = result["data"]["last_tied_share"]
    ties = f"; {share:.1%} of users have several events at their last instant" if share else ""
    return (
        f"The split is leave-last-out, for {users}. Each method ranks the whole catalogue {seen} the items of the "
        "history. An item with the same score as the held-out item counts as ranked above it. Tie rules for events of "
        f"one instant: {', '.join(result['ties'])}{ties}. {result['note']}"
    )


def unfinished(result: Mapping[str, Any]) -> list[str]:
    """Returns one line for each failed cell, and one line if other cells are unfinished."""
    lines = [f"FAILED ({one['code']}): {one['cell']}: {one['reason']}; see {one['log']}" for one in result["failures"]]
    if result["num_left"]:
        are = "is" if result["num_left"] == 1 else "are"
        lines.append(
            f"{counted(result['num_left'], 'cell')} {are} not finished: run the same command again to continue"
        )
    return lines


def charts(result: Mapping[str, Any]) -> dict[str, Svg]:
    """Draws the charts of the study and returns them by name."""
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
