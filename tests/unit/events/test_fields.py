from __future__ import annotations

import math

import pyarrow as pa
import pytest

from tackboard.core.errors import DataError, UsageError
from tackboard.events.fields import check_field_name, parse_contexts, parse_field, parse_field_options
from tackboard.events.schema import NAMES


def column(values: list, type_: pa.DataType | None = None) -> pa.ChunkedArray:
    array = pa.array(values, type_)
    return pa.chunked_array([array[:1], array[1:]])


def test_options_name_a_column_and_optionally_the_field() -> None:
    found = parse_field_options(["dwell", "price=Price in EUR", "x=a=b"])
    assert found == {"dwell": "dwell", "price": "Price in EUR", "x": "a=b"}
    with pytest.raises(UsageError, match="field price already"):
        parse_field_options(["price", "price=other"])


@pytest.mark.parametrize("name", ["Price", "1st", "_x", "a-b", "a b", "", "class", "preis€"])
def test_a_name_that_is_no_identifier_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(UsageError, match="--field another_name=col"):
        check_field_name(name, "col")


def test_a_reserved_name_is_refused() -> None:
    for name in ("user", "item_id", "time_ms", "context", "time"):
        with pytest.raises(UsageError, match="reserved"):
            check_field_name(name, name)
    check_field_name("dwell_ms", "Dwell")


@pytest.mark.parametrize(
    ("texts", "type_", "values"),
    [
        (["1", "", " -2 ", "9223372036854775807"], pa.int64(), [1, None, -2, 9223372036854775807]),
        (["1", "2.5", "1e3", "", "-0"], pa.float64(), [1.0, 2.5, 1000.0, None, -0.0]),
        (["1", "inf", "-Infinity", ".5"], pa.float64(), [1.0, math.inf, -math.inf, 0.5]),
        (["true", "False", "", "TRUE"], pa.bool_(), [True, False, None, True]),
        (["a", "", " b ", "1"], NAMES, ["a", None, "b", "1"]),
        (["007", "7"], NAMES, ["007", "7"]),
        (["1", "9223372036854775808"], NAMES, ["1", "9223372036854775808"]),
        (["1", "true"], NAMES, ["1", "true"]),
    ],
)
def test_text_becomes_the_type_that_all_its_values_have(texts: list, type_: pa.DataType, values: list) -> None:
    found = parse_field(column(texts), "x", typed=False)
    assert found.type == type_
    assert found.to_pylist() == values
    assert math.isnan(parse_field(column(["1", "NaN"]), "x", typed=False)[1].as_py())


@pytest.mark.parametrize(
    ("given", "type_"),
    [
        (column([1, None], pa.int8()), pa.int64()),
        (column([1, None], pa.uint64()), pa.int64()),
        (column([0.5, None], pa.float32()), pa.float64()),
        (column([True, None]), pa.bool_()),
        (column(["", None]), NAMES),
        (column([" 1", None], pa.large_string()), NAMES),
        (column(["a", None], NAMES), NAMES),
        (column([None, None], pa.int64()), pa.int64()),
    ],
)
def test_typed_columns_keep_their_values(given: pa.ChunkedArray, type_: pa.DataType) -> None:
    found = parse_field(given, "x", typed=True)
    assert found.type == type_
    assert found.to_pylist() == given.to_pylist()


@pytest.mark.parametrize(
    ("given", "typed", "words"),
    [
        (column([[1], [2]]), True, r"'x' has type list<item: int64>"),
        (column([1, 2], pa.timestamp("ms")), True, "'x' has type timestamp"),
        (column([2**64 - 1, 1], pa.uint64()), True, "above"),
        (column([None, None]), True, "holds no value"),
        (column(["", "  "]), False, "holds no value"),
    ],
)
def test_columns_that_cannot_be_fields_are_refused(given: pa.ChunkedArray, typed: bool, words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse_field(given, "x", typed=typed)


def test_contexts_are_kept_as_they_are_and_empty_ones_null() -> None:
    found = parse_contexts(column([' {"a": [1, null]}', "", None, "{}"]), "c")
    assert found.type == pa.string()
    assert found.to_pylist() == ['{"a": [1, null]}', None, None, "{}"]
    with pytest.raises(DataError, match="has type int64"):
        parse_contexts(column([1, 2]), "c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "not an object"),
        ("null", "not an object"),
        ('{"a": NaN}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_context_that_is_no_object_names_its_line(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        parse_contexts(column(["{}", "", "{}", text, text]), "c", lambda row: f"log.csv line {row + 2}")
    assert "log.csv line 5: the context" in str(caught.value)
