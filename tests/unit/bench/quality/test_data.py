"""Public files become datasets whose order is settled by a stated rule."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tackboard.bench.quality.data import (
    BENCHES,
    Bench,
    every_nth_user,
    find_bench,
    find_files,
    last_tied_share,
    prepare,
    prepared_name,
    read_facts,
    renumber_items,
    settle_ties,
)
from tackboard.core.errors import DataError, UsageError
from tackboard.events.dataset import open_dataset
from tackboard.events.public.publisher import PublicData, canonical_events
from tackboard.events.schema import numpy_column

ROOT = Path(__file__).resolve().parents[4]


def events_of(rows: list[tuple[int, int, int]]) -> pa.Table:
    users, items, times = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return canonical_events(users, items, times)


def settled(rows: list[tuple[int, int, int]], rule: str) -> dict[int, list[tuple[int, int]]]:
    """User → (item, time) in the order of the settled times."""
    table = settle_ties(events_of(rows), rule)
    assert numpy_column(table, "received_ms").tolist() == numpy_column(table, "time_ms").tolist()
    found: dict[int, list[tuple[int, int]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: (row["user"], row["time_ms"])):
        found.setdefault(row["user"], []).append((row["item"], row["time_ms"]))
    return found


ROWS = [(7, 1, 5000), (3, 9, 1000), (7, 2, 5000), (7, 3, 1000), (7, 4, 5000), (3, 8, 1000)]


def test_ties_keep_the_order_of_the_file_or_turn_it_round() -> None:
    assert settled(ROWS, "file") == {3: [(9, 1000), (8, 1001)], 7: [(3, 1000), (1, 5000), (2, 5001), (4, 5002)]}
    assert settled(ROWS, "reverse") == {3: [(8, 1000), (9, 1001)], 7: [(3, 1000), (4, 5000), (2, 5001), (1, 5002)]}


def test_random_ties_stay_in_their_instant_and_do_not_change() -> None:
    rows = [(user, item, 1000 * (item // 10)) for user in range(5) for item in range(40)]
    first, second = settled(rows, "random"), settled(rows, "random")
    assert first == second
    orders = set()
    for events in first.values():
        items = [item for item, _ in events]
        assert [item // 10 for item in items] == sorted(item // 10 for item in items)
        assert [time for _, time in events] == [1000 * second + place for second in range(4) for place in range(10)]
        orders.add(tuple(items))
    assert len(orders) == 5, "users do not share one order"


def test_more_events_in_a_second_than_it_has_milliseconds_are_refused() -> None:
    rows = [(1, item, 1000) for item in range(1001)] + [(1, 5, 2000)]
    with pytest.raises(DataError, match="more events at one instant"):
        settle_ties(events_of(rows), "file")


def test_share_of_users_whose_last_instant_is_tied() -> None:
    assert last_tied_share(events_of(ROWS)) == 1.0
    assert last_tied_share(events_of([*ROWS, (3, 5, 2000)])) == 0.5
    assert last_tied_share(events_of([(1, 1, 1), (2, 2, 1)])) == 0.0


def test_every_nth_user_keeps_the_items() -> None:
    users = pa.table({"user": pa.array([3, 7]), "age": pa.array([20, 30])})
    content = PublicData(events=events_of(ROWS), items=pa.table({"item": pa.array([1])}), users=users)
    half = every_nth_user(content, 2)
    assert set(half.events["user"].to_pylist()) == {3}
    assert half.users is not None and half.users["user"].to_pylist() == [3]
    assert half.items is content.items
    names = canonical_events(pa.array(["a", "b", "a"]), np.arange(3), np.arange(3))
    kept = every_nth_user(PublicData(events=names), 2)
    assert kept.events["user"].to_pylist() == ["a", "a"]


def test_large_ids_and_names_are_renumbered_and_small_numbers_stay() -> None:
    events, items = renumber_items(events_of(ROWS), None)
    assert events["item"].to_pylist() == [1, 9, 2, 3, 4, 8] and items is None
    large = events_of([(1, -5, 0), (1, 2**60, 1), (2, -5, 2)])
    events, items = renumber_items(large, None)
    assert events["item"].to_pylist() == [1, 2, 1]
    assert items is not None
    assert items.to_pylist() == [{"item": 1, "published_item": "-5"}, {"item": 2, "published_item": str(2**60)}]
    named = canonical_events(np.arange(2), pa.array(["b", "a"]), np.arange(2))
    attributes = pa.table({"item": pa.array(["c", "a", "b"]), "colour": pa.array(["x", "y", "z"])})
    events, items = renumber_items(named, attributes)
    assert events["item"].to_pylist() == [2, 1]
    assert items is not None
    assert items["item"].to_pylist() == [3, 1, 2] and items["published_item"].to_pylist() == ["c", "a", "b"]


def test_prepared_dataset_has_the_whole_catalogue_and_rising_times(fake_ml_1m: Path, tmp_path: Path) -> None:
    bench = find_bench("ml-1m")
    paths = prepare(bench, ("file", "reverse"), tmp_path, fake_ml_1m)
    assert [path.name for path in paths.values()] == ["ml-1m-file", "ml-1m-reverse"]
    facts = read_facts(paths["file"])
    assert (facts.num_users, facts.num_items, facts.num_rows, facts.num_events) == (24, 35, 36, 288)
    assert facts.last_tied_share == 1.0
    assert facts.newest_tokens(5) == 24 * 5 and facts.newest_tokens(200) == 24 * 11
    last = {}
    for rule, path in paths.items():
        dataset = open_dataset(path)
        assert dataset.path.name == f"ml-1m-{rule}", "the snapshot's name is the same wherever it is prepared"
        table = dataset.read_events(["user_id", "item_id", "time_ms"])
        users, times = numpy_column(table, "user_id"), numpy_column(table, "time_ms")
        assert (np.diff(times)[users[1:] == users[:-1]] > 0).all()
        last[rule] = numpy_column(table, "item_id")[np.append(users[1:] != users[:-1], True)]
    assert not (last["file"] == last["reverse"]).any(), "every user has a tied last second here"
    before = paths["file"].stat().st_mtime_ns
    assert prepare(bench, ("file",), tmp_path, None) == {"file": paths["file"]}, "made once, needs no files again"
    assert paths["file"].stat().st_mtime_ns == before
    half = prepare(bench, ("file",), tmp_path, fake_ml_1m, stride=2)["file"]
    assert half.name == prepared_name(bench, "file", 2) == "ml-1m-file-every2"
    assert (read_facts(half).num_users, read_facts(half).num_items) == (12, 35)
    assert not list(tmp_path.glob(".making*"))


def test_unpacked_files_and_the_folder_itself_will_do(fake_ml_1m: Path, tmp_path: Path) -> None:
    public = BENCHES["ml-1m"].public
    archive = fake_ml_1m / "ml-1m" / "ml-1m.zip"
    assert find_files(public, fake_ml_1m) == find_files(public, archive.parent) == find_files(public, archive)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path / "unpacked")
    folder = tmp_path / "unpacked"
    assert find_files(public, folder) == [folder / "ml-1m"]
    assert read_facts(prepare(BENCHES["ml-1m"], ("file",), tmp_path, folder)["file"]).num_users == 24


@pytest.mark.parametrize("given", [None, "absent", "empty"])
def test_missing_files_are_told_with_their_source(tmp_path: Path, given: str | None) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"grouplens\.org"):
        find_files(BENCHES["ml-1m"].public, None if given is None else tmp_path / given)


@pytest.mark.parametrize("content", [b"no zip at all", b"PK\x05\x06" + bytes(4) + b"\x01\x00" * 2 + bytes(10)])
def test_broken_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ml-1m.zip").write_bytes(content)
    (tmp_path / "datasets").mkdir()
    with pytest.raises(DataError, match="not ml-1m as published"):
        prepare(BENCHES["ml-1m"], ("file",), tmp_path / "datasets", tmp_path)
    assert not list((tmp_path / "datasets").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("bench", [BENCHES["ml-1m"], BENCHES["deskdrop"]], ids=lambda bench: bench.name)
def test_real_files(bench: Bench, tmp_path: Path) -> None:
    folder = Path(os.environ.get("TACKBOARD_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / bench.name).is_dir():
        pytest.skip(f"no {bench.name} in {folder}: set TACKBOARD_DATA to the folder of your downloads")
    facts = read_facts(prepare(bench, ("file",), tmp_path, folder)["file"])
    counts = bench.public.counts
    assert (facts.num_users, facts.num_events) == (counts.users, counts.events)
    if bench.name == "ml-1m":
        assert (facts.num_items, facts.num_rows) == (3_883, 3_953), "every row of movies.dat, rated or not"
        assert facts.last_tied_share == pytest.approx(0.42, abs=0.005)
    else:
        assert (facts.num_items, facts.num_rows) == (2_987, 2_988), "renumbered"
