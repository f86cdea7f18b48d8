from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError
from tackboard.events.columns import parse_ids, parse_names, parse_positions, parse_requests


def column(values: list, type_: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, type_)])


def test_text_of_plain_integers_becomes_int64() -> None:
    ids = parse_ids(column(["1", " -2 ", "", "9223372036854775807"]), "u")
    assert ids.values.to_pylist() == [1, -2, 0, 9223372036854775807]
    assert ids.empty.tolist() == [False, False, True, False]


@pytest.mark.parametrize("odd", ["007", "1.0", "-0", "x", "9223372036854775808", "1e5"])
def test_one_id_that_is_no_plain_integer_makes_all_of_them_text(odd: str) -> None:
    ids = parse_ids(column(["1", odd]), "u")
    assert ids.values.to_pylist() == ["1", odd]


def test_spaces_around_ids_do_not_matter() -> None:
    ids = parse_ids(column(["a", " a", "b ", "  "]), "u")
    assert ids.values.to_pylist()[:3] == ["a", "a", "b"]
    assert ids.values.indices.to_pylist()[:2] == [0, 0]
    assert ids.empty.tolist() == [False, False, False, True]


def test_integer_columns_and_integers_stored_as_floats() -> None:
    assert parse_ids(column([3, None], pa.int32()), "u").empty.tolist() == [False, True]
    ids = parse_ids(column([3.0, None, float("nan")], pa.float64()), "u")
    assert ids.values.to_pylist()[0] == 3
    assert ids.empty.tolist() == [False, True, True]
    for bad in (column([0.5]), column([1e300]), column([True])):
        with pytest.raises(DataError):
            parse_ids(bad, "u")
    with pytest.raises(DataError, match="above"):
        parse_ids(column([2**64 - 1], pa.uint64()), "u")


def test_the_type_can_be_forced() -> None:
    assert parse_ids(column([1, 2]), "i", "string").values.to_pylist() == ["1", "2"]
    forced = parse_ids(column(["1", "x"]), "i", "int64")
    assert forced.empty.tolist() == [False, True]


def test_names_are_trimmed_and_empty_ones_unknown() -> None:
    names, num_empty = parse_names(column(["click", " click", "", None, "save"]))
    assert names.to_pylist() == ["click", "click", "unknown", "unknown", "save"]
    assert num_empty == 2
    assert parse_names(column([5, 4, 5]))[0].to_pylist() == ["5", "4", "5"]


def test_requests_and_positions() -> None:
    assert parse_requests(column(["r1", "", " r2"])).to_pylist() == ["r1", None, "r2"]
    assert parse_requests(column([7, None])).to_pylist() == [7, None]
    positions, num_bad = parse_positions(column(["0", "3.0", "", "-1", "x"]))
    assert positions.to_pylist() == [0, 3, None, None, None]
    assert num_bad == 2
    assert parse_positions(column([2, 5]))[0].type == pa.int32()


def place(row: int) -> str:
    return f"log.csv line {row + 2}"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a", "b\x00c"], "log.csv line 3: the column 'u' holds a NUL byte"),
        (["a\nb", "c"], "log.csv line 2: the column 'u' holds a line break"),
        ([0.0, 1.0, 0.5], "log.csv line 4: the id column 'u' holds fractions"),
        ([0.0, 2.0**54], r"log.csv line 3: the id column 'u' holds floats beyond 2\^53"),
        ([[1], [2]], "log.csv line 2: the id column 'u' has type list"),
    ],
)
def test_unusable_ids_are_named_by_their_place_and_never_shown(values: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse_ids(column(values), "u", place=place)


def test_numbers_above_int64_are_named_by_their_place() -> None:
    large = column([1, None, 2**63], pa.uint64())
    for parse in (parse_ids, parse_requests):
        with pytest.raises(DataError, match="log.csv line 4: the column 'u' holds a number above"):
            parse(large, "u", place=place)


def test_names_requests_and_positions_must_be_scalars_on_one_line() -> None:
    for parse in (parse_names, parse_requests, parse_positions):
        with pytest.raises(DataError, match="log.csv line 2: the column 'a' has type list"):
            parse(column([[1], [2]]), "a", place)
    for parse in (parse_names, parse_requests):
        with pytest.raises(DataError, match="log.csv line 3: the column 'a' holds a line break"):
            parse(column(["x", "y\nz"]), "a", place)
