"""This module shows the profile of `tackboard data stats` as a self-contained HTML page, or as lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.core.errors import counted
from tackboard.report.page import Figure, Page, Section
from tackboard.report.svg import Bars, Line, bar_chart, format_number, line_chart

MAX_DAYS = 4000
"""If a log spans more days than this, only days with events are drawn. In such a log, times often have a wrong unit."""
NUM_BARS = 20
"""Largest number of bars in a chart of actions, surfaces or columns."""


def render(profile: Mapping[str, Any]) -> str:
    """Returns the page as HTML."""
    page = Page(
        f"Dataset {profile['dataset']}",
        f"What the {profile['num_events']:,} events of snapshot {profile['snapshot']} look like.",
        footer=f"tackboard data stats, snapshot {profile['snapshot']}. Days and hours are UTC.",
    )
    median = f"median {profile['events_per_user']['quantiles']['q50']:,.0f} events"
    popular = f"{profile['items']['top_1_percent_share']:.0%}"
    size = _bytes(sum(one["bytes"] for one in profile["files"].values()))
    figures = [
        ("events", f"{profile['num_events']:,}", _span(profile)),
        ("users", f"{profile['num_users']:,}", median),
        ("items with events", f"{profile['num_items']:,}", f"{profile['num_items_listed']:,} listed"),
        ("share of the events", popular, "on the most popular 1% of the items"),
        ("on disk", size, "all files"),
    ]
    page.lead.figures([Figure(label=label, value=value, note=note) for label, value, note in figures])
    _add_time(page.section("Time"), profile)
    _add_users(page.section("Users"), profile)
    _add_items(page.section("Items"), profile)
    _add_names(page.section("Actions and surfaces"), profile)
    if profile["requests"] is not None:
        _add_requests(page.section("Requests and labels"), profile["requests"])
    if profile["fields"]:
        _add_fields(page.section("Fields"), profile["fields"])
    _add_files(page.section("Files"), profile["files"])
    return page.render()


def lines(profile: Mapping[str, Any]) -> list[str]:
    """Returns the profile as lines for a terminal."""
    per_user, gap, lateness = profile["events_per_user"], profile["gap_s"], profile["lateness_s"]
    rows = [
        ("dataset", f"{profile['dataset']}, snapshot {profile['snapshot']}"),
        ("events", f"{profile['num_events']:,}, {_span(profile)}"),
        ("users", f"{profile['num_users']:,}"),
        ("items", f"{profile['num_items']:,} with events, {profile['num_items_listed']:,} listed"),
        ("actions", _named(profile["actions"])),
        ("surfaces", _named(profile["surfaces"])),
        ("per user", f"{_quantiles(per_user)}, maximum {per_user['max']:,}"),
        (
            "popularity",
            f"{profile['items']['top_1_percent_share']:.1%} of the events are on the most popular 1% of the items",
        ),
        ("gaps, s", _quantiles(gap)),
        ("lateness, s", f"{_quantiles(lateness)}" + _negative(lateness)),
    ]
    rows += [
        (f"field {name}", f"{field['type']}, {field['missing_share']:.1%} missing")
        for name, field in profile["fields"].items()
    ]
    if profile["requests"] is not None:
        requests = profile["requests"]
        rows.append(("requests", f"{requests['num_requests']:,} with {requests['num_candidates']:,} candidates"))
        rows += [
            (f"label {name}", f"{one['positive']:,} positive, {one['negative']:,} negative, {one['unknown']:,} unknown")
            for name, one in requests["labels"].items()
        ]
    rows += [(name, _bytes(file["bytes"])) for name, file in profile["files"].items()]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _add_time(section: Section, profile: Mapping[str, Any]) -> None:
    days = profile["days"]
    every_day = dict(zip(days["day"], days["events"], strict=True))
    is_long = days["day"][-1] > MAX_DAYS
    number = days["day"] if is_long else range(days["day"][-1] + 1)
    _line(
        section,
        "Events per day. A day without events between busy days usually means that part of the log is missing.",
        list(number),
        [every_day.get(day, 0) for day in number],
        title="Events per day",
        description=f"{len(every_day)} days with events from {days['first']} on.",
        x_label=f"days since {days['first']}",
    )
    _line(
        section,
        "Events by hour of the day.",
        list(range(24)),
        profile["hours"],
        title="Events by hour of the day",
        description=", ".join(f"{hour}: {count:,}" for hour, count in enumerate(profile["hours"])),
        x_label="hour of the day, UTC",
        height=240,
    )
    lateness = profile["lateness_s"]
    caption = f"Time from an event to its receipt.{_negative(lateness, ' ')} Seconds: {_quantiles(lateness)}."
    _bins(section, caption, lateness["bins"], "Lateness: received − happened", "events")


def _add_users(section: Section, profile: Mapping[str, Any]) -> None:
    per_user, gap = profile["events_per_user"], profile["gap_s"]
    caption = (
        f"Users by number of events. Mean {per_user['mean']:.1f}, {_quantiles(per_user)}, maximum {per_user['max']:,}."
    )
    _bins(section, caption, per_user["bins"], "Events per user", "users")
    caption = f"Time between one event of a user and the next. Seconds: {_quantiles(gap)}."
    _bins(section, caption, gap["bins"], "Gaps between a user's events", "gaps")


def _add_items(section: Section, profile: Mapping[str, Any]) -> None:
    items, growth = profile["items"], profile["catalogue"]
    _line(
        section,
        "Events of an item by its rank, both axes logarithmic. A straight line is a power law.",
        items["rank"],
        items["events"],
        title="Events of an item by its rank",
        description=f"The first item has {items['events'][0]:,} events, the last {items['events'][-1]:,}.",
        x_label="rank of the item by events",
        log_x=True,
        log_y=True,
    )
    if len(growth["day"]) > 1:
        since = "birth" if growth["by"] == "birth_ms" else "first event"
        _line(
            section,
            f"Items at the end of each day. An item counts from its {since} on.",
            growth["day"],
            growth["items"],
            y_label="items",
            title="Growth of the catalogue",
            description=f"From {growth['items'][0]:,} to {growth['items'][-1]:,} items.",
            x_label=f"days since {profile['days']['first']}",
            height=240,
        )
    section.table(
        ["item", "events", "share"],
        [[one["item"], f"{one['events']:,}", f"{one['events'] / profile['num_events']:.2%}"] for one in items["top"]],
        caption="The most popular items.",
        align=["left", "right", "right"],
    )


def _add_names(section: Section, profile: Mapping[str, Any]) -> None:
    for title, names in (("Actions", profile["actions"]), ("Surfaces", profile["surfaces"])):
        rarer = f" {len(names) - NUM_BARS} rarer names are not drawn." if len(names) > NUM_BARS else ""
        shown = dict(list(names.items())[:NUM_BARS])
        _bars(section, f"{title}.{rarer}", shown, title, _named(names), "share of events")


def _add_requests(section: Section, requests: Mapping[str, Any]) -> None:
    per_request = requests["candidates_per_request"]
    section.text(
        f"{requests['num_requests']:,} requests with {requests['num_candidates']:,} candidates; half of the requests "
        f"have at most {per_request.get('q50', 0):,.0f} candidates{_estimated(requests)}. "
        "A label is unknown while an action may still follow: the label's time window is open, and no action was "
        "joined yet."
    )
    section.table(
        ["label", "positive", "negative", "unknown", "share of positives among known labels"],
        [
            [name, *(f"{one[key]:,}" for key in ("positive", "negative", "unknown")), _rate(one)]
            for name, one in requests["labels"].items()
        ],
        align=["left", "right", "right", "right", "right"],
    )


def _add_fields(section: Section, fields: Mapping[str, Any]) -> None:
    section.table(
        ["field", "type", "missing"],
        [[name, field["type"], f"{field['missing_share']:.2%}"] for name, field in fields.items()],
        align=["left", "left", "right"],
    )


def _add_files(section: Section, files: Mapping[str, Any]) -> None:
    section.table(
        ["file", "rows", "size"],
        [
            [name, f"{file['num_rows']:,}" if "num_rows" in file else "", _bytes(file["bytes"])]
            for name, file in files.items()
        ],
        align=["left", "right", "right"],
    )
    columns = [
        (f"{name.removesuffix('.parquet')}.{column}", size)
        for name, file in files.items()
        for column, size in file["columns"].items()
    ]
    largest = sorted(columns, key=lambda pair: -pair[1])[:NUM_BARS]
    description = ", ".join(f"{name} {_bytes(size)}" for name, size in largest)
    kilobytes = {name: size / 1e3 for name, size in largest}
    caption = "The columns that take the most space in the Parquet files, the largest first."
    _bars(section, caption, kilobytes, "Bytes by column", description, "kilobytes, compressed", "{:,.1f}")


def _line(
    section: Section, caption: str, x: Sequence[float], y: Sequence[float], *, y_label: str = "events", **chart: Any
) -> None:
    section.chart(line_chart([Line(name=y_label, x=x, y=y)], y_label=y_label, **chart), caption)


def _bars(
    section: Section,
    caption: str,
    values: Mapping[str, float],
    title: str,
    description: str,
    label: str,
    value_format: str = "{:.1%}",
) -> None:
    bars = [Bars(name=label, values=list(values.values()))]
    names = [name[:32] for name in values]
    chart = bar_chart(names, bars, title=title, description=description, x_label=label, value_format=value_format)
    section.chart(chart, caption)


def _bins(section: Section, caption: str, bins: Mapping[str, int], title: str, unit: str) -> None:
    """Draws the bins, without the empty bins at both ends."""
    filled = [place for place, count in enumerate(bins.values()) if count]
    shown = list(bins.items())[filled[0] : filled[-1] + 1] if filled else list(bins.items())[:1]
    total = max(sum(bins.values()), 1)
    description = ", ".join(f"{name}: {count:,}" for name, count in shown)
    _bars(section, caption, {name: count / total for name, count in shown}, title, description, f"share of {unit}")


def _span(profile: Mapping[str, Any]) -> str:
    days: Sequence[int] = profile["days"]["day"]
    return f"{counted(days[-1] + 1, 'day')} from {profile['days']['first']} on"


def _quantiles(spread: Mapping[str, Any]) -> str:
    found = spread["quantiles"]
    if not found:
        return "none"
    shown = {share: format_number(float(f"{found[f'q{share}']:.3g}")) for share in (10, 50, 90, 99)}
    return ", ".join(f"{share}% are at most {value}" for share, value in shown.items()) + _estimated(spread)


def _estimated(spread: Mapping[str, Any]) -> str:
    return " (estimated)" if spread.get("estimated") else ""


def _negative(lateness: Mapping[str, Any], before: str = ", ") -> str:
    count = lateness["num_negative"]
    return f"{before}Events received before they happened: {count:,}." if count else ""


def _named(shares: Mapping[str, float]) -> str:
    shown = [f"{name} {share:.1%}" for name, share in list(shares.items())[:8]]
    return ", ".join(shown) + (f" and {len(shares) - 8} more" if len(shares) > 8 else "")


def _rate(label: Mapping[str, int]) -> str:
    known = label["positive"] + label["negative"]
    return f"{label['positive'] / known:.2%}" if known else ""


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
