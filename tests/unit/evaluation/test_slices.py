"""The slices of judged events, compared with plain loops over the log; each slicing adds up to all events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tackboard.data.sequences import Sequences
from tackboard.data.source import load_sequences
from tackboard.data.time_split import HOUR_MS
from tackboard.evaluation import slices
from tackboard.evaluation.judged_events import JudgedEvents, first_seen, judged_events
from tackboard.evaluation.ranking import Ranked
from tackboard.evaluation.slices import DAY_MS, SeenItems, sliced_rows, slicings_of

ByTime = Callable[..., Sequences]
AGES = {"its first event": 0, "under 1 hour": 1, "1 to 24 hours": HOUR_MS, "1 to 7 days": DAY_MS}
LENGTHS = {"no event": 0, "1 to 4 events": 1, "5 to 19 events": 5, "20 to 99 events": 20}
SINCE = {"under 1 hour": 0, "1 to 6 hours": HOUR_MS, "6 to 24 hours": 6 * HOUR_MS, "1 to 3 days": DAY_MS}


def label_of(value: int, bounds: dict[str, int]) -> str:
    """The last label whose bound the value reaches."""
    return [label for label, bound in bounds.items() if value >= bound][-1]


def labels(sequences: Sequences, judged: JudgedEvents, known: np.ndarray) -> dict[str, list[str]]:
    """Slicing → label of each judged event."""
    found = slicings_of(sequences, judged, known, first_seen(sequences), SeenItems(sequences))
    return {slicing.name: [slicing.labels[code] for code in slicing.codes.tolist()] for slicing in found}


@pytest.mark.parametrize("seed", [1, 2])
def test_slices_equal_a_plain_loop(by_time: ByTime, seed: int) -> None:
    sequences = by_time(seed)
    assert sequences.source.time_split is not None
    judged = judged_events(sequences, "all")
    known = np.arange(len(sequences.catalogue)) % 3 > 0
    found = labels(sequences, judged, known)
    stored = sequences.source.dataset.read_events(["action", "surface"]).to_pydict()
    for row, (user, event) in enumerate(zip(judged.users, judged.events, strict=True)):
        time, item = int(sequences.events.times[event]), int(sequences.item_ids[event])
        before = sequences.item_ids[sequences.offsets[user] : event].tolist()
        born = int(sequences.events.times[sequences.item_ids == item].min())
        assert {name: values[row] for name, values in found.items()} == {
            "item age": label_of(time - born, AGES),
            "item in training": "seen" if known[np.searchsorted(sequences.catalogue, item)] else "never seen",
            "item for the user": "seen before" if item in before else "new",
            "history": label_of(len(before), LENGTHS),
            "time since the cut": label_of(time - sequences.source.time_split.cut_ms, SINCE),
            "action": stored["action"][event],
            "surface": stored["surface"][event],
        }
    assert all(len(set(values)) > 1 for values in found.values())


def test_without_a_cut_there_is_no_time_since_it(last_out: Callable[[int], Sequences]) -> None:
    sequences = last_out(3)
    judged = judged_events(sequences, "first")
    assert "time since the cut" not in labels(sequences, judged, np.ones(len(sequences.catalogue), dtype=bool))


def test_items_that_were_seen_before(by_time: ByTime) -> None:
    sequences = by_time(4)
    judged = judged_events(sequences, "all")
    places = np.random.default_rng(4).integers(-1, len(sequences.catalogue), (len(judged), 7))
    found = SeenItems(sequences).before(judged, places)
    for row, (user, event) in enumerate(zip(judged.users, judged.events, strict=True)):
        before = set(sequences.item_ids[sequences.offsets[user] : event].tolist())
        wanted = [place >= 0 and int(sequences.catalogue[place]) in before for place in places[row]]
        assert found[row].tolist() == wanted
    assert found.any() and not found.all()


def test_each_slicing_adds_up_to_all_events(by_time: ByTime) -> None:
    sequences = by_time(5)
    judged = judged_events(sequences, "all")
    ranks = {name: np.random.default_rng(seed).integers(0, 20, len(judged)) for seed, name in enumerate("ab")}
    ranked = {name: Ranked(found, np.zeros((len(judged), 0), dtype=np.int64)) for name, found in ranks.items()}
    known = np.ones(len(sequences.catalogue), dtype=bool)
    slicings = slicings_of(sequences, judged, known, first_seen(sequences), SeenItems(sequences))
    rows = sliced_rows(slicings, ranked, 10)
    for slicing in slicings:
        for name, found in ranks.items():
            own = [row for row in rows if (row["by"], row["name"]) == (slicing.name, name)]
            assert sum(row["num_events"] for row in own) == len(judged)
            hits = sum(row["num_events"] * row["hr@10"] for row in own)
            assert hits == pytest.approx((found < 10).sum(), abs=1e-3)
            for row in own:
                mine = found[[slicing.labels[code] == row["slice"] for code in slicing.codes]]
                gains = np.where(mine < 10, 1 / np.log2(mine + 2.0), 0.0)
                assert (row["num_events"], row["ndcg@10"]) == (len(mine), pytest.approx(gains.mean(), abs=1e-6))


def test_many_surfaces_become_others(
    tmp_path: Path, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names with the most judged events are kept."""
    monkeypatch.setattr(slices, "MOST_NAMES", 2)
    surfaces = ["c", "a", "b", "b", "a", "a", "d", "e"]
    log = [(user, 5, "click", name, time) for user, name in enumerate(surfaces) for time in (1, 2)]
    sequences = load_sequences(make_dataset(tmp_path, log))
    found = labels(sequences, judged_events(sequences, "first"), np.ones(1, dtype=bool))
    assert Counter(found["surface"]) == {"a": 3, "b": 2, "others": 3}
