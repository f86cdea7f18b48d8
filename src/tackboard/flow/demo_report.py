"""Writes the demo's report, `report.html`, from the outcome of a demo and the files that the outcome names.

The page must convince somebody who did not run the demo. It says what was promised and whether the promise was kept,
how each number was measured, which files were written, and which commands a user would type to repeat the demo.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tackboard.core.files import read_json, write_text_atomic
from tackboard.core.manifest import read_manifest
from tackboard.core.rundir import RunDirectory
from tackboard.features.feature_set import read_features
from tackboard.flow.command import typed
from tackboard.flow.outcome import BASELINE, FINETUNED, RANKER, STAGE_NAMES, TARGET_GAP_CLOSED, Outcome, hardware_words
from tackboard.report.page import Figure, Page, Section
from tackboard.report.svg import Bars, Line, Tone, bar_chart, histogram, line_chart, percentile

ROW_TONES: dict[str, Tone] = {"popularity": "soft", "item-to-item": "strong", "model": "accent", "oracle": "second"}
ORACLE = (
    "The oracle is a ranker that knows what no model can: it reads the hidden interests from which the synthetic world "
    "drew each user's next event, so its score is the best that any method could reach on this data."
)
STEP_TONES: dict[str, Tone] = {BASELINE: "soft", RANKER: "strong", FINETUNED: "accent"}
STEP_WORDS = {
    BASELINE: "the mean label of an item in training; this mean is the same for every user",
    RANKER: "a model that reads the user's newest events and the features, and has tables of items; it is trained on "
    "the requests alone",
    FINETUNED: "the same ranker with the pretrained PinFM; here PinFM is trained further, at a tenth of the ranker's "
    "learning rate",
}
NUM_SMOOTHED = 25
HASH_DIGITS = 12


def write_report(outcome: Outcome) -> Path:
    """Writes report.html into the demo's folder and returns its path."""
    path = outcome.out / "report.html"
    write_text_atomic(path, render(outcome))
    return path


def render(outcome: Outcome) -> str:
    """Returns the page as HTML."""
    environment = outcome.environment
    page = Page(
        "Tackboard demo",
        "From a synthetic log of user activity to scores served over HTTP, in one command.",
        footer=(
            f"tackboard {environment['packages']['tackboard']} at commit {environment['commit'] or 'unknown'}, "
            f"{outcome.stages['data'].answer.get('num_events', 0):,} events, {outcome.total_seconds:.0f} s in all."
        ),
    )
    _add_headline(page.lead, outcome)
    _add_training(page.section("Pretraining"), outcome)
    _add_quality(page.section("PinFM alone"), outcome)
    _add_lift(page.section("Lift of each step"), outcome)
    _add_serving(page.section("Serving"), outcome)
    _add_features(page.section("Features"), outcome)
    _add_artefacts(page.section("What was built"), outcome)
    _add_time(page.section("Time and memory"), outcome)
    by_hand = page.section("The same by hand")
    by_hand.text(
        "These commands repeat the demo by hand. The server logs no features here, so replay reads the demo's own log. "
        "Export overwrites nothing: choose another folder, or remove the bundle first."
    )
    by_hand.code("\n".join(commands_by_hand(outcome)))
    return page.render()


