"""Which cells a study has, and that rankers differ only where their names say."""

import dataclasses

import pytest

from tackboard.bench.finetune.data import SOURCES
from tackboard.bench.finetune.finetune_study import (
    COLD,
    FIRST,
    OF_LABELS,
    SCRATCH,
    SHARES,
    SIZES,
    TITLES,
    TREES,
    WAYS,
    FinetuneOptions,
    plan,
)
from tackboard.core.errors import UsageError


def test_every_seed_has_every_ranker() -> None:
    planned = plan(FinetuneOptions(seeds=2))
    names = {(name, share) for name, share, _ in planned.rankers}
    at_all = {*WAYS, *COLD, *OF_LABELS}
    assert names == {(name, "all") for name in at_all} | {(name, share) for name in OF_LABELS for share in SHARES}
    assert len(planned.rankers) == 2 * len(names) and set(planned.pretrained) == {0, 1}
    order = [cell.method for cell in planned.cells]
    first = [f"{name}-all" for name in WAYS + COLD if name in FIRST]
    assert order[:2] == ["pinfm"] * 2 and set(order[2 : 2 + 2 * len(FIRST)]) == set(first)
    rest = [cell.seed for cell in planned.cells[2 + 2 * len(FIRST) :]]
    assert rest == sorted(rest), "whole seeds follow each other"
    assert len({cell.name for cell in planned.cells}) == len(planned.cells)
    assert {name for name, _ in names} == set(TITLES)


@pytest.mark.parametrize("dataset", SOURCES)
@pytest.mark.parametrize("quick", [False, True])
def test_rankers_differ_only_where_their_names_say(dataset: str, *, quick: bool) -> None:
    planned = plan(FinetuneOptions(dataset=dataset, quick=quick, seeds=1))
    assert {name for name, share, _ in planned.rankers if share != "all"} <= set(OF_LABELS)
    configs = {name: cell.run_config() for (name, share, _), cell in planned.rankers.items() if share == "all"}
    base = configs["late-last"]
    for name, config in configs.items():
        same_data = dataclasses.replace(config.data, max_history=base.data.max_history)
        assert (same_data, config.training) == (base.data, base.training)
        assert config.model.recent == base.model.recent and config.model.features == base.model.features
        assert config.model.head == base.model.head and config.data.labels == SOURCES[dataset].config.labels
        after = planned.rankers[name, "all", 0].after
        assert (after is None) == (name in ("none", SCRATCH, TREES))
        assert config.optimizer.multipliers == ({} if after is None else {"pinfm.": 0.0 if name == "frozen" else 0.1})
    assert configs[SCRATCH].model == base.model == configs["frozen"].model
    assert configs["dropout"].model.cold_start.random_id_share == 0.1 if "dropout" in configs else dataset == "ml-1m"
    [pretrained] = planned.pretrained.values()
    assert pretrained.prepared.endswith("-before") and pretrained.run_config().model.width == base.model.width


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="--dataset deskdrop does not exist"):
        FinetuneOptions(dataset="deskdrop")
    with pytest.raises(UsageError, match="--seeds is -1"):
        FinetuneOptions(seeds=-1)
    assert set(SIZES) == set(SOURCES)
