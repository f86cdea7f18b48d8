"""One result: which events it judges, its table by plain loops, its name, and the oracle above all baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tackboard.data.config import PartOfUsers
from tackboard.data.loader import DataConfig
from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.evaluation.baselines import TrainingEvents, all_baselines
from tackboard.evaluation.catalogue import judge_catalogue, result_name
from tackboard.evaluation.judged_events import JUDGED, first_seen, judged_events
from tackboard.evaluation.live_counts import LiveCounts
from tackboard.evaluation.ranking import EvaluationConfig, rank_events
from tackboard.events.synthetic.world_config import WorldConfig
from tackboard.events.synthetic.world_dataset import write_world
from tackboard.features.standard import standard_features
from tackboard.models.interface import build_model
from tackboard.train.config import RunConfig

pytestmark = pytest.mark.usefixtures("torch_settings")
Config = Callable[..., RunConfig]
ByTime = Callable[..., Sequences]
BASELINES = ["popularity", "item-to-item", "recently seen", "recent, live", "recent, frozen"]


def judge(
    sequences: Sequences, config: RunConfig, settings: EvaluationConfig | None = None, **options: Any
) -> dict[str, Any]:
    """The result of an untrained model, which is the same every time."""
    torch.manual_seed(0)
    model = build_model(config.model, sequences.source.vocabulary)
    tables, length = config.model.tables, config.model.max_history
    settings = settings or EvaluationConfig(cutoffs=(1, 10))
    return judge_catalogue(model, sequences, tables, length, settings, quiet=True, **options)


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


@pytest.mark.parametrize("filter_seen", [True, False])
def test_the_figures_equal_plain_loops(by_time: ByTime, tiny_config: Config, filter_seen: bool) -> None:
    sequences = by_time(1)
    settings = EvaluationConfig(cutoffs=(1, 10), judged="all", filter_seen=filter_seen, chunk_users=5)
    result = judge(sequences, tiny_config(), settings)
    assert [row["name"] for row in result["rows"]] == [*BASELINES, "model"]
    assert (result["split"], result["judged"], result["filter_seen"]) == ("time", "all", filter_seen)
    assert (result["cut_ms"], result["until_ms"]) == dataclasses.astuple(sequences.source.time_split)[::-1]
    judged = judged_events(sequences, "all")
    assert (result["num_events"], result["num_users"]) == (len(judged), len(set(judged.users)))
    training, appears_ms = TrainingEvents.of(sequences), first_seen(sequences)
    known = set(training.items.tolist())
    unknown = [place not in known for place in judged.items(sequences).tolist()]
    assert result["never_seen_share"] == pytest.approx(np.mean(unknown), abs=1e-6) and 0 < sum(unknown) < len(judged)
    rivals = all_baselines(
        sequences, training, LiveCounts.of(sequences), filter_seen=filter_seen, appears_ms=appears_ms
    ).rivals
    num_items = (appears_ms <= sequences.events.times[judged.events].max()).sum()
    counts = training.counts()
    for name in BASELINES:
        row = rows_of(result)[name]
        found = rank_events(rivals[name], sequences, judged, filter_seen=filter_seen, appears_ms=appears_ms, top=10)
        recalls: dict[int, list[bool]] = {}
        shown: set[int] = set()
        bits, repeats = [], []
        for place, (user, event) in enumerate(zip(judged.users.tolist(), judged.events.tolist(), strict=True)):
            recalls.setdefault(user, []).append(bool(found.ranks[place] < 10))
            before = sequences.item_ids[sequences.offsets[user] : event].tolist()
            for item in found.top[place][found.top[place] >= 0].tolist():
                shown.add(item)
                bits.append(-np.log2(max(counts[item], 0.5) / counts.sum()))
                repeats.append(sequences.catalogue[item] in before)
        expected = {
            "hr@10": np.mean(found.ranks < 10),
            "mrr": np.mean(1 / (found.ranks + 1.0)),
            "recall@10": np.mean([np.mean(hits) for hits in recalls.values()]),
            "coverage@10": len(shown) / num_items,
            "novelty@10": np.mean(bits),
            "repeats@10": np.mean(repeats),
        }
        assert {key: row[key] for key in expected} == pytest.approx(expected, abs=1e-3), name
    for by in {row["by"] for row in result["slices"]}:
        for name in (*BASELINES, "model"):
            own = [row for row in result["slices"] if (row["by"], row["name"]) == (by, name)]
            assert sum(row["num_events"] for row in own) == len(judged)
            hits = sum(row["num_events"] * row["hr@10"] for row in own) / len(judged)
            assert hits == pytest.approx(rows_of(result)[name]["hr@10"], abs=1e-4)


@pytest.mark.parametrize("judged", JUDGED)
def test_the_first_the_last_or_all_events(by_time: ByTime, tiny_config: Config, judged: str) -> None:
    sequences = by_time(2)
    settings = EvaluationConfig(cutoffs=(1,), judged=judged)  # type: ignore[arg-type]
    result = judge(sequences, tiny_config(), settings)
    assert result["num_events"] == len(judged_events(sequences, judged))  # type: ignore[arg-type]
    which = {
        "all": "all positive events",
        "first": "each user's first positive event",
        "last": "each user's last positive event",
    }
    assert result["protocol"] == (
        f"{which[judged]} from 2024-05-03T12:00:00 on, "
        "training before 2024-05-03T12:00:00, full catalogue, ties against the target"
    )
    some = judge(sequences, tiny_config(), settings, max_users=4)
    assert some["num_users"] == 4 < result["num_users"] and some["name"] != result["name"]
    # Users are drawn by their ids, so they are the same every time.
    assert judge(sequences, tiny_config(), settings, max_users=4)["rows"] == some["rows"]


@pytest.mark.parametrize(
    ("held_out", "protocol"),
    [
        (1, "leave-last-out, full catalogue, ties against the target"),
        (2, "validation: the last positive event but one, full catalogue, ties against the target"),
    ],
)
def test_leave_last_out_says_which_event(tiny_dataset: Path, tiny_config: Config, held_out: int, protocol: str) -> None:
    sequences = load_sequences(tiny_dataset, ("click", "save"), held_out=held_out)
    result = judge(sequences, tiny_config())
    assert (result["held_out"], result["protocol"], result["judged"]) == (held_out, protocol, "last")
    assert [row["name"] for row in result["rows"]] == [*BASELINES[:4], "model"]
    assert "cut_ms" not in result and set(result["windows_h"]) == {"recent, live"}


def test_a_validation_slice_fits_the_live_head_too(by_time: ByTime, tiny_config: Config) -> None:
    result = judge(by_time(3, slice_hours=20.0), tiny_config())
    assert [row["name"] for row in result["rows"]] == [*BASELINES, "model", "model, live"]
    assert result["until_ms"] < result["cut_ms"]


def test_baselines_count_what_training_read(by_time: ByTime, tiny_config: Config) -> None:
    """The judged log has other events; users outside of `part` were not trained on."""
    judged_log, trained = by_time(1, 50), by_time(2, 51)
    part = PartOfUsers("train", 0.5)
    other = judge(judged_log, tiny_config(), trained=trained, part=part)
    training = TrainingEvents.of(trained, part, judged_log.catalogue)
    rival = all_baselines(
        judged_log, training, LiveCounts.of(judged_log), filter_seen=False, appears_ms=first_seen(judged_log)
    ).rivals
    for name in ("popularity", "item-to-item", "recent, frozen"):
        found = rank_events(
            rival[name],
            judged_log,
            judged_events(judged_log, "first"),
            filter_seen=False,
            appears_ms=first_seen(judged_log),
        )
        assert rows_of(other)[name]["mrr"] == pytest.approx(np.mean(1 / (found.ranks + 1.0)), abs=1e-6)
    own = judge(judged_log, tiny_config())
    assert rows_of(other)["popularity"] != rows_of(own)["popularity"]
    assert rows_of(other)["recently seen"]["mrr"] == rows_of(own)["recently seen"]["mrr"]


def test_other_settings_have_another_name(by_time: ByTime, last_out: Callable[[int], Sequences]) -> None:
    plain = EvaluationConfig()
    changed = [
        dataclasses.replace(plain, cutoffs=(1, 5, 10)),
        dataclasses.replace(plain, filter_seen=True),
        dataclasses.replace(plain, judged="last"),
        dataclasses.replace(plain, judged="all"),
    ]
    sequences, other, last = by_time(1), by_time(2), last_out(1)
    later = dataclasses.replace(sequences.source.time_split, cut_ms=1_714_900_000_123)  # type: ignore[type-var]
    names = [
        *(result_name(sequences, settings, None) for settings in (plain, *changed)),
        result_name(sequences, plain, 5),
        result_name(other, plain, None),
        result_name(last, plain, None),
    ]
    sequences.source.time_split = later
    names.append(result_name(sequences, plain, None))
    assert len(set(names)) == len(names)
    assert names[0].startswith("first-from-2024-05-03T120000_all-items_at-1-5-10-50_of-")
    longest = dataclasses.replace(plain, cutoffs=tuple(range(1_000_000, 1_000_012)), filter_seen=True)
    assert len(f"step-00000001_{result_name(sequences, longest, 1_000_000)}.html") < 220


def test_the_oracle_of_a_world_that_turns_over_is_above_all_baselines(tmp_path: Path, tiny_config: Config) -> None:
    """Most items are new after the cut, so popularity in training says little, and live counts say more."""
    world = WorldConfig(
        num_users=300,
        num_items=400,
        num_topics=4,
        median_events=15.0,
        max_events=60,
        item_half_life_hours=24.0,
        born_later_share=0.9,
    )
    write_world(world, tmp_path, "turnover")
    data = DataConfig(
        dataset=str(tmp_path / "turnover"), positive_actions=("click", "save", "share"), split="time", cut="0.8"
    )
    sequences = data.open(standard_features).read()
    result = judge(sequences, tiny_config(), EvaluationConfig(cutoffs=(10,), judged="all"))
    rows = rows_of(result)
    assert result["num_events"] > 300 and result["never_seen_share"] > 0.2
    for metric in ("hr@10", "ndcg@10", "mrr"):
        assert rows["oracle"][metric] > max(rows[name][metric] for name in BASELINES)
    assert rows["recent, live"]["hr@10"] > rows["popularity"]["hr@10"]
    assert result["gap_closed"] is not None and result["gap_closed"] < 0  # an untrained model
