"""The page of `tackboard data stats`: a profile in, one self-contained HTML file out, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.core.errors import counted
from tackboard.report.page import Figure, Page, Section
from tackboard.report.svg import Bars, Line, bar_chart, format_number, line_chart

MAX_DAYS = 4000
"""Of a longer span, which is nearly always a wrong unit, only the days with events are drawn."""
NUM_BARS = 20
"""Names of actions, surfaces and columns that are drawn; a table has them all."""


def render(profile: Mapping[str, Any]) -> str:
    """The page as HTML."""
    page = Page(
        f"Dataset {profile['dataset']}",
        f"What the {profile['num_events']:,} events of snapshot {profile['snapshot']} look like.",
        footer=f"tackboard data stats, snapshot {profile['snapshot']}. Days and hours are UTC.",
    )
    page.lead.figures(
        [
            Figure(label="events", value=f"{profile['num_events']:,}", note=_span(profile)),
            Figure(
                label="users", value=f"{profile['num_users']:,}", note=_median(profile["events_per_user"], "events")
            ),
            Figure(
                label="items with events",
                value=f"{profile['num_items']:,}",
                note=f"{profile['num_items_listed']:,} listed",
            ),
            Figure(
                label="events on 1% of the items",
                value=f"{profile['items']['top_1_percent_share']:.0%}",
                note="the most popular",
            ),
            Figure(
                label="on disk", value=_bytes(sum(one["bytes"] for one in profile["files"].values())), note="all files"
            ),
        ]
    )
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
    """The figures for a terminal, one a line."""
    per_user, gap, lateness = profile["events_per_user"], profile["gap_s"], profile["lateness_s"]
    rows = [
        ("dataset", f"{profile['dataset']}, snapshot {profile['snapshot']}"),
        ("events", f"{profile['num_events']:,}, {_span(profile)}"),
        ("users", f"{profile['num_users']:,}"),
        ("items", f"{profile['num_items']:,} with events, {profile['num_items_listed']:,} listed"),
        ("actions", _named(profile["actions"])),
        ("surfaces", _named(profile["surfaces"])),
        ("per user", f"{_quantiles(per_user)}, most {per_user['max']:,}"),
        ("popularity", f"{profile['items']['top_1_percent_share']:.1%} of events on 1% of the items"),
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
    section.chart(
        line_chart(
            [Line(name="events", x=list(number), y=[every_day.get(day, 0) for day in number])],
            title="Events per day",
            description=f"{len(every_day)} days with events from {days['first']} on.",
            x_label=f"days since {days['first']}",
            y_label="events",
        ),
        "Events per day. A day at zero between busy ones is usually a part of the log that lacks.",
    )
    section.chart(
        line_chart(
            [Line(name="events", x=list(range(24)), y=profile["hours"])],
            title="Events by hour of the day",
            description=", ".join(f"{hour}: {count:,}" for hour, count in enumerate(profile["hours"])),
            x_label="hour of the day, UTC",
            y_label="events",
            height=240,
        ),
        "Events by hour of the day.",
    )
    lateness = profile["lateness_s"]
    section.chart(
        _bins(lateness["bins"], "Lateness: received − happened", "events"),
        f"How long after it happened an event was received.{_negative(lateness, ' ')} {_quantiles(lateness)} seconds.",
    )


def _add_users(section: Section, profile: Mapping[str, Any]) -> None:
    per_user = profile["events_per_user"]
    section.chart(
        _bins(per_user["bins"], "Events per user", "users"),
        f"Users by their events. Mean {per_user['mean']:.1f}, {_quantiles(per_user)}, most {per_user['max']:,}.",
    )
    gap = profile["gap_s"]
    section.chart(
        _bins(gap["bins"], "Gaps between a user's events", "gaps"),
        f"Time between one event of a user and the next. {_quantiles(gap)} seconds.",
    )


def _add_items(section: Section, profile: Mapping[str, Any]) -> None:
    items, growth = profile["items"], profile["catalogue"]
    section.chart(
        line_chart(
            [Line(name="events", x=items["rank"], y=items["events"])],
            title="Events of an item by its rank",
            description=f"The first item has {items['events'][0]:,} events, the last {items['events'][-1]:,}.",
            x_label="rank of the item by events",
            y_label="events",
            log_x=True,
            log_y=True,
        ),
        "Events of an item by its rank, both axes logarithmic. A straight line is a power law.",
    )
    if len(growth["day"]) > 1:
        by = "their birth" if growth["by"] == "birth_ms" else "their first event"
        section.chart(
            line_chart(
                [Line(name="items", x=growth["day"], y=growth["items"])],
                title="Growth of the catalogue",
                description=f"From {growth['items'][0]:,} to {growth['items'][-1]:,} items.",
                x_label=f"days since {profile['days']['first']}",
                y_label="items",
                height=240,
            ),
            f"Items that were there by the end of each day, by {by}.",
        )
    section.table(
        ["item", "events", "share"],
        [[one["item"], f"{one['events']:,}", f"{one['events'] / profile['num_events']:.2%}"] for one in items["top"]],
        caption="The most popular items.",
        align=["left", "right", "right"],
    )


def _add_names(section: Section, profile: Mapping[str, Any]) -> None:
    for title, names in (("Actions", profile["actions"]), ("Surfaces", profile["surfaces"])):
        shown = list(names)[:NUM_BARS]
        section.chart(
            bar_chart(
                [name[:32] for name in shown],
                [Bars(name="share of events", values=[names[name] for name in shown])],
                title=title,
                description=_named(names),
                x_label="share of events",
                value_format="{:.1%}",
            ),
            f"{title}." + (f" {len(names) - NUM_BARS} rarer ones are not drawn." if len(names) > NUM_BARS else ""),
        )


def _add_requests(section: Section, requests: Mapping[str, Any]) -> None:
    per_request = requests["candidates_per_request"]
    section.text(
        f"{requests['num_requests']:,} requests with {requests['num_candidates']:,} candidates; half of the requests "
        f"have at most {per_request.get('q50', 0):,.0f}{_estimated(requests)}. "
        "A label is unknown while its window is open."
    )
    section.table(
        ["label", "positive", "negative", "unknown", "positive of the known"],
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
    section.chart(
        bar_chart(
            [name[:32] for name, _ in largest],
            [Bars(name="kilobytes, compressed", values=[size / 1e3 for _, size in largest])],
            title="Bytes by column",
            description=", ".join(f"{name} {_bytes(size)}" for name, size in largest),
            x_label="kilobytes",
            value_format="{:,.1f}",
        ),
        "What each column takes in its Parquet file, the largest first.",
    )


def _bins(bins: Mapping[str, int], title: str, unit: str) -> Any:
    """Bars of the bins from the first to the last that is not empty."""
    filled = [place for place, count in enumerate(bins.values()) if count]
    shown = list(bins.items())[filled[0] : filled[-1] + 1] if filled else list(bins.items())[:1]
    total = max(sum(bins.values()), 1)
    return bar_chart(
        [name for name, _ in shown],
        [Bars(name=f"share of {unit}", values=[count / total for _, count in shown])],
        title=title,
        description=", ".join(f"{name}: {count:,}" for name, count in shown),
        x_label=f"share of {unit}",
        value_format="{:.1%}",
    )


def _span(profile: Mapping[str, Any]) -> str:
    days: Sequence[int] = profile["days"]["day"]
    return f"{counted(days[-1] + 1, 'day')} from {profile['days']['first']} on"


def _median(spread: Mapping[str, Any], unit: str) -> str:
    return f"median {spread['quantiles']['q50']:,.0f} {unit}"


def _quantiles(spread: Mapping[str, Any]) -> str:
    found = spread["quantiles"]
    if not found:
        return "none"
    shown = {share: format_number(float(f"{found[f'q{share}']:.3g}")) for share in (10, 50, 90, 99)}
    return ", ".join(f"{share}% at most {value}" for share, value in shown.items()) + _estimated(spread)


def _estimated(spread: Mapping[str, Any]) -> str:
    return " (estimated)" if spread.get("estimated") else ""


def _negative(lateness: Mapping[str, Any], before: str = ", ") -> str:
    count = lateness["num_negative"]
    return f"{before}{count:,} were received before they happened." if count else ""


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
