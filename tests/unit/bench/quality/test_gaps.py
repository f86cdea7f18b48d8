"""Figures by the time between the held-out event and the event before, from a log that is written by hand here."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.bench.quality.cell import Judge, metrics_of
from tackboard.bench.quality.cells import Cell, Result
from tackboard.bench.quality.data import TIE_RULES, find_bench, settle_ties
from tackboard.bench.quality.gaps import GAPS, by_gap, gap_names, gap_rows, range_of_gaps, without_same_second
from tackboard.data.source import open_sequences
from tackboard.events.dataset import write_dataset
from tackboard.events.public.publisher import canonical_events

DAY_S = 86_400
LAST_GAPS_S = (0, 0, 1, 59, 60, 3_599, 3_600, DAY_S - 1, DAY_S, 9 * DAY_S)
"""The last gap of each user. Every user has three events; a day lies between the first two."""


def judge_of(folder: Path, rule: str) -> Judge:
    """Ranks the last events of a log in which user n's last gap is LAST_GAPS_S[n - 1]."""
    users = np.repeat(np.arange(1, len(LAST_GAPS_S) + 1), 3)
    times_s = np.concatenate([[1_000_000, 1_000_000 + DAY_S, 1_000_000 + DAY_S + gap] for gap in LAST_GAPS_S])
    actions = pa.array(["view"] * len(users))
    events = canonical_events(users, np.tile([1, 2, 3], len(LAST_GAPS_S)), times_s * 1000, action=actions)
    source = {"kind": "made up", "last_tied_share": 0.2}
    path = write_dataset(folder, "log", settle_ties(events, rule), source=source)
    return Judge(open_sequences(path, held_out=1).read(), {"filter_seen": False})


@pytest.mark.parametrize("rule", TIE_RULES)
def test_gaps_of_a_log(tmp_path: Path, rule: str) -> None:
    judge = judge_of(tmp_path, rule)
    assert judge.gaps().tolist() == list(LAST_GAPS_S), "a tie rule changes the order, not the gap"
    assert judge.arrays()["users"].tolist() == list(range(10))


def test_ranges() -> None:
    assert range_of_gaps(np.array(LAST_GAPS_S)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert range_of_gaps(np.array([-1])).tolist() == [-1], "a user without an event before is in no range"


def test_the_same_instant_is_called_after_the_times_of_the_dataset() -> None:
    assert [find_bench(name).instant for name in ("ml-1m", "deskdrop", "kakao-brunch")] == ["second", "second", "hour"]
    assert gap_names("second") == list(GAPS) and gap_names("hour") == ["same hour", *list(GAPS)[1:]]
    group = [result_of("ours", 0, [0, 99], [0, 7_200])]
    figures = by_gap({("file", "ours"): group}, "hour")
    assert [(one["gap"], one["users"]) for one in figures if one["users"]] == [("same hour", 1), ("under a day", 1)]


def result_of(method: str, seed: int, ranks: list[int], gaps: list[int] | None = None) -> Result:
    cell = Cell(prepared="log-file", ties="file", method=method, seed=seed, stage="test", protocol={})
    arrays = {"ranks": np.array(ranks), "returns": np.zeros(len(ranks), dtype=bool)}
    if gaps is not None:
        arrays["gaps"] = np.array(gaps)
    values = {"metrics": metrics_of(arrays["ranks"]), "targets_sha256": "same"}
    return Result(Path("none"), cell, values, arrays)


def test_figures_of_each_range_by_hand() -> None:
    gaps = list(LAST_GAPS_S[:6])  # two users in the same second, two under a minute, two under an hour
    group = [result_of("ours", 0, [0, 99, 0, 0, 99, 99], gaps), result_of("ours", 1, [0, 0, 0, 99, 99, 2], gaps)]
    figures = by_gap({("file", "ours"): group, ("file", "old"): [result_of("old", 0, [0] * 6)]})
    assert [one["users"] for one in figures] == [2, 2, 2, 0, 0], "a result without gaps is left out"
    assert [one.get("hr@10") for one in figures] == [0.75, 0.75, 0.25, None, None]
    assert figures[2]["ndcg@10"] == pytest.approx(0.25 / np.log2(2 + 2))
    rows = gap_rows({("file", "ours"): group}, {("file", "ours"): ["Ours", "items", "file"]})
    assert rows == [
        ["number of users", "", "file", "", "2", "2", "2", "0", "0"],
        ["Ours", "items", "file", "hr@10", "0.7500", "0.7500", "0.2500", "", ""],
        ["Ours", "items", "file", "ndcg@10", "0.7500", "0.7500", "0.1250", "", ""],
    ]
    assert len(rows[0]) == 4 + len(GAPS)


def test_results_without_same_second_targets() -> None:
    group = [result_of("ours", 0, [0, 0, 99, 0], [0, 0, 1, DAY_S])]
    only_tied = [result_of("tied", 0, [0, 0], [0, 0])]
    apart = without_same_second({("file", "ours"): group, ("file", "tied"): only_tied})
    assert list(apart) == [("file", "ours")]
    [one] = apart["file", "ours"]
    assert one.array().tolist() == [99, 0] and one.values["metrics"]["hr@10"] == 0.5
    assert group[0].values["metrics"]["hr@10"] == 0.75, "the whole result stays as it is"
    assert one.values["targets_sha256"] != group[0].values["targets_sha256"], "other users are never paired with these"
