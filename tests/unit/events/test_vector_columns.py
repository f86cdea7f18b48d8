from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tackboard.core.errors import DataError
from tackboard.events.vector_columns import from_stored, to_stored, with_vectors

ROWS = [[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0]]
VECTORS = pa.list_(pa.float32(), 3)


@pytest.mark.parametrize(
    "type_",
    [
        VECTORS,
        pa.list_(pa.float64(), 3),
        pa.list_(pa.float64()),
        pa.list_(pa.float32()),
        pa.large_list(pa.float64()),
        pa.list_(pa.float16()),
    ],
)
def test_lists_of_one_length_become_vectors(type_: pa.DataType) -> None:
    column = pa.chunked_array([pa.array(ROWS[:1], type_), pa.array(ROWS[1:], type_)])
    table = with_vectors(pa.table({"v": column, "other": ["a", "b", "c"]}))
    assert table["v"].type == VECTORS
    assert table["v"].to_pylist() == ROWS
    assert table.column_names == ["v", "other"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1.0], [1.0, 2.0]]),
        pa.array([[1, 2], [3, 4]]),
        pa.array([["a"], ["b"]]),
        pa.array([[], []], pa.list_(pa.float64())),
        pa.array([None, None], pa.list_(pa.float64())),
        pa.array([1.0, 2.0]),
    ],
)
def test_other_columns_stay(column: pa.Array) -> None:
    table = pa.table({"v": column})
    assert with_vectors(table) is to_stored(table) is from_stored(table) is table


def test_a_vector_that_lacks_a_number_is_refused() -> None:
    with pytest.raises(DataError, match="'v' lacks a number"):
        with_vectors(pa.table({"v": [[1.0, None], [1.0, 2.0]]}))


@pytest.mark.parametrize("rows", [ROWS, [None, None], [], [[0.0, -0.0, float("inf")]]])
def test_vectors_survive_parquet(tmp_path: Path, rows: list) -> None:
    table = pa.table({"v": pa.array(rows, VECTORS), "n": pa.array(range(len(rows)), pa.int64())})
    pq.write_table(to_stored(table), tmp_path / "t.parquet")
    assert from_stored(pq.read_table(tmp_path / "t.parquet")).equals(table)
    assert from_stored(pq.read_table(tmp_path / "t.parquet", columns=["v"])).equals(table.select(["v"]))


def test_other_fixed_size_lists_are_stored_as_lists(tmp_path: Path) -> None:
    table = pa.table({"i": pa.array([[2**62, 1], None], pa.list_(pa.int64(), 2))})
    pq.write_table(to_stored(table), tmp_path / "t.parquet")
    assert from_stored(pq.read_table(tmp_path / "t.parquet"))["i"].to_pylist() == [[2**62, 1], None]
