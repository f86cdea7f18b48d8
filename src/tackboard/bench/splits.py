"""`tackboard bench splits` trains the same recipe twice, once for leave-last-out and once for a split by time.

Both runs read the same number of tokens. Each is judged by its own split, beside the same baselines. The gap between
the two tables shows what leave-last-out hides: how well a model that was trained only on the past ranks the newest
events of the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tackboard.bench.daily.periods import PLANS, SMALL, find_dataset
from tackboard.bench.quality.data import of_dataset
from tackboard.bench.report import Report, Table, where_and_when
from tackboard.core.files import read_json, write_json_atomic
from tackboard.core.progress import say
from tackboard.flow.command import run_command
from tackboard.flow.jobs import step_name

SPLITS = ("last", "time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """What is trained on one dataset, and where its log is cut."""

    recipe: str
    settings: tuple[str, ...]
    cut: str
    tokens: int
    tokens_per_step: int
    max_users: int


SPLIT_PLANS = {
    "ml-1m": SplitPlan(
        recipe="ml-1m",
        settings=(*SMALL, "model.tables.num_rows=4096", "model.tables.dim=16", "data.uniform_negatives=1024"),
        cut="0.9",
        tokens=1_000_000,
        tokens_per_step=4096,
        max_users=2000,
    ),
    **{
        name: SplitPlan(
            recipe=PLANS[name].recipe,
            settings=PLANS[name].settings,
            cut=cut,
            tokens=min(PLANS[name].tokens // 2, 1_000_000),
            tokens_per_step=PLANS[name].tokens_per_step,
            max_users=2000,
        )
        for name, cut in (("kakao-brunch", "2019-02-28"), ("deskdrop", "2017-02-22"), ("news", "2025-01-26"))
    },
}


def measure_splits(
    folder: Path, dataset: str, *, data: Path | None = None, tokens: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Returns the tables of both splits. Finished runs stay in `folder`."""
    plan = of_dataset(dataset, SPLIT_PLANS)
    plan = dataclasses.replace(plan, tokens=tokens or plan.tokens)
    folder.mkdir(parents=True, exist_ok=True)
    path = find_dataset(dataset, folder, data)
    return {
        "bench": "splits",
        "dataset": dataset,
        "seed": seed,
        "plan": dataclasses.asdict(plan),
        "splits": {split: _judged(folder, path, plan, dataset, split, seed) for split in SPLITS},
        **where_and_when(),
    }


def _judged(folder: Path, path: Path, plan: SplitPlan, dataset: str, split: str, seed: int) -> dict[str, Any]:
    """Trains and evaluates the run of one split, unless an earlier call has done this."""
    steps = max(1, round(plan.tokens / plan.tokens_per_step))
    settings = [*plan.settings, f"data.dataset={path}", f"data.split={split}", f"training.steps={steps}"]
    settings += [f"data.tokens_per_step={plan.tokens_per_step}", f"training.checkpoint_every={steps}"]
    settings += [f"seed={seed}", "training.device=cpu", *([f"data.cut={plan.cut}"] if split == "time" else [])]
    arguments = ["train", plan.recipe, *(word for setting in settings for word in ("--set", setting))]
    home = folder / step_name(f"{dataset}-split-{split}", {"arguments": arguments, "max_users": plan.max_users})
    home.mkdir(exist_ok=True)
    if not (home / "train.json").exists():
        say(f"{dataset}: training with data.split={split}")
        trained = run_command("train", [*arguments, "--runs", str(home), "--json"], log=home / "train.log")
        write_json_atomic(home / "train.json", {name: trained.require(name) for name in ("run", "tokens")})
    if not (home / "figures.json").exists():
        say(f"{dataset}: evaluating with data.split={split}")
        run = read_json(home / "train.json")
        words = ["evaluate", str(run["run"]), "--max-users", str(plan.max_users), "--cutoffs", "10,50"]
        judged = run_command("evaluate", [*words, "--json"], log=home / "evaluate.log")
        figures = {name: judged.require(name) for name in FIGURES}
        write_json_atomic(home / "figures.json", figures | {"tokens": run["tokens"]})
    return read_json(home / "figures.json")


FIGURES = ("rows", "protocol", "num_users", "num_items", "filter_seen", "never_seen_share", "windows_h", "slices")


def splits_report(result: Mapping[str, Any]) -> Report:
    """Makes the report of one dataset."""
    plan, splits = result["plan"], result["splits"]
    names = [row["name"] for row in splits["time"]["rows"] if row["name"] != "oracle"]
    by_name = {split: {row["name"]: row for row in found["rows"]} for split, found in splits.items()}
    rows = []
    for name in names:
        cells = [name]
        for metric in ("hr@10", "ndcg@10"):
            cells += ["" if name not in by_name[split] else f"{by_name[split][name][metric]:.4f}" for split in SPLITS]
        rows.append(tuple(cells))
    facts = [
        (
            *(split, found["protocol"], f"{found['num_users']:,}", f"{found['num_items']:,}"),
            *("taken out" if found["filter_seen"] else "kept", f"{found['never_seen_share']:.1%}"),
            f"{found['tokens']:,}",
        )
        for split, found in splits.items()
    ]
    return Report(
        result=result,
        theme=f"splits-{result['dataset']}",
        title=f"Leave-last-out beside a split by time: {result['dataset']}",
        command=f"bench splits --dataset {result['dataset']} --tokens {plan['tokens']}"
        + (f" --seed {result['seed']}" if result["seed"] else ""),
        words=[
            f"The recipe `{plan['recipe']}` was trained on {plan['tokens']:,} tokens for each split, with settings "
            f"({', '.join(plan['settings'])}) with which a CPU trains it in minutes. The figures are not those of the "
            "recipe as shipped.",
        ],
        tables=[
            Table("both splits", ("", "HR@10, last", "HR@10, time", "NDCG@10, last", "NDCG@10, time"), rows),
            Table(
                "what was judged",
                ("split", "protocol", "users", "items", "seen items", "never seen", "tokens"),
                facts,
                "Never seen: judged events on items that training never saw",
            ),
        ],
    )
