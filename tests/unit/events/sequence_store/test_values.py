from __future__ import annotations

import numpy as np

from tackboard.events.sequence_store.values import (
    Values,
    empty_column,
    encode_texts,
    join,
    join_values,
    num_rows,
    object_array,
    same_columns,
    take,
)


def texts(*words: str | None) -> Values:
    codes, dictionary = encode_texts(["" if word is None else word for word in words])
    present = None if None not in words else np.array([word is not None for word in words])
    return Values(codes, present, dictionary)


def test_strings_are_coded_once_each() -> None:
    column = texts("b", "a", "b")
    assert column.values.tolist() == [0, 1, 0]
    assert column.dictionary is not None and column.dictionary.tolist() == ["b", "a"]
    assert column.to_pylist() == ["b", "a", "b"]


def test_joining_keeps_values_and_gaps() -> None:
    joined = join_values([texts("a", None), texts("b"), texts("a")])
    assert joined.to_pylist() == ["a", None, "b", "a"]
    numbers = join_values([Values(np.array([1])), Values(np.array([2, 3]), np.array([False, True]))])
    assert numbers.to_pylist() == [1, None, 3]


def test_a_shared_dictionary_is_not_copied() -> None:
    dictionary = object_array(["x", "y"])
    joined = join_values([Values(np.array([0]), None, dictionary), Values(np.array([1]), None, dictionary)])
    assert joined.dictionary is dictionary
    assert joined.to_pylist() == ["x", "y"]


def test_columns_are_taken_and_joined_together() -> None:
    columns = {"a": Values(np.arange(4)), "b": texts("p", "q", None, "r")}
    assert num_rows(columns) == 4
    some = take(columns, np.array([3, 0]))
    assert some["a"].to_pylist() == [3, 0] and some["b"].to_pylist() == ["r", "p"]
    assert join([some, take(columns, slice(2, 3))])["b"].to_pylist() == ["r", "p", None]


def test_same_is_bit_for_bit_and_blind_to_what_is_missing() -> None:
    def floats(*values: float) -> dict[str, Values]:
        return {"a": Values(np.array(values))}

    assert same_columns(floats(np.nan, 1.0), floats(np.nan, 1.0))
    assert not same_columns(floats(0.0), floats(-0.0))
    assert not same_columns(floats(0.0), floats(0.0, 0.0))
    there = np.array([True, False])
    assert same_columns({"a": Values(np.array([1, 2]), there)}, {"a": Values(np.array([1, 3]), there)})
    assert not same_columns({"a": Values(np.array([1, 2]), there)}, {"a": Values(np.array([1, 2]))})
    assert same_columns({"a": texts("x", "y")}, {"a": Values(np.array([1, 0]), None, object_array(["y", "x"]))})
    assert not same_columns({"a": texts("x", "y")}, {"a": texts("x", "z")})


def test_empty_columns_can_be_joined() -> None:
    assert join_values([empty_column("string"), texts("a")]).to_pylist() == ["a"]
    assert join_values([empty_column("bool"), Values(np.array([True]))]).values.dtype == np.bool_
