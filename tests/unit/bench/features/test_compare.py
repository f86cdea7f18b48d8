"""A rival's values are accepted only where they are ours."""

from typing import Any

import pyarrow as pa
import pytest

from tackboard.bench.features.compare import differences


def one(values: Any, type_: Any = None) -> pa.Table:
    return pa.table({"x": pa.array(values, type=type_)})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (one([1, None]), one([1, None], pa.int32())),
        (one([True, False]), one([True, False])),
        (one([1.0, float("nan"), float("inf"), None]), one([1.0 + 1e-13, float("nan"), float("inf"), None])),
        (one([1e6]), one([1e6 * (1 + 1e-13)])),
        (one([[1, 2], []], pa.large_list(pa.int64())), one([[1, 2], []])),
    ],
)
def test_same(ours: pa.Table, theirs: pa.Table) -> None:
    assert differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (one([1, None]), one([1, 0])),
        (one([2**62]), one([2**62 + 1])),
        (one([1.0]), one([1.0 + 1e-11])),
        (one([1.0]), one([float("nan")])),
        (one([float("inf")]), one([float("-inf")])),
        (one([float("inf")]), one([1e300])),
        (one([1.0]), one([1])),
        (one([[1, 2]]), one([[2, 1]])),
        (one([1]), one([1, 1])),
        (one([1]), pa.table({"y": [1]})),
    ],
)
def test_different(ours: pa.Table, theirs: pa.Table) -> None:
    assert len(differences(ours, theirs)) == 1


def test_a_difference_names_column_row_and_values() -> None:
    ours, theirs = one([5, 6, 7]), one([5, 0, 0])
    assert differences(ours, theirs) == ["x differs in 2 of 3 rows: row 1 is 0, not 6"]
