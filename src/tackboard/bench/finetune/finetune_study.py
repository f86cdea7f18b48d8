"""Plans the cells of `tackboard bench finetune`, one for each ranker, share of the requests and seed.

    ways         all requests: no PinFM, frozen, from scratch, and each way to use a fine-tuned PinFM
    cold start   all requests: early fusion, then random ids, dropout by item age, content vector and learned token
    labels       a tenth, a third and all of the requests: from scratch, frozen, fine-tuned; trees on counts

A ranker is the recipe `finetune-VARIANT`, so rankers differ only in what their names say. `SIZES` fixes the sizes and
the number of steps for each dataset. Decided: no setting is tuned, for any ranker. The number of steps of the synthetic
world was chosen from one fit of `late-last` on a world with another seed, and by the time that a study may take. Every
ranker may train for the same number of steps, is judged a few times on validation users, and is tested once, at its
best checkpoint. Rankers of FIRST run for all seeds before other rankers, so that a study that runs out of time compares
at least these over all seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tackboard.bench.finetune.data import FinetuneSource, find_source, make_datasets, names_of
from tackboard.bench.quality.cells import Cell, Work
from tackboard.core.config import apply_overrides
from tackboard.core.errors import UsageError
from tackboard.recipes.finetune import VARIANTS, finetune
from tackboard.recipes.registry import find_recipe
from tackboard.train.config import RunConfig, config_to_json

SCRATCH, TREES = "scratch", "trees"
"""Names of the two rankers that no recipe defines: `late-last` without pretraining, and trees on counts."""
TITLES = {
    "none": "no PinFM",
    SCRATCH: "late fusion, last; PinFM from scratch",
    "frozen": "late fusion, last; PinFM frozen",
    "late-mean": "late fusion, mean",
    "late-last": "late fusion, last",
    "early": "early fusion",
    "content": "early fusion + content vector",
    "content-token": "early fusion + content vector and token",
    "random-ids": "early fusion + CIR",
    "dropout": "early fusion + CIR + age dropout",
    "cold-start": "early fusion + CIR + age dropout + content vector and token",
    TREES: "boosted trees on counts",
}
"""Ranker → its name in tables. A PinFM is fine-tuned unless the name says otherwise."""
WAYS = ("none", SCRATCH, "frozen", "late-mean", "late-last", "early", "content", "content-token")
COLD = ("none", "early", "random-ids", "dropout", "cold-start")
OF_LABELS = (SCRATCH, "frozen", "late-last", TREES)
FIRST = ("none", "frozen", "late-last", "early", "dropout", "cold-start")
"""Rankers whose cells on all requests run first, for every seed."""
SHARES = {"tenth": 0.1, "third": 1 / 3, "all": 1.0}
"""Name of a share of the training requests → share."""
QUICK_SHARES = {"third": 1 / 3, "all": 1.0}
NUM_SEEDS = 3
NUM_JUDGEMENTS = 4
TEST_SHARE, VALIDATION_SHARE = 0.4, 0.1
MOST_TREE_REQUESTS = 20_000
"""Trees learn from at most this many requests, because all their rows are in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneSizes:
    """The sizes of the models on one dataset."""

    recipe: str
    """The recipe of pretraining."""
    pretraining: tuple[str, ...] = ()
    """Settings that differ from this recipe."""
    ranker: tuple[str, ...] = ()
    """Settings of every ranker that differ from its recipe."""
    steps: Mapping[str, int]
    """Name of a share of the requests → number of steps of a ranker."""


SIZES = {
    "synthetic": FinetuneSizes(
        recipe="demo",
        pretraining=("model.width=64", "model.tables.dim=16", "training.steps=200"),
        ranker=("model.recent.num_events=16", "data.tokens_per_step=1024"),
        steps={"tenth": 90, "third": 180, "all": 360},
    ),
    "ml-1m": FinetuneSizes(
        recipe="ml-1m",
        ranker=("model.recent.num_events=100", "data.tokens_per_step=16384", "training.precision=auto"),
        steps={"all": 1200},
    ),
    "kakao-brunch": FinetuneSizes(
        recipe="kakao-brunch",
        ranker=("model.recent.num_events=100", "data.tokens_per_step=65536", "training.precision=auto"),
        steps={"tenth": 200, "third": 500, "all": 1200},
    ),
}
QUICK = FinetuneSizes(
    recipe="",
    pretraining=(
        *("model.width=32", "model.tables.num_hashes=4", "model.tables.dim=8", "model.tables.num_rows=2048"),
        *(
            "data.tokens_per_step=4096",
            "training.steps=40",
            "training.checkpoint_every=40",
            "optimizer.warmup_steps=10",
        ),
    ),
    ranker=("model.recent.num_events=8", "data.tokens_per_step=1024", "optimizer.warmup_steps=10"),
    steps={"third": 40, "all": 80},
)
"""What `--quick` changes, on every dataset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The options of `tackboard bench finetune` that the user gave."""

    dataset: str = "synthetic"
    """Name of the dataset, see data.py."""
    quick: bool = False
    """Use few users and few steps, to see that everything works."""
    seeds: int = 0
    """Number of seeds; 0 for the default number."""

    def __post_init__(self) -> None:
        find_source(self.dataset)
        if self.seeds < 0:
            raise UsageError(f"--seeds is {self.seeds}", allowed="allowed: 1 or more")


