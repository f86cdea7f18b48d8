"""`tackboard bench parallel` measures training in two processes: the bytes sent, the quality of the model, and the
cost.

Every arm trains the recipe `demo` on the demo's synthetic world with `tackboard train`, in one process or, under
torchrun, in two processes of this host. Then `tackboard evaluate` measures the model. The reference is training in two
processes with tables divided by rows, in fp32. In the first steps, one process must have the same losses as the
reference, and so must two processes that hold whole sub-tables. Otherwise the bench stops. Decided: every process
computes on one thread, so two processes use twice as many cores as one process. The bench keeps finished arms in its
folder, and a second call continues from them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tackboard.bench.report import Report, Table, where_and_when
from tackboard.bench.turns import Neighbours, disturbance_lines
from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import STATE, load_trained, stored_parameters
from tackboard.core.errors import TackboardError
from tackboard.core.files import read_json, write_json_atomic
from tackboard.core.progress import say
from tackboard.core.vocabulary import Vocabulary
from tackboard.evaluation.judged_events import judged_events
from tackboard.evaluation.ranking import rank_model, target_ranks
from tackboard.features.feature_set import read_features
from tackboard.flow.command import PROGRAM, run_command
from tackboard.flow.jobs import step_name
from tackboard.metrics.paired import gains, hits, paired_bootstrap
from tackboard.models.stored_parameters import restore_model
from tackboard.parallel.config import PRECISIONS
from tackboard.parallel.meeting import check_packages
from tackboard.train.config import config_from_json

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *PROGRAM[1:])
TABLES = ("model.tables.num_hashes=4", "model.tables.num_rows=2048", "model.tables.dim=32")
SAME_STEPS, SAME_LOSS = 20, 1e-5
"""Number of first steps in which the losses of some arms must be equal, and the largest allowed relative difference."""
NUM_RESAMPLES = 1000


def _precision(name: str) -> tuple[str, ...]:
    return ("--set", f"parallel.forward_precision={name}", "--set", f"parallel.backward_precision={name}")


ONE, REFERENCE, BY_TABLE = "one process", "fp32", "fp32, whole sub-tables"
ARMS: dict[str, tuple[str, ...]] = {
    ONE: (),
    REFERENCE: (),
    BY_TABLE: ("--set", "parallel.sharding=table"),
    **{name: _precision(name) for name in PRECISIONS if name != "fp32"},
    "fp32, narrow tables": ("--narrow-tables",),
    "fp8, narrow tables": ("--narrow-tables", *_precision("fp8")),
}
"""Name of an arm → its arguments of `tackboard train`. The first three must have the same losses."""
QUICK_ARMS = (ONE, REFERENCE, BY_TABLE, "fp8, narrow tables")


def measure(folder: Path, *, steps: int | None = None, seeds: int | None = None, quick: bool = False) -> dict[str, Any]:
    """Trains and evaluates every arm in `folder`, once for each of `seeds` seeds. Raises TackboardError if the losses
    of two arms differ although they must be equal."""
    check_packages()
    num_steps = steps or (SAME_STEPS if quick else 300)
    num_seeds = seeds or (1 if quick else 2)
    small = ("--set", "num_users=300", "--set", "num_items=400") if quick else ()
    out = folder / step_name("world", {"small": small})
    world = ("data", "synth", "--world", "demo", *small, "--out", str(out), "--name", "demo", "--json")
    rows = []
    dataset = out / "demo"
    if not dataset.exists():
        run_command("data", world, log=out / "data.log")
    for seed in range(num_seeds):
        found: dict[str, dict[str, Any]] = {}
        for name in QUICK_ARMS if quick else ARMS:
            found[name] = _trained(folder, name, dataset, seed, num_steps)
            if name in (REFERENCE, BY_TABLE):
                check_equal(name, found[name]["losses"], found[ONE]["losses"])
        rows += [{"arm": name, "seed": seed, **compared(found, name)} for name in found]
    shares = [row["others_share"] for row in rows]
    return {
        "bench": "parallel",
        "quick": quick,
        "steps": num_steps,
        "seeds": num_seeds,
        "rows": rows,
        "evaluation": found[REFERENCE]["evaluation"],
        "others_share": None if None in shares else round(sum(shares) / len(shares), 3),
        "disturbed": any(row["disturbed"] for row in rows),
        **where_and_when(),
    }


def _trained(folder: Path, name: str, dataset: Path, seed: int, num_steps: int) -> dict[str, Any]:
    """Returns the figures of one arm. An arm that is finished in `folder` is not trained again."""
    settings = (
        *(f"data.dataset={dataset}", f"seed={seed}", *TABLES, "training.device=cpu", "training.num_threads=1"),
        *(f"training.steps={num_steps}", "training.log_every=1", f"training.checkpoint_every={num_steps}"),
    )
    arguments = ("train", "demo", *(word for setting in settings for word in ("--set", setting)), *ARMS[name])
    arm = folder / step_name(f"arm{list(ARMS).index(name)}-seed{seed}", {"name": name, "arguments": arguments})
    if (arm / "figures.json").exists():
        return read_json(arm / "figures.json")
    say(f"{name}, seed {seed}")
    arguments = (*arguments, "--runs", str(arm / "runs"), "--json")
    with Neighbours() as neighbours:
        program = PROGRAM if name == ONE else TORCHRUN
        train = run_command("train", arguments, log=arm / "train.log", program=program)
    run = Path(train.require("run"))
    judged = run_command("evaluate", ("evaluate", str(run), "--json"), log=arm / "evaluate.log")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    figures = {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "ranks": ranks_of(run).tolist(),
        "evaluation": {row["name"]: row for row in judged.require("rows")},
        "bytes_per_step": None if name == ONE else train.require("wire")["payload_bytes"] / num_steps,
        "cpu_s": train.cpu_seconds,
        **neighbours.report(),
    }
    write_json_atomic(arm / "figures.json", figures)
    return figures


def ranks_of(run: Path) -> NDArray[np.int64]:
    """Returns the 0-based rank of each user's held-out item, as `tackboard evaluate` computes it [U]."""
    checkpoint = load_trained(find_checkpoint(run))
    state = checkpoint.state
    config, vocabulary = config_from_json(state["config"]), Vocabulary.from_dict(state["vocabulary"])
    place = checkpoint.path / STATE
    model = restore_model(config.model, vocabulary, stored_parameters(checkpoint), place, "cpu")
    data = config.data.at(state["lineage"])
    sequences = data.open(lambda _: read_features(checkpoint.path), vocabulary=vocabulary).read()
    score = rank_model(model, sequences, config.model.tables, config.model.max_history)
    judged = judged_events(sequences, config.evaluation.judged)
    return target_ranks(score, sequences, judged, filter_seen=config.evaluation.filter_seen)


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Returns the largest relative difference between the losses of two runs in the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def check_equal(name: str, losses: list[float], expected: list[float]) -> None:
    """Raises TackboardError if the losses of the first steps differ from those of one process (`expected`)."""
    difference = largest_difference(losses[:SAME_STEPS], expected[:SAME_STEPS])
    if not difference <= SAME_LOSS:
        raise TackboardError(
            f"the losses of {name} and of {ONE} differ by {difference:.1e} within {SAME_STEPS} steps",
            allowed=f"allowed: {SAME_LOSS:g}",
        )


