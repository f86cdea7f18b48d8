from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tackboard.core.errors import CorruptFileError
from tackboard.events.layout import Layout, RowReader, cut_buckets, read_layout, write_buckets
from tackboard.events.schema import without_unused_names


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 20))
def test_buckets_hold_whole_users_and_as_many_as_fit(counts: list[int], rows_per_bucket: int) -> None:
    user_ids = np.repeat(np.arange(len(counts), dtype=np.int64) * 3 - 40, counts)
    layout = cut_buckets(user_ids, rows_per_bucket)
    bounds = layout.offsets["events"]
    assert bounds[0] == 0
    assert bounds[-1] == len(user_ids)
    for bucket in range(layout.num_buckets):
        first, last = layout.rows_of("events", bucket)
        inside = user_ids[first:last]
        assert inside[0] == layout.first_users[bucket]
        assert last - first <= rows_per_bucket or len(set(inside)) == 1
        assert set(layout.buckets_of(inside)) == {bucket}
        if last < len(user_ids):  # The next user did not fit, or the bucket is already too large.
            after = int((user_ids == user_ids[last]).sum())
            assert user_ids[last] != user_ids[last - 1]
            assert last - first + after > rows_per_bucket


def test_users_without_events_have_a_bucket_too() -> None:
    layout = cut_buckets(np.array([5, 5, 9, 9, 12]), 2)
    assert layout.first_users.tolist() == [5, 9, 12]
    assert layout.buckets_of(np.array([-7, 5, 8, 9, 11, 12, 99])).tolist() == [0, 0, 0, 1, 1, 2, 2]
    requests = layout.with_rows("requests", np.array([-7, 5, 8, 12, 99, 99]))
    assert requests.offsets["requests"].tolist() == [0, 3, 3, 6]


def test_users_that_lie_far_apart(tmp_path: Path) -> None:
    """Ids of strings fill all 64 bits: the difference of two may not fit."""
    users = np.array([-(2**63), -(2**62), 2**62, 2**63 - 1])
    cut_buckets(users, 1).write(tmp_path)
    again = read_layout(tmp_path, tmp_path / "events.parquet")
    assert again.first_users.tolist() == users.tolist()
    assert again.buckets_of(users).tolist() == [0, 1, 2, 3]


def test_a_layout_survives_the_disk_and_nonsense_does_not(tmp_path: Path) -> None:
    layout = cut_buckets(np.array([1, 1, 2, 2**62]), 2).with_rows("requests", np.array([2, 2]))
    layout.write(tmp_path)
    again = read_layout(tmp_path, tmp_path / "events.parquet")
    assert again.first_users.tolist() == [1, 2]
    assert {name: rows.tolist() for name, rows in again.offsets.items()} == {"events": [0, 2, 4], "requests": [0, 0, 2]}
    nonsense = (
        '{"version": 2}',
        "[]",
        '{"version": 1}',
        '{"version": 1, "first_users": [1]}',
        '{"version": 1, "first_users": [1], "events": [0]}',
        '{"version": 1, "first_users": [2, 1], "events": [0, 1, 2]}',
    )
    for text in nonsense:
        (tmp_path / "layout.json").write_text(text)
        with pytest.raises(CorruptFileError, match="layout"):
            read_layout(tmp_path, tmp_path / "events.parquet")


@pytest.mark.parametrize("rows_per_group", [1, 2, 3, 5, 100])
def test_old_snapshots_without_a_layout_are_looked_through(tmp_path: Path, rows_per_group: int) -> None:
    users = np.array([3, 3, 3, 3, 3, 4, 6, 6, 6, 7, 8, 8])
    path = tmp_path / "events.parquet"
    pq.write_table(pa.table({"user_id": users, "n": np.arange(12)}), path, row_group_size=rows_per_group)
    layout = read_layout(tmp_path, path)
    assert layout.offsets["events"][-1] == 12
    reader, seen = RowReader(path), []
    for bucket in range(layout.num_buckets):
        rows = reader.read([layout.rows_of("events", bucket)], ["n", "user_id"])
        assert set(layout.buckets_of(rows["user_id"].to_numpy())) == {bucket}
        seen += rows["n"].to_pylist()
    assert seen == list(range(12))


def test_rows_are_read_by_position_and_only_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    names = pa.array([f"user {n}" for n in range(1000)]).dictionary_encode()
    table = pa.table({"n": np.arange(1000), "name": names, "lists": [[n, n] for n in range(1000)]})
    write_buckets(table, np.array([0, 300, 300, 301, 1000]), path)
    assert pq.ParquetFile(path).num_row_groups == 3
    reader = RowReader(path)
    taken = reader.read([(299, 302), (5, 7), (4, 4)], ["lists", "n"])
    assert taken.column_names == ["lists", "n"]
    assert taken["n"].to_pylist() == [299, 300, 301, 5, 6]
    assert taken["lists"].to_pylist() == [[n, n] for n in (299, 300, 301, 5, 6)]
    assert reader.read([(0, 1000)], ["name"])["name"].to_pylist() == names.to_pylist()
    small, large = RowReader(path), RowReader(path, reader.metadata)
    assert large.read([(299, 302)], ["n"])["n"].to_pylist() == [299, 300, 301]
    large.bytes_read = 0
    small.read([(300, 301)], ["n"])
    large.read([(300, 301)], ["n", "name"])
    assert 0 < small.bytes_read < large.bytes_read < path.stat().st_size / 10
    assert small.read([], ["n"]).num_rows == 0


def test_a_row_group_carries_no_strings_of_others(tmp_path: Path) -> None:
    names = pa.array([f"a rather long name of a user, number {n}" for n in range(5000)]).dictionary_encode()
    table = pa.table({"name": names.cast(pa.dictionary(pa.int32(), pa.string()))})
    piece = without_unused_names(table.slice(10, 3), larger_than=100)
    assert len(piece["name"].chunk(0).dictionary) == 3
    assert piece.schema == table.schema
    assert piece["name"].to_pylist() == names.to_pylist()[10:13]
    write_buckets(table, np.arange(0, 5001, 100), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 10 * sum(len(name) for name in names.to_pylist())


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptFileError, match=r"x\.parquet cannot be read"):
        RowReader(tmp_path / "x.parquet")
    assert Layout(np.zeros(0, dtype=np.int64), {}).num_buckets == 0