Key = tuple[str, str]
"""A ranker, and the name of a share of the training requests."""


@dataclasses.dataclass(frozen=True)
class FinetunePlan:
    """The cells of a study."""

    source: FinetuneSource
    pretrained: Mapping[int, Cell]
    """Seed → the cell that pretrains."""
    rankers: Mapping[tuple[str, str, int], Cell]
    """(ranker, name of the share, seed) → its cell."""

    @property
    def cells(self) -> list[Cell]:
        """All cells in the order in which they run: the rankers of FIRST with all requests come first, for every
        seed."""
        others = sorted(self.rankers, key=lambda key: (key[0] not in FIRST or key[1] != "all", key[2]))
        return [*self.pretrained.values(), *(self.rankers[key] for key in others)]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.source.config.labels


def plan(options: FinetuneOptions) -> FinetunePlan:
    """Plans the cells of a study. Nothing is read or written."""
    source, seeds = find_source(options.dataset), range(options.seeds or (1 if options.quick else NUM_SEEDS))
    names = names_of(source, quick=options.quick)
    pretrained = {seed: _pretraining_cell(source, names, seed, quick=options.quick) for seed in seeds}
    wanted: dict[Key, None] = {}
    if "ways" in source.parts:
        wanted |= dict.fromkeys((name, "all") for name in WAYS)
    if "cold start" in source.parts:
        wanted |= dict.fromkeys((name, "all") for name in COLD)
    if "labels" in source.parts:
        shares = QUICK_SHARES if options.quick else SHARES
        wanted |= dict.fromkeys((name, share) for share in shares for name in OF_LABELS)
    rankers = {
        (name, share, seed): _ranker_cell(source, names, pretrained[seed], name, share, quick=options.quick)
        for seed in seeds
        for name, share in wanted
    }
    return FinetunePlan(source, pretrained, rankers)


def prepare_plan(options: FinetuneOptions, work: Work, files: Path | None) -> None:
    """Makes the datasets that the cells read."""
    make_datasets(find_source(options.dataset), work.datasets, files, quick=options.quick)


def pretraining_config(source: FinetuneSource, seed: int, *, quick: bool) -> RunConfig:
    """Returns the config of pretraining."""
    sizes = SIZES[source.name]
    config = apply_overrides(find_recipe(sizes.recipe), [*sizes.pretraining, *(QUICK.pretraining if quick else ())])
    return dataclasses.replace(config, seed=seed)


def ranker_config(source: FinetuneSource, pretrained: RunConfig, name: str, share: str, *, quick: bool) -> RunConfig:
    """Returns the config of a ranker whose PinFM has the config `pretrained`. The config names no run to start from."""
    sizes = SIZES[source.name]
    steps = (QUICK if quick else sizes).steps[share]
    config = finetune(name if name in VARIANTS else "late-last", pretrained)
    labels = str(list(source.config.labels)).replace("'", '"')
    settings = [
        *sizes.ranker,
        *(QUICK.ranker if quick else ()),
        *(f"data.labels={labels}", f"model.head.labels={labels}"),
        *(f"data.test_share={TEST_SHARE}", f"data.validation_share={VALIDATION_SHARE}"),
        *(f"training.steps={steps}", f"training.checkpoint_every={steps}"),
        f"training.validate_every={-(-steps // NUM_JUDGEMENTS)}",
        "start.needs_run=false",  # A cell names no run, because its path differs by machine (open_run adds the run).
    ]
    if name in (SCRATCH, TREES):
        settings += ["optimizer.multipliers={}", "start.prefix="]
    return dataclasses.replace(apply_overrides(config, settings), seed=pretrained.seed)


def _pretraining_cell(source: FinetuneSource, names: tuple[str, str], seed: int, *, quick: bool) -> Cell:
    config = pretraining_config(source, seed, quick=quick)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset=names[1]))
    protocol = {"filter_seen": False, "max_users": 200 if quick else 2_000}
    return Cell(
        prepared=names[1],
        ties="file",
        method="pinfm",
        seed=seed,
        stage="pretrain",
        protocol=protocol,
        config=config_to_json(config),
    )


def _ranker_cell(
    source: FinetuneSource, names: tuple[str, str], pretrained: Cell, name: str, share: str, *, quick: bool
) -> Cell:
    config = ranker_config(source, pretrained.run_config(), name, share, quick=quick)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset=names[0]))
    protocol: dict[str, Any] = {"share": SHARES[share], "labels": list(source.config.labels)}
    if name == TREES:
        protocol |= {"before": names[1], "most_requests": MOST_TREE_REQUESTS}
    return Cell(
        prepared=names[0],
        ties="file",
        method=f"{name}-{share}",
        seed=pretrained.seed,
        stage="finetune-trees" if name == TREES else "finetune",
        protocol=protocol,
        config=config_to_json(config),
        after=None if name in ("none", SCRATCH, TREES) else pretrained,
    )