def verdict(outcome: Outcome) -> str:
    """Says what the target is, and whether it was met."""
    target = f"at least {TARGET_GAP_CLOSED:.0%} of the gap between the better baseline's HR@10 and the oracle's"
    if outcome.quick:
        return f"The target is {target}. This was a quick run, which trains too little to be judged by this target."
    met = "Met" if outcome.target_met else "Not met"
    return f"Target, fixed before the first comparison: {target}. {met}: the model closes {outcome.gap_closed:.1%}."


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and its neighbours, `window` values in all. `window` must be odd.

    Near the ends the window is narrower on both sides, so that the smoothed curve never lags.
    """
    means = []
    for index in range(len(values)):
        reach = min(window // 2, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        means.append(sum(near) / len(near))
    return means


def _add_headline(lead: Section, outcome: Outcome) -> None:
    lead.verdict(verdict(outcome), good=outcome.target_met or outcome.quick)
    rows, latencies = outcome.metrics, outcome.latencies_ms
    baseline = max((row for name, row in rows.items() if name not in ("model", "oracle")), key=lambda row: row["hr@10"])
    lead.figures(
        [
            Figure(
                "HR@10 of PinFM",
                f"{rows['model']['hr@10']:.3f}",
                f"{baseline['name']} {baseline['hr@10']:.3f}, oracle {rows['oracle']['hr@10']:.3f}; "
                f"gap closed {outcome.gap_closed:.0%}",
            ),
            _lift_figure(outcome),
            Figure("requests scored", f"{len(latencies):,}", f"{outcome.num_candidates:,} candidates each"),
            Figure(
                "latency p50 / p99, ms",
                f"{percentile(latencies, 50):.1f} / {percentile(latencies, 99):.1f}",
                "as the client sees it",
            ),
            Figure(
                "total time",
                _duration(outcome.total_seconds),
                f"with {_bytes(outcome.peak_rss_bytes)} at the peak",
            ),
        ]
    )


def _add_training(section: Section, outcome: Outcome) -> None:
    train = outcome.stages["pretrain"]
    lines = [line for line in RunDirectory(Path(train.require("run"))).read_metrics() if "loss" in line]
    steps = [float(line["step"]) for line in lines]
    losses = [float(line["loss"]) for line in lines]
    section.text(
        f"{train.require('step'):,} steps of next-item prediction at {train.require('tokens_per_s'):,.0f} tokens per "
        "second. A token is one event of a user's history."
    )
    if not lines:
        section.text("The run wrote no losses.")
        return
    window = min(NUM_SMOOTHED, max(1, len(losses) // 8)) | 1
    section.chart(
        line_chart(
            [
                Line(name="loss, as logged", x=steps, y=losses, tone="raw", width=1.0),
                Line(name=f"mean of {window} such points", x=steps, y=smooth(losses, window), tone="accent"),
            ],
            title="Training loss by step",
            description=f"From {losses[0]:.3f} at step {steps[0]:.0f} to {losses[-1]:.3f} at step {steps[-1]:.0f}.",
            x_label="step",
            y_label="loss (nats)",
        ),
        f"InfoNCE loss with in-batch negatives: {losses[0]:.3f} at step {steps[0]:.0f}, "
        f"{losses[-1]:.3f} at step {steps[-1]:.0f}.",
    )


def _add_quality(section: Section, outcome: Outcome) -> None:
    evaluate = outcome.stages["evaluate"]
    seen = "are left out" if evaluate.require("filter_seen") else "stay in"
    section.text(
        f"Protocol: for each of {evaluate.require('num_users'):,} users the last positive event is held out and "
        f"predicted from all the events before it, by ranking the full catalogue. Items the user has seen {seen}; ties "
        "count against the method. HR@k is the share of users whose held-out item is among the first k; NDCG@k also "
        "rewards a higher rank."
    )
    section.text(ORACLE)
    rows = outcome.metrics
    for metric, name in (("hr", "HR"), ("ndcg", "NDCG")):
        keys = [key for key in _metric_keys(rows["model"]) if key.startswith(f"{metric}@")]
        section.chart(
            bar_chart(
                [key.upper() for key in keys],
                [
                    Bars(name=row_name, values=[row[key] for key in keys], tone=ROW_TONES.get(row_name))
                    for row_name, row in rows.items()
                ],
                title=f"{name} by method",
                description=". ".join(f"{row_name}: " + _listed(row, keys) for row_name, row in rows.items()),
                x_label=name,
            )
        )
    keys = _metric_keys(rows["model"])
    section.table(
        ["", *(key.upper() for key in keys)],
        [[row_name, *(f"{row[key]:.4f}" for key in keys)] for row_name, row in rows.items()],
        align=["left", *(["right"] * len(keys))],  # type: ignore[list-item]
        strong_rows=[list(rows).index("model")],
    )
    better = max(row["hr@10"] for name, row in rows.items() if name not in ("model", "oracle"))
    section.text(
        f"Gap closed = (model − better baseline) / (oracle − better baseline) in HR@10 = "
        f"({rows['model']['hr@10']:.4f} − {better:.4f}) / ({rows['oracle']['hr@10']:.4f} − {better:.4f}) "
        f"= {outcome.gap_closed:.1%}."
    )


def _lift_figure(outcome: Outcome) -> Figure:
    label, steps = next(iter(outcome.lift.items()))
    hits = {name: metrics["hit@3"] for name, metrics in steps.items()}
    return Figure(
        f"ranker's HIT@3 ({label})",
        f"{hits[FINETUNED]:.3f}",
        f"without PinFM {hits[RANKER]:.3f}, item mean {hits[BASELINE]:.3f}",
    )


def lift_words(outcome: Outcome) -> str:
    """Says what pretraining changes for each label, whether it helps or not."""
    words = []
    for label, steps in outcome.lift.items():
        before, after = steps[RANKER]["hit@3"], steps[FINETUNED]["hit@3"]
        verb = "raises" if after > before else "lowers" if after < before else "leaves"
        change = f"from {before:.3f} to {after:.3f}" if after != before else f"at {before:.3f}"
        words.append(f"{verb} HIT@3 of {label} {change}")
    return f"On these requests PinFM {' and '.join(words)}."


def _add_lift(section: Section, outcome: Outcome) -> None:
    made, judged = outcome.stages["requests"].require("counts"), outcome.stages["finetune-eval"]
    rules = outcome.stages["requests"].require("rules")
    section.text(
        f"A ranker scores the candidates of a request. The log does not say what was shown, so "
        f"{made['requests']:,} requests were made from it: from each user's events on new items, the newest "
        f"{rules['per_user']} are taken, and each of them gives one request. An item is new if the user "
        "had no earlier event with it. The candidates of a request are the event's item and up to "
        f"{rules['candidates']} other items. Other users chose these other items in the same hour, and the user "
        "never chose them. Items with more events in this hour are more likely to be drawn as other items, so "
        "popularity alone does not tell which candidate the user chose. The label “next” is 1 for the item that the "
        "user chose. The label “save” is 1 for this item if the user saved it."
    )
    section.text(
        "Protocol: one user in five was held out of pretraining and of both rankers. All three methods (the item's "
        "mean label, the ranker without PinFM and the ranker with PinFM) are judged on the requests of these "
        f"{judged.require('num_users'):,} users, which have {judged.require('num_candidates'):,} candidates in all. "
        f"Both rankers take {outcome.stages['finetune'].require('step'):,} steps on the same requests. The ranker "
        "without PinFM learns about items from these requests alone. The other ranker also has what PinFM learned "
        "about items in pretraining, from the histories of the users who were not held out."
    )
    section.text(
        "HIT@3 considers only the requests that have a candidate whose label is 1. It is the share of these requests "
        "in which such a candidate is among the first three; ties count against the method. AUC counts pairs of two "
        "candidates: the label of the first is 1, and the label of the second is 0. It is the share of these pairs in "
        "which the first scores higher; a tie counts half. NE is the log-loss, divided by the log-loss of a constant "
        "prediction; a value below 1 is better than the constant prediction."
    )
    lift = outcome.lift
    section.chart(
        bar_chart(
            list(lift),
            [
                Bars(name=step, values=[steps[step]["hit@3"] for steps in lift.values()], tone=tone)
                for step, tone in STEP_TONES.items()
            ],
            title="HIT@3 by step",
            description=". ".join(
                f"{label}: " + ", ".join(f"{step} {metrics['hit@3']:.3f}" for step, metrics in steps.items())
                for label, steps in lift.items()
            ),
            x_label="HIT@3",
        ),
        lift_words(outcome),
    )
    rows: list[list[str]] = []
    for label, steps in lift.items():
        previous = None
        for step, metrics in steps.items():
            change = "" if previous is None else f"{metrics['hit@3'] - previous:+.4f}"
            previous = metrics["hit@3"]
            figures = [f"{metrics[name]:.4f}" for name in ("auc", "auc_within_users", "ne")]
            rows.append([label, step, f"{previous:.4f}", change, *figures])
    section.table(
        ["label", "ranked by", "HIT@3", "added by this step", "AUC", "AUC within users", "NE"],
        rows,
        align=["left", "left", *(["right"] * 5)],  # type: ignore[list-item]
        strong_rows=[index for index, row in enumerate(rows) if row[1] == FINETUNED],
    )
    section.facts(list(STEP_WORDS.items()))


def _add_serving(section: Section, outcome: Outcome) -> None:
    section.text(
        "The ranker on PinFM is served. Requests went through the unmodified public client tritonclient over HTTP, one "
        "after another on one connection, from this machine. Each request has the known events of one user, "
        f"{outcome.num_candidates:,} candidates and their attributes. PinFM reads the user once per request; the "
        "ranker's own sequence module reads the user's newest events once per candidate."
    )
    latencies = outcome.latencies_ms
    marks = {percent: percentile(latencies, percent) for percent in (50, 90, 99)}
    section.chart(
        histogram(
            latencies,
            title="Latency of a request",
            description=", ".join(f"p{percent} {value:.1f} ms" for percent, value in marks.items()),
            x_label="milliseconds from call to scores, binary and JSON together",
            y_label="requests",
        )
    )
    section.table(
        ["wire format", "requests", "p50 ms", "p90 ms", "p99 ms", "server CPU ms per request"],
        [
            [
                exchange.wire,
                len(exchange.latencies_ms),
                *(f"{percentile(exchange.latencies_ms, percent):.2f}" for percent in (50, 90, 99)),
                f"{exchange.server_cpu_ms_per_request:.2f}",
            ]
            for exchange in outcome.exchanges
        ],
        align=["left", "right", "right", "right", "right", "right"],
    )
    section.text(
        f"The scores of {outcome.num_compared} requests were computed again without a server. They differ by at most "
        f"{outcome.largest_difference:.1e} of the largest absolute score (allowed: 1e-05). Binary and JSON agree for "
        "every request."
    )


def _add_features(section: Section, outcome: Outcome) -> None:
    bundle = Path(outcome.stages["export"].require("bundle"))
    features = read_features(bundle)
    replayed, trimming = outcome.stages["replay"], outcome.stages["finetune"].require("trimming")
    section.text(
        "The ranker's features are defined once, in the feature language. The same kernels compute them in training "
        "and in the server. The bundle contains the definition as features.json."
    )
    if features is not None:
        section.table(
            ["feature", "type", "one value per", "meaning"],
            [[one.name, str(one.type), one.level, one.description] for one in features.features()],
            align=["left", "left", "left", "left"],
        )
    section.text(
        "The server logged the features that it served. They were computed again in batch from the dataset, using only "
        f"events received before each request. Of {replayed.require('num_values'):,} values in "
        f"{replayed.require('num_compared'):,} requests, {replayed.require('num_mismatches'):,} differ in at least one "
        f"bit. For {replayed.require('num_late'):,} requests, some event had happened before the request but was "
        "received only after the request."
    )
    section.text(
        f"Training the ranker read these columns into memory: {', '.join(trimming['read'])} "
        f"({_bytes(trimming['bytes'])} for all events). "
        + (
            f"The other columns ({', '.join(trimming['skipped'])}) stayed on disk, which saved "
            f"{_bytes(trimming['bytes_saved'])}."
            if trimming["skipped"]
            else "There are no other columns."
        )
    )


def _add_artefacts(section: Section, outcome: Outcome) -> None:
    data, train = outcome.stages["data"], outcome.stages["finetune"]
    bundle = Path(outcome.stages["export"].require("bundle"))
    signature = read_json(bundle / "signature.json")
    section.facts(
        [
            (
                "dataset",
                f"{data.require('num_events'):,} events, {data.require('num_users'):,} users, "
                f"{data.require('num_items'):,} items in {data.require('dataset')}",
            ),
            ("model", f"{_num_parameters(Path(train.require('run')))} parameters; {_model_words(signature)}"),
            ("checkpoint", f"step {train.require('step'):,} in {_shown(train.require('checkpoint'))}"),
            ("bundle", f"{_bytes(outcome.stages['export'].require('bytes'))} in {bundle}"),
        ]
    )
    section.table(
        ["file of the bundle", "size", "SHA-256 begins"],
        [
            [entry["name"], _bytes(entry["bytes"]), entry["sha256"][:HASH_DIGITS]]
            for entry in read_manifest(bundle)["files"]
        ],
        align=["left", "right", "left"],
    )
    environment = outcome.environment
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    section.facts(
        [
            ("versions", f"Python {environment['python']}, {versions}"),
            ("machine", hardware_words(environment["hardware"])),
            ("system", environment["platform"]),
            ("commit", environment["commit"] or "not a git checkout"),
        ]
    )


def _add_time(section: Section, outcome: Outcome) -> None:
    section.table(
        ["stage", "seconds", "CPU seconds", "peak memory"],
        [
            [name, f"{stage.seconds:.1f}", f"{stage.cpu_seconds:.1f}", _bytes(stage.peak_rss_bytes)]
            for name, stage in outcome.stages.items()
        ],
        align=["left", "right", "right", "right"],
        caption="Each stage is a command of its own: starting Python and loading libraries is included.",
    )


def commands_by_hand(outcome: Outcome) -> list[str]:
    """Returns commands that repeat the demo, as a user would type them. The first `score` needs the running server."""
    lines = []
    for name in STAGE_NAMES[: STAGE_NAMES.index("serve")]:
        lines.append(typed([word for word in outcome.stages[name].arguments if word != "--json"]))
    bundle = str(outcome.stages["export"].require("bundle"))
    request = str(outcome.out / "requests" / "user-1.json")
    lines.append(typed(["serve", bundle, "--port", "8000"]))
    lines.append(typed(["score", request, "--url", "127.0.0.1:8000"]) + "   # while the server runs")
    lines.append(typed(["score", request, "--offline", "--bundle", bundle]))
    lines.append(typed([word for word in outcome.stages["replay"].arguments if word != "--json"]))
    return lines


def _num_parameters(run: Path) -> str:
    """Returns the number of parameters that training recorded, or the words "an unknown number of"."""
    path = run / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    counts = [event["parameters"] for event in events if "parameters" in event]
    return f"{counts[0]:,}" if counts else "an unknown number of"


def _model_words(signature: dict[str, Any]) -> str:
    tables = "; ".join(
        f"{name}: {table['shape'][0]:,} rows of {table['shape'][1]} {table['dtype']} numbers"
        for name, table in signature["tables"].items()
    )
    return (
        f"{signature['model']['config_class']}, {signature['id_type']} ids, up to {signature['max_history']:,} "
        f"events of a history; tables: {tables}"
    )


def _shown(path: str) -> str:
    """Returns a path as the reader would type it: relative if it lies below the working folder, else unchanged."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def _metric_keys(row: dict[str, float]) -> list[str]:
    """Returns the names of the metrics to show, in order. NDCG@1 is left out, because it equals HR@1 by definition."""
    return [key for key in row if "@" in key and key != "ndcg@1"]


def _listed(row: dict[str, float], keys: Sequence[str]) -> str:
    return ", ".join(f"{key.upper()} {row[key]:.3f}" for key in keys)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
