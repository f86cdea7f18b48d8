"""Turns the result of `tackboard bench daily` into tables, a chart over the periods, and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tackboard.bench.daily.daily_study import (
    ALONE,
    ARMS,
    CONTINUED,
    FROZEN,
    HEAD,
    LIVE,
    NUM_CHOOSING,
    NUM_FITTED,
    NUM_RESAMPLES,
    RETRAINED,
)
from tackboard.bench.report import Report, Table
from tackboard.report.svg import Line, Tone, line_chart

TONES: Mapping[str, Tone] = {LIVE: "second", FROZEN: "soft", RETRAINED: "strong", CONTINUED: "third", HEAD: "accent"}
"""The arms in the chart, and their colours."""


def daily_report(result: Mapping[str, Any]) -> Report:
    """Makes the report of one log."""
    plan, periods = result["plan"], result["periods"]
    options = f" --dataset {plan['dataset']} --periods {plan['periods']} --tokens {plan['tokens']}"
    options += (f" --seed {result['seed']}" if result["seed"] else "") + (" --quick" if result["quick"] else "")
    which = "the first positive event of each user is" if plan["judged"] == "first" else "all positive events are"
    return Report(
        result=result,
        theme=f"daily-{plan['dataset']}",
        title=f"Judged on the time after training: {plan['dataset']}, {plan['periods']} times {plan['hours']} hours",
        command=f"bench daily{options}",
        words=[
            f"The periods lie between {result['first_cut']} and {result['end']}. In each period, "
            f"{which} judged, for at most {plan['max_users']:,} users of the period, who are drawn by their ids. "
            "Every item that appeared in the log before the event is ranked; items of the history stay in the ranking; "
            "ties count against the target.",
            f"Each trained arm reads {plan['tokens']:,} tokens in all. `{FROZEN}` reads all of them before the first "
            f"cut. `{RETRAINED}` begins each period with random parameters and reads an equal part. `{CONTINUED}` "
            "reads half of the tokens on events up to one period before the first cut, and the rest in equal parts, "
            "one for each period.",
            f"`{HEAD}` is the model of `{CONTINUED}` with live counts, ages and the user's own items. Its weights are "
            f"fitted to at most {NUM_FITTED:,} events of the period before, with the model of the period before. "
            f"`{ALONE}` has the same head, but no model. The windows of recent popularity are chosen on at most "
            f"{NUM_CHOOSING} events of the period before.",
        ],
        tables=[
            Table(
                "all periods",
                ("arm", "HR@10", "to live popularity", "NDCG@10", "to live popularity", "periods won"),
                [_pooled_row(row, plan["periods"]) for row in result["arms"]],
                "Means over users; a user's figure is the mean over the user's judged events. Differences are those to "
                f"`{LIVE}`, with 95% intervals of {NUM_RESAMPLES:,} paired resamples of users. They do not cover "
                "differences between seeds. A period is won if HR@10 over its events is above that of live popularity",
            ),
            Table(
                "HR@10 of each period",
                ("from", "events", "never seen", "item age h", "window h", *ARMS),
                [_period_row(period) for period in periods],
                "Never seen: judged events on items without an event before the period. Item age: median time since "
                "the item's first event. Window: the window of live popularity",
            ),
            Table(
                "training",
                ("arm", "runs", "tokens", "CPU s"),
                [
                    (row["arm"], str(row["runs"]), f"{row['tokens']:,}", f"{row['cpu_s']:,.0f}")
                    for row in result["training"]
                ],
                "CPU s: all commands, with start-up",
            ),
        ],
        notes=[_verdict(result), _worth_of_the_model(result)],
        charts={"hr10": _chart(result)},
    )


def _verdict(result: Mapping[str, Any]) -> str:
    """Says whether the best other arm is ahead of live popularity on both metrics, with its whole interval."""
    best = max((row for row in result["arms"] if row["arm"] != LIVE), key=lambda row: float(row["hr@10"]))
    low = min(best[f"{name}_difference"][1] for name in ("hr@10", "ndcg@10"))
    met = "met" if low > 0 else "not met"
    return (
        f"Aim: the interval of the best arm's difference to live popularity lies above 0. {met.capitalize()}: the best "
        f"arm is `{best['arm']}`"
    )


def _worth_of_the_model(result: Mapping[str, Any]) -> str:
    """Says what the model adds to the live head."""
    (row,) = (row for row in result["arms"] if row["arm"] == HEAD)
    shown = (f"{name.upper()} {_shown(row[f'{name}_over_alone'])}" for name in ("hr@10", "ndcg@10"))
    return f"What the model adds to the live head (`{HEAD}` against `{ALONE}`): {', '.join(shown)}"


def _shown(difference: Sequence[float]) -> str:
    mean, low, high = difference
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def _pooled_row(row: Mapping[str, Any], num_periods: int) -> tuple[str, ...]:
    cells = [row["arm"]]
    for name in ("hr@10", "ndcg@10"):
        difference = row.get(f"{name}_difference")
        cells += [f"{row[name]:.4f}", "" if difference is None else _shown(difference)]
    return (*cells, "" if row["arm"] == LIVE else f"{row['periods_won']} of {num_periods}")


def _period_row(period: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *(period["begin"], f"{period['num_events']:,}", f"{period['never_seen_share']:.1%}"),
        *(f"{period['item_age_h']:.1f}", f"{period['live_h']:g}"),
        *(f"{period['arms'][arm]['hr@10']:.4f}" for arm in ARMS),
    )


def _chart(result: Mapping[str, Any]) -> str:
    periods: Sequence[Mapping[str, Any]] = result["periods"]
    lines = [
        Line(
            name=arm,
            x=[place + 1.0 for place in range(len(periods))],
            y=[float(period["arms"][arm]["hr@10"]) for period in periods],
            tone=tone,
        )
        for arm, tone in TONES.items()
    ]
    return line_chart(
        lines,
        title=f"HR@10 of each period, {result['plan']['dataset']}",
        description="HR@10 of live popularity and of the trained arms, period by period.",
        x_label="period",
        y_label="HR@10",
    ).document