def compared(found: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Returns the figures of an arm, compared with the arm REFERENCE; its CPU time is compared with the arm ONE."""
    arm, reference, one = found[name], found[REFERENCE], found[ONE]
    row: dict[str, Any] = {
        "final_loss": arm["losses"][-1],
        "loss_difference": largest_difference(arm["losses"], reference["losses"]),
        "bytes_per_step": arm["bytes_per_step"],
        "byte_share": arm["bytes_per_step"] and arm["bytes_per_step"] / reference["bytes_per_step"],
        "cpu_s": arm["cpu_s"],
        "times_cpu": arm["cpu_s"] / one["cpu_s"],
        **{key: arm[key] for key in ("others_share", "disturbed")},
    }
    ranks, expected = np.array(arm["ranks"]), np.array(reference["ranks"])
    for metric, per_user in (("hr@10", hits), ("ndcg@10", gains)):
        drawn = paired_bootstrap(per_user(ranks, 10), per_user(expected, 10), num_resamples=NUM_RESAMPLES)
        row[metric] = arm["evaluation"]["model"][metric]
        row[f"{metric}_difference"] = [drawn.mean, drawn.low, drawn.high]
    return row


QUALITY_COLUMNS = (
    *("arm", "seed", "final loss", "loss, largest difference in %", "HR@10", "difference", "NDCG@10", "difference"),
)
COST_COLUMNS = (*("arm", "seed", "MB per step", "share of fp32", "CPU s", "to one process", "others"),)


def report(result: Mapping[str, Any]) -> Report:
    """Makes the report of a measurement."""
    rows = sorted(result["rows"], key=lambda row: list(ARMS).index(row["arm"]))
    quality = [
        (
            *(row["arm"], str(row["seed"]), f"{row['final_loss']:.4f}", f"{100 * row['loss_difference']:.4f}"),
            *(row["hr@10"], _interval(row["hr@10_difference"]), row["ndcg@10"], _interval(row["ndcg@10_difference"])),
        )
        for row in rows
    ]
    cost = [
        (
            *(row["arm"], str(row["seed"])),
            "" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1e6:.3f}",
            "" if row["byte_share"] is None else f"{row['byte_share']:.1%}",
            *(f"{row['cpu_s']:.1f}", f"{row['times_cpu']:.2f}×"),
            "" if row["others_share"] is None else f"{row['others_share']:.0%}",
        )
        for row in rows
    ]
    judged = {name: f"{row['hr@10']:.4f} / {row['ndcg@10']:.4f}" for name, row in result["evaluation"].items()}
    others = ", ".join(f"{name} {judged[name]}" for name in judged if name != "model")
    options = f"{' --quick' if result['quick'] else ''} --steps {result['steps']} --seeds {result['seeds']}"
    return Report(
        result=result,
        theme="parallel",
        title="Training in two processes: bytes on the wire, quality and CPU time",
        command=f"bench parallel{options}",
        words=[
            f"The recipe `demo`, {result['steps']} steps, on the demo's synthetic world, with 4 sub-tables of 2,048 "
            "rows of width 32. At this width a row is one group of mx4, and fp8 adds a scale of 2 bytes to 32 bytes. "
            "Narrow tables have 4,096 rows of width 16.",
            "Every arm except the first trains in two processes. Tables are divided by rows, except where the arm says "
            "whole sub-tables. The name of an arm gives the precision of rows and of their gradients on the wire.",
            f"In the first {SAME_STEPS} steps, the losses of both fp32 arms differ from those of one process by a "
            f"share of at most {SAME_LOSS:g}. Only training depends on the seed; the world is always the same.",
        ],
        tables=[
            Table(
                "loss and quality",
                QUALITY_COLUMNS,
                [tuple(cell if isinstance(cell, str) else f"{cell:.4f}" for cell in row) for row in quality],
                f"Differences are those from the arm {REFERENCE} with the same seed. The difference of the loss is the "
                "largest relative difference in any step. Narrow tables begin with other random rows, so their losses "
                "differ from the first step on. Metrics: leave-last-out, the whole catalogue. In brackets: 95% "
                f"intervals of {NUM_RESAMPLES:,} paired resamples of users, which do not include the chance of another "
                f"seed. HR@10 / NDCG@10 of the baselines on the same users: {others}",
            ),
            Table(
                "wire and time",
                COST_COLUMNS,
                cost,
                "MB per step: rows, gradients and row ids that process 0 hands to the all-to-all operation, including "
                "the part for itself, which does not leave the process. Share of fp32: these bytes, with ids, divided "
                f"by those of the arm {REFERENCE}. CPU s: all processes of the command, including the launcher and "
                "start-up. Others: the share of the machine's CPU time that other processes used at the time. This "
                "share changes from arm to arm, so wall time is not shown. Two processes share two cores with "
                "everything else on the machine and send bytes through memory. So CPU time shows the overhead, and "
                "nothing here shows how training scales",
            ),
        ],
        notes=disturbance_lines(result),
    )


def _interval(values: list[float]) -> str:
    mean, low, high = (round(value, 4) + 0.0 for value in values)  # Adding 0 turns -0 into 0.
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
