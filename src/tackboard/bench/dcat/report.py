"""Makes the report of `tackboard bench dcat`: tables of equality, serving, training and fixed length, and a chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tackboard.bench.dcat.rungs import SKIP, WHOLE
from tackboard.bench.dcat.speed import ratio_of
from tackboard.bench.report import Report, Table
from tackboard.bench.turns import aim_lines
from tackboard.report.svg import Bars, bar_chart

PARTS = {"end_to_end": "end to end", "module": "PinFM alone"}
"""Key of a measurement → its words."""


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    _, clock = ratio_of(result["device"])
    command = "bench dcat" + (" --quick" if result["quick"] else f" --device {result['device']}")
    return Report(
        result=result,
        theme="dcat",
        title="DCAT beside whole sequences for every candidate",
        command=command,
        words=[
            f"{result['words']}.",
            "Every line of a ladder adds one thing to the line before. The first line runs every candidate through "
            "its whole sequence, with packed attention; the other parts of the ranker are the same in all lines. "
            "All lines took turns. Times are medians over the rounds. A ratio compares a line with the first line in "
            f"the same round; the median over {result['rounds']} rounds is shown. Ratios are computed from {clock}.",
        ],
        tables=[
            _equality(result),
            *(_speed(result, "serving", line) for line in result["serving"]),
            *(_speed(result, "training", line) for line in result["training"]),
            _fixed_length(result),
        ],
        notes=[
            "published for PinFM on GPUs, compared with FlashAttention: 7 times the throughput in serving and 3 times "
            "in training; the fixed length and the skipped layer add a quarter",
            *aim_lines(result),
        ],
        charts={"times": _chart(result)},
    )


def _equality(result: Mapping[str, Any]) -> Table:
    rows = [
        (
            result["lines"][line["name"]],
            f"{line['scores']:.1e}",
            f"{line['gradients']:.1e}",
            f"{line['change']:.1e}",
        )
        for line in result["equality"]
    ]
    words = (
        "largest differences, as shares of the largest value. Every line must equal the first line. Only the fixed "
        "length must equal a version of the first line whose candidates may not see the overwritten slots. The last "
        "column compares the scores of every line with those of the first line"
    )
    return Table("Values and gradients, checked first", ("line", "scores", "gradients", "from first"), rows, words)


def _speed(result: Mapping[str, Any], part: str, line: Mapping[str, Any]) -> Table:
    figure, _ = ratio_of(result["device"])
    units = ("wall ms", "CPU ms", "times as fast")
    header = ("line", *(f"{words}: {unit}" for words in PARTS.values() for unit in units))
    rows = []
    for entries in zip(*(line[key] for key in PARTS), strict=True):
        cells = [
            f"{entry[key]:{form}}"
            for entry in entries
            for key, form in (("wall_ms", ",.1f"), ("cpu_ms", ",.1f"), (figure, ".2f"))
        ]
        rows.append((result["lines"][entries[0]["name"]], *cells))
    words = f"requests of different users: {line['requests']}; candidates of each: {line['candidates']:,}"
    if part == "training":
        losses = ", ".join(f"{entry['loss']:.5f}" for entry in line["end_to_end"])
        words += f"; a step holds about this many requests. Losses after the timed steps: {losses}"
        peaks = [entry["gpu_peak_bytes"] for entry in line["end_to_end"]]
        if any(peaks):
            words += f". GPU memory, MB: {', '.join(f'{peak / 1e6:,.0f}' for peak in peaks)}"
    return Table(f"{part.capitalize()}, 1:{line['candidates']}", header, rows, words)


def _fixed_length(result: Mapping[str, Any]) -> Table:
    found = result["fixed_length"]
    full = found["full"]
    rows = [("full", "", "", "", "", f"{full['auc']:.4f}", f"{full['hit@3']:.4f}")]
    rows += [
        (
            str(line["length"]),
            f"{line['changed']:.1%}",
            f"{line['difference']:.3f}",
            f"{line['kendall']:.3f}",
            f"{line['same_best']:.1%}",
            f"{line['auc']:.4f}",
            f"{line['hit@3']:.4f}",
        )
        for line in found["lengths"]
    ]
    words = (
        f"a ranker, trained for {found['steps']} steps with the full context of up to {found['max_history'] + 1} "
        f"tokens, scores {found['requests']:,} held-out requests of {found['candidates']} candidates with fewer slots. "
        "Difference (in standard deviations of the full scores), Kendall's τ and same best candidate are means over "
        "the requests whose scores changed; AUC and HIT@3 are computed over all requests"
    )
    header = ("slots", "requests changed", "difference", "Kendall's τ", "same best", "AUC", "HIT@3")
    return Table("What a fixed length changes", header, rows, words)


def _chart(result: Mapping[str, Any]) -> str:
    figure, clock = ratio_of(result["device"])
    lines = [*(("serving", line) for line in result["serving"]), *(("training", line) for line in result["training"])]
    bars = [
        Bars(
            name=words,
            values=[next(entry[figure] for entry in line[key] if entry["name"] == SKIP) for _, line in lines],
        )
        for key, words in PARTS.items()
    ]
    return bar_chart(
        [f"{part} 1:{line['candidates']}" for part, line in lines],
        bars,
        title="How many times as fast as whole sequences",
        description=f"DCAT with the last layer skipped, compared with the line {WHOLE}, by users to candidates.",
        x_label=f"times as fast, by {clock}",
        value_format="{:.1f}",
    ).document
