"""Makes the report of `tackboard bench pretrain`: tables of floor, ladder, rival and parts, and two charts per size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tackboard.bench.pretrain.breakdown import PARTS
from tackboard.bench.pretrain.floor import FORMULAS
from tackboard.bench.report import Report, Table
from tackboard.bench.turns import aim_lines
from tackboard.report.svg import Bars, bar_chart


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    sizes = result["sizes"]
    command = " --quick" if result["quick"] else f" --size {','.join(sizes)}"
    command += "".join(f" --set {setting}" for setting in result["overrides"])
    tables: list[Table] = []
    charts: dict[str, str] = {}
    for name, size in sizes.items():
        tables += [_floor(name, size), _ladder(name, size), *_rival(name, size), _parts(name, size)]
        charts |= _charts(name, size)
    return Report(
        result=result,
        theme="pretrain",
        title="Pretraining: a step beside its floor, one optimisation at a time",
        command=f"bench pretrain{command}",
        words=[
            "A step is a step of `tackboard train`: loading, lookup, backbone, loss, backward, both optimisers, "
            "logging and the guard against bad losses and gradients. Every line of a ladder adds one optimisation to "
            "the line before. All lines and the rival took turns, each in a process of its own, and figures are "
            "medians over the rounds."
        ],
        tables=tables,
        notes=[*_shares(sizes), *aim_lines(result)],
        charts=charts,
    )


def _floor(name: str, size: Mapping[str, Any]) -> Table:
    floor, counts = size["floor"], size["counts"]
    rows = [
        (item, f"{line['ms']:.3f}", f"{line['gflop']:,.2f}", f"{line['mb']:,.1f}", FORMULAS[item])
        for item, line in floor["items"].items()
    ]
    rows.append(("total", f"{floor['total_ms']:.3f}", "", "", ""))
    words = (
        f"{size['words']}. A mean batch has N = {counts['num_events']:,} events in B = {counts['num_rows']:,} rows, "
        f"C = {counts['causal_pairs']:,} causal pairs, A = {counts['num_predicting']:,} tokens that predict, R = "
        f"{counts['num_sums']:,} softmax sums in the loss, Q = {counts['num_negatives']:,} negatives, "
        f"M = {counts['num_items']:,} items, U = {counts['num_table_rows']:,} table rows. "
        f"Measured here: {floor['peak_gflop_per_s']:,.0f} GFLOP/s for a large product, "
        f"{floor['copy_gb_per_s']:,.1f} GB/s for a large copy"
    )
    return Table(f"{name}: the floor", ("item", "ms", "GFLOP", "MB", "what is counted"), rows, words)


def _ladder(name: str, size: Mapping[str, Any]) -> Table:
    header = ("added", "wall ms", "gain", "CPU ms", "CPU gain", "tokens/s", "page faults", "memory MB", "loss")
    rows = [
        (
            line["words"],
            f"{line['wall_ms']:.1f}",
            f"{line['gain']:.2f}",
            f"{line['cpu_ms']:.1f}",
            f"{line['cpu_gain']:.2f}",
            f"{line['tokens_per_s']:,.0f}",
            f"{line['page_faults']:,.0f}",
            f"{(line['gpu_peak_bytes'] or line['peak_bytes']) / 1e6:,.0f}",
            f"{line['last_loss']:.5f}",
        )
        for line in size["ladder"]
    ]
    recompiled = size["ladder"][-1]["recompiled"]
    return Table(
        f"{name}: the ladder", header, rows, f"graphs compiled in timed steps of the last line: {recompiled:g}"
    )


def _rival(name: str, size: Mapping[str, Any]) -> list[Table]:
    rival, ours = size["rival"], size["ladder"][-1]
    if rival is None:
        return []
    if "failed" in rival:
        return [Table(f"{name}: the rival", (), (), f"plain PyTorch has no figures: {rival['failed']}")]
    checked = "its first loss equals ours" if rival["is_checked"] else "its loss was not compared"
    words = (
        f"plain PyTorch (benchmarks/rivals/plain_pretrain.py) with the same batches; {checked}. Tackboard makes "
        f"{rival['times_as_fast']:.2f} times as many tokens per second, and {rival['times_as_fast_per_cpu_s']:.2f} "
        "times as many per CPU-second"
    )
    rows = [
        (who, f"{line['wall_ms']:.1f}", f"{line['cpu_ms']:.1f}", f"{line['tokens_per_s']:,.0f}", _megabytes(line))
        for who, line in (("tackboard", ours), ("plain PyTorch", rival))
    ]
    return [Table(f"{name}: the rival", ("", "wall ms", "CPU ms", "tokens/s", "memory MB"), rows, words)]


def _megabytes(line: Mapping[str, Any]) -> str:
    return f"{line['peak_bytes'] / 1e6:,.0f}"


def _parts(name: str, size: Mapping[str, Any]) -> Table:
    parts = size["parts"]
    total = sum(parts["parts"].values())
    rows = [(PARTS[part], f"{ms:.2f}", f"{ms / total:.1%}") for part, ms in parts["parts"].items()]
    words = "time of the main thread with all optimisations, measured by the profiler"
    if parts["gpu_ms"] is not None:
        words = f"time of GPU kernels; {parts['synchronisations']:.1f} synchronisations per step"
    return Table(f"{name}: where the time goes", ("part", "ms", "share"), rows, words)


def _shares(sizes: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: the step runs at {size['product']['floor_share']:.1%} of the floor's speed; MFU of backbone and "
        f"projections {size['product']['mfu']:.1%}"
        for name, size in sizes.items()
    ]


def _charts(name: str, size: Mapping[str, Any]) -> dict[str, str]:
    lines = size["ladder"]
    groups = [line["words"] for line in lines] + ["the floor"]
    ladder = bar_chart(
        groups,
        [Bars(name="wall time per step", values=[*(line["wall_ms"] for line in lines), size["floor"]["total_ms"]])],
        title=f"{name}: the ladder",
        description="Wall time per step as one optimisation after another is added, beside the floor.",
        x_label="ms",
        value_format="{:.1f}",
    )
    parts = size["parts"]["parts"]
    where = bar_chart(
        [PARTS[part] for part in parts],
        [Bars(name="time per step", values=list(parts.values()))],
        title=f"{name}: where the time goes",
        description="Time per step by part of the model.",
        x_label="ms",
        value_format="{:.1f}",
    )
    return {f"{name}-ladder": ladder.document, f"{name}-parts": where.document}
