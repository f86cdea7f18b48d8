"""The made-up dataset has the size and shape asked for; the rivals' files say what our loader would read."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tackboard.bench.loader.data import ACTION_SHARES, ACTIONS, POSITIVE, Setting, made_up_events, prepare


def test_made_up_events() -> None:
    events = made_up_events(20_000, 500, 50, seed=3)
    assert events.num_rows == 20_000
    users, times = events["user"].to_numpy(), events["time_ms"].to_numpy()
    assert np.all(np.diff(users) >= 0)
    assert np.all(np.diff(times)[np.diff(users) == 0] >= 0)
    lengths = np.unique(users, return_counts=True)[1]
    assert lengths.max() > 5 * np.median(lengths), "few users with many events"
    counts = np.sort(np.unique(events["item"].to_numpy(), return_counts=True)[1])
    assert counts[-50:].sum() > 0.5 * counts.sum(), "a power law"
    names = np.array(events["action"].to_pylist())
    for name, share in zip(ACTIONS, ACTION_SHARES, strict=True):
        assert abs((names == name).mean() - share) < 0.02
    assert made_up_events(20_000, 500, 50, seed=3).equals(events)
    assert not made_up_events(20_000, 500, 50, seed=4).equals(events)


def test_what_the_rivals_read(loader_folder: Path, tmp_path: Path) -> None:
    setting = Setting.read(loader_folder)
    counts = prepare(setting, tmp_path)
    assert setting.positive_actions == POSITIVE and setting.actions == ACTIONS
    examples = pq.read_table(tmp_path / "examples.parquet")
    assert counts["num_examples"] == examples.num_rows > 100
    lengths = np.array([len(row) for row in examples["item"].to_pylist()])
    assert lengths.max() == setting.max_length and lengths.sum() == counts["num_tokens"] < counts["num_events"]
    with np.load(tmp_path / "items.npz") as items:
        assert items["rows"].shape == (counts["num_items"], setting.num_hashes)
        assert np.isin(np.concatenate(examples["item"].to_pylist()), items["item_ids"]).all()


def test_rows_of_a_window() -> None:
    setting = Setting(dataset="d", positive_actions=(), window_buckets=4, num_buckets=10)
    assert setting.window_rows(1_000) == 400
