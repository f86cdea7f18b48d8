"""Shows the result of `judge_catalogue` as one HTML page: a table of the rivals, and a chart of every slicing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.report.page import Align, Figure, Page, Section
from tackboard.report.svg import Bars, Tone, bar_chart

WORDS = {
    "item age": "The age of an item is the time since its first event in the log.",
    "item in training": "A model of ids cannot rank an item that training never saw. Live counts can.",
    "item for the user": "An item that the user had seen before can be found by looking at the history alone.",
    "history": "The number of the user's events before the judged event.",
    "time since the cut": "This shows how fast a frozen model ages. Live counts do not age.",
}
TONES: Mapping[str, Tone] = {
    "model": "accent",
    "model, live": "third",
    "recent, live": "second",
    "item-to-item": "strong",
    "popularity": "soft",
    "oracle": "raw",
}
"""The rivals in the charts, and their colours. The table has all rivals."""
MOST_LETTERS = 30
"""Longer labels are cut."""


def evaluation_page(result: Mapping[str, Any]) -> str:
    """Returns the page as HTML."""
    rows = result["rows"]
    judged = f"{result['num_events']:,} events of {result['num_users']:,} users, {result['num_items']:,} items"
    page = Page(
        f"Evaluation at step {result['step']:,}", f"{judged}. {result['protocol']}.", footer=result["checkpoint"]
    )
    table = page.section("The model and its rivals")
    seen = "taken out of" if result["filter_seen"] else "kept in"
    table.text(f"Items of the history are {seen} the ranking. Higher is better for HR, NDCG, MRR and recall.")
    best = max(range(len(rows)), key=lambda place: (rows[place]["name"] != "oracle", _main(rows[place])))
    names = [name for name in rows[0] if name != "name"]
    sides: list[Align] = ["right"] * (1 + len(names))
    sides[0] = "left"
    table.table(
        ["", *names],
        [[row["name"], *(f"{row[name]:.4f}" for name in names)] for row in rows],
        align=sides,
        strong_rows=[best],
        caption="The best rival by HR is bold; the oracle is not counted.",
    )
    for name, hours in result["windows_h"].items():
        table.text(f"“{name}” counts the events of {hours:g} hours. On earlier events, this window was the best.")
    figures = page.section("What training knew")
    figures.figures(
        [
            Figure("judged on items never seen in training", f"{result['never_seen_share']:.1%}"),
            Figure("best by HR", str(rows[best]["name"])),
        ]
    )
    slices = page.section("Slices")
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in result["slices"]:
        by_name.setdefault(row["by"], []).append(row)
    for name, found in by_name.items():
        _add_slicing(slices, name, found)
    return page.render()


def _main(row: Mapping[str, Any]) -> float:
    """Returns HR at 10, or at the first cutoff if 10 is not a cutoff."""
    name = "hr@10" if "hr@10" in row else next(key for key in row if key.startswith("hr@"))
    return float(row[name])


def shortened(label: str) -> str:
    """Returns a label that leaves room for the bars, because names of actions and surfaces can have any length."""
    return label if len(label) <= MOST_LETTERS else f"{label[: MOST_LETTERS - 1]}…"


def _add_slicing(section: Section, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds a chart with one group of bars per slice."""
    labels = list(dict.fromkeys(row["slice"] for row in rows))
    counts = {row["slice"]: row["num_events"] for row in rows}
    metric = next(key for key in rows[0] if key.startswith("hr@"))
    values = {(row["slice"], row["name"]): float(row[metric]) for row in rows}
    rivals = [rival for rival in TONES if (labels[0], rival) in values]
    bars = [
        Bars(
            name=rival,
            values=[values[label, rival] for label in labels],
            tone=TONES[rival],
        )
        for rival in rivals
    ]
    chart = bar_chart(
        [f"{shortened(label)} ({counts[label]:,})" for label in labels],
        bars,
        title=f"{metric.upper()} by {name}",
        description=f"{metric.upper()} of the main rivals by {name}. In brackets: the number of judged events.",
        x_label=metric.upper(),
    )
    section.chart(chart, WORDS.get(name, f"By the {name} of the judged event."))
